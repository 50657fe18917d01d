"""How far predicted classes overlap with the labels, a volume and a class at a time.

In: places among the classes of a volume, predicted and labelled. Out: Dice [C]; voxels of each.
"""

from __future__ import annotations

import numpy as np

from finetuning.dense.segmentation.volumes import IGNORED


def overlap(
    predicted_DHW: np.ndarray, truth_DHW: np.ndarray, num_classes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(shared, predicted, labelled) voxels of each class [C]; IGNORED voxels count nowhere."""
    known = truth_DHW != IGNORED
    predicted, truth = predicted_DHW[known].astype(np.int64), truth_DHW[known].astype(np.int64)
    pairs = np.bincount(truth * (num_classes + 1) + predicted, minlength=(num_classes + 1) ** 2)
    table = pairs.reshape(num_classes + 1, num_classes + 1)
    return table.diagonal()[1:], table.sum(axis=0)[1:], table.sum(axis=1)[1:]


def dice(shared: np.ndarray, predicted: np.ndarray, labelled: np.ndarray) -> np.ndarray:
    """Dice of each class; NaN where the labels have none of it."""
    result = np.full(shared.shape, np.nan)
    return np.divide(2 * shared, predicted + labelled, out=result, where=labelled > 0)
