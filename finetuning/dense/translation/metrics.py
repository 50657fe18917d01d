"""How far a predicted slab is from the device's image, a volume and a slab at a time.

In: two images [D, W] in 0..1, NaN where nothing is known in the second. Out: L1 in the same numbers, and SSIM
(Wang et al. 2004) as scikit-image computes it, over the acquired field.
"""

from __future__ import annotations

import numpy as np
from skimage.metrics import structural_similarity

WINDOW = 7  # pixels of SSIM, where the field is as long


def l1(predicted_DW: np.ndarray, truth_DW: np.ndarray) -> float:
    """Mean absolute difference where the truth is known; NaN where it is nowhere."""
    known = ~np.isnan(truth_DW)
    return float(np.abs(predicted_DW - truth_DW)[known].mean()) if known.any() else float("nan")


def ssim(predicted_DW: np.ndarray, truth_DW: np.ndarray, field: tuple[slice, ...]) -> float:
    """Structural similarity in the field; NaN where it is not wholly known, or less than 3 pixels wide."""
    truth, predicted = truth_DW[field], predicted_DW[field]
    window = min(WINDOW, *(side - 1 + side % 2 for side in truth.shape))
    if window < 3 or np.isnan(truth).any():
        return float("nan")
    value = structural_similarity(truth, predicted, data_range=1.0, win_size=window)
    return float(value)
