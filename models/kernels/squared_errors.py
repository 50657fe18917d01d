"""Squared errors of voxels, without a float32 copy of the guesses that waits for the backward pass.

In: guesses of P places beside every token, in any precision, and the voxels of all tokens. Out: errors in
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Gather = Callable[[Tensor, Tensor], Tensor]  # (truth [B, N, V], ids [B, K]) -> [B, K, V]


def _difference(guess: Tensor, truth: Tensor, ids: Tensor, gather: Gather) -> Tensor:
    return guess.float() - gather(truth, ids)


class SquaredErrors(torch.autograd.Function):
    """Mean squared errors [P, B, K] of guesses [B, K, P V] and the rows near [P, B, K] of truth [B, N, V].
    The backward pass takes the differences again, from the guesses as they came, perhaps in bfloat16.
    """

    @staticmethod
    def forward(ctx: Any, guesses: Tensor, truth: Tensor, near: Tensor, gather: Gather) -> Tensor:
        ctx.save_for_backward(guesses, truth, near)
        ctx.gather = gather
        places = zip(guesses.chunk(len(near), -1), near, strict=True)
        return torch.stack(
            [_difference(guess, truth, ids, gather).square().mean(-1) for guess, ids in places]
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor, None, None, None]:
        guesses, truth, near = ctx.saved_tensors
        gradient, shares = torch.empty_like(guesses), (2 / truth.shape[-1] * error).unsqueeze(-1)
        chunks = (t.chunk(len(near), -1) for t in (gradient, guesses))
        for part, guess, ids, share in zip(*chunks, near, shares, strict=True):
            part.copy_(_difference(guess, truth, ids, ctx.gather).mul_(share))
        return gradient, None, None, None
