"""Native frames out of the pixel data element of an open DICOM file, one at a time.

In: a file positioned at its pixel data element and the header's description of the pixels. Out: an iterator
of arrays, one frame each, with every length checked against the stream before anything of that size exists.
Standard: DICOM PS3.5 section 8 and annex A.4.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Any

import numpy as np
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate
from pydicom.pixels import get_decoder
from pydicom.uid import UID, JPEGLSTransferSyntaxes, JPEGTransferSyntaxes

from data_setup.readers.codestream import check_codestream, is_complete
from data_setup.readers.faults import OCTReadError, RejectReason, UnboundedReadError, named_faults, number

MAX_FRAME_BYTES = 2**30  # no OCT frame is near this; a header that claims more is wrong
# A codec needs 20 times a frame's bytes; above 8 MiB a frame this many times its codestream is a lie.
_MAX_RATIO, _PLAUSIBLE_BYTES = 200, 2**23
_PLAUSIBLE_VOLUME_BYTES = 2**28  # the same of all frames together
_ITEM, _SEQUENCE_END = 0xFFFEE000, 0xFFFEE0DD
_UNDEFINED = 0xFFFFFFFF


class BoundedFile:
    """A binary file whose reads never ask for more than is left, so a wrong length allocates nothing.

    A read without a size raises UnboundedReadError: in pydicom only the inflating of a file asks for one.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size = file.seek(0, 2)
        file.seek(0)

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            raise UnboundedReadError
        return self._file.read(min(size, max(0, self.size - self._file.tell())))

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


@dataclass(frozen=True)
class PixelLayout:
    """What the header says about the pixels; `options` is what the decoder of pydicom takes."""

    frames: int
    rows: int
    columns: int
    samples: int
    bits_allocated: int
    bits_stored: int
    pixel_representation: int
    photometric: str
    transfer_syntax: UID
    options: dict[str, Any]

    @property
    def frame_bytes(self) -> int:
        # Uncompressed 4:2:2 colour shares its two chroma samples between neighbouring pixels.
        samples = 2 if self.photometric == "YBR_FULL_422" and self.samples == 3 else self.samples
        return self.rows * self.columns * samples * (self.bits_allocated // 8)


def read_layout(ds: Dataset, url: str) -> PixelLayout:
    """The header's pixel description; raises OCTReadError header_mismatch or unsupported_pixels."""
    with named_faults(url, RejectReason.HEADER_MISMATCH, "a complete pixel description"):
        bits = int(ds.BitsAllocated)
        stored = ds.get("BitsStored")
        frames = ds.get("NumberOfFrames")
        layout = PixelLayout(
            frames=1 if frames is None else int(frames),
            rows=int(ds.Rows),
            columns=int(ds.Columns),
            samples=int(ds.get("SamplesPerPixel") or 1),
            bits_allocated=bits,
            bits_stored=bits if stored is None else int(stored),
            pixel_representation=int(ds.get("PixelRepresentation") or 0),
            photometric=str(ds.get("PhotometricInterpretation") or "MONOCHROME2"),
            transfer_syntax=UID(ds.file_meta.TransferSyntaxUID),
            options={"planar_configuration": int(ds.get("PlanarConfiguration") or 0)},
        )
    counts = (layout.frames, layout.rows, layout.columns, layout.samples)
    if min(counts) < 1 or max(counts[1:]) > 0xFFFF:
        said = "frames, rows, columns, samples above 0, and all but frames below 65536"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, said, " x ".join(map(number, counts)))
    if bits not in (8, 16, 32) or not 1 <= layout.bits_stored <= bits:
        found = f"{number(layout.bits_stored, 64)} of {number(bits, 64)}"
        raise OCTReadError(url, RejectReason.UNSUPPORTED_PIXELS, "bits stored within 8, 16 or 32", found)
    if layout.frame_bytes > MAX_FRAME_BYTES:
        found = f"{layout.frame_bytes} bytes ({layout.rows} x {layout.columns})"
        raise OCTReadError(
            url, RejectReason.UNSUPPORTED_PIXELS, f"frames up to {MAX_FRAME_BYTES} bytes", found
        )
    layout.options.update(
        transfer_syntax_uid=layout.transfer_syntax,
        number_of_frames=1,  # the decoder is handed one frame at a time
        rows=layout.rows,
        columns=layout.columns,
        samples_per_pixel=layout.samples,
        bits_allocated=bits,
        bits_stored=layout.bits_stored,
        pixel_representation=layout.pixel_representation,
        photometric_interpretation=layout.photometric,
        pixel_keyword="PixelData",
    )
    return layout


def iter_pixels(file: BoundedFile, layout: PixelLayout, url: str) -> Iterator[np.ndarray]:
    """Native frames [rows, cols] or [rows, cols, samples] in file order; raises OCTReadError.

    The file stands at the pixel data element. Nothing is converted: stored values, stored colours.
    """
    syntax = layout.transfer_syntax
    decoder = _decoder(syntax, url)
    vr, length = _element_header(file, syntax, url)
    if syntax.is_encapsulated:
        spans = _encapsulated_frames(file, layout, length, url)
    else:
        spans = _native_frames(file, layout, length, url)
    shape = (layout.rows, layout.columns) + ((layout.samples,) if layout.samples > 1 else ())
    dtype = None
    for index, fragments in enumerate(spans):
        where = f"frame {index + 1} of {number(layout.frames)}"
        data = b"".join(_read_span(file, *span) for span in fragments)
        options = dict(layout.options)
        if syntax.is_encapsulated:
            if layout.frame_bytes > max(_PLAUSIBLE_BYTES, _MAX_RATIO * len(data)):
                said = f"{layout.frame_bytes} bytes, at most {_MAX_RATIO} times as many as in the codestream"
                raise OCTReadError(url, RejectReason.CORRUPT_PIXEL_DATA, said, f"{len(data)} in {where}")
            size = (layout.rows, layout.columns, layout.samples)
            data = check_codestream(data, syntax, size, where, url)
            data = encapsulate([data], has_bot=False)
        else:
            options["pixel_vr"] = vr
        with named_faults(url, RejectReason.CORRUPT_PIXEL_DATA, f"{where} to decode"):
            # More pixels than the header has room for: pydicom would crop them with a remark.
            warnings.filterwarnings("error", "The decoded RLE segment contains", UserWarning)
            frame, _ = decoder.as_array(data, index=0, raw=True, validate=False, **options)
        dtype = dtype or frame.dtype
        if frame.shape != shape or frame.dtype != dtype:
            found = f"{frame.shape} {frame.dtype} in {where}"
            raise OCTReadError(url, RejectReason.FRAME_SIZE_MISMATCH, f"{shape} {dtype}", found)
        yield frame


def check_element(file: BoundedFile, layout: PixelLayout, url: str) -> None:
    """What iter_pixels would raise before it reads a pixel; compressed frames are not walked.

    The file stands at the pixel data element, and then at its value.
    """
    _decoder(layout.transfer_syntax, url)
    _, length = _element_header(file, layout.transfer_syntax, url)
    if layout.transfer_syntax.is_encapsulated:
        _check_undefined(length, url)
    else:
        _native_frames(file, layout, length, url)


def _decoder(syntax: UID, url: str) -> Any:
    supported = "a transfer syntax that pydicom decodes frame by frame"
    with named_faults(url, RejectReason.UNSUPPORTED_PIXELS, supported):
        decoder = get_decoder(syntax)
    if not decoder.is_available:
        package = "pylibjpeg-libjpeg" if syntax in JPEGTransferSyntaxes + JPEGLSTransferSyntaxes else None
        licence = " (GPL-3.0, so not in requirements.txt)" if package else ""
        command = f"pip install {package or 'pylibjpeg pylibjpeg-openjpeg'}{licence}"
        raise OCTReadError(
            url, RejectReason.MISSING_CODEC, f"a codec for {syntax.name}: {command}", "none installed"
        )
    return decoder


def _element_header(file: BoundedFile, syntax: UID, url: str) -> tuple[str, int]:
    """(VR, length) of the pixel data element; leaves the file at its value."""
    order = "<" if syntax.is_little_endian else ">"
    head = file.read(8)
    if len(head) < 8:
        raise OCTReadError(url, RejectReason.MISSING_PIXEL_DATA, "a PixelData element", "none")
    group, element = struct.unpack(f"{order}HH", head[:4])
    if (group, element) != (0x7FE0, 0x0010):
        names = {0x0008: "FloatPixelData", 0x0009: "DoubleFloatPixelData"}
        found = names.get(element, f"({group:04x},{element:04x})")
        raise OCTReadError(url, RejectReason.UNSUPPORTED_PIXELS, "integer PixelData", f"only {found}")
    if syntax.is_implicit_VR:
        return "OW", struct.unpack(f"{order}L", head[4:])[0]
    tail = file.read(4)
    if len(tail) < 4:
        raise OCTReadError(
            url, RejectReason.TRUNCATED_PIXEL_DATA, "a PixelData length", "the end of the file"
        )
    return head[4:6].decode("latin-1"), struct.unpack(f"{order}L", tail)[0]


def _native_frames(
    file: BoundedFile, layout: PixelLayout, length: int, url: str
) -> Iterator[list[tuple[int, int]]]:
    expected = layout.frames * layout.frame_bytes
    start, left = file.tell(), file.size - file.tell()
    said = f"{number(layout.frames)} frames of {layout.frame_bytes} bytes"
    if length == _UNDEFINED:
        raise OCTReadError(
            url, RejectReason.CORRUPT_PIXEL_DATA, "a defined PixelData length", "undefined length"
        )
    if left < length and left < expected:
        raise OCTReadError(url, RejectReason.TRUNCATED_PIXEL_DATA, said, f"{left} bytes before the file ends")
    if length not in (expected, expected + expected % 2):
        if length and length % layout.frame_bytes == 0:
            reason = RejectReason.FRAME_COUNT_MISMATCH
        elif length < expected:
            reason = RejectReason.TRUNCATED_PIXEL_DATA
        else:
            reason = RejectReason.FRAME_SIZE_MISMATCH
        raise OCTReadError(url, reason, said, f"{length} bytes")
    return ([(start + i * layout.frame_bytes, layout.frame_bytes)] for i in range(layout.frames))


def _encapsulated_frames(
    file: BoundedFile, layout: PixelLayout, length: int, url: str
) -> list[list[tuple[int, int]]]:
    """Per frame its fragments as (offset, length); the whole chain is walked first, reading headers only."""
    _check_undefined(length, url)
    items: list[tuple[int, int]] = []
    while True:
        head = file.read(8)
        said = f"{number(layout.frames)} frames and an end-of-sequence item"
        if len(head) < 8:
            found = f"the end of the file after {max(0, len(items) - 1)} fragments"
            raise OCTReadError(url, RejectReason.TRUNCATED_PIXEL_DATA, said, found)
        group, element, size = struct.unpack("<HHL", head)
        tag = group << 16 | element
        if tag == _SEQUENCE_END:
            break
        if tag != _ITEM or size == _UNDEFINED:
            found = f"({group:04x},{element:04x}) after {len(items)} items"
            raise OCTReadError(url, RejectReason.CORRUPT_PIXEL_DATA, "an item of PixelData", found)
        if items and size == 0:
            found = f"none in fragment {number(len(items))}"
            raise OCTReadError(url, RejectReason.TRUNCATED_PIXEL_DATA, "bytes in every fragment", found)
        items.append((file.tell(), size))
        file.seek(size, 1)
    if not items:
        raise OCTReadError(url, RejectReason.CORRUPT_PIXEL_DATA, "a basic offset table item", "no item")
    table, fragments = items[0], items[1:]
    total, claimed = sum(size for _, size in fragments), layout.frames * layout.frame_bytes
    if total == 0:
        raise OCTReadError(
            url, RejectReason.TRUNCATED_PIXEL_DATA, f"{number(layout.frames)} frames", "no bytes"
        )
    frames = _group_fragments(file, layout, table, fragments)
    if len(frames) != layout.frames:
        found = f"{len(frames)} in {len(fragments)} fragments"
        raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, f"{number(layout.frames)} frames", found)
    if claimed > max(_PLAUSIBLE_VOLUME_BYTES, _MAX_RATIO * total):  # before the caller allocates for it
        said = (
            f"{number(layout.frames)} frames of at most {_MAX_RATIO} times as many bytes as in the fragments"
        )
        raise OCTReadError(url, RejectReason.CORRUPT_PIXEL_DATA, said, f"{total} bytes in the fragments")
    return frames


def _check_undefined(length: int, url: str) -> None:
    if length != _UNDEFINED:
        said = "compressed PixelData in items of undefined length"
        raise OCTReadError(url, RejectReason.CORRUPT_PIXEL_DATA, said, f"a length of {length}")


def _group_fragments(
    file: BoundedFile, layout: PixelLayout, table: tuple[int, int], fragments: list[tuple[int, int]]
) -> list[list[tuple[int, int]]]:
    if len(fragments) <= layout.frames:
        return [[f] for f in fragments]
    if layout.frames == 1:
        return [fragments]
    offsets = np.frombuffer(_read_span(file, *table)[: table[1] // 4 * 4], "<u4").astype(int)
    positions = {start - fragments[0][0]: index for index, (start, _) in enumerate(fragments)}
    if len(offsets) == layout.frames and offsets[0] == 0 and set(offsets.tolist()) <= positions.keys():
        bounds = [positions[o] for o in offsets.tolist()] + [len(fragments)]
        return [fragments[a:b] for a, b in pairwise(bounds)]
    # No usable table: a frame ends where its codestream does.
    frames: list[list[tuple[int, int]]] = [[]]
    for offset, size in fragments:
        frames[-1].append((offset, size))
        tail = min(size, 16)
        if is_complete(_read_span(file, offset + size - tail, tail)):
            frames.append([])
    return [f for f in frames if f]


def _read_span(file: BoundedFile, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)
