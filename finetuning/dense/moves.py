"""Augmentation of planes: one affine map within B-scans for voxels, tokens and truth; gain and noise.

In: the seed and the number of the update. Out: `Moves`, the same for every arm and after a resume. A place is
mirrored along W, shifted and scaled along H and W, and sheared (rows by column). Tokens of a frozen
encoder are those of the unmoved volume, moved by the same map; truth moves with the voxels, and what is not
known, or comes from outside the grid, is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class Moves:
    """A map for each of B planes: where the voxel of an output lies in the input."""

    theta_B23: Tensor  # (w, h, 1) in -1..1 -> (w, h) in -1..1
    gain_B3: Tensor  # factor, offset and noise
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
        on_device = [torch.from_numpy(part).float().to(device) for part in (theta, parts)]
        is_blurred = bool(rng.random() < BLURRED * strength)
        return cls(on_device[0], on_device[1], int(rng.integers(2**31)), is_blurred)

    def of(self, places: Sequence[int]) -> Moves:
        """The maps of some planes."""
        chosen = list(places)
        return replace(self, theta_B23=self.theta_B23[chosen], gain_B3=self.gain_B3[chosen])

    def voxels(self, voxels_BdHW: Tensor) -> Tensor:
        """Moved, with gain and noise; those at the border where they come from outside."""
        factor, offset, noise = self.gain_B3[:, :, None, None, None].unbind(1)
        moved = _sample(voxels_BdHW, self.theta_B23, "bilinear", "border")
        if self.is_blurred:
            moved = F.avg_pool2d(moved, 3, 1, 1, count_include_pad=False)
        generator = torch.Generator().manual_seed(self.seed)
        speckle = torch.randn(moved.shape, generator=generator).to(moved.device)
        return moved * factor + offset + speckle * noise

    def tokens(self, tokens_BhwE: Tensor) -> Tensor:
        """Moved by the same map, between neighbours linear."""
        if not tokens_BhwE.shape[3]:
            return tokens_BhwE
        moved = _sample(tokens_BhwE.movedim(3, 1), self.theta_B23, "bilinear", "border")
        return moved.movedim(1, 3)

    def classes(self, truth_BdHW: Tensor, unknown: int) -> Tensor:
        """Nearest; `unknown` where they come from outside."""
        moved = _sample(truth_BdHW.float() + 1, self.theta_B23, "nearest", "zeros").round().long()
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
        return (((source - slope * places_W - shift) / scale + 1) * size - 1) / 2

    def _source_w(self, width: int) -> Tensor:
        factor, _, shift = self.theta_B23[:, 0, :, None].unbind(1)
        return factor * _centres(width, self.theta_B23.device) + shift


def _centres(count: int, device: torch.device) -> Tensor:
    """Centres of so many voxels in -1..1."""
    return (2 * torch.arange(count, device=device) + 1) / count - 1


def _sample(values_BCHW: Tensor, theta_B23: Tensor, mode: str, outside: str) -> Tensor:
    """Values at the places of a map, on the grid that they have."""
    grid = F.affine_grid(theta_B23, list(values_BCHW.shape), align_corners=False)
    return F.grid_sample(values_BCHW, grid, mode=mode, padding_mode=outside, align_corners=False)
