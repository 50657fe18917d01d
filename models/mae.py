"""Pixel targets of the recipe `mae`: the voxels of each patch, as a masked autoencoder reconstructs them.

In: the context encoder's own view [B, C, D, H, W]. Out: one target vector per token, in the order of its
patch embedding. After He et al. 2022, "Masked autoencoders are scalable vision learners".
"""

from __future__ import annotations

from typing import Literal

from einops import rearrange
from torch import Tensor

MaeTarget = Literal["normalised", "plain"]
VARIANCE_EPS = 1e-6


def pixel_targets(view_BCDHW: Tensor, patch: tuple[int, int, int], kind: MaeTarget) -> Tensor:
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
