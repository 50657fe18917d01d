"""Layers that a maker's software drew, as a file that a manifest names (`label_surfaces`)."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Surfaces:
    """float32 [S, D, W]: rows of the image, 0 = the centre of the top row, NaN where nothing was drawn."""

    heights: np.ndarray
    names: tuple[str, ...]

    def to_bytes(self) -> bytes:
        """A .npz with `surfaces` and `names`."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, surfaces=self.heights, names=np.array(self.names))
        return buffer.getvalue()
