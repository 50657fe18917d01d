"""Heidelberg VOL (HEYEX's raw export): header, spacing, eye and lines of the B-scans, by eyepy's fields.

A VOL has a header of 2048 bytes, the localizer, then for each B-scan its own header (place, layers) and
float32 intensities. ScaleX, ScaleZ and Distance are in mm; the places of the B-scans on the localizer give
order and direction, checked as for HEYEX XML. A circle or star scan is not a volume. Intensities 0..1 become
grey values by eyepy's formula. Files that eyepy itself wrote (`ep-v...`) hold grey values 0..255 instead,
which its own reader turns into two levels: they are taken as they are.
"""

import functools
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.geometry import Geometry, Measures, check_geometry
from data_setup.readers.heidelberg import DEVICE, geometry_of_lines
from data_setup.readers.makers.library import PATTERNS, Surfaces, check_size, eyepy_module, parsing, text_of
from data_setup.readers.sidecar import Sidecar, checked_frames, make_header
from data_setup.tables.text import SIDES

_MODULE = "eyepy.io.he.vol_reader"
# numbers of the file's header; the rest stays bytes: a name that is no ASCII must not stop it
_USED = (
    *("size_x", "n_bscans", "size_y", "scale_x", "distance", "scale_y"),
    *("size_x_slo", "size_y_slo", "scan_pattern"),
)
_USED_OF_B_SCAN = ("bscan_hdr_size", "start_x", "start_y", "end_x", "end_y", "num_seg", "seg_offset")
_NO_VALUE = np.float32(3e38)  # HEYEX writes the largest float32 where it measured nothing
_MAX_LAYERS = 64


@dataclass(frozen=True)
class _File:
    """What the headers of one VOL say."""

    shape: tuple[int, int, int]
    is_grey: bool  # 0..255, as eyepy wrote them
    side: str | None
    patient_id: str
    measured: Geometry
    starts: tuple[int, ...]  # the byte where the header of each B-scan begins, in the file's order
    headers: tuple[Any, ...]

    @property
    def order(self) -> tuple[int, ...]:
        return self.measured.order or tuple(range(self.shape[0]))


def read(file: IO[bytes], url: str, sidecar: Sidecar) -> Iterator[Any]:
    """The header, then uint8 frames [H, W] in order; raises OCTReadError."""
    vol = _headers(file, url)
    shape, dtype, measured = vol.shape, np.dtype(np.uint8), vol.measured
    header = make_header(
        url, "Heidelberg VOL", shape, dtype, measured, sidecar, laterality=vol.side, device=DEVICE
    )
    yield header
    yield from checked_frames((_frame(file, vol, index, url) for index in vol.order), header)


def patient_id(file: IO[bytes], url: str) -> str:
    """The id that somebody typed into HEYEX; it may identify a person. Raises OCTReadError."""
    return _headers(file, url).patient_id


def surfaces(file: IO[bytes], url: str) -> Surfaces | None:
    """The boundaries that HEYEX drew, in the order of the file; None without one; raises OCTReadError."""
    vol = _headers(file, url)
    width = vol.shape[2]
    mapping = eyepy_module(_MODULE, url).SEG_MAPPING
    names = sorted(mapping, key=mapping.__getitem__)  # in the order of the file
    heights = np.full((len(names), vol.shape[0], width), np.nan, np.float32)
    for index, head in enumerate(vol.headers):
        if head.num_seg > _MAX_LAYERS:
            expected = f"up to {_MAX_LAYERS} boundaries in a B-scan"
            raise OCTReadError(url, RejectReason.CORRUPT_FILE, expected, head.num_seg)
        file.seek(vol.starts[index] + head.seg_offset)
        rows = np.frombuffer(_exactly(file, 4 * head.num_seg * width, url), "<f4").reshape(-1, width)
        heights[: len(rows), index] = rows[: len(names)]
    heights[~(np.abs(heights) < _NO_VALUE)] = np.nan
    is_drawn = (np.isfinite(heights) & (heights != 0)).any(axis=(1, 2))  # HEYEX fills unused ones with 0
    heights[~is_drawn] = np.nan
    return Surfaces(heights, tuple(names)).drawn()


@functools.cache
def _formats() -> tuple[Any, Any]:
    """eyepy's fields of the file's header and of a B-scan's."""
    import construct
    from eyepy.io.he.vol_reader import bscan_format, vol_format

    def with_numbers(fields: list[Any], names: tuple[str, ...]) -> Any:
        kept = [f if f.name in names else f.name / construct.Bytes(f.sizeof()) for f in fields]
        return construct.Struct(*kept)

    of_file = [f for f in vol_format.subcons if f.name not in ("localizer", "bscans")]
    of_b_scan = [f.name for f in bscan_format.subcons].index("layer_segmentations")
    return with_numbers(of_file, _USED), with_numbers(list(bscan_format.subcons[:of_b_scan]), _USED_OF_B_SCAN)


def _headers(file: IO[bytes], url: str) -> _File:
    eyepy_module(_MODULE, url)
    own, of_b_scan = _formats()
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    with parsing(url, "the header of a VOL file"):
        head = own.parse(_exactly(file, own.sizeof(), url))
    shape = (head.n_bscans, head.size_y, head.size_x)
    if head.scan_pattern in PATTERNS or head.n_bscans < 2:
        pattern = PATTERNS.get(head.scan_pattern, "no raster")
        actual = f"{min(head.n_bscans, 0xFFFF)}, scan pattern {head.scan_pattern}: {pattern}"
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, "two parallel B-scans or more", actual)
    check_size(shape, 4, url)
    place, starts, headers = own.sizeof() + head.size_x_slo * head.size_y_slo, [], []
    for _ in range(shape[0]):
        file.seek(place)
        with parsing(url, "the header of a B-scan"):
            one = of_b_scan.parse(_exactly(file, of_b_scan.sizeof(), url))
        starts.append(place)
        headers.append(one)
        place += one.bscan_hdr_size + 4 * shape[1] * shape[2]
    if place > size:
        raise OCTReadError(url, RejectReason.TRUNCATED_PIXEL_DATA, f"{place} bytes", size)
    lines = [((h.start_x, h.start_y), (h.end_x, h.end_y)) for h in headers]
    scales = [Measures(head.scale_y, head.scale_x, head.distance or None)] * shape[0]
    measured = check_geometry(geometry_of_lines(lines, scales), shape, None, None, url)
    is_grey, side = head.version.startswith(b"ep-v"), SIDES.get(text_of(head.scan_position).lower())
    return _File(shape, is_grey, side, text_of(head.patient_id), measured, tuple(starts), tuple(headers))


def _frame(file: IO[bytes], vol: _File, index: int, url: str) -> np.ndarray:
    """uint8 [H, W] of a B-scan; raises OCTReadError unsupported_pixels for other values."""
    rows, columns = vol.shape[1:]
    file.seek(vol.starts[index] + vol.headers[index].bscan_hdr_size)
    values = np.frombuffer(_exactly(file, 4 * rows * columns, url), "<f4").reshape(rows, columns).copy()
    is_measured = np.abs(values) < _NO_VALUE
    low, high = values.min(where=is_measured, initial=0), values.max(where=is_measured, initial=0)
    values[~is_measured] = 0
    if vol.is_grey and np.array_equal(values, values.astype(np.uint8)):
        return values.astype(np.uint8)
    if not (low >= 0 and high <= 1):
        expected = f"intensities 0..1 in B-scan {index + 1}"
        raise OCTReadError(url, RejectReason.UNSUPPORTED_PIXELS, expected, f"{low:.4g}..{high:.4g}")
    grey: np.ndarray = eyepy_module("eyepy.core.utils", url).from_vol_intensity(values)
    return grey


def _exactly(file: IO[bytes], length: int, url: str) -> bytes:
    data = file.read(length)
    if len(data) < length:
        raise OCTReadError(url, RejectReason.TRUNCATED_PIXEL_DATA, f"{length} bytes more", len(data))
    return data
