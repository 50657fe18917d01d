"""Dropout and stochastic depth without a generator, the same again where a block is computed again.

In: the samples' own seeds (int64) and activations. Out: activations with elements or whole samples zeroed and
the rest rescaled; the masks come from utils.counter_rng.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from utils.counter_rng import counter_uniform


class Stochastic:
    """Dropout and stochastic depth of one forward pass, a function of the samples' own seeds.

    Every call draws on from the streams; the same seeds give the same masks on every engine and in every
    batch layout.
    """

    def __init__(self, seed_B: Tensor, dropout: float, drop_path: float) -> None:
        self.seed_B, self.dropout_rate, self.drop_path_rate = seed_B, dropout, drop_path
        self.drawn = 0  # numbers of every stream so far

    def _uniform(self, shape: torch.Size) -> Tensor:
        """The next numbers in [0, 1) of every sample's stream, [B, *shape]. The counter is a sum of two short
        ones: XLA writes each `arange` into the program.
        """
        columns = shape[-1]
        row, column = (
            torch.arange(n, device=self.seed_B.device) for n in (shape.numel() // columns, columns)
        )
        counter = (row * columns + self.drawn).unsqueeze(1) + column
        self.drawn += shape.numel()
        return counter_uniform(self.seed_B.view(-1, 1, 1), counter).view(-1, *shape)

    def dropout(self, x: Tensor) -> Tensor:
        """Zero elements of x [B, ...] with the dropout rate and rescale the rest."""
        if self.dropout_rate == 0:
            return x
        keep = self._uniform(x.shape[1:]) >= self.dropout_rate
        return x * keep.to(x.dtype) / (1 - self.dropout_rate)

    def drop_path(self, x: Tensor, rate: float) -> Tensor:
        """Zero whole samples of a residual branch x [B, ...] with this rate and rescale the rest."""
        if rate == 0:
            return x
        keep = self._uniform(torch.Size([1] * (x.ndim - 1))) >= rate
        return x * keep.to(x.dtype) / (1 - rate)


class Rewound:
    """A block whose stochastic layers draw the same numbers at every call."""

    def __init__(self, block: nn.Module, noise: Stochastic | None, drop_path: float) -> None:
        self.block, self.noise, self.drop_path = block, noise, drop_path
        self.drawn = noise.drawn if noise is not None else 0

    def __call__(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        if self.noise is not None:
            self.noise.drawn = self.drawn
        return self.block(x, rotary, self.noise, self.drop_path)
