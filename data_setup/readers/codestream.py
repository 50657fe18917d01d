"""Is a JPEG, JPEG-LS or JPEG 2000 codestream whole, and of the size in the DICOM header?

The codecs return a partial picture for a JPEG 2000 stream that ends early, and allocate whatever size a
codestream claims. So the end marker, the tile-part lengths, the size, and the number of planes, tiles and
scans are checked here first.
Standard: ISO/IEC 15444-1 annex A (JPEG 2000 markers), ITU-T T.81 annex B (JPEG markers).
"""

import struct

from pydicom import uid

from data_setup.readers.faults import OCTReadError, RejectReason, named_faults, number

_SIZE_MARKERS = {*range(0xC0, 0xD0), 0xF7} - {0xC4, 0xC8, 0xCC}  # JPEG and JPEG-LS frame headers
_J2K_START = b"\xff\x4f\xff\x51"  # SOC, then SIZ; a JP2 wrapper may come before
_J2K_TILE_PART = 0xFF90
_J2K_DATA, _J2K_STYLE = 0xFF93, 0xFF52  # SOD, COD (and COC behind it)
_J2K_SEGMENTS = {0xFF00 | low for low in (*range(0x50, 0x54), 0x55, *range(0x57, 0x5A), *range(0x5C, 0x62))}
_J2K_SEGMENTS |= {0xFF63, 0xFF64, 0xFF74, 0xFF75, 0xFF77, 0xFF78}
_TILE_PART_BYTES = 14  # the least a tile-part takes (SOT and SOD), and each tile has one
_SEQUENTIAL = {0xC0, 0xC1}
_SCAN = 0xDA
PADDING = b"\0 \xff"  # writers fill a frame up to a block with one of these
TAIL_BYTES = 4096  # where the end of a codestream is sought, padding included
_BARE = {0x00, 0x01, *range(0xD0, 0xDA)}  # no marker that a segment follows


def is_complete(data: bytes) -> bool:
    """True when the codestream ends with EOI / EOC, padding aside."""
    return data.rstrip(PADDING).endswith(b"\xff\xd9")


def check_codestream(data: bytes, syntax: uid.UID, size: tuple[int, int, int], where: str, url: str) -> bytes:
    """One frame's codestream without padding and without its JP2 wrapper, whose boxes are not checked. Raises
    OCTReadError when it is cut, not of `size` (rows, columns, samples), or too much work for it.
    """
    is_j2k = syntax in uid.JPEG2000TransferSyntaxes
    if syntax == uid.RLELossless:
        with named_faults(url, RejectReason.CORRUPT_PIXEL_DATA, f"run-length segments in {where}"):
            return _rle_without_padding(data, size[0] * size[1])
    if not is_j2k and syntax not in uid.JPEGTransferSyntaxes and syntax not in uid.JPEGLSTransferSyntaxes:
        return data
    if not is_complete(data):
        actual = f"{where} of {len(data)} bytes without one"
        raise OCTReadError(url, RejectReason.TRUNCATED_PIXEL_DATA, "an end-of-codestream marker", actual)
    data = data.rstrip(PADDING)
    with named_faults(url, RejectReason.CORRUPT_PIXEL_DATA, f"a codestream in {where}"):
        if is_j2k:
            data = data[data.index(_J2K_START) :]
            actual_size, tiles = _j2k_size(data)
            missing, packets = _j2k_walk(data)
            kind, scans = None, 1
        else:
            actual_size, kind, scans = _jpeg_size(data)
            missing, tiles, packets = 0, 1, 0
    if missing > 0:
        actual = f"{where} ends {number(missing, len(data))} bytes early"
        raise OCTReadError(url, RejectReason.TRUNCATED_PIXEL_DATA, "whole tile-parts", actual)
    if actual_size != size:
        expected, actual = (" x ".join(map(number, s)) for s in (size, actual_size))
        raise OCTReadError(url, RejectReason.FRAME_SIZE_MISMATCH, expected, f"{actual} in {where}")
    wrong = {
        "as many tiles as fit into its bytes": tiles * _TILE_PART_BYTES > len(data),
        "as many packets as fit into its bytes": packets > len(data),
        "a sequential JPEG": syntax in (uid.JPEGBaseline8Bit, uid.JPEGExtended12Bit)
        and kind not in _SEQUENTIAL,
        "a scan for each sample at most": scans > size[2],
    }
    for expected in (rule for rule, is_wrong in wrong.items() if is_wrong):
        raise OCTReadError(url, RejectReason.CORRUPT_PIXEL_DATA, expected, f"another codestream in {where}")
    return data


def _rle_without_padding(data: bytes, length: int) -> bytes:
    """The frame up to the end of its last segment, of `length` bytes, where nothing but padding follows."""
    if data[-2:].strip(PADDING):
        return data
    count, *offsets = struct.unpack_from("<16L", data)
    at = offsets[count - 1]
    while length > 0 and at < len(data):  # PackBits: a literal run, or a byte that is repeated
        run = data[at]
        length -= run + 1 if run < 128 else 257 - run if run > 128 else 0
        at += run + 2 if run < 128 else 2 if run > 128 else 1
    return data[:at] if length == 0 and not data[at:].strip(PADDING) else data


def _j2k_size(data: bytes) -> tuple[tuple[int, int, int], int]:
    """(rows, columns, components) and the number of tiles of the SIZ segment."""
    x1, y1, x0, y0, width, height, tile_x, tile_y, planes = struct.unpack_from(">8LH", data, 8)
    tiles = -((tile_x - x1) // width) * -((tile_y - y1) // height)
    return (y1 - y0, x1 - x0, planes), tiles


def _j2k_walk(data: bytes) -> tuple[int, int]:
    """(bytes by which tile-parts reach beyond the end marker, packets of one tile that the headers claim)."""
    position, packets = 2, 0
    end = part_end = len(data) - 2
    while position < end:
        marker, length = struct.unpack_from(">HH", data, position)
        if marker == _J2K_TILE_PART:
            part_length = struct.unpack_from(">L", data, position + 6)[0]
            part_end = position + part_length if part_length else end
            if part_end > end:
                return part_end - end, packets
        elif marker == _J2K_DATA:
            position = part_end
            continue
        elif marker not in _J2K_SEGMENTS:  # codecs would search for the next marker
            raise ValueError("no marker segment")
        elif marker in (_J2K_STYLE, _J2K_STYLE + 1):
            packets = max(packets, _j2k_packets(data, position))
        position += 2 + length
    return 0, packets


def _j2k_packets(data: bytes, at: int) -> int:
    """Packets of a tile under the COD or COC segment there: each layer of each precinct is one."""
    is_default = data[at + 1] == _J2K_STYLE & 0xFF
    style = at + (4 if is_default else 5)  # the component of a COC has one byte up to 256 of them
    layers = struct.unpack_from(">H", data, at + 6)[0] if is_default else 1
    levels = data[at + 9 if is_default else style + 1]
    sizes = at + 14 if is_default else style + 6
    if not data[style] & 1:
        return layers * (levels + 1)
    x1, y1, x0, y0, width, height = struct.unpack_from(">6L", data, 8)
    count = 0
    for level, size in enumerate(data[sizes : sizes + levels + 1]):
        sides = min(width, x1 - x0) >> (levels - level), min(height, y1 - y0) >> (levels - level)
        count += (sides[0] >> (size & 15)) * (sides[1] >> (size >> 4))
    return layers * max(1, count)


def _jpeg_size(data: bytes) -> tuple[tuple[int, int, int], int, int]:
    """(rows, columns, components), the second byte of the frame header's marker, and the number of scans."""
    position, frame = 2, None
    while True:
        first, marker, length = struct.unpack_from(">BBH", data, position)
        if (first, marker) == (0xFF, 0xFF):  # a fill byte
            position += 1
            continue
        if first != 0xFF or marker in _BARE or length < 2:  # each codec would search on in its own way
            raise ValueError("no marker segment")
        if marker in _SIZE_MARKERS:
            frame = struct.unpack_from(">HHB", data, position + 5), marker
        elif marker == _SCAN and frame is not None:
            # In the coded data no other byte than 0 follows 0xFF (below 0x80 in JPEG-LS).
            return *frame, data.count(bytes((0xFF, _SCAN)), position)
        position += 2 + length
