"""What a decoder reads and learns from: planes of the token grid with their voxels and labels.

In: a frozen encoder's kept tokens (finetuning.features), or an encoder that is being trained, the store, its
labels. Out: tensors of some planes, or what is predicted of a volume. Whole volumes stay in memory as
far as CACHE_BYTES go: a plane is drawn from each many times.
"""

from __future__ import annotations

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
from finetuning.features.kept import KeptFeatures
from utils.config.schema import Config

CACHE_BYTES = 2**31
AT_ONCE = 8  # planes of a volume that are predicted together


class Planes:
    """Planes of volumes: a plane is one index of the token grid's first axis; the labels are heights.

    Other kinds of labels say which of their axes is D, and what outputs [b, ..., d, H, W] predict.
    """

    d_axis = 1  # of [S, D, W]
    predicted_of: Callable[[Tensor], Tensor] = staticmethod(heights_of)

    def __init__(
        self,
        cfg: Config,
        source: KeptFeatures | Callable[[Tensor], Tensor],
        volumes: DenseVolumes,
        device: torch.device,
    ) -> None:
        """`source`: kept tokens, or what makes tokens [B, N, E] of normalised volumes [B, 1, D, H, W]."""
        self.grid, self.patch = cfg.grid, cfg.spatial.patch_size
        self.source, self.volumes, self.device = source, volumes, device
        self._samples = StoredSamples(volumes.store, np.unique(volumes.rows))
        self._memory: dict[int, tuple[np.ndarray | None, Tensor]] = {}
        self._held = 0

    def _whole(self, row: int) -> tuple[np.ndarray | None, Tensor]:
        """(kept tokens float16 [N, E], normalised voxels float16 [D, H, W]) of a volume."""
        if row not in self._memory:
            tokens, size = None, 0
            if not callable(self.source):
                tokens = self.source.tokens(np.array([row]))[0]
                size = tokens.nbytes
            voxels = plain_view(default_collate([self._samples[row]]))[0, 0].to(torch.float16)
            size += voxels.numel() * 2
            if self._held + size > CACHE_BYTES:
                return tokens, voxels
            self._held += size
            self._memory[row] = tokens, voxels
        return self._memory[row]

    def inputs(self, chosen: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Tokens [B, gh, gw, E] and voxels [B, d, H, W] of (row, plane) pairs, on the device."""
        rows = list(dict.fromkeys(row for row, _ in chosen))
        whole = dict(zip(rows, map(self._whole, rows), strict=True))
        made = None
        if callable(self.source):
            views = torch.stack([voxels for _, voxels in whole.values()])[:, None]
            made = dict(zip(rows, self.source(views.to(self.device).float()), strict=True))
        gd, gh, gw = self.grid
        d = self.patch[0]
        tokens, voxels = [], []
        for row, plane in chosen:
            of_row, volume = whole[row]
            of_row_NE = torch.from_numpy(of_row) if made is None else made[row]
            tokens.append(rearrange(of_row_NE, "(gd gh gw) e -> gd gh gw e", gd=gd, gh=gh, gw=gw)[plane])
            voxels.append(volume[plane * d : (plane + 1) * d])
        return torch.stack(tokens).to(self.device).float(), torch.stack(voxels).to(self.device).float()

    def truth(self, chosen: Sequence[tuple[int, int]]) -> Tensor:
        """The labels of (row, plane) pairs, heights [B, S, d, W]; NaN where there is none."""
        d, before = self.patch[0], (slice(None),) * self.d_axis
        parts = [self.volumes.read(row)[(*before, slice(p * d, (p + 1) * d))] for row, p in chosen]
        return torch.from_numpy(np.stack(parts)).to(self.device)

    def batch(self, chosen: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, voxels and truth of (row, plane) pairs."""
        return *self.inputs(chosen), self.truth(chosen)

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
