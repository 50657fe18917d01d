"""What the makers' readers share: eyepy and construct, and the layers that a maker's software drew.

eyepy (MIT), which is optional, knows the fields of Heidelberg's files; without it a file is a reject with the
pip line. Its releases rename what it holds, so the pip line names the one that was tried.
"""

import importlib
import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.sidecar import MAX_VOLUME_BYTES, reading

PIP_LINE = "pip install eyepy==0.21.0"
PATTERNS = {1: "a single line", 2: "a circle", 5: "a star of radial lines"}  # of Heidelberg, no volumes


@dataclass(frozen=True)
class Surfaces:
    """Layers of a file that a manifest names (`label_surfaces`): float32 [S, D, W] and S names. Rows of the
    image, 0 = the centre of the top row, NaN where nothing was drawn.
    """

    heights: np.ndarray
    names: tuple[str, ...]

    def drawn(self) -> Self | None:
        """Without those that have no row at all; None where nothing is left."""
        is_drawn = ~np.isnan(self.heights).all(axis=(1, 2))
        names = tuple(name for name, kept in zip(self.names, is_drawn, strict=True) if kept)
        return replace(self, heights=self.heights[is_drawn], names=names) if names else None

    def to_bytes(self) -> bytes:
        """A .npz with `surfaces` and `names`."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, surfaces=self.heights, names=np.array(self.names))
        return buffer.getvalue()


def eyepy_module(name: str, url: str) -> Any:
    """A module of eyepy, such as eyepy.io.he.vol_reader; raises OCTReadError missing_library."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        expected = f"eyepy, which reads this kind: {PIP_LINE}"
        raise OCTReadError(url, RejectReason.MISSING_LIBRARY, expected, f"no {error.name}") from None


@contextmanager
def parsing(url: str, expected: str) -> Iterator[None]:
    """Turn what eyepy and construct raise about the file's bytes into corrupt_file."""
    import construct

    try:
        with reading(url, RejectReason.CORRUPT_FILE, expected):
            yield
    except construct.ConstructError as error:  # its text quotes bytes of the file
        raise OCTReadError(url, RejectReason.CORRUPT_FILE, expected, type(error).__name__) from None


def text_of(field: bytes) -> str:
    """A string of a file, up to its first zero; latin-1 has a letter for each byte."""
    return field.split(b"\0", 1)[0].decode("latin-1").strip()


def check_size(shape: tuple[int, int, int], value_bytes: int, url: str) -> None:
    """Raise corrupt_file for a (B-scans, rows, columns) that no volume has."""
    if not 0 < math.prod(shape) * value_bytes <= MAX_VOLUME_BYTES:
        expected = f"B-scans x rows x columns of up to {MAX_VOLUME_BYTES} bytes"
        raise OCTReadError(url, RejectReason.CORRUPT_FILE, expected, "another number")
