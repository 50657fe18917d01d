"""Which of many items to look at, the same choice everywhere."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def evenly_spaced(count: int, limit: int) -> Tensor:
    """int64 indices of at most `limit` of `count` items, first and last among them; all where that allows."""
    return torch.from_numpy(np.linspace(0, count - 1, min(limit, count)).round().astype(np.int64))
