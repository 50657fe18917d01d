"""What a decoder reads and learns from: planes of the token grid with their voxels and labels, and their
augmentation.

In: a frozen encoder's kept tokens (finetuning.features), or an encoder that is being trained, the store, its
labels. Out: tensors of some planes, or what is predicted of a volume. Whole volumes stay in memory as
far as CACHE_BYTES go: a plane is drawn from each many times.

`Moves` follow from the seed and the number of the update, so they are the same for every arm and after a
resume. A place is mirrored along W, shifted and scaled along H and W, sheared and bent (rows by column). Some
planes lose a box of voxels, as to a cyst, and some dim in a band of columns, as below a vessel. Tokens of a
frozen encoder are those of the unmoved volume, moved by the same map; truth moves with the voxels, unknown
where it was, or where it comes from outside the grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.data import default_collate

from data_setup.loader import StoredSamples
from data_setup.normalisation import plain_view
from finetuning.dense.decoder import heights_of
from finetuning.dense.folds import DenseVolumes
from finetuning.features.kept import KeptFeatures
from finetuning.features.yardsticks import LocalTokens
from utils.config.schema import Config

CACHE_BYTES = 2**31
AT_ONCE = 8  # planes of a volume that are predicted together
MIRRORED, BLURRED = 0.5, 0.3  # share of the planes, and of the batches
SHIFT_H, SHIFT_W = 0.12, 0.08  # at most, of the grid's size
SCALE_H, SCALE_W = 0.08, 0.1  # standard deviations of their logarithms
TILT = 0.06  # standard deviation: rows by column, each of the grid's size
GAIN, OFFSET = 0.2, 0.2  # standard deviations, of the gain's logarithm and in those of the voxels
NOISE = 0.3  # at most, standard deviation
BEND, KNOTS = 0.016, 9  # standard deviation, of the grid's size, at so many places along W
SHADOWED = 0.3  # share of the planes with a box, and of those with a band
BOX_H, BOX_W, BAND_W = (0.03, 0.12), (0.03, 0.16), (0.01, 0.05)  # of the grid's size


class Planes:
    """Planes of volumes: a plane is one index of the token grid's first axis; the labels are heights.

    Other kinds of labels say which of their axes is D, what outputs [b, ..., d, H, W] predict, and how labels
    move.
    """

    d_axis = 1  # of [S, D, W]
    predicted_of: Callable[[Tensor], Tensor] = staticmethod(heights_of)

    def moved(self, truth: Tensor, moves: Moves) -> Tensor:
        return moves.heights(truth, self.size[1])

    def __init__(
        self,
        cfg: Config,
        source: KeptFeatures | Callable[[Tensor], Tensor],
        volumes: DenseVolumes,
        device: torch.device,
    ) -> None:
        """`source`: kept tokens, or what makes tokens [B, N, E] of normalised volumes [B, 1, D, H, W]."""
        self.grid, self.patch, self.size = cfg.grid, cfg.spatial.patch_size, cfg.spatial.image_size
        self.source, self.volumes, self.device = source, volumes, device
        has_none = isinstance(source, LocalTokens) and not source.width  # voxels are all that is read
        self.runs = None if has_none or not callable(source) else source  # on whole volumes
        self._samples = StoredSamples(volumes.store, np.unique(volumes.rows))
        self._memory: dict[int, tuple[np.ndarray | None, Tensor]] = {}
        self._truth: dict[int, np.ndarray] = {}
        self._held = 0

    def _whole(self, row: int) -> tuple[np.ndarray | None, Tensor]:
        """(kept tokens float16 [N, E], normalised voxels float16 [D, H, W]) of a volume."""
        if row not in self._memory:
            tokens = np.zeros((math.prod(self.grid), 0), np.float16) if self.runs is None else None
            if isinstance(self.source, KeptFeatures):
                tokens = self.source.tokens(np.array([row]))[0]
            voxels = plain_view(default_collate([self._samples[row]]))[0, 0].to(torch.float16)
            if not self._fits((0 if tokens is None else tokens.nbytes) + voxels.numel() * 2):
                return tokens, voxels
            self._memory[row] = tokens, voxels
        return self._memory[row]

    def _labels(self, row: int) -> np.ndarray:
        if row not in self._truth:
            values = self.volumes.read(row)
            if not self._fits(values.nbytes):
                return values
            self._truth[row] = values
        return self._truth[row]

    def _fits(self, size: int) -> bool:
        fits = self._held + size <= CACHE_BYTES
        self._held += size if fits else 0
        return fits

    def inputs(self, chosen: Sequence[tuple[int, int]], moves: Moves | None = None) -> tuple[Tensor, Tensor]:
        """Tokens [B, gh, gw, E] and voxels [B, d, H, W] of (row, plane) pairs, on the device.

        `moves` has a map for every pair; what makes tokens of whole volumes takes that of a row's first.
        """
        rows = list(dict.fromkeys(row for row, _ in chosen))
        whole = dict(zip(rows, map(self._whole, rows), strict=True))
        d, grid = self.patch[0], dict(zip(("gd", "gh", "gw"), self.grid, strict=True))
        places = [plane for _, plane in chosen]
        if self.runs is not None:
            view_RDHW = torch.stack([voxels for _, voxels in whole.values()]).to(self.device).float()
            if moves is not None:
                view_RDHW = moves.of([[r for r, _ in chosen].index(row) for row in rows]).voxels(view_RDHW)
            made = rearrange(self.runs(view_RDHW[:, None]), "r (gd gh gw) e -> r gd gh gw e", **grid)
            number = [rows.index(row) for row, _ in chosen]
            views = rearrange(view_RDHW, "r (gd d) h w -> r gd d h w", d=d)
            return made[number, places], views[number, places]
        tokens, voxels = [], []
        for row, plane in chosen:
            of_row, volume = whole[row]
            of_row_NE = torch.from_numpy(of_row)
            tokens.append(rearrange(of_row_NE, "(gd gh gw) e -> gd gh gw e", **grid)[plane])
            voxels.append(volume[plane * d : (plane + 1) * d])
        result = torch.stack(tokens).to(self.device).float(), torch.stack(voxels).to(self.device).float()
        return result if moves is None else (moves.tokens(result[0]), moves.voxels(result[1]))

    def truth(self, chosen: Sequence[tuple[int, int]]) -> Tensor:
        """The labels of (row, plane) pairs, heights [B, S, d, W]; NaN where there is none."""
        d, before = self.patch[0], (slice(None),) * self.d_axis
        parts = [self._labels(row)[(*before, slice(p * d, (p + 1) * d))] for row, p in chosen]
        return torch.from_numpy(np.stack(parts)).to(self.device)

    def batch(
        self, chosen: Sequence[tuple[int, int]], moves: Moves | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, voxels and truth of (row, plane) pairs, moved where there are maps."""
        truth = self.truth(chosen)
        if moves is not None and self.runs is not None:  # whole volumes are moved
            rows = [row for row, _ in chosen]
            moves = moves.of([rows.index(row) for row in rows])
        return *self.inputs(chosen, moves), truth if moves is None else self.moved(truth, moves)

    @torch.no_grad()
    def judge(
        self, decoder: nn.Module, row: int, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[np.ndarray, float]:
        """What is predicted of a whole volume, and the mean loss of its planes."""
        parts, losses, start = [], [], 0
        for outputs in self.outputs(decoder, row):
            chosen = [(row, plane) for plane in range(start, start + len(outputs))]
            losses += [float(loss(outputs, self.truth(chosen)))] * len(outputs)
            parts += list(self.predicted_of(outputs).cpu())
            start += len(outputs)
        return torch.cat(parts, dim=self.d_axis).numpy(), float(np.mean(losses))

    @torch.no_grad()
    def outputs(self, decoder: nn.Module, row: int) -> Iterator[Tensor]:
        """A decoder's outputs [b, S, d, H, W] of a whole volume, some planes at a time."""
        decoder.eval()
        for start in range(0, self.grid[0], AT_ONCE):
            chosen = [(row, plane) for plane in range(start, min(start + AT_ONCE, self.grid[0]))]
            yield decoder(*self.inputs(chosen))

    def predict(self, decoder: nn.Module, row: int) -> np.ndarray:
        """What is predicted of a whole volume: surfaces float32 [S, D, W] in voxels."""
        parts = [plane for part in self.outputs(decoder, row) for plane in self.predicted_of(part).cpu()]
        return torch.cat(parts, dim=self.d_axis).numpy()


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
        factor, _, shift = self.theta_B23[:, 0, :, None].unbind(1)
        source_BW = factor * _centres(width, self.theta_B23.device) + shift
        place_BW = ((source_BW + 1) * width - 1) / 2
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


def _centres(count: int, device: torch.device) -> Tensor:
    """Centres of so many voxels in -1..1."""
    return (2 * torch.arange(count, device=device) + 1) / count - 1


def _span(rng: np.random.Generator, count: int, size: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """First and last place in -1..1 of parts of the grid, of a size between two shares of it."""
    length = 2 * rng.uniform(*size, count)
    first = rng.uniform(-1, 1 - length)
    return first, first + length
