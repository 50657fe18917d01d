"""What is trained: the mean of soft Dice over classes, and cross-entropy with weights for rare classes.

In: logits [B, C + 1, d, H, W] and places among the classes [B, d, H, W]. Out: a number. Dice is that of MONAI
(Milletari et al. 2016, V-Net), over the whole batch, without the background: a plane without a class says
little about it.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from monai.losses import DiceLoss
from torch import Tensor

from finetuning.cohort.cohort import TRAIN
from finetuning.dense.layers.planes import Planes
from finetuning.dense.moves import Moves
from finetuning.dense.segmentation.volumes import IGNORED, ClassVolumes

_dice = DiceLoss(include_background=False, batch=True)


def likeliest(outputs_BSdHW: Tensor) -> Tensor:
    """Places among the classes, uint8 [B, d, H, W]."""
    return outputs_BSdHW.argmax(dim=1).to(torch.uint8)


class ClassPlanes(Planes):
    """As `Planes`; the labels are places among the classes [B, d, H, W]."""

    d_axis = 0
    predicted_of = staticmethod(likeliest)

    def moved(self, truth: Tensor, moves: Moves) -> Tensor:
        """Nearest; IGNORED where nothing is known."""
        return moves.classes(truth, IGNORED)


def segmentation_loss(logits_BSdHW: Tensor, truth_BdHW: Tensor, weight_S: Tensor) -> Tensor:
    """Dice loss and cross-entropy over the voxels that are not IGNORED."""
    truth = truth_BdHW.long()
    known = truth != IGNORED
    truth = torch.where(known, truth, 0)
    logits = logits_BSdHW.float()
    mask = known.unsqueeze(1)
    hot = F.one_hot(truth, logits.shape[1]).movedim(-1, 1) * mask
    dice = _dice(logits.softmax(dim=1) * mask, hot.float())
    entropy = F.cross_entropy(logits, truth, weight=weight_S, reduction="none")
    total = (weight_S[truth] * known).sum().clamp(min=1e-6)
    return dice + (entropy * known).sum() / total


def class_weights(volumes: ClassVolumes, how: str) -> np.ndarray:
    """Weights of background and classes in the cross-entropy, float32 [C + 1], their mean 1.

    `auto`: the root of a class's rarity among the training volumes' voxels; `none`: all the same.
    """
    counts = np.sum([volumes.counts(int(row)) for row in volumes.of(TRAIN)], axis=0)
    if how == "none":
        return np.ones(len(counts), np.float32)
    rarity = np.sqrt(counts.sum() / np.maximum(counts, 1))
    return (rarity / rarity.mean()).astype(np.float32)
