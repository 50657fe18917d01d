"""Topcon FDA and FDS: chunks with names; the voxels, the size of the field and the eye.

FDA holds a JPEG 2000 codestream for each B-scan (@IMG_JPEG), FDS 16-bit values (@IMG_SCAN_03). Spacing from
@PARAM_SCAN_04 or _02: width / A-scans, height / (B-scans - 1), as Topcon's DICOM has it, and the axial one
in um; the eye from @CAPTURE_INFO. The layout is that of uocte's wiki, and reads as panimg 0.18 reads it; no
library that fits beside this project's versions opens these files. No chunk says which way the B-scans run:
the order along D stays unknown. Names and dates of people are not read.

Boundaries of an FDA (@CONTOUR_INFO) are rows from the bottom: the bottom row is 0. In a real file the first
line of each is that of the first B-scan; oct-converter 0.7 reverses them, and gives one row more.
"""

import re
import struct
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from pylibjpeg import decode

from data_setup.protocols import DEVICES, Shape
from data_setup.readers.faults import OCTReadError, RejectReason, number
from data_setup.readers.makers.library import Surfaces, text_of
from data_setup.readers.sidecar import MAX_VOLUME_BYTES, Sidecar, checked_frames, make_header, reading

_MAX_CHUNKS = 1000
_RASTER = 2  # scan mode of a 3D raster in the files that were seen
_SIDES = {0: "R", 1: "L"}
_CODESTREAMS = (b"\xff\x4f\xff\x51", b"\0\0\0\x0cjP  ")  # first bytes of JPEG 2000, bare and in a box
_EYES = (b"@CAPTURE_INFO_02", b"@CAPTURE_INFO")
_FIELDS = {b"@PARAM_SCAN_04": 12, b"@PARAM_SCAN_02": 21}  # bytes before the width of the field
_PATIENTS = (b"@PATIENT_INFO_02", b"@PATIENT_INFO")
_MODELS = (b"@HW_INFO_03", b"@HW_INFO_02", b"@HW_INFO_01")
_CONTOUR = "<20sBBIII"  # name, method, format, width, height, bytes
_VALUES = {0: "<u2", 1: "<f8"}  # of a format
_LAYERS = ("ILM", "RNFL_GCL", "GCL_IPL", "IPL_INL", "MZ_EZ", "IZ_RPE", "BM", "INL_OPL", "ELM", "CSI")
# oct-converter's names; RETINA_2 and _3 have two in two programs, so they keep their own
_BOUNDARIES = {"RETINA_1": "ILM", "RETINA_4": "BM"}
_BOUNDARIES |= {f"MULTILAYERS_{number}": name for number, name in enumerate(_LAYERS, 1)}
_Chunks = dict[bytes, tuple[int, int]]  # name -> first byte, length


@dataclass(frozen=True)
class _Voxels:
    """Where the B-scans are."""

    shape: Shape
    start: int  # byte of the first B-scan
    end: int
    is_jpeg: bool


def read(file: IO[bytes], url: str, sidecar: Sidecar, kind: str) -> Iterator[Any]:
    """The header, then uint8 frames [H, W] in file order; raises OCTReadError."""
    with reading(url, RejectReason.CORRUPT_FILE, "the chunks of a Topcon file"):
        chunks = _chunks(file, url)
        voxels = _voxels(file, chunks, url)
        side = next((_SIDES.get(_part(file, chunks, n, 1, url)[0]) for n in _EYES if n in chunks), None)
        model = next((text_of(_part(file, chunks, n, 16, url)) for n in _MODELS if n in chunks), "")
        spacing = _spacing(file, chunks, voxels.shape, url)
    dtype, device = np.dtype(np.uint8 if voxels.is_jpeg else "<u2"), _device(model)
    header = make_header(url, kind, voxels.shape, dtype, spacing, sidecar, laterality=side, device=device)
    yield header
    yield from checked_frames(stored_frames(file, url), header)


def stored_frames(file: IO[bytes], url: str, wanted: Container[int] | None = None) -> Iterator[np.ndarray]:
    """The values as stored, [H, W], of the `wanted` B-scans from 0, None: all; raises OCTReadError."""
    with reading(url, RejectReason.CORRUPT_FILE, "the chunks of a Topcon file"):
        voxels = _voxels(file, _chunks(file, url), url)
    every = range(voxels.shape[0]) if wanted is None else wanted
    return (_jpeg_frames if voxels.is_jpeg else _raw_frames)(file, voxels, url, every)


def surfaces(file: IO[bytes], url: str) -> Surfaces | None:
    """The boundaries that an FDA holds, in its own order; None without one. Raises OCTReadError."""
    with reading(url, RejectReason.CORRUPT_FILE, "the chunks of a Topcon file"):
        shape = _voxels(file, _chunks(file, url), url).shape
        every = contours(file, url, shape[1])
    for name, rows in every.items():
        if rows.shape != shape[::2]:
            expected = f"{name} of {shape[0]} x {shape[2]}, as the B-scans"
            raise OCTReadError(
                url, RejectReason.FRAME_SIZE_MISMATCH, expected, " x ".join(map(str, rows.shape))
            )
    drawn = Surfaces(np.stack(list(every.values())), tuple(every)).drawn() if every else None
    if drawn is None:
        return None
    order = np.argsort(np.nanmean(drawn.heights, axis=(1, 2)), kind="stable")
    return Surfaces(drawn.heights[order], tuple(drawn.names[place] for place in order))


def contours(file: IO[bytes], url: str, height: int) -> dict[str, np.ndarray]:
    """{name: float32 [B-scans, A-scans]} of an FDA, rows of images of `height` from the top, 0 the first. NaN
    where the file has no row of the image. Raises OCTReadError, struct.error.
    """
    result: dict[str, np.ndarray] = {}
    head = struct.calcsize(_CONTOUR)
    for place, count in (place for name, place in _walk(file, url) if name == b"@CONTOUR_INFO"):
        file.seek(place)
        label, _, form, columns, lines, _ = struct.unpack(_CONTOUR, file.read(head))
        kind = np.dtype(_VALUES.get(form, "V1"))
        if form not in _VALUES or head + columns * lines * kind.itemsize > count:
            expected = "boundaries of 16 or 64 bits in a chunk of their size"
            raise OCTReadError(url, RejectReason.CORRUPT_FILE, expected, f"format {form}, {count} bytes")
        values = np.frombuffer(file.read(columns * lines * kind.itemsize), kind).reshape(lines, columns)
        rows = height - 1 - values.astype(np.float32)
        rows[~((rows >= 0) & (rows < height))] = np.nan
        result[_BOUNDARIES.get(text_of(label), text_of(label))] = rows
    return result


def patient_id(file: IO[bytes], url: str) -> str:
    """The id that somebody typed in, "" without one; it may identify a person. Raises OCTReadError."""
    with reading(url, RejectReason.CORRUPT_FILE, "the chunks of a Topcon file"):
        chunks = _chunks(file, url)
        return next((text_of(_part(file, chunks, n, 32, url)) for n in _PATIENTS if n in chunks), "")


def _chunks(file: IO[bytes], url: str) -> _Chunks:
    """Each chunk's place by name, of the first with that name."""
    return dict(reversed(_walk(file, url)))


def _walk(file: IO[bytes], url: str) -> list[tuple[bytes, tuple[int, int]]]:
    """Name and place of every chunk."""
    size = file.seek(0, 2)
    chunks = []
    place = 15  # after the mark and the version
    for _ in range(_MAX_CHUNKS):
        file.seek(place)
        length = file.read(1)
        if length in (b"", b"\0"):
            break
        name, count = file.read(length[0]), struct.unpack("<I", file.read(4))[0]
        place += 1 + length[0] + 4
        chunks.append((name, (place, count)))
        place += count
        if place > size:
            expected = f"{place} bytes, as its chunks say"
            raise OCTReadError(url, RejectReason.TRUNCATED_PIXEL_DATA, expected, size)
    return chunks


def _part(file: IO[bytes], chunks: _Chunks, name: bytes, length: int, url: str, skip: int = 0) -> bytes:
    """Bytes from within a chunk; raises corrupt_file where the chunk is shorter."""
    start, count = chunks[name]
    if count < skip + length:
        expected = f"{skip + length} bytes in a chunk of the header"
        raise OCTReadError(url, RejectReason.CORRUPT_FILE, expected, count)
    file.seek(start + skip)
    return file.read(length)


def _voxels(file: IO[bytes], chunks: _Chunks, url: str) -> _Voxels:
    """The B-scans of the first chunk with any; raises not_a_volume, header_mismatch."""
    if b"@IMG_JPEG" in chunks:
        start, count = chunks[b"@IMG_JPEG"]
        head = _part(file, chunks, b"@IMG_JPEG", 25, url)
        mode, _, _, width, height, frames, _ = struct.unpack("<BIIIIII", head)
        voxels = _Voxels((frames, height, width), start + 25, start + count, True)
    elif b"@IMG_SCAN_03" in chunks:
        start, count = chunks[b"@IMG_SCAN_03"]
        head = _part(file, chunks, b"@IMG_SCAN_03", 22, url)
        mode, width, height, bits, frames, _, size = struct.unpack("<BIIIIBI", head)
        voxels = _Voxels((frames, height, width), start + 22, start + count, False)
        if bits != 16 or not 2 * frames * height * width == size == count - 22:
            expected = "16 bits x B-scans x rows x columns = the length of its chunk"
            actual = f"{bits} x {frames} x {height} x {width}, {count - 22} bytes"
            raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, actual)
    else:
        expected = "B-scans in @IMG_JPEG or @IMG_SCAN_03"
        raise OCTReadError(url, RejectReason.MISSING_PIXEL_DATA, expected, "neither")
    if mode != _RASTER or frames < 2:
        expected = f"a 3D raster (scan mode {_RASTER}) of two B-scans or more"
        raise OCTReadError(
            url, RejectReason.NOT_A_VOLUME, expected, f"scan mode {mode}, {number(frames)} B-scans"
        )
    if not 0 < frames * height * width <= MAX_VOLUME_BYTES:
        expected = f"B-scans x rows x columns up to {MAX_VOLUME_BYTES}"
        raise OCTReadError(url, RejectReason.CORRUPT_FILE, expected, "another number")
    return voxels


def _spacing(file: IO[bytes], chunks: _Chunks, shape: Shape, url: str) -> tuple[list[float] | None, str]:
    """(spacing of D, H, W in mm, its chunk), or None and the reason."""
    name = next((n for n in _FIELDS if n in chunks), None)
    if name is None:
        return None, "no @PARAM_SCAN"
    width, height, axial_um = struct.unpack("<3d", _part(file, chunks, name, 24, url, skip=_FIELDS[name]))
    return [height / (shape[0] - 1), axial_um / 1000, width / shape[2]], name.decode()


def _jpeg_frames(file: IO[bytes], voxels: _Voxels, url: str, wanted: Container[int]) -> Iterator[np.ndarray]:
    place = voxels.start
    for index in range(voxels.shape[0]):
        with reading(url, RejectReason.CORRUPT_PIXEL_DATA, f"JPEG 2000 of B-scan {index + 1}"):
            file.seek(place)
            length = struct.unpack("<I", file.read(4))[0]
            place += 4 + length
            if place > voxels.end:
                raise ValueError("the chunk ends before the B-scan")
            frame = decode(file.read(length)) if index in wanted else None
        if frame is not None:
            yield frame
    file.seek(min(place + 4, voxels.end))
    if file.read(max(0, min(12, voxels.end - place - 4))).startswith(_CODESTREAMS):
        expected = f"{voxels.shape[0]} B-scans, as the header says"
        raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, expected, "another after them")


def _raw_frames(file: IO[bytes], voxels: _Voxels, url: str, wanted: Container[int]) -> Iterator[np.ndarray]:
    frames, height, width = voxels.shape
    for index in (index for index in range(frames) if index in wanted):
        file.seek(voxels.start + index * 2 * height * width)
        with reading(url, RejectReason.TRUNCATED_PIXEL_DATA, f"values of B-scan {index + 1}"):
            frame = np.frombuffer(file.read(2 * height * width), "<u2").reshape(height, width)
        yield frame.astype(np.uint16)


def _device(model: str) -> str | None:
    """The name as in AI-READI's tables, else the maker's own in that form; None without one."""
    name = re.sub(r"[^a-z0-9]+", "_", model.lower()).strip("_")
    known = next((d for d in DEVICES if d.removeprefix("topcon_") in name), None)
    return known or (f"topcon_{name}" if name else None)
