"""Batch normalisation over the valid tokens of a batch.

In: tokens [B, M, E] and their weights [B, M]. Out: the same tokens, each channel of mean 0 and variance 1
over those with weight above 0, scaled and shifted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def _as_it_is(value: Tensor) -> Tensor:
    return value


class WeightedBatchNorm(nn.Module):
    """BatchNorm1d over the tokens [B, M] with weight above 0; shapes stay static, padding moves no
    statistic. `total` sums over the processes that share a batch, with gradient; the runtime may set it.
    """

    momentum, eps = 0.1, 1e-5  # as BatchNorm1d has them

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.total: Callable[[Tensor], Tensor] = _as_it_is
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x_BME: Tensor, weight_BM: Tensor) -> Tensor:
        x = x_BME.float()
        if self.training:
            weight = weight_BM.unsqueeze(-1).float()
            count, first = self.total(
                torch.cat((weight.sum().view(1), (x * weight).sum((0, 1))))
            ).tensor_split([1])
            count = count.clamp(min=1.0)
            mean = first / count
            var = self.total(((x - mean).square() * weight).sum((0, 1))) / count
            with torch.no_grad():
                unbiased = var * count / (count - 1).clamp(min=1.0)
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(unbiased, self.momentum)
        else:
            mean, var = self.running_mean, self.running_var
        return ((x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias).to(x_BME.dtype)
