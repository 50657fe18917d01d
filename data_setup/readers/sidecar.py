"""What the importers share: the YAML of a file, the header, the checked frames, the fault boundary.

The YAML (`Sidecar`) holds what a file does not, and goes before what the file holds. It lies beside the file,
or as volume.yaml in any folder above it up to the root: key by key the nearest counts. Nothing is invented: a
missing spacing, range of values or order of axes is a reject.
"""

import difflib
import math
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import yaml
from nibabel.spatialimages import HeaderDataError
from nibabel.wrapstruct import WrapStructError
from PIL import Image
from scipy.io.matlab import MatReadError
from tifffile import TiffFileError

from data_setup.protocols import Shape, Triple
from data_setup.readers.dicom import OCTHeader, grey_frames
from data_setup.readers.faults import OCTReadError, RejectReason, named_faults
from data_setup.readers.geometry import Geometry, check_plausible
from data_setup.readers.pixels import MAX_RATIO, PLAUSIBLE_VOLUME_BYTES
from data_setup.tables.text import D_ORDERS, SIDES
from utils.config.schema import StorageOptions
from utils.config.written import AmbiguousYamlError, plain_yaml
from utils.storage import StorageNotFoundError, is_vacant, join, read_bytes

FOLDER_SIDECAR = "volume.yaml"
MAX_SIDECAR_BYTES = 2**16
MAX_VOLUME_BYTES = 2**32  # no OCT volume is near this; a header that claims more is wrong
_LIBRARY_ERRORS = (  # SyntaxError is what XML and PNG parsers raise
    *(SyntaxError, zlib.error, zipfile.BadZipFile, yaml.YAMLError, HeaderDataError, WrapStructError),
    *(MatReadError, TiffFileError, Image.DecompressionBombError, Image.DecompressionBombWarning),
)


@dataclass(frozen=True)
class Sidecar:
    """The YAML beside a file, or volume.yaml in a folder; a key that it does not have is None."""

    spacing_mm: Triple | None = None  # (D, H, W)
    laterality: str | None = None  # L | R
    device: str | None = None
    protocol: str | None = None
    # NIfTI, MetaImage, MATLAB, NumPy: D, H, W in array order; -H, -W: the other way round
    axes: tuple[str, str, str] | None = None
    d_order: str | None = None  # superior_to_inferior | inferior_to_superior | unknown
    bits_stored: int | None = None  # of unsigned integers; 12 bits in 16, say
    value_range: tuple[float, float] | None = None  # values of black and white, for signed and float data
    num_frames: int | None = None  # the number of B-scans that has to be there
    files: str | None = None  # folder: pattern of the B-scan images, "oct_*.png"
    array: str | None = None  # MATLAB, NumPy: the name of the volume's array
    columns: tuple[float, float] | None = None  # folder: share of an image's width that is the B-scan
    shape: Shape | None = None  # (D, H, W) of raw voxels
    listed_spacing_mm: Triple | None = None  # the manifest's, no key: where neither YAML nor file has one


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _is_whole(value: Any, low: int, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _are_numbers(value: Any, count: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == count
        and all(isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) for v in value)
    )


def _are_axes(value: Any) -> bool:
    return (
        isinstance(value, list)
        and all(isinstance(v, str) and v != "-D" for v in value)
        and sorted(v.removeprefix("-") for v in value) == ["D", "H", "W"]
    )


_RULES = {
    "spacing_mm": ("three lengths in mm above 0, [D, H, W]", lambda v: _are_numbers(v, 3) and min(v) > 0),
    "laterality": ("L, R, OS, OD, left or right", lambda v: _is_text(v) and v.strip().lower() in SIDES),
    "device": ("a name", _is_text),
    "protocol": ("a name", _is_text),
    "axes": ("D, H and W in array order, such as [W, -H, D]", _are_axes),
    "d_order": (" | ".join(D_ORDERS), lambda v: _is_text(v) and v in D_ORDERS),
    "bits_stored": ("1 to 16", lambda v: _is_whole(v, 1, 16)),
    "value_range": ("[black, white], black below white", lambda v: _are_numbers(v, 2) and v[0] < v[1]),
    "num_frames": ("2 or more", lambda v: _is_whole(v, 2)),
    "files": ("a pattern such as oct_*.png", _is_text),
    "array": ("a name", _is_text),
    "columns": (
        "[from, to] in shares of the width, 0 to 1",
        lambda v: _are_numbers(v, 2) and 0 <= v[0] < v[1] <= 1,
    ),
    "shape": (
        "three whole numbers from 1, [D, H, W]",
        lambda v: isinstance(v, list) and len(v) == 3 and all(_is_whole(n, 1) for n in v),
    ),
}
assert [*_RULES, "listed_spacing_mm"] == [f.name for f in fields(Sidecar)]


def sidecar_url(url: str) -> str:
    """eye.nii.gz, eye.ome.tif -> eye.yaml, beside the file."""
    return re.sub(r"(\.nii\.gz|\.ome\.tiff?|\.[^./]+)$", "", url, flags=re.IGNORECASE) + ".yaml"


def sidecar_urls(url: str, path: str, is_folder: bool) -> list[str]:
    """Where the YAML of a file or a folder of images may be, the nearest first; `path`: below the root."""
    urls = [join(url, FOLDER_SIDECAR) if is_folder else sidecar_url(url)]
    folder = url.rstrip("/")
    for _ in path.strip("/").split("/"):
        folder = folder.rpartition("/")[0]
        urls.append(join(folder, FOLDER_SIDECAR))
    return list(dict.fromkeys(urls))


def read_sidecars(urls: Iterable[str], options: StorageOptions | None, *beneath: Sidecar) -> Sidecar:
    """What the YAML at these URLs say and those `beneath`, of each key the first; raises OCTReadError
    bad_sidecar."""
    every = [*(read_sidecar(url, options) for url in urls), *beneath]
    names = [f.name for f in fields(Sidecar)]
    return Sidecar(**{n: next((v for s in every if (v := getattr(s, n)) is not None), None) for n in names})


def read_sidecar(url: str, options: StorageOptions | None) -> Sidecar:
    """The YAML at the URL, an empty one when there is none; raises OCTReadError bad_sidecar."""
    try:
        data = read_bytes(url, options)
    except StorageNotFoundError:
        if is_vacant(url, options):
            return Sidecar()
        raise OCTReadError(url, RejectReason.BAD_SIDECAR, "a file", "a pipe or a link to nowhere") from None
    return parse_sidecar(data, url)


def parse_sidecar(data: bytes, url: str) -> Sidecar:
    """The keys of a YAML, of a file or of a row's cell; `url` is for the error, bad_sidecar."""
    if len(data) > MAX_SIDECAR_BYTES:
        raise OCTReadError(url, RejectReason.BAD_SIDECAR, f"at most {MAX_SIDECAR_BYTES} bytes", len(data))
    try:
        with reading(url, RejectReason.BAD_SIDECAR, "YAML of `key: value` lines"):
            values = plain_yaml(data.decode("utf-8-sig"))
    except AmbiguousYamlError as error:
        actual = "an octal or sexagesimal number, or an alias"
        if error.key is not None:
            actual = f"{error.key if error.key in _RULES else 'a key'} twice"
        expected = "each key once, and numbers in plain decimal figures"
        raise OCTReadError(url, RejectReason.BAD_SIDECAR, expected, actual) from None
    if not isinstance(values, dict) or not all(isinstance(k, str) for k in values):
        raise OCTReadError(url, RejectReason.BAD_SIDECAR, "`key: value` lines", type(values).__name__)
    for key, value in values.items():
        if key not in _RULES:
            near = "".join(f", near {k}" for k in difflib.get_close_matches(key, _RULES, 1))
            expected = f"keys out of {', '.join(_RULES)}"
            raise OCTReadError(url, RejectReason.BAD_SIDECAR, expected, f"another one{near}")
        rule, is_right = _RULES[key]
        if not is_right(value):
            raise OCTReadError(url, RejectReason.BAD_SIDECAR, f"{key}: {rule}", "something else")
    parts: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    if "laterality" in parts:
        parts["laterality"] = SIDES[parts["laterality"].strip().lower()]
    return Sidecar(**parts)


def array_axes(sidecar: Sidecar, what: str, url: str) -> tuple[list[int], list[int]]:
    """(array axes of D, H, W; steps of H and W: 1 or -1) by the YAML's `axes`; raises OCTReadError."""
    if sidecar.axes is None:
        expected = f"axes: [W, H, D] or so in the YAML, for {what}"
        raise OCTReadError(url, RejectReason.UNKNOWN_AXES, expected, "none")
    names = [axis.removeprefix("-") for axis in sidecar.axes]
    order = [names.index(name) for name in "DHW"]
    return order, [-1 if sidecar.axes[i].startswith("-") else 1 for i in order[1:]]


@contextmanager
def reading(url: str, reason: RejectReason, expected: str) -> Iterator[None]:
    """`faults.named_faults` for the libraries of the importers; never held across a yield of a frame."""
    try:
        with named_faults(url, reason, expected):
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    except AmbiguousYamlError:
        raise
    except _LIBRARY_ERRORS as error:
        raise OCTReadError(url, reason, expected, type(error).__name__) from None


def check_length(length: int, url: str, stored: int | None = None) -> None:
    """Raise header_mismatch for more bytes of voxels than any OCT volume has, or than `stored` bytes hold."""
    limit = MAX_VOLUME_BYTES if stored is None else max(PLAUSIBLE_VOLUME_BYTES, MAX_RATIO * stored)
    limit = min(limit, MAX_VOLUME_BYTES)
    if length > limit:
        expected = f"up to {limit} bytes of voxels"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, length)


def make_header(
    url: str,
    kind: str,
    shape: Shape,
    dtype: np.dtype,
    spacing: tuple[Iterable[float] | None, str] | Geometry,
    sidecar: Sidecar,
    *,
    flip_d: bool = False,
    orientation_source: str = "unknown",
    scale: tuple[float, float] = (1.0, 0.0),
    laterality: str | None = None,
    device: str | None = None,
    steps_hw: Sequence[int] = (1, 1),
) -> OCTHeader:
    """The header of an imported volume; the values of the sidecar go before the given ones.

    `spacing`: (D, H, W) in mm and its source, or None and why there is none; or all that the places of the
    B-scans say. Raises OCTReadError:
    missing_spacing, implausible_spacing, not_a_volume, frame_count_mismatch, unsupported_pixels (float,
    signed or scaled data without value_range).
    """
    order = None
    if isinstance(spacing, Geometry):
        order, flip_d, orientation_source = spacing.order, spacing.flip_d, spacing.orientation_source
        spacing = spacing.spacing_mm, spacing.spacing_source
    spacing_mm, source = (sidecar.spacing_mm, "sidecar") if sidecar.spacing_mm else spacing
    if spacing_mm is None and sidecar.listed_spacing_mm is not None:
        spacing_mm, source = sidecar.listed_spacing_mm, "manifest"
    if spacing_mm is None:
        expected = (
            "a spacing in mm; the file has none: give spacing_mm: [D, H, W] in its YAML or the manifest"
        )
        raise OCTReadError(url, RejectReason.MISSING_SPACING, expected, source)
    d, h, w = (float(s) for s in spacing_mm)
    check_plausible((d, h, w), source, url)
    if shape[0] < 2:
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, "two B-scans or more", shape[0])
    if sidecar.num_frames not in (None, shape[0]):
        expected = f"{sidecar.num_frames} B-scans (num_frames)"
        raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, expected, shape[0])
    if sidecar.shape not in (None, shape):
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, f"shape {sidecar.shape} as in the YAML", shape)
    if sidecar.d_order is not None:
        flip_d = D_ORDERS[sidecar.d_order]
        orientation_source = "unknown" if sidecar.d_order == "unknown" else "sidecar"
    bits, rescale = _grey_values(url, dtype, scale, sidecar)
    return OCTHeader(
        url=url,
        shape=shape,
        spacing_mm=(d, h, w),
        spacing_source=source,
        flip_d=flip_d,
        orientation_source=orientation_source,
        device=sidecar.device or device,
        protocol=sidecar.protocol,
        laterality=sidecar.laterality or laterality,
        sop_instance_uid="",
        transfer_syntax=kind,
        bits_stored=bits,
        inverted=False,
        rescale=rescale,
        order=order,
        steps_hw=(steps_hw[0], steps_hw[1]),
    )


def array_frames(
    url: str,
    kind: str,
    what: str,
    stored: tuple[tuple[int, ...], np.dtype],
    spacing: tuple[tuple[float, ...] | None, str],
    sidecar: Sidecar,
    load: Callable[[], np.ndarray],
) -> Iterator[Any]:
    """The header of an array whose axes the YAML names, then its frames; `what`: the axes, for a message.
    `stored`: shape and type of what `load` gives, `spacing`: of its axes. Raises OCTReadError.
    """
    order, steps = array_axes(sidecar, what, url)
    frames, rows, columns = (stored[0][i] for i in order)
    lengths, source = spacing
    in_order = ([lengths[i] for i in order] if lengths else None, source)
    header = make_header(url, kind, (frames, rows, columns), stored[1], in_order, sidecar, steps_hw=steps)
    yield header
    array = load().transpose(order)[:, :: steps[0], :: steps[1]]
    yield from checked_frames((np.ascontiguousarray(frame) for frame in array), header)


def checked_frames(frames: Iterable[np.ndarray], header: OCTHeader) -> Iterator[np.ndarray]:
    """Stored values [H, W] to uint8, each frame checked; raises OCTReadError at the frame that is wrong."""
    return grey_frames(_stored_frames(frames, header), header)


def _stored_frames(frames: Iterable[np.ndarray], header: OCTHeader) -> Iterator[np.ndarray]:
    url, count, dtype = header.url, 0, None
    for count, frame in enumerate(frames, start=1):
        where = f"B-scan {count} of {header.shape[0]}"
        dtype = dtype or frame.dtype
        if frame.shape != header.shape[1:] or frame.dtype != dtype:
            expected, actual = f"{header.shape[1:]} {dtype}", f"{frame.shape} {frame.dtype} in {where}"
            raise OCTReadError(url, RejectReason.FRAME_SIZE_MISMATCH, expected, actual)
        if frame.dtype.kind == "f" and not np.isfinite(frame).all():
            actual = f"{np.count_nonzero(~np.isfinite(frame))} others in {where}"
            raise OCTReadError(url, RejectReason.NOT_FINITE, "finite values", actual)
        yield frame
    if count != header.shape[0]:
        raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, f"{header.shape[0]} B-scans", count)


def _grey_values(
    url: str, dtype: np.dtype, scale: tuple[float, float], sidecar: Sidecar
) -> tuple[int, tuple[float, float]]:
    """(bits, rescale) so that `to_uint8` maps black..white to 0..255, as it does for a DICOM file."""
    bits = 8 * dtype.itemsize
    if sidecar.value_range is not None:
        black, white = sidecar.value_range
        gain = (2**bits - 1) / (white - black)
        return bits, (gain * scale[0], gain * (scale[1] - black))
    if dtype.kind != "u" or bits > 16 or scale != (1.0, 0.0):
        expected = "unsigned integers of 8 or 16 bits, or value_range: [black, white] in the YAML"
        actual = f"{dtype.name}{' with a scale' if scale != (1.0, 0.0) else ''}"
        raise OCTReadError(url, RejectReason.UNSUPPORTED_PIXELS, expected, actual)
    if sidecar.bits_stored is not None and sidecar.bits_stored > bits:
        raise OCTReadError(url, RejectReason.BAD_SIDECAR, f"bits_stored up to {bits}", sidecar.bits_stored)
    return sidecar.bits_stored or bits, (1.0, 0.0)
