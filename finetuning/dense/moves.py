"""Augmentation of planes: one map within B-scans for voxels, tokens and truth; gain, noise, shadows.

In: the seed and the number of the update. Out: `Moves`, the same for every arm and after a resume. A place is
mirrored along W, shifted and scaled along H and W, sheared and bent (rows by column). Some planes lose a box
of voxels, as to a cyst, and some dim in a band of columns, as below a vessel. Tokens of a frozen
encoder are those of the unmoved volume, moved by the same map; truth moves with the voxels, and what is not
known, or comes from outside the grid, is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

MIRRORED, BLURRED = 0.5, 0.3  # share of the planes, and of the batches
SHIFT_H, SHIFT_W = 0.12, 0.08  # at most, of the grid's size
SCALE_H, SCALE_W = 0.08, 0.1  # standard deviations of their logarithms
TILT = 0.06  # standard deviation: rows by column, each of the grid's size
GAIN, OFFSET = 0.2, 0.2  # standard deviations, of the gain's logarithm and in those of the voxels
NOISE = 0.3  # at most, standard deviation
BEND, KNOTS = 0.016, 9  # standard deviation, of the grid's size, at so many places along W
SHADOWED = 0.3  # share of the planes with a box, and of those with a band
BOX_H, BOX_W, BAND_W = (0.03, 0.12), (0.03, 0.16), (0.01, 0.05)  # of the grid's size


@dataclass(frozen=True)
class Moves:
    """A map for each of B planes: where the voxel of an output lies in the input."""

    theta_B23: Tensor  # (w, h, 1) in -1..1 -> (w, h) in -1..1
    bend_BK: Tensor  # added to h of the input, linear between the knots
    gain_B3: Tensor  # factor, offset and noise
    box_B6: Tensor  # top, bottom, left, right in -1..1, the share of light that is left, whether there is one
    band_B4: Tensor  # left, right, share, whether
    seed: int
    is_blurred: bool

    @classmethod
    def draw(cls, seed: tuple[int, int], count: int, strength: float, device: torch.device) -> Moves:
        """`seed`: of the run, and the update's number; `strength`: of all ranges, 0..1."""
        rng = np.random.default_rng([*seed, 1])
        tilt, scale_h, scale_w, gain, offset = rng.normal(size=(5, count)) * strength
        shift_h, shift_w = rng.uniform(-1, 1, (2, count)) * strength
        mirror, noise = rng.random((2, count))
        theta = np.zeros((count, 2, 3))
        theta[:, 0, 0] = np.exp(scale_w * SCALE_W) * np.where(mirror < MIRRORED * strength, -1, 1)
        theta[:, 0, 2] = 2 * shift_w * SHIFT_W
        theta[:, 1, 0] = tilt * TILT
        theta[:, 1, 1] = np.exp(scale_h * SCALE_H)
        theta[:, 1, 2] = 2 * shift_h * SHIFT_H
        parts = np.stack([np.exp(gain * GAIN), offset * OFFSET, noise * strength * NOISE], axis=1)
        is_blurred, noise_seed = bool(rng.random() < BLURRED * strength), int(rng.integers(2**31))
        bend = 2 * BEND * strength * rng.normal(size=(count, KNOTS))
        box = np.stack(
            [*_span(rng, count, BOX_H), *_span(rng, count, BOX_W), *rng.random((2, count))], axis=1
        )
        band = np.stack([*_span(rng, count, BAND_W), *rng.random((2, count))], axis=1)
        for shadow in (box, band):
            shadow[:, -1] = shadow[:, -1] < SHADOWED * strength
        arrays = (theta, bend, parts, box, band)
        map_, bent, light, boxes, bands = (torch.from_numpy(a).float().to(device) for a in arrays)
        return cls(map_, bent, light, boxes, bands, noise_seed, is_blurred)

    def of(self, places: Sequence[int]) -> Moves:
        """The maps of some planes."""
        i = list(places)
        theta, bend, gain = self.theta_B23[i], self.bend_BK[i], self.gain_B3[i]
        return Moves(theta, bend, gain, self.box_B6[i], self.band_B4[i], self.seed, self.is_blurred)

    def voxels(self, voxels_BdHW: Tensor) -> Tensor:
        """Moved, with gain and noise; those at the border where they come from outside."""
        factor, offset, noise = self.gain_B3[:, :, None, None, None].unbind(1)
        moved = self._shadowed(self._sample(voxels_BdHW, "bilinear", "border"))
        if self.is_blurred:
            moved = F.avg_pool2d(moved, 3, 1, 1, count_include_pad=False)
        generator = torch.Generator().manual_seed(self.seed)
        speckle = torch.randn(moved.shape, generator=generator).to(moved.device)
        return moved * factor + offset + speckle * noise

    def _shadowed(self, voxels_BdHW: Tensor) -> Tensor:
        """Dim towards the darkest voxel of a plane, in its box and in its band."""
        darkest = voxels_BdHW.amin((1, 2, 3), keepdim=True)
        row, column = (_centres(n, voxels_BdHW.device) for n in voxels_BdHW.shape[2:])
        top, bottom, first, last, *box = self.box_B6[:, :, None, None].unbind(1)
        in_box = (row[:, None] > top) & (row[:, None] < bottom) & (column > first) & (column < last)
        start, stop, *band = self.band_B4[:, :, None, None].unbind(1)
        in_band = (column > start) & (column < stop)
        light = torch.ones_like(voxels_BdHW[:, 0])
        for inside, (share, there) in ((in_box, box), (in_band, band)):
            light = torch.where(inside & (there > 0), light * share, light)
        return darkest + (voxels_BdHW - darkest) * light[:, None]

    def tokens(self, tokens_BhwE: Tensor) -> Tensor:
        """Moved by the same map, between neighbours linear."""
        if not tokens_BhwE.shape[3]:
            return tokens_BhwE
        moved = self._sample(tokens_BhwE.movedim(3, 1), "bilinear", "border")
        return moved.movedim(1, 3)

    def classes(self, truth_BdHW: Tensor, unknown: int) -> Tensor:
        """Nearest; `unknown` where they come from outside."""
        moved = self._sample(truth_BdHW.float() + 1, "nearest", "zeros").round().long()
        return torch.where(moved == 0, unknown, moved - 1).to(truth_BdHW.dtype)

    def columns(self, truth_BSdW: Tensor) -> Tensor:
        """What has no rows, NaN where it comes from outside."""
        width = truth_BSdW.shape[3]
        place_BW = ((self._source_w(width) + 1) * width - 1) / 2
        column = place_BW.round().long()
        known = (column >= 0) & (column < width)
        index = column.clamp(0, width - 1)[:, None, None].expand(truth_BSdW.shape)
        return torch.where(known[:, None, None], truth_BSdW.gather(3, index), torch.nan)

    def heights(self, truth_BSdW: Tensor, size: int) -> Tensor:
        """Places along `size` rows, NaN where not known."""
        slope, scale, shift = self.theta_B23[:, 1, :, None, None, None].unbind(1)
        places_W = _centres(truth_BSdW.shape[3], truth_BSdW.device)
        source = (2 * self.columns(truth_BSdW) + 1) / size - 1
        bend = self._bend(truth_BSdW.shape[3])[:, None, None]
        return (((source - slope * places_W - shift - bend) / scale + 1) * size - 1) / 2

    def _bend(self, width: int) -> Tensor:
        """Of every column [B, W]."""
        bend = F.interpolate(self.bend_BK[:, None], width, mode="linear", align_corners=True)
        return bend[:, 0]

    def _sample(self, values_BCHW: Tensor, mode: str, outside: str) -> Tensor:
        """Values at the places of the map, on the grid that they have."""
        grid_BHW2 = F.affine_grid(self.theta_B23, list(values_BCHW.shape), align_corners=False)
        across, down = grid_BHW2.unbind(3)
        grid_BHW2 = torch.stack([across, down + self._bend(values_BCHW.shape[3])[:, None]], dim=3)
        return F.grid_sample(values_BCHW, grid_BHW2, mode=mode, padding_mode=outside, align_corners=False)

    def _source_w(self, width: int) -> Tensor:
        factor, _, shift = self.theta_B23[:, 0, :, None].unbind(1)
        return factor * _centres(width, self.theta_B23.device) + shift


def _centres(count: int, device: torch.device) -> Tensor:
    """Centres of so many voxels in -1..1."""
    return (2 * torch.arange(count, device=device) + 1) / count - 1


def _span(rng: np.random.Generator, count: int, size: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """First and last place in -1..1 of parts of the grid, of a size between two shares of it."""
    length = 2 * rng.uniform(*size, count)
    first = rng.uniform(-1, 1 - length)
    return first, first + length
