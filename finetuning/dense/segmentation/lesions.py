"""Lesions one by one: which of those that are labelled are found, and which predicted ones are none.

In: classes of a volume, as predicted and as labelled. Out: counts of each class. A lesion is what touches by
faces, edges or corners. It is found where it shares a voxel with a prediction of its class; a predicted one
that shares none with a label is false.
"""

from __future__ import annotations

import numpy as np
from scipy.ndimage import generate_binary_structure, label

from finetuning.dense.segmentation.volumes import IGNORED

TOUCHING = generate_binary_structure(3, 3)


def count_lesions(
    predicted_DHW: np.ndarray, truth_DHW: np.ndarray, num_classes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(labelled, found, false) lesions of each class [C]; IGNORED voxels are nobody's."""
    known, counts = truth_DHW != IGNORED, np.zeros((3, num_classes), np.int64)
    for place in range(num_classes):
        sides = (truth_DHW == place + 1, known & (predicted_DHW == place + 1))
        both = sides[0] & sides[1]
        (labelled, num_labelled), (predicted, num_predicted) = (label(side, TOUCHING) for side in sides)
        met = [len(np.unique(numbers[both])) for numbers in (labelled, predicted)]
        counts[:, place] = num_labelled, met[0], num_predicted - met[1]
    return counts[0], counts[1], counts[2]
