"""Planes of the token grid with the classes of their voxels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn

from finetuning.dense.layers.planes import Planes


class ClassPlanes(Planes):
    """As `Planes`; the labels are places among the classes."""

    def truth(self, chosen: Sequence[tuple[int, int]]) -> Tensor:
        """Places [B, d, H, W] of (row, plane) pairs."""
        d = self.patch[0]
        parts = [self.volumes.read(row)[plane * d : (plane + 1) * d] for row, plane in chosen]
        return torch.from_numpy(np.stack(parts)).to(self.device)

    def predict(self, decoder: nn.Module, row: int) -> np.ndarray:
        """The likeliest place of every voxel of a volume, uint8 [D, H, W]."""
        parts = [part.argmax(dim=1).to(torch.uint8).cpu() for part in self.outputs(decoder, row)]
        return rearrange(torch.cat(parts), "gd d h w -> (gd d) h w").numpy()
