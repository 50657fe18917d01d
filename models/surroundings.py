"""Targets that need no teacher: random features of a token's surroundings, the same in every run.

In: a view [B, 1, D, H, W] and which of its tokens are valid. Out: for each token what fixed random filters
see at it and around it, each feature standardised over its volume. Random filters with a rectifier keep
distances between patches (Giryes et al. 2016, arXiv:1504.08291).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# tokens up and down (h) and to the side (w) within a token's own B-scans; beyond the grid the nearest one
PLACES = tuple((h, w) for h in range(-3, 4) for w in range(-1, 2))
FEATURES = 64  # of a place
SEED = 0  # of the filters, not of the run: runs of several seeds have one question
EPS = 1e-5  # of a variance, as a batch normalisation has it


class SurroundingTargets(nn.Module):
    """FEATURES filters with a rectifier see the 3 x 3 patches around a token; its targets are what they see
    of the tokens at PLACES: `forward(view [B, 1, D, H, W], weight [B, N])` gives float32 [B, N, width], of
    mean 0 and variance 1 over the tokens of a volume that have a weight.
    """

    width = len(PLACES) * FEATURES

    def __init__(self, patch: tuple[int, int, int]) -> None:
        super().__init__()
        d, h, w = patch
        generator = torch.Generator().manual_seed(SEED)
        weight = torch.randn(FEATURES, 1, d, 3 * h, 3 * w, generator=generator)
        self.patch = patch
        self.weight: Tensor
        self.bias: Tensor
        self.register_buffer("weight", weight / weight[0].numel() ** 0.5)
        self.register_buffer("bias", torch.empty(FEATURES).uniform_(-1, 1, generator=generator))

    @torch.no_grad()
    def forward(self, view_BCDHW: Tensor, weight_BN: Tensor) -> Tensor:
        _, h, w = self.patch
        # the padding is a border of zeros, the mean of a normalised view
        seen = F.conv3d(view_BCDHW, self.weight, self.bias, stride=self.patch, padding=(0, h, w)).relu()
        height, width = seen.shape[3:]
        rows, columns = (torch.arange(size, device=seen.device) for size in (height, width))
        parts = [
            seen.index_select(3, (rows + dh).clamp(0, height - 1)).index_select(
                4, (columns + dw).clamp(0, width - 1)
            )
            for dh, dw in PLACES
        ]
        features_BNE = torch.cat(parts, dim=1).flatten(2).transpose(1, 2).float()
        share_BN1 = (weight_BN / weight_BN.sum(1, keepdim=True).clamp(min=1.0)).unsqueeze(-1)
        centred = features_BNE - (features_BNE * share_BN1).sum(1, keepdim=True)
        return centred * torch.rsqrt((centred.square() * share_BN1).sum(1, keepdim=True) + EPS)
