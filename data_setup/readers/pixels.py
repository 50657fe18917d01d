"""Native frames out of the pixel data element of an open DICOM file, one at a time.

In: a file positioned at its pixel data element and the header's description of the pixels. Out: an iterator
of arrays, one frame each. Every length is checked against the file before memory of that size is allocated.
Standard: DICOM PS3.5 section 8 and annex A.4.
"""

import struct
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Any

import numpy as np
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate
from pydicom.pixels import get_decoder
from pydicom.uid import UID, JPEGLSTransferSyntaxes, JPEGTransferSyntaxes, UID_dictionary

from data_setup.readers.codestream import PADDING, TAIL_BYTES, check_codestream, is_complete
from data_setup.readers.faults import OCTReadError, RejectReason, UnboundedReadError, named_faults, number

MAX_FRAME_BYTES = 2**30  # no OCT frame is near this; a header that claims more is wrong
# A codec needs 20 times a frame's bytes. A frame above 8 MiB with more than this many times the bytes of its
# codestream is a false claim.
MAX_RATIO, _PLAUSIBLE_BYTES = 200, 2**23
PLAUSIBLE_VOLUME_BYTES = 2**28  # the same of all frames together
_ITEM, _SEQUENCE_END = 0xFFFEE000, 0xFFFEE0DD
_UNDEFINED = 0xFFFFFFFF


class BoundedFile:
    """A binary file whose reads stop at its end, so a wrong length allocates nothing. A read without a size
    raises UnboundedReadError: pydicom does that only to inflate a whole file.
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
    """The header's description of the pixels."""

    frames: int
    rows: int
    columns: int
    samples: int
    bits_allocated: int
    bits_stored: int
    pixel_representation: int
    photometric: str
    planar_configuration: int
    transfer_syntax: UID

    @property
    def frame_bytes(self) -> int:
        # Uncompressed 4:2:2 colour shares its two chroma samples between neighbouring pixels.
        samples = 2 if self.photometric == "YBR_FULL_422" and self.samples == 3 else self.samples
        return self.rows * self.columns * samples * (self.bits_allocated // 8)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of pydicom's decoder for one frame."""
        return {
            "transfer_syntax_uid": self.transfer_syntax,
            "number_of_frames": 1,
            "rows": self.rows,
            "columns": self.columns,
            "samples_per_pixel": self.samples,
            "bits_allocated": self.bits_allocated,
            "bits_stored": self.bits_stored,
            "pixel_representation": self.pixel_representation,
            "photometric_interpretation": self.photometric,
            "planar_configuration": self.planar_configuration,
            "pixel_keyword": "PixelData",
            "correct_unused_bits": False,  # which cuts off what is above them: grey_frames refuses it
        }


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
            photometric=str(ds.PhotometricInterpretation),  # black or white is 0: nobody else says it
            planar_configuration=int(ds.get("PlanarConfiguration") or 0),
            transfer_syntax=UID(ds.file_meta.TransferSyntaxUID),
        )
    counts = (layout.frames, layout.rows, layout.columns, layout.samples)
    if min(counts) < 1 or max(counts[1:]) > 0xFFFF:
        expected = "frames, rows, columns, samples above 0, and all but frames below 65536"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, " x ".join(map(number, counts)))
    if bits not in (8, 16, 32) or not 1 <= layout.bits_stored <= bits:
        actual = f"{number(layout.bits_stored, 64)} of {number(bits, 64)}"
        raise OCTReadError(url, RejectReason.UNSUPPORTED_PIXELS, "bits stored within 8, 16 or 32", actual)
    if layout.frame_bytes > MAX_FRAME_BYTES:
        expected = f"frames up to {MAX_FRAME_BYTES} bytes"
        actual = f"{layout.frame_bytes} bytes ({layout.rows} x {layout.columns})"
        raise OCTReadError(url, RejectReason.UNSUPPORTED_PIXELS, expected, actual)
    return layout


def iter_pixels(
    file: BoundedFile, layout: PixelLayout, url: str, order: Sequence[int] | None = None
) -> Iterator[np.ndarray]:
    """Native frames [rows, cols] or [rows, cols, samples]; raises OCTReadError.

    `order` has the index in the file of each frame, None for file order. The file is at the pixel data
    element. Values and colours are those that the file stores.
    """
    syntax = layout.transfer_syntax
    decoder = _decoder(syntax, url)
    vr, length = _element_header(file, syntax, url)
    find_spans = _encapsulated_frames if syntax.is_encapsulated else _native_frames
    spans = find_spans(file, layout, length, url)
    shape = (layout.rows, layout.columns) + ((layout.samples,) if layout.samples > 1 else ())
    options = layout.options if syntax.is_encapsulated else layout.options | {"pixel_vr": vr}
    dtype = None
    for index in order or range(layout.frames):
        where = f"frame {index + 1} of {number(layout.frames)}"
        data = b"".join(_read_span(file, *span) for span in spans[index])
        if syntax.is_encapsulated:
            if layout.frame_bytes > max(_PLAUSIBLE_BYTES, MAX_RATIO * len(data)):
                expected = f"{layout.frame_bytes} bytes, at most {MAX_RATIO} times those of the codestream"
                raise OCTReadError(url, RejectReason.CORRUPT_PIXEL_DATA, expected, f"{len(data)} in {where}")
            size = (layout.rows, layout.columns, layout.samples)
            data = encapsulate([check_codestream(data, syntax, size, where, url)], has_bot=False)
        with named_faults(url, RejectReason.CORRUPT_PIXEL_DATA, f"{where} to decode"):
            # pydicom warns of more pixels than the header has, and crops them.
            warnings.filterwarnings("error", "The decoded RLE segment contains", UserWarning)
            frame, _ = decoder.as_array(data, index=0, raw=True, validate=False, **options)
        dtype = dtype or frame.dtype
        if frame.shape != shape or frame.dtype != dtype:
            actual = f"{frame.shape} {frame.dtype} in {where}"
            raise OCTReadError(url, RejectReason.FRAME_SIZE_MISMATCH, f"{shape} {dtype}", actual)
        yield frame


def check_element(file: BoundedFile, layout: PixelLayout, url: str) -> None:
    """Raise what iter_pixels would before it reads a pixel; moves the file to the pixel data's value."""
    _decoder(layout.transfer_syntax, url)
    _, length = _element_header(file, layout.transfer_syntax, url)
    if layout.transfer_syntax.is_encapsulated:
        _check_undefined(length, url)
    else:
        _native_frames(file, layout, length, url)


def _decoder(syntax: UID, url: str) -> Any:
    supported = "a transfer syntax that pydicom decodes frame by frame: export it uncompressed"
    with named_faults(url, RejectReason.UNSUPPORTED_PIXELS, supported):
        try:
            decoder = get_decoder(syntax)
        except NotImplementedError:
            is_ge = str(syntax) == "1.2.840.113619.5.2"
            name = "GE's private one" if is_ge else syntax.name if syntax in UID_dictionary else "another one"
            raise OCTReadError(url, RejectReason.UNSUPPORTED_PIXELS, supported, name) from None
    if not decoder.is_available:
        package = "pyjpegls" if syntax in JPEGLSTransferSyntaxes else "pylibjpeg pylibjpeg-openjpeg"
        if syntax in JPEGTransferSyntaxes:
            package = "python-gdcm"
        expected = f"a codec for {syntax.name}: pip install {package}"
        raise OCTReadError(url, RejectReason.MISSING_CODEC, expected, "none installed")
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
        name = names.get(element, f"({group:04x},{element:04x})")
        raise OCTReadError(url, RejectReason.UNSUPPORTED_PIXELS, "integer PixelData", f"only {name}")
    is_explicit = head[4:6] in (b"OB", b"OW", b"UN") and head[6:8] == b"\0\0"
    if is_explicit == syntax.is_implicit_VR:  # 16,975 bytes implicitly: no frames are of that size
        says, has = ("implicit", "explicit") if is_explicit else ("explicit", "implicit")
        expected, actual = f"{says} VR, as the transfer syntax says", f"{has} VR: correct TransferSyntaxUID"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, actual)
    if syntax.is_implicit_VR:
        return "OW", struct.unpack(f"{order}L", head[4:])[0]
    tail = file.read(4)
    if len(tail) < 4:
        actual = "the end of the file"
        raise OCTReadError(url, RejectReason.TRUNCATED_PIXEL_DATA, "a PixelData length", actual)
    return head[4:6].decode("latin-1"), struct.unpack(f"{order}L", tail)[0]


def _native_frames(
    file: BoundedFile, layout: PixelLayout, length: int, url: str
) -> list[list[tuple[int, int]]]:
    """The bytes of each frame as one (offset, length)."""
    total = layout.frames * layout.frame_bytes
    start, rest = file.tell(), file.size - file.tell()
    expected = f"{number(layout.frames)} frames of {layout.frame_bytes} bytes"
    if length == _UNDEFINED:
        raise OCTReadError(url, RejectReason.CORRUPT_PIXEL_DATA, expected, "an undefined length")
    if rest < min(length, total):
        actual = f"{rest} bytes before the file ends"
        raise OCTReadError(url, RejectReason.TRUNCATED_PIXEL_DATA, expected, actual)
    if length not in (total, total + total % 2):
        reason = RejectReason.FRAME_SIZE_MISMATCH
        if length and length % layout.frame_bytes == 0:
            reason = RejectReason.FRAME_COUNT_MISMATCH
        elif length < total:
            reason = RejectReason.TRUNCATED_PIXEL_DATA
        raise OCTReadError(url, reason, expected, f"{length} bytes")
    return [[(start + i * layout.frame_bytes, layout.frame_bytes)] for i in range(layout.frames)]


def _encapsulated_frames(
    file: BoundedFile, layout: PixelLayout, length: int, url: str
) -> list[list[tuple[int, int]]]:
    """The fragments of each frame as (offset, length); only the items' headers are read."""
    _check_undefined(length, url)
    count = f"{number(layout.frames)} frames"
    items: list[tuple[int, int]] = []
    while True:
        head = file.read(8)
        if len(head) < 8:
            expected = f"{count} and an end-of-sequence item"
            actual = f"the end of the file after {max(0, len(items) - 1)} fragments"
            raise OCTReadError(url, RejectReason.TRUNCATED_PIXEL_DATA, expected, actual)
        group, element, size = struct.unpack("<HHL", head)
        tag = group << 16 | element
        if tag == _SEQUENCE_END:
            break
        if tag != _ITEM or size == _UNDEFINED:
            actual = f"({group:04x},{element:04x}) after {len(items)} items"
            raise OCTReadError(url, RejectReason.CORRUPT_PIXEL_DATA, "an item of PixelData", actual)
        if items and size == 0:
            actual = f"none in fragment {number(len(items))}"
            raise OCTReadError(url, RejectReason.TRUNCATED_PIXEL_DATA, "bytes in every fragment", actual)
        items.append((file.tell(), size))
        file.seek(size, 1)
    if not items:
        raise OCTReadError(url, RejectReason.CORRUPT_PIXEL_DATA, "a basic offset table item", "no item")
    table, fragments = items[0], items[1:]
    total, claimed = sum(size for _, size in fragments), layout.frames * layout.frame_bytes
    if total == 0:
        raise OCTReadError(url, RejectReason.TRUNCATED_PIXEL_DATA, count, "no bytes")
    frames = _group_fragments(file, layout, table, fragments)
    if len(frames) != layout.frames:
        actual = f"{len(frames)} in {len(fragments)} fragments"
        raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, count, actual)
    if claimed > max(PLAUSIBLE_VOLUME_BYTES, MAX_RATIO * total):  # before the caller allocates for it
        expected = f"{count} of at most {MAX_RATIO} times as many bytes as in the fragments"
        raise OCTReadError(url, RejectReason.CORRUPT_PIXEL_DATA, expected, f"{total} bytes in the fragments")
    return frames


def _check_undefined(length: int, url: str) -> None:
    if length != _UNDEFINED:
        expected = "compressed PixelData in items of undefined length"
        raise OCTReadError(url, RejectReason.CORRUPT_PIXEL_DATA, expected, f"a length of {length}")


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
        tail = min(size, TAIL_BYTES)
        end = _read_span(file, offset + size - tail, tail)
        if not frames[-1] and not end.strip(PADDING):  # of the frame before
            continue
        frames[-1].append((offset, size))
        if is_complete(end):
            frames.append([])
    return [f for f in frames if f]


def _read_span(file: BoundedFile, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)
