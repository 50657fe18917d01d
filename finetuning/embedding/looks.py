"""Whether a scan looks like a retina, the right way up: only from its frames, no label, no model.

In: uint8 frames [H, W] as they pass on their way to the grid, and the spacing. Out: beside QUALITY_COLUMNS
    upright_share   share of A-scans whose brightness rises more sharply than it falls on the way down, by the
                    sum of cubed slopes: vitreous and the layer before the photoreceptors end sharply, the
                    choroid slowly. Near 1 of a retina, near 0 of one upside down, 1/2 of what has no layers
    grey_skew       skewness of grey values: most of a scan is dark; below 0 of an inverted one
    brightest_grey  the grey value that one in a thousand exceeds
    step_share      how much neighbouring B-scans differ, as a share of any two: near 1 where they are in no
                    order
    field_d, _h, _w of the scan in mm
Measured on 15 eyes of four devices and on the phantom's: docs/guides/embedding.md.
"""

from __future__ import annotations

import numpy as np
from scipy.ndimage import gaussian_filter

from data_setup.store.quality import Meter

COLUMNS = ("upright_share", "grey_skew", "brightest_grey", "step_share", "field_d", "field_h", "field_w")
EDGE_ROWS = 2  # of blocks, beyond which a slope is that of the frame's edge
SMALL = 12  # rows and columns of the small picture that is kept of each B-scan
LEAST_FRAMES = 8  # fewer say nothing of their order


class Looks(Meter):
    """A Meter that asks these questions too."""

    def __init__(self) -> None:
        super().__init__()
        self._rises: list[np.ndarray] = []  # of each frame, of each column of blocks with an edge in it
        self._skews: list[float] = []
        self._small: list[np.ndarray] = []
        self._greys = np.zeros(256)
        self._shape = (0, 0)

    def _look(self, frame: np.ndarray) -> None:
        super()._look(frame)
        assert self._before is not None
        self._shape = frame.shape
        self._greys += np.bincount(frame.ravel(), minlength=256)
        blocks = self._before
        smooth = gaussian_filter(blocks, (1.0, 0.5))
        slopes = np.diff(smooth, axis=0)[EDGE_ROWS:-EDGE_ROWS] ** 3
        self._rises.append((slopes.sum(axis=0) > 0)[np.abs(slopes).sum(axis=0) > 0])
        if (spread := float(blocks.std())) == 0:
            return
        scaled = (blocks - blocks.mean()) / spread
        self._skews.append(float((scaled**3).mean()))
        bright = np.maximum(scaled, 0).sum(axis=1)
        centre = round(float(bright @ np.arange(len(bright)) / bright.sum()))
        level = gaussian_filter(np.roll(scaled, len(bright) // 2 - centre, axis=0), len(bright) / (2 * SMALL))
        down, right = (max(1, n // SMALL) for n in level.shape)
        self._small.append(level[::down, ::right].ravel())

    def columns(self, spacing_mm: tuple[float, float, float]) -> dict[str, float]:
        """QUALITY_COLUMNS and COLUMNS of the frames that have passed; NaN for what they do not say."""
        rises = np.concatenate(self._rises)
        count = np.cumsum(self._greys)
        lengths = (len(self._rises), *self._shape)
        values = {
            "upright_share": float(rises.mean()) if len(rises) else np.nan,
            "grey_skew": float(np.mean(self._skews)) if self._skews else np.nan,
            "brightest_grey": float(np.searchsorted(count, 0.999 * count[-1])),
            "step_share": self._step_share(),
            **{f"field_{axis}": n * mm for axis, n, mm in zip("dhw", lengths, spacing_mm, strict=True)},
        }
        return super().columns(spacing_mm) | {name: round(value, 4) for name, value in values.items()}

    def _step_share(self) -> float:
        """Von Neumann's ratio: squared difference of neighbours over that of any two."""
        if len(self._small) < LEAST_FRAMES:
            return np.nan
        apart = np.array(self._small)
        apart = apart - apart.mean(axis=0)
        of_any_two = 2 * (apart**2).sum() / (len(apart) - 1)
        steps = (np.diff(apart, axis=0) ** 2).sum() / (len(apart) - 1)
        return float(steps / of_any_two) if of_any_two > 0 else np.nan
