"""Is a JPEG, JPEG-LS or JPEG 2000 codestream whole, and of the size that the DICOM header says?

The codecs do not notice a JPEG 2000 stream that ends early (they return a partial picture), and they allocate
whatever size a codestream claims; so the end marker, the tile-part lengths and the size are read here first.
Standard: ISO/IEC 15444-1 annex A (JPEG 2000 markers), ITU-T T.81 annex B (JPEG markers).
"""

from __future__ import annotations

import struct

from pydicom.uid import UID, JPEG2000TransferSyntaxes, JPEGLSTransferSyntaxes, JPEGTransferSyntaxes

from data_setup.faults import OCTReadError, RejectReason, named_faults

_SIZE_MARKERS = {*range(0xC0, 0xD0), 0xF7} - {0xC4, 0xC8, 0xCC}  # JPEG and JPEG-LS frame headers
_J2K_START = b"\xff\x4f\xff\x51"  # SOC, then SIZ; a JP2 wrapper may come before
_J2K_TILE_PART = 0xFF90


def is_complete(data: bytes) -> bool:
    """True when the codestream ends with EOI / EOC, padding zeros aside."""
    return data[-16:].rstrip(b"\0").endswith(b"\xff\xd9")


def check_codestream(data: bytes, syntax: UID, size: tuple[int, int], where: str, url: str) -> None:
    """Raise OCTReadError when one frame's codestream is cut or not `size` (rows, columns)."""
    is_j2k = syntax in JPEG2000TransferSyntaxes
    if not is_j2k and syntax not in JPEGTransferSyntaxes and syntax not in JPEGLSTransferSyntaxes:
        return
    if not is_complete(data):
        found = f"{where} of {len(data)} bytes without one"
        raise OCTReadError(url, RejectReason.TRUNCATED_PIXEL_DATA, "an end-of-codestream marker", found)
    with named_faults(url, RejectReason.CORRUPT_PIXEL_DATA, f"a codestream in {where}"):
        found_size = _j2k_size(data) if is_j2k else _jpeg_size(data)
        missing = _j2k_missing_bytes(data) if is_j2k else 0
    if missing > 0:
        found = f"{where} ends {missing} bytes early"
        raise OCTReadError(url, RejectReason.TRUNCATED_PIXEL_DATA, "whole tile-parts", found)
    if found_size != size:
        said = f"{size[0]} x {size[1]}"
        raise OCTReadError(
            url, RejectReason.FRAME_SIZE_MISMATCH, said, f"{found_size[0]} x {found_size[1]} in {where}"
        )


def _j2k_size(data: bytes) -> tuple[int, int]:
    start = data.index(_J2K_START)
    x1, y1, x0, y0 = struct.unpack_from(">4L", data, start + 8)
    return y1 - y0, x1 - x0


def _j2k_missing_bytes(data: bytes) -> int:
    """How many bytes the tile-parts reach beyond the end-of-codestream marker; 0 for a whole stream."""
    position = data.index(_J2K_START) + 2
    end = len(data.rstrip(b"\0")) - 2
    while position < end:
        marker, length = struct.unpack_from(">HH", data, position)
        if marker != _J2K_TILE_PART:  # a segment of the main header
            position += 2 + length
            continue
        part_length = struct.unpack_from(">L", data, position + 6)[0]
        position = position + part_length if part_length else end
    return position - end


def _jpeg_size(data: bytes) -> tuple[int, int]:
    position = 2
    while True:
        marker, length = struct.unpack_from(">HH", data, position)
        if marker & 0xFF in _SIZE_MARKERS:
            rows, columns = struct.unpack_from(">HH", data, position + 5)
            return rows, columns
        position += 2 + length
