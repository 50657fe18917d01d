"""Heidelberg E2E (HEYEX's exchange file): its OCT series, by eyepy's directory and fields.

A file may hold many series, of both eyes. A series is a volume where it has two B-scans or more; a path
names one of several as `eye.E2E#ID`, with the ID that the file gives it. Slices are ordered by their
number, have to be as many as each of them says, and to lie parallel and evenly spaced where their places
are given. The eye is each series' own; eyepy's property of it gives 82 and 76 instead. E2E states the axial
spacing in mm, and places in degrees. No number turns these into mm without the length of the eye: spacing_mm
comes from the manifest or a YAML, and the reject says what a medium eye would have. Which way the degrees
run is not known: the order along D stays unknown.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy as np

from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.geometry import check_lines
from data_setup.readers.heidelberg import DEVICE
from data_setup.readers.makers.library import PATTERNS, Surfaces, check_size, eyepy_module, parsing
from data_setup.readers.sidecar import Sidecar, checked_frames, make_header

_MODULE = "eyepy.io.he.e2e_reader"
_MM_A_DEGREE = 0.2896  # eyepy's constant of a medium eye; proposed, never used
_AGREE = 0.01  # relative: the axial spacing of file and manifest
_PATIENT, _LATERALITY, _IMAGE, _B_SCAN_META = 9, 11, 1073741824, 10004  # types of folders
_OCT = 35652097  # type of an image
_LAYER = 10019
_NO_VALUE = 3e38  # HEYEX writes the largest float32 where it measured nothing, and 0
_SIDES = {ord("L"): "L", ord("R"): "R"}
_FIELDS = ("patient_id", "study_id", "series_id", "slice_id", "pos", "start", "type", "size", "ind")


def read(file: IO[bytes], url: str, sidecar: Sidecar, part: str | None) -> Iterator[Any]:
    """The header, then uint8 frames [H, W] in order; `part`: the ID of a series. Raises OCTReadError."""
    series = _chosen(_series(file, url), part, url)
    slices = [series.slices[key] for key in sorted(series.slices)]
    with parsing(url, "the header of each B-scan"):
        metas = [_data(one, _B_SCAN_META) for one in slices]
        letter = int(_data(series, _LATERALITY).laterality) if _LATERALITY in series.folders else 0
    shape = (len(slices), int(metas[0].size_y), int(metas[0].size_x))
    _check(metas, shape, url)
    axial = float(f"{metas[0].scale_y:.6g}")  # single precision
    spacing, dtype, side = (None, _in_degrees(metas, shape, axial)), np.dtype(np.uint8), _SIDES.get(letter)
    header = make_header(
        url, "Heidelberg E2E", shape, dtype, spacing, sidecar, laterality=side, device=DEVICE
    )
    yield header  # before the check of the axial spacing: data_setup.index stands one in
    if not math.isclose(header.spacing_mm[1], axial, rel_tol=_AGREE):
        expected = f"an axial spacing of {axial:g} mm, as in the file"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, f"{header.spacing_mm[1]:g}")
    yield from checked_frames((_frame(one, shape, url) for one in slices), header)


def volume_ids(file: IO[bytes], url: str) -> list[str]:
    """The IDs of the series that have two B-scans or more; raises OCTReadError."""
    return [str(one.id) for one in _series(file, url) if _is_volume(one)]


def patient_id(file: IO[bytes], url: str, part: str | None) -> str:
    """The id that somebody typed in, "" without one; it may identify a person. Raises OCTReadError."""
    patient = _chosen(_series(file, url), part, url).patient
    with parsing(url, "the folder of a patient"):
        return str(_data(patient, _PATIENT).patient_id).strip() if _PATIENT in patient.folders else ""


def surfaces(file: IO[bytes], url: str, part: str | None) -> Surfaces | None:
    """HEYEX's boundaries, in the order of the frames, by eyepy's names, or None. Raises OCTReadError."""
    series = _chosen(_series(file, url), part, url)
    slices = [series.slices[key] for key in sorted(series.slices)]
    with parsing(url, "the boundaries of each B-scan"):
        width = int(_data(slices[0], _B_SCAN_META).size_x)
        numbers = eyepy_module(_MODULE, url).SEG_MAPPING
        names = {number: name for name, number in numbers.items()}
        heights = np.full((len(names), len(slices), width), np.nan, np.float32)
        for index, one in enumerate(slices):
            for layer in (folder.data for folder in one.folders.get(_LAYER, [])):
                values = np.asarray(layer.data, np.float32)
                if layer.id in names and len(values) == width:
                    heights[list(names).index(layer.id), index] = values
    heights[~((heights > 0) & (heights < _NO_VALUE))] = np.nan
    return Surfaces(heights, tuple(names.values())).drawn()


def _series(file: IO[bytes], url: str) -> list[Any]:
    """eyepy's series of an open file."""
    module = eyepy_module(_MODULE, url)

    class OpenReader(module.HeE2eReader):  # type: ignore[name-defined]
        """eyepy's reader on an open file, which may be in a bucket; its own opens a path."""

        def _index_file(self) -> None:
            self.file_object = file
            for chunk in module.e2e_format.parse_stream(file).chunks:
                for head in chunk.folders:
                    fields = {name: getattr(head, name) for name in _FIELDS}
                    self.file_hierarchy.add_folder(module.E2EFolder(**fields, reader=self))

    file.seek(0)
    with parsing(url, "the directory of an E2E file"):
        series = list(OpenReader(url).series)
    if not series:
        expected = "a directory with series: export the patient from HEYEX again"
        raise OCTReadError(url, RejectReason.CORRUPT_FILE, expected, "none, as in a file that is cut")
    return series


def _is_volume(series: Any) -> bool:
    return sum(_B_SCAN_META in one.folders for one in series.slices.values()) > 1


def _chosen(every: Sequence[Any], part: str | None, url: str) -> Any:
    """The series with this ID, or the only one that is a volume; raises not_a_volume."""
    volumes = [one for one in every if _is_volume(one)]
    chosen = [one for one in volumes if part in (None, str(one.id))]
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join(f"#{one.id}" for one in volumes) or "none"
    expected = f"one series of two B-scans or more; the path names one of several as FILE#ID ({names})"
    raise OCTReadError(url, RejectReason.NOT_A_VOLUME, expected, len(chosen))


def _data(place: Any, kind: int) -> Any:
    """The content of the first folder of a type."""
    return place.folders[kind][0].data


def _check(metas: Sequence[Any], shape: tuple[int, int, int], url: str) -> None:
    """Raise OCTReadError where the slices are no whole raster of one size."""
    patterns = {int(meta.scan_pattern) for meta in metas}
    for pattern in patterns & set(PATTERNS):
        expected = "a raster of parallel B-scans"
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, expected, f"{PATTERNS[pattern]} (scan pattern)")
    check_size(shape, 2, url)
    sizes = {(int(meta.size_y), int(meta.size_x)) for meta in metas}
    if len(sizes) > 1:
        raise OCTReadError(url, RejectReason.FRAME_SIZE_MISMATCH, "one size for all B-scans", sorted(sizes))
    counts = {int(meta.n_bscans) for meta in metas}
    if counts != {len(metas)}:
        expected = f"{max(counts)} B-scans, as each of them says"
        raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, expected, len(metas))
    numbers = [int(meta.aktImage) for meta in metas]
    if sorted(set(numbers)) != numbers:
        expected = "B-scans in the order of their numbers"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, "another order")
    lines = [((meta.start_x, meta.start_y), (meta.end_x, meta.end_y)) for meta in metas]
    check_lines(np.array(lines, float), "degrees", url)


def _in_degrees(metas: Sequence[Any], shape: tuple[int, int, int], axial: float) -> str:
    """Why there is no spacing, and what it would be in an eye of medium length."""
    first, last = metas[0], metas[-1]
    width = math.hypot(first.end_x - first.start_x, first.end_y - first.start_y)
    height = math.hypot(last.start_x - first.start_x, last.start_y - first.start_y)
    mm = (height / (shape[0] - 1) * _MM_A_DEGREE, axial, width / shape[2] * _MM_A_DEGREE)
    return "{:.3g} x {:.3g} degrees; in a medium eye [{:.4g}, {:.6g}, {:.4g}]".format(height, width, *mm)


def _frame(one: Any, shape: tuple[int, int, int], url: str) -> np.ndarray:
    """uint8 [H, W] of a slice; raises OCTReadError."""
    expected = f"one B-scan of {shape[1:]} in each slice"
    with parsing(url, expected):
        images = [folder.get_bytes() for folder in one.folders.get(_IMAGE, [])]
        heads = [struct.unpack_from("<5I", image) for image in images]  # size, type, values, rows, columns
        kept = [(image, head) for image, head in zip(images, heads, strict=True) if head[1] == _OCT]
        sizes = [head[3:] for _, head in kept]
        if sizes != [shape[1:]]:
            raise OCTReadError(url, RejectReason.FRAME_SIZE_MISMATCH, expected, sizes)
        codes = np.frombuffer(kept[0][0], "<u2", shape[1] * shape[2], offset=20).reshape(shape[1:])
    grey: np.ndarray = eyepy_module("eyepy.core.utils", url).from_e2e_intensity(intensities(codes))
    return grey


def intensities(codes: np.ndarray) -> np.ndarray:
    """float32 of E2E's 16-bit floats: no sign, 6 bits of exponent (less 63), 10 of mantissa.

    eyepy 0.21, panimg 0.18 and oct-converter 0.7 take the bits of the mantissa in reverse order. In a real
    file its highest bit is the one that is set less often, and neighbours are closer this way.
    """
    return np.ldexp(1 + (codes & 0x3FF).astype(np.float32) / 1024, (codes >> 10).astype(np.int32) - 63)
