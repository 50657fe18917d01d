"""From a dense decoder's outputs to en-face slabs: where along an A-scan to look, and what is seen there.

In: outputs [B, 2S, d, H, W] of the decoders of layers and segmentation. Out: slabs [B, S, d, W] in flow's own
numbers. Each slab has a weight over the H voxels of an A-scan (softmax) and a value at each: an en-face image
is a projection, and which rows are projected is learnt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from finetuning.dense.layers.planes import Planes
from finetuning.dense.moves import Moves

OUTPUTS = 2  # of a slab: value and weight


def slabs_of(outputs_BSdHW: Tensor) -> Tensor:
    """Slabs [B, S, d, W] of outputs [B, 2S, d, H, W]."""
    value, weight = outputs_BSdHW.float().chunk(OUTPUTS, dim=1)
    return (value * weight.softmax(dim=3)).sum(dim=3)


def slab_loss(outputs_BSdHW: Tensor, truth_BSdW: Tensor) -> Tensor:
    """Mean absolute difference over the places that are known."""
    known = ~truth_BSdW.isnan()
    difference = (slabs_of(outputs_BSdHW) - torch.where(known, truth_BSdW, 0.0)).abs()
    return torch.where(known, difference, 0.0).sum() / known.sum().clamp(min=1)


def predicted_slabs(outputs_BSdHW: Tensor) -> Tensor:
    """Slabs [B, S, d, W] in 0..1."""
    return slabs_of(outputs_BSdHW).clamp(0, 1)


class SlabPlanes(Planes):
    """As `Planes`; the labels are slabs [B, S, d, W], as its heights are."""

    predicted_of = staticmethod(predicted_slabs)

    def moved(self, truth: Tensor, moves: Moves) -> Tensor:
        """Moved along W: a slab has no rows."""
        return moves.columns(truth)
