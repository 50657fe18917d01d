"""What a decoder reads and learns from: planes of the token grid with their voxels and labels.

In: a frozen encoder's kept tokens (finetuning.features), or an encoder that is being trained, the store, its
labels. Out: tensors of some planes, or what is predicted of a volume. Whole volumes stay in memory as
far as CACHE_BYTES go: a plane is drawn from each many times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils.data import default_collate

from data_setup.loader import StoredSamples
from data_setup.normalisation import plain_view
from finetuning.dense.folds import DenseVolumes
from finetuning.dense.layers.decoder import heights_of
from finetuning.dense.moves import Moves
from finetuning.features.kept import KeptFeatures
from finetuning.features.yardsticks import LocalTokens
from utils.config.schema import Config

CACHE_BYTES = 2**31
AT_ONCE = 8  # planes of a volume that are predicted together


class Planes:
    """Planes of volumes: a plane is one index of the token grid's first axis; the labels are heights.

    Other kinds of labels say which of their axes is D, what outputs [b, ..., d, H, W] predict, and how labels
    move.
    """

    d_axis = 1  # of [S, D, W]
    predicted_of: Callable[[Tensor], Tensor] = staticmethod(heights_of)

    def moved(self, truth: Tensor, moves: Moves) -> Tensor:
        """Labels of planes that were moved."""
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
        """Whether so many bytes more stay in memory."""
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
