"""Labels that come with a tree: one volume of classes, or surfaces as rows of the image, of one scan.

In: the place that a manifest's column `label_volume` or `label_surfaces` names, the shape of the scan. Out:
uint8 [D, H, W] or float32 [S, D, W] in the frame order of the scan's file, but for NIfTI, whose B-scans lie
side by side; or an OCTReadError with its reason.

A label volume is an .npz with `labels`, a NIfTI file, or a folder or a pattern of PNG in the order of image
folders, whose grey values (or places in a palette) are the classes. Surfaces are an .npz with `surfaces`, the
row of the image (0 the centre of the first), NaN where unknown, and `names`; or a DICOM Height Map
Segmentation (.dcm) as finetuning.predict writes it.
"""

import hashlib
import io
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from PIL import Image

from data_setup.protocols import Shape
from data_setup.readers import nifti
from data_setup.readers.arrays import check_once
from data_setup.readers.dicom import open_file
from data_setup.readers.faults import OCTReadError, RejectReason, named_faults
from data_setup.readers.heights import read_stated_heights
from data_setup.readers.images import MAX_PIXELS, is_image, ordered_images, upright
from data_setup.readers.open_record import with_ends
from data_setup.readers.sidecar import (
    MAX_VOLUME_BYTES,
    Sidecar,
    parse_sidecar,
    read_sidecars,
    reading,
    sidecar_urls,
)
from utils import storage
from utils.config.schema import StorageOptions
from utils.storage import ObjectStat, join, list_names, read_bytes
from utils.workers import in_threads

NUM_VALUES = 256
_NIFTI = (".nii", ".nii.gz")
_ONE_FILE = (".npz", ".dcm")
_GREY = ("1", "L", "P", "I;16", "I")  # modes whose numbers are classes


@dataclass(frozen=True)
class LabelVolume:
    values: np.ndarray  # uint8 [D, H, W]
    flip_d: bool | None  # the labels' own header: D runs from inferior to superior; None: as the scan's
    is_in_file_order: bool  # the B-scans as in the scan's file, before its reader sorts them


def read_label_volume(
    url: str,
    path: str,
    shape: Shape,
    scan: tuple[str, str],
    options: StorageOptions | None = None,
    volume_yaml: str | None = None,
) -> LabelVolume:
    """The classes of a scan of `shape`; `scan`: URL and path of its file, whose YAML names axes too.
    `volume_yaml`: the scan's cell of the manifest, beneath the files. Raises OCTReadError, StorageError.
    """
    name, flip_d = url.lower(), None
    if name.endswith(".npz"):
        values = _arrays(url, ("labels",), options)["labels"]
    elif name.endswith(_NIFTI):
        row = parse_sidecar(volume_yaml.encode(), url) if volume_yaml else Sidecar()
        with open_file(url, options) as file, named_faults(url, RejectReason.CORRUPT_FILE, "a NIfTI file"):
            sidecar = read_sidecars(_yaml_urls(url, path, scan), options, row)
            values, flip_d = nifti.read_array(file, url, sidecar)
    else:
        values = _read_images(url, options)
    _check_shape(values.shape, shape, url)
    return LabelVolume(whole_numbers(values, url), flip_d, not name.endswith(_NIFTI))


def read_label_surfaces(
    url: str, shape: Shape, options: StorageOptions | None = None, scan_uid: str | None = None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """(float32 [S, D, W] in rows of the image, names) of a scan of `shape`; `scan_uid`: of a DICOM scan. A
    surface without a single height is left out. Raises OCTReadError, StorageError.
    """
    if url.lower().endswith(".dcm"):
        stated = read_stated_heights(url, options)
        if scan_uid and stated.references and scan_uid not in stated.references:
            expected = "the scan of the manifest as the map's referenced image"
            raise OCTReadError(url, RejectReason.WRONG_REFERENCE, expected, "another scan")
        values, names = stated.values, stated.names
    else:
        arrays = _arrays(url, ("surfaces", "names"), options)
        values, names = arrays["surfaces"], tuple(str(name).strip() for name in arrays["names"].ravel())
    is_plain = values.ndim == 3 and values.dtype.kind == "f" and len(values) == len(names)
    if not is_plain or len(set(names)) != len(names) or not all(names) or "|" in "".join(names):
        expected = "surfaces [S, B-scans, A-scans] of floats, and S different names"
        actual = f"{values.dtype} {list(values.shape)} and {len(set(names))} names"
        raise OCTReadError(url, RejectReason.NOT_LABELS, expected, actual)
    _check_shape((values.shape[1], shape[1], values.shape[2]), shape, url)
    values = np.where(np.isfinite(values), values, np.nan).astype(np.float32)
    is_known = ~np.isnan(values).all(axis=(1, 2))
    if not is_known.any():
        raise OCTReadError(url, RejectReason.NO_VALID_HEIGHTS, "a height of a surface", "none")
    return values[is_known], tuple(np.array(names)[is_known].tolist())


def _yaml_urls(url: str, path: str, scan: tuple[str, str]) -> list[str]:
    """Where the axes of a NIfTI of labels may be said, the nearest first."""
    own = sidecar_urls(url, path.removeprefix("./"), False)
    return list(dict.fromkeys([*own, *sidecar_urls(*scan, False)]))


def label_stat(
    url: str, path: str, scan: tuple[str, str], options: StorageOptions | None = None, facts: str = ""
) -> ObjectStat:
    """Size and version of the file, or of all images together; raises StorageError, OCTReadError. Of NIfTI
    with the YAML that may say its axes, and `facts` on which its direction depends.
    """
    if url.lower().endswith(_ONE_FILE):
        return with_ends(storage.stat(url, options), [url], options)
    is_nifti = url.lower().endswith(_NIFTI)
    urls = [url] if is_nifti else _image_urls(url, options)
    stats = in_threads(lambda image: storage.stat(image, options), urls)
    lines = [f"{image}\t{s.size}\t{s.etag_or_mtime}\n" for image, s in zip(urls, stats, strict=True)]
    if is_nifti:
        for yaml_url in _yaml_urls(url, path, scan):
            with suppress(storage.StorageNotFoundError):
                lines.append(f"{yaml_url}\t{storage.stat(yaml_url, options).etag_or_mtime}\n")
        lines.append(facts)
    digest = hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()
    return with_ends(ObjectStat(sum(s.size for s in stats), digest), urls, options)


def _arrays(url: str, names: Sequence[str], options: StorageOptions | None) -> dict[str, np.ndarray]:
    """The arrays of an .npz; raises OCTReadError where it is damaged or has no such ones."""
    data = read_bytes(url, options)
    try:
        with reading(url, RejectReason.CORRUPT_FILE, "an .npz file"):
            content = np.load(io.BytesIO(data), allow_pickle=False)
            present = sorted(content.files)  # an .npy has none
            check_once(present, url)
            arrays = {name: np.array(content[name]) for name in names if name in present}
    except zipfile.BadZipFile:
        raise OCTReadError(url, RejectReason.CORRUPT_FILE, "an .npz file", "a damaged zip") from None
    if lacking := [name for name in names if name not in arrays]:
        expected = f"an .npz with {', '.join(lacking)}"
        raise OCTReadError(url, RejectReason.NOT_LABELS, expected, ", ".join(present[:5]) or "no array")
    return arrays


def _image_urls(url: str, options: StorageOptions | None) -> list[str]:
    """The PNG files of a folder, or of a pattern in one, in the order of image folders."""
    folder, pattern = url.rstrip("/"), None
    if "*" in url.rpartition("/")[2]:
        folder, _, pattern = url.rpartition("/")
    listed = list_names(folder, options)
    names = [name for name in listed if name.lower().endswith(".png")]
    expected = "an .npz, a .nii.gz, or a folder of PNG"
    if not names and any(is_image(name) for name in (url, *listed)):
        actual = "images of another kind: JPEG has values between those of the classes"
        raise OCTReadError(url, RejectReason.NOT_LABELS, expected, actual)
    if not names:
        raise OCTReadError(url, RejectReason.MISSING_FILE, expected, "none")
    return [join(folder, name) for name in ordered_images(names, Sidecar(files=pattern), url)]


def _read_images(url: str, options: StorageOptions | None) -> np.ndarray:
    """Classes [D, H, W] of the images of a folder."""
    urls = _image_urls(url, options)
    frames: list[np.ndarray] = []
    for number, image_url in enumerate(urls, start=1):
        where, data = f"image {number} of {len(urls)}", read_bytes(image_url, options)
        with reading(url, RejectReason.CORRUPT_FILE, f"{where} to be a PNG"):
            image = Image.open(io.BytesIO(data), formats=("PNG",))
            mode, size = image.mode, image.width * image.height
            values = np.asarray(upright(image)) if mode in _GREY and size <= MAX_PIXELS else None
        if values is None:
            expected = "one class a pixel: grey, or a palette"
            raise OCTReadError(url, RejectReason.UNSUPPORTED_PIXELS, expected, f"{mode} in {where}")
        if frames and values.shape != frames[0].shape:
            expected, actual = f"{frames[0].shape}", f"{values.shape} in {where}"
            raise OCTReadError(url, RejectReason.FRAME_SIZE_MISMATCH, expected, actual)
        if values.nbytes * len(urls) > MAX_VOLUME_BYTES:
            expected = f"up to {MAX_VOLUME_BYTES} bytes"
            raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, values.nbytes * len(urls))
        frames.append(values)
    return np.stack(frames)


def _check_shape(actual: tuple[int, ...], shape: Shape, url: str) -> None:
    if len(actual) != 3 or actual[1:] != shape[1:]:
        expected = f"{shape[1]} x {shape[2]}, as the scan's B-scans"
        raise OCTReadError(url, RejectReason.FRAME_SIZE_MISMATCH, expected, " x ".join(map(str, actual[1:])))
    if actual[0] != shape[0]:
        raise OCTReadError(
            url, RejectReason.FRAME_COUNT_MISMATCH, f"{shape[0]} B-scans, as the scan", actual[0]
        )


def whole_numbers(values: np.ndarray, url: str) -> np.ndarray:
    """uint8 of the same numbers; raises not_labels where that is not possible."""
    if values.dtype.kind not in "buif":
        raise OCTReadError(url, RejectReason.NOT_LABELS, "whole numbers", values.dtype)
    with np.errstate(invalid="ignore"):
        whole = values.astype(np.uint8)
        if not (whole == values).all():
            expected = f"whole numbers from 0 to {NUM_VALUES - 1}"
            raise OCTReadError(url, RejectReason.NOT_LABELS, expected, "others")
    return whole
