"""Dropout and stochastic depth without a generator.

In: the samples' own seeds (int64) and activations. Out: activations with elements or whole samples zeroed and
the rest rescaled; the masks come from utils.counter_rng.
"""

from __future__ import annotations

import torch
from torch import Tensor

from utils.counter_rng import counter_uniform


class Stochastic:
    """Dropout and stochastic depth of one forward pass, a function of the samples' own seeds.

    Every call draws on from the streams; the same seeds give the same masks on every engine and in every
    batch layout.
    """

    def __init__(self, seed_B: Tensor, dropout: float, drop_path: float) -> None:
        self.seed_B, self.dropout_rate, self.drop_path_rate = seed_B, dropout, drop_path
        self.drawn = 0  # numbers of every stream so far

    def _uniform(self, count: int) -> Tensor:
        """The next `count` numbers in [0, 1) of every sample's stream, [B, count]."""
        counter = torch.arange(self.drawn, self.drawn + count, device=self.seed_B.device)
        self.drawn += count
        return counter_uniform(self.seed_B.unsqueeze(1), counter)

    def dropout(self, x: Tensor) -> Tensor:
        """Zero elements of x [B, ...] with the dropout rate and rescale the rest."""
        if self.dropout_rate == 0:
            return x
        keep = self._uniform(x[0].numel()).view(x.shape) >= self.dropout_rate
        return x * keep.to(x.dtype) / (1 - self.dropout_rate)

    def drop_path(self, x: Tensor, rate: float) -> Tensor:
        """Zero whole samples of a residual branch x [B, ...] with this rate and rescale the rest."""
        if rate == 0:
            return x
        keep = self._uniform(1).view(-1, *[1] * (x.ndim - 1)) >= rate
        return x * keep.to(x.dtype) / (1 - rate)
