"""Zeiss IMG (the Cirrus Research Browser's raw export): voxels of 8 bits without a header.

Its shape is the manifest's (number_of_frames, height, width) or `shape: [D, H, W]` of a YAML, and has to
fit the number of bytes. The voxels run B-scan by B-scan, row by row, unless `axes` of the YAML says how
else, the slowest first: `[D, W, -H]` for A-scans that lie one after another and run from choroid to
vitreous. Nothing in the file can show that a shape or an order is wrong: look at a B-scan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.sidecar import MAX_VOLUME_BYTES, Sidecar, checked_frames, make_header


def read(file: IO[bytes], url: str, sidecar: Sidecar, listed: tuple[int, int, int] | None) -> Iterator[Any]:
    """The header, then uint8 frames [H, W]; `listed`: the manifest's (D, H, W). Raises OCTReadError."""
    shape = sidecar.shape or listed
    size = file.seek(0, 2)
    if shape is None:
        expected = "number_of_frames, height and width in the manifest, or shape: [D, H, W] in a YAML"
        raise OCTReadError(url, RejectReason.MISSING_SHAPE, expected, f"raw voxels, {size} bytes")
    if math.prod(shape) != size or size > MAX_VOLUME_BYTES:
        expected = f"{math.prod(shape)} bytes, a voxel each ({' x '.join(map(str, shape))})"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, size)
    axes = sidecar.axes or ("D", "H", "W")
    header = make_header(url, "Zeiss IMG", shape, np.dtype(np.uint8), (None, "no spacing"), sidecar)
    yield header
    file.seek(0)
    names = [axis.removeprefix("-") for axis in axes]
    lengths = dict(zip("DHW", shape, strict=True))
    array = np.frombuffer(file.read(size), np.uint8).reshape([lengths[name] for name in names])
    array = array[tuple(slice(None, None, -1 if axis.startswith("-") else 1) for axis in axes)]
    volume = array.transpose([names.index(name) for name in "DHW"])
    yield from checked_frames((np.ascontiguousarray(frame) for frame in volume), header)
