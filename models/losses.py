"""What training minimises: the loss of a token, pixel targets, and penalties against collapse.

In: predictions and targets [..., E], or the context tokens of a batch. Out: a loss per token, or a penalty.

A penalty is a function of *mean statistics* of the tokens. The mean over the global batch is a sum over its
samples, so the exact gradient of the global penalty reaches every sample as the gradient of
`<dpenalty/dmean, statistics>`: neither accumulation nor the number of processes changes it.

`vicreg`: hinge on the standard deviation at 1 and off-diagonal covariance (Bardes et al. 2022,
arXiv:2105.04906). Pixel targets: He et al. 2022, arXiv:2111.06377.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

PixelNorm = Literal["normalised", "plain"]
VARIANCE_EPS = 1e-6


def per_token_l1(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean absolute difference over the features: [..., E] -> [...]."""
    return (prediction - target).abs().mean(-1)


def per_token_normalised_l2(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean over the features of the squared difference of L2-normalised vectors: [..., E] -> [...]."""
    return (F.normalize(prediction, dim=-1) - F.normalize(target, dim=-1)).square().mean(-1)


def per_token_l2(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean squared difference over the features of a vector: [..., E] -> [...]."""
    return (prediction - target).square().mean(-1)


def nanmedian(values: Tensor, dim: int) -> Tensor:
    """Median without NaN along a dimension, which is copied to be contiguous: many times faster."""
    return values.movedim(dim, -1).contiguous().nanmedian(-1).values


class TokenLoss(NamedTuple):
    """A loss of one token, and the constant that minimises it over many targets: the baseline of skill
    gauges.
    """

    distance: Callable[[Tensor, Tensor], Tensor]  # prediction, target [..., E] -> [...]
    centre: Callable[[Tensor, int], Tensor] = torch.nanmean  # of values without NaN along a dimension


TOKEN_LOSSES = {
    "l1": TokenLoss(per_token_l1, nanmedian),
    "l2": TokenLoss(per_token_l2),
    "normalised_l2": TokenLoss(per_token_normalised_l2),
}


def weighted_mean(values_BM: Tensor, weight_BM: Tensor) -> Tensor:
    """Per-sample mean [B] over the tokens with weight; 0 where a sample has none."""
    return (values_BM * weight_BM).sum(1) / weight_BM.sum(1).clamp(min=1.0)


def pixel_targets(view_BCDHW: Tensor, patch: tuple[int, int, int], kind: PixelNorm) -> Tensor:
    """float32 voxels [B, N, C*d*h*w] of every patch; `normalised`: each patch to mean 0 and variance 1.

    The variance is the unbiased one with 1e-6 added, as the published norm_pix_loss has it.
    """
    d, h, w = patch
    targets = rearrange(
        view_BCDHW.float(), "b c (gd d) (gh h) (gw w) -> b (gd gh gw) (c d h w)", d=d, h=h, w=w
    )
    if kind == "plain":
        return targets
    mean, variance = targets.mean(-1, keepdim=True), targets.var(-1, keepdim=True)
    return (targets - mean) / (variance + VARIANCE_EPS).sqrt()


# a token's own place and the six beside it on the grid (d, h, w)
NEIGHBOURS = ((0, 0, 0), (1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1))


def ids_beside(
    ids_BK: Tensor, grid: tuple[int, int, int], offset: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """The ids of the tokens one `offset` (-1 to 1 an axis) away, both [B, K], and whether (bool) the grid has
    them; where it has not, the id is that of the nearest token of the grid.
    """
    _, height, width = grid
    axes_BK = ids_BK // (height * width), ids_BK // width % height, ids_BK % width
    moved_BK = [axis + step for axis, step in zip(axes_BK, offset, strict=True)]
    inside_BK = [axis.clamp(0, size - 1) for axis, size in zip(moved_BK, grid, strict=True)]
    d, h, w = inside_BK
    is_there = [axis == near for axis, near in zip(moved_BK, inside_BK, strict=True)]
    return (d * height + h) * width + w, is_there[0] & is_there[1] & is_there[2]


Statistics = tuple[Tensor, ...]


class VicReg:
    """mean(relu(1 - std)) + covariance_weight * sum of squared off-diagonal covariances / E."""

    eps = 1e-4
    covariance_weight = 0.1

    def statistics(self, tokens_BKE: Tensor, weight_BK: Tensor) -> Statistics:
        """Per-sample means over the valid tokens, summed over the samples; float32."""
        tokens = tokens_BKE.float()
        weight = weight_BK / weight_BK.sum(1, keepdim=True).clamp(min=1.0)
        scaled = (tokens * weight.sqrt().unsqueeze(-1)).flatten(0, 1)
        return torch.einsum("bke,bk->e", tokens, weight), scaled.T @ scaled

    def penalty(self, means: Statistics) -> Tensor:
        """The scalar penalty of the statistics' mean over the global batch."""
        first, second = means
        covariance = second - torch.outer(first, first)
        std = (covariance.diagonal().clamp(min=0) + self.eps).sqrt()
        off_diagonal = covariance - torch.diag_embed(covariance.diagonal())
        return (1 - std).relu().mean() + self.covariance_weight * off_diagonal.square().sum() / len(first)


def surrogate(regulariser: VicReg, means: Statistics) -> tuple[Tensor, Statistics]:
    """The penalty at these global means, and its gradient in them (detached)."""
    with torch.enable_grad():
        leaves = tuple(m.detach().requires_grad_() for m in means)
        value = regulariser.penalty(leaves)
        gradient = torch.autograd.grad(value, leaves)
    return value.detach(), gradient
