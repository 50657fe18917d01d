"""Volume features from token features, the same for every probe, table and checkpoint selection.

In: an encoder and normalised views with the validity of their tokens. Out: mean + std over valid tokens,
[n, 2E].
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from models.probes.participants import pool_tokens
from utils.runtime.single import Runtime


@torch.no_grad()
def embed(encoder: nn.Module, views: Iterable[tuple[Tensor, Tensor]], runtime: Runtime) -> np.ndarray:
    """float32 [n, 2E] from pairs of a view [B, 1, D, H, W] and its token validity [B, N] on the device."""
    features = []
    for view_BCDHW, valid_BN in views:
        with runtime.autocast():
            tokens_BNE = encoder(view_BCDHW)
        features.append(runtime.to_torch(pool_tokens(tokens_BNE.float(), valid_BN)).cpu())
    return torch.cat(features).numpy()
