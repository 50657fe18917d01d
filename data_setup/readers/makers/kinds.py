"""The reader of each maker's kind, by its name; and which volumes one file holds."""

import math
import re
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from data_setup.protocols import Shape
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.makers import e2e, topcon, vol
from data_setup.readers.makers.library import Surfaces
from data_setup.readers.sidecar import MAX_VOLUME_BYTES, Sidecar, checked_frames, make_header

E2E, VOL, FDA, FDS, IMG = "Heidelberg E2E", "Heidelberg VOL", "Topcon FDA", "Topcon FDS", "Zeiss IMG"
KINDS = (E2E, VOL, FDA, FDS, IMG)
LAYERED = (VOL, E2E, FDA)
HEADED = (E2E, VOL, FDA, FDS)  # the file says the eye and the person


def read(kind: str, file: IO[bytes], url: str, sidecar: Sidecar, listed: Shape | None) -> Iterator[Any]:
    """The header, then uint8 frames [H, W] in order; `listed`: the manifest's shape. Raises OCTReadError."""
    if kind == VOL:
        return vol.read(file, url, sidecar)
    if kind == E2E:
        return e2e.read(file, url, sidecar, split_part(url)[1])
    if kind == IMG:
        return _read_img(file, url, sidecar, listed)
    return topcon.read(file, url, sidecar, kind)


def patient_id(kind: str, file: IO[bytes], url: str) -> str:
    """The person's id of a HEADED kind, "" without one; it may identify somebody. Raises OCTReadError."""
    if kind == E2E:
        return e2e.patient_id(file, url, split_part(url)[1])
    return (vol if kind == VOL else topcon).patient_id(file, url)


def surfaces(kind: str, file: IO[bytes], url: str) -> Surfaces | None:
    """The layers of a LAYERED kind, in the order of the file; None without any. Raises OCTReadError. An FDA
    does not say to which end of the B-scans its first line belongs: index/label_maps.py looks.
    """
    if kind == E2E:
        return e2e.surfaces(file, url, split_part(url)[1])
    return (vol if kind == VOL else topcon).surfaces(file, url)


def split_part(url: str) -> tuple[str, str | None]:
    """(the file, the volume in it): eye.E2E#12 -> eye.E2E, 12; every other URL -> itself, None."""
    match = re.fullmatch(r"(.+\.e2e)#(\d+)", url, re.IGNORECASE)
    return (match[1], match[2]) if match else (url, None)


def _read_img(file: IO[bytes], url: str, sidecar: Sidecar, listed: Shape | None) -> Iterator[Any]:
    """A Zeiss IMG (the Cirrus Research Browser's raw export): voxels of 8 bits without a header.

    Its shape is the manifest's, `listed`, or `shape` of a YAML, and has to fit the bytes. Voxels run
    B-scan by B-scan, row by row, unless `axes` says how else, the slowest first: `[D, W, -H]` for A-scans
    that lie one after another and run from choroid to vitreous. Nothing in the file shows a wrong order.
    """
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
