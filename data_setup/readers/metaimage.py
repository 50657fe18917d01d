"""MetaImage (.mhd with its .raw, .mha) as an OCT volume.

The header gives size, type and spacing; `axes` of the YAML (or the row's volume_yaml) says what the axes are,
in the order of DimSize: [W, H, D] where x runs along the B-scan. TransformMatrix and Offset are not read.
Format: https://itk.org/Wiki/ITK/MetaIO/Documentation.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import numpy as np

from data_setup.readers.dicom import open_file
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.sidecar import Sidecar, array_frames, check_length, reading
from utils.config.schema import StorageOptions
from utils.storage import join

_TYPES = {
    "MET_UCHAR": "u1",
    "MET_CHAR": "i1",
    "MET_USHORT": "u2",
    "MET_SHORT": "i2",
    "MET_UINT": "u4",
    "MET_INT": "i4",
    "MET_FLOAT": "f4",
    "MET_DOUBLE": "f8",
}
_LOCAL = "LOCAL"
_MAX_HEADER = 2**16
_TRUE = ("true", "1")


@dataclass(frozen=True)
class MetaHeader:
    """What the text of a MetaImage says."""

    shape: tuple[int, int, int]  # in the order of DimSize
    dtype: np.dtype  # with its byte order
    spacing: tuple[float, ...] | None
    data_file: str  # LOCAL: behind the header
    start: int  # of the voxels in their file
    is_compressed: bool

    @property
    def length(self) -> int:
        """Bytes of the voxels."""
        return math.prod(self.shape) * self.dtype.itemsize


def read(file: IO[bytes], url: str, sidecar: Sidecar, options: StorageOptions | None = None) -> Iterator[Any]:
    """The header, then uint8 frames [H, W]; raises OCTReadError."""
    meta = read_header(file, url)
    spacing = (meta.spacing, "metaimage_header" if meta.spacing else "no ElementSpacing")
    stored = (meta.shape, meta.dtype.newbyteorder("="))
    voxels = partial(read_voxels, file, url, meta, options)
    yield from array_frames(url, "MetaImage", "the axes of DimSize", stored, spacing, sidecar, voxels)


def read_header(file: IO[bytes], url: str) -> MetaHeader:
    """The header of a file of three axes and one value a voxel; raises OCTReadError."""
    file.seek(0)
    fields: dict[str, str] = {}
    with reading(url, RejectReason.CORRUPT_FILE, "lines of `Key = value` up to ElementDataFile"):
        head, end = file.read(_MAX_HEADER), 0
        while "ElementDataFile" not in fields:
            if end >= len(head):
                raise ValueError("no ElementDataFile")
            line, _, _ = head[end:].partition(b"\n")
            end += len(line) + 1
            key, value = (part.strip() for part in line.decode("ascii").partition("=")[::2])
            if fields.setdefault(key, value) != value:
                expected, actual = "each key once", f"{key[:40]} twice, with two values"
                raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, actual)
        sizes = tuple(int(n) for n in fields["DimSize"].split())
        spacing = fields.get("ElementSpacing", fields.get("ElementSize"))  # ITK's order
        lengths = tuple(float(n) for n in spacing.split()) if spacing else None
        kind, channels = fields["ElementType"], int(fields.get("ElementNumberOfChannels", 1))
        start = int(fields.get("HeaderSize", 0))
    if len(sizes) != 3 or min(sizes) < 1 or channels != 1:
        actual = f"DimSize of {len(sizes)} numbers, {channels} channels"
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, "three axes and one value a voxel", actual)
    if kind not in _TYPES or start < 0 or (lengths is not None and len(lengths) != 3):
        expected = f"ElementType of {', '.join(_TYPES)}, three lengths, HeaderSize of 0 or more"
        raise OCTReadError(url, RejectReason.UNSUPPORTED_FORMAT, expected, "another MetaImage")
    is_big = any(fields.get(f"{name}ByteOrderMSB", "").lower() in _TRUE for name in ("BinaryData", "Element"))
    data_file = fields["ElementDataFile"]
    if not re.fullmatch(r"[^/\\%:]+", data_file) or data_file.split()[0] == "LIST" or data_file[0] == ".":
        expected = "ElementDataFile LOCAL, or one file in the same folder"
        raise OCTReadError(url, RejectReason.UNSUPPORTED_FORMAT, expected, "another")
    meta = MetaHeader(
        shape=(sizes[0], sizes[1], sizes[2]),
        dtype=np.dtype(_TYPES[kind]).newbyteorder(">" if is_big else "<"),
        spacing=lengths,
        data_file=data_file,
        start=end if data_file.upper() == _LOCAL else start,
        is_compressed=fields.get("CompressedData", "").lower() in _TRUE,
    )
    check_length(meta.length, url)
    return meta


def read_voxels(
    file: IO[bytes], url: str, meta: MetaHeader, options: StorageOptions | None = None
) -> np.ndarray:
    """Stored values in native order, axes in the order of DimSize; raises OCTReadError."""
    is_local = meta.data_file.upper() == _LOCAL
    expected = f"{meta.length} bytes of voxels"
    with (
        nullcontext(file) if is_local else open_file(data_url(url, meta), options) as source,
        reading(url, RejectReason.TRUNCATED_PIXEL_DATA, expected),
    ):
        check_length(meta.length, url, source.seek(0, 2))
        source.seek(meta.start)
        data = source.read(-1 if meta.is_compressed else meta.length)
        if meta.is_compressed:
            data = zlib.decompressobj().decompress(data, meta.length)
    if len(data) < meta.length:
        raise OCTReadError(url, RejectReason.TRUNCATED_PIXEL_DATA, expected, len(data))
    array = np.frombuffer(data, meta.dtype).reshape(meta.shape, order="F")
    return array.astype(meta.dtype.newbyteorder("="), copy=False)


def data_url(url: str, meta: MetaHeader) -> str:
    """Where the voxels are; the header's own place where they follow it."""
    return url if meta.data_file.upper() == _LOCAL else join(url.rpartition("/")[0], meta.data_file)
