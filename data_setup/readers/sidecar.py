"""What the importers share: the YAML beside a file, grey values to uint8, the header, the fault boundary.

The YAML (`Sidecar`) says what a file cannot say of itself; what it says goes before what the file says.
Nothing is invented: a spacing, a range of values or an order of axes that neither tells is a reject.
"""

from __future__ import annotations

import difflib
import io
import math
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import IO, Any

import numpy as np
import yaml
from nibabel.spatialimages import HeaderDataError
from nibabel.wrapstruct import WrapStructError
from PIL import Image
from tifffile import TiffFileError

from data_setup.readers.dicom import OCTHeader, to_uint8
from data_setup.readers.faults import OCTReadError, RejectReason, named_faults
from data_setup.readers.geometry import PLAUSIBLE_MM
from utils.config.schema import StorageOptions
from utils.storage import StorageNotFoundError, is_remote, open_url, read_bytes

FOLDER_SIDECAR = "volume.yaml"
MAX_SIDECAR_BYTES = 2**16
MAX_VOLUME_BYTES = 2**32  # no OCT volume is near this; a header that claims more is wrong
_LIBRARY_ERRORS = (
    zlib.error,
    SyntaxError,  # what XML and PNG parsers raise
    yaml.YAMLError,
    HeaderDataError,
    WrapStructError,
    TiffFileError,  # no ValueError in older versions
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)
_D_ORDERS = {"superior_to_inferior": False, "inferior_to_superior": True, "unknown": False}
Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Sidecar:
    """The YAML beside a file, or volume.yaml in a folder; None: not said."""

    spacing_mm: Triple | None = None  # (D, H, W)
    laterality: str | None = None  # L | R
    device: str | None = None
    protocol: str | None = None
    axes: tuple[str, str, str] | None = None  # NIfTI: D, H, W in array order; -H, -W: the other way round
    d_order: str | None = None  # superior_to_inferior | inferior_to_superior | unknown
    bits_stored: int | None = None  # of unsigned integers; 12 bits in 16, say
    value_range: tuple[float, float] | None = None  # values of black and white, for signed and float data
    num_frames: int | None = None  # how many B-scans there have to be
    files: str | None = None  # folder: pattern of the B-scan images, "oct_*.png"


def sidecar_url(url: str) -> str:
    """eye.nii.gz, eye.ome.tif -> eye.yaml, beside the file."""
    return re.sub(r"(\.nii\.gz|\.ome\.tiff?|\.[^./]+)$", "", url, flags=re.IGNORECASE) + ".yaml"


def read_sidecar(url: str, options: StorageOptions | None) -> Sidecar:
    """The YAML at the URL, an empty one when there is none; raises OCTReadError bad_sidecar."""
    try:
        data = read_bytes(url, options)
    except StorageNotFoundError:
        return Sidecar()
    if len(data) > MAX_SIDECAR_BYTES:
        raise OCTReadError(url, RejectReason.BAD_SIDECAR, f"at most {MAX_SIDECAR_BYTES} bytes", len(data))
    with reading(url, RejectReason.BAD_SIDECAR, "YAML of `key: value` lines"):
        loaded = yaml.safe_load(data.decode("utf-8-sig"))
    keys = [f.name for f in fields(Sidecar)]
    if not isinstance(loaded, dict) or not all(isinstance(k, str) for k in loaded):
        raise OCTReadError(url, RejectReason.BAD_SIDECAR, "`key: value` lines", type(loaded).__name__)
    for key in loaded:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1)
            said = f"keys out of {', '.join(keys)}"
            raise OCTReadError(
                url, RejectReason.BAD_SIDECAR, said, f"another one{', near ' + near[0] if near else ''}"
            )
    rules = {
        "spacing_mm": ("three lengths in mm above 0, [D, H, W]", lambda v: _numbers(v, 3) and min(v) > 0),
        "laterality": ("L or R", lambda v: v in ("L", "R")),
        "device": ("a name", _is_text),
        "protocol": ("a name", _is_text),
        "axes": ("D, H and W in array order, such as [W, -H, D]", _are_axes),
        "d_order": (" | ".join(_D_ORDERS), lambda v: isinstance(v, str) and v in _D_ORDERS),
        "bits_stored": ("1 to 16", lambda v: _is_whole(v) and 1 <= v <= 16),
        "value_range": (
            "[black, white], the first below the second",
            lambda v: _numbers(v, 2) and v[0] < v[1],
        ),
        "num_frames": ("2 or more", lambda v: _is_whole(v) and v >= 2),
        "files": ("a pattern such as oct_*.png", _is_text),
    }
    for key, value in loaded.items():
        said, is_right = rules[key]
        if not is_right(value):
            raise OCTReadError(url, RejectReason.BAD_SIDECAR, f"{key}: {said}", "something else")
    return Sidecar(**{k: tuple(v) if isinstance(v, list) else v for k, v in loaded.items()})


@contextmanager
def reading(url: str, reason: RejectReason, expected: str) -> Iterator[None]:
    """`faults.named_faults` for the libraries of the importers; never held across a yield of a frame."""
    try:
        with named_faults(url, reason, expected):
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    except _LIBRARY_ERRORS as error:
        raise OCTReadError(url, reason, expected, type(error).__name__) from None


def open_file(url: str, options: StorageOptions | None) -> IO[bytes]:
    """The file, seekable; a remote one comes in one request. Raises OCTReadError missing_file."""
    with named_faults(url, RejectReason.CORRUPT_FILE, "a file"):
        return io.BytesIO(read_bytes(url, options)) if is_remote(url) else open_url(url, options=options)


def make_header(
    url: str,
    kind: str,
    shape: tuple[int, int, int],
    dtype: np.dtype,
    spacing: tuple[Iterable[float] | None, str],
    sidecar: Sidecar,
    *,
    flip_d: bool = False,
    orientation_source: str = "unknown",
    scale: tuple[float, float] = (1.0, 0.0),
    laterality: str | None = None,
    device: str | None = None,
) -> OCTHeader:
    """The header of an imported volume; spacing and order of D of the sidecar go before the given ones.

    Raises OCTReadError: missing_spacing, implausible_spacing, not_a_volume, frame_count_mismatch,
    unsupported_pixels (float or signed data, or scaled data, without value_range).
    """
    found, source = (sidecar.spacing_mm, "sidecar") if sidecar.spacing_mm else spacing
    if found is None:
        said = f"a spacing in mm; the file has none: give spacing_mm: [D, H, W] in {_sidecar_name(kind)}"
        raise OCTReadError(url, RejectReason.MISSING_SPACING, said, source)
    d, h, w = (float(s) for s in found)
    for (name, (low, high)), value in zip(PLAUSIBLE_MM.items(), (d, h, w), strict=True):
        if not low <= value <= high:
            said = f"{name} spacing in {low:g}..{high:g} mm"
            raise OCTReadError(url, RejectReason.IMPLAUSIBLE_SPACING, said, f"{value:g} mm ({source})")
    if shape[0] < 2:
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, "two B-scans or more", shape[0])
    if sidecar.num_frames not in (None, shape[0]):
        said = f"{sidecar.num_frames} B-scans (num_frames)"
        raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, said, shape[0])
    if sidecar.d_order is not None:
        flip_d = _D_ORDERS[sidecar.d_order]
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
    )


def checked_frames(frames: Iterable[np.ndarray], header: OCTHeader) -> Iterator[np.ndarray]:
    """Stored values [H, W] to uint8, each frame checked; raises OCTReadError at the frame that is wrong."""
    url, (slope, intercept) = header.url, header.rescale
    top = 2**header.bits_stored - 1
    darkest, brightest, count, dtype = 255, 0, 0, None
    for count, frame in enumerate(frames, start=1):
        where = f"B-scan {count} of {header.shape[0]}"
        dtype = dtype or frame.dtype
        if frame.shape != header.shape[1:] or frame.dtype != dtype:
            said = f"{header.shape[1:]} {dtype}"
            found = f"{frame.shape} {frame.dtype} in {where}"
            raise OCTReadError(url, RejectReason.FRAME_SIZE_MISMATCH, said, found)
        if frame.dtype.kind == "f" and not np.isfinite(frame).all():
            found = f"{np.count_nonzero(~np.isfinite(frame))} others in {where}"
            raise OCTReadError(url, RejectReason.NOT_FINITE, "finite values", found)
        low, high = float(frame.min()), float(frame.max())
        if min(low * slope, high * slope) + intercept < -1e-4 * top or (
            max(low * slope, high * slope) + intercept > (1 + 1e-4) * top
        ):
            said = "values inside value_range, or 0 to 2^bits_stored - 1"
            raise OCTReadError(url, RejectReason.HEADER_MISMATCH, said, f"{low:g} to {high:g} in {where}")
        grey = to_uint8(frame, header)
        darkest, brightest = min(darkest, int(grey.min())), max(brightest, int(grey.max()))
        yield grey
    if count != header.shape[0]:
        raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, f"{header.shape[0]} B-scans", count)
    if darkest == brightest:
        raise OCTReadError(url, RejectReason.CONSTANT_VOLUME, "an image", f"every voxel {darkest}")


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
        scaled = " with a scale" if scale != (1.0, 0.0) else ""
        said = "unsigned integers of 8 or 16 bits, or value_range: [black, white] in the YAML"
        raise OCTReadError(url, RejectReason.UNSUPPORTED_PIXELS, said, f"{dtype.name}{scaled}")
    if sidecar.bits_stored is not None and sidecar.bits_stored > bits:
        raise OCTReadError(url, RejectReason.BAD_SIDECAR, f"bits_stored up to {bits}", sidecar.bits_stored)
    return sidecar.bits_stored or bits, (1.0, 0.0)


def _sidecar_name(kind: str) -> str:
    return FOLDER_SIDECAR if kind == "images" else "a YAML of the same name beside it"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _numbers(value: Any, count: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == count
        and all(isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) for v in value)
    )


def _are_axes(value: Any) -> bool:
    return (
        isinstance(value, list)
        and all(isinstance(v, str) for v in value)
        and sorted(v.removeprefix("-") for v in value) == ["D", "H", "W"]
        and "-D" not in value
    )
