"""How far predicted surfaces are from a device's, and how far the layers between them overlap.

In: surfaces [S, D, W] in voxels along h (0: the centre of the first), the volume's own spacing. Out: one
number a surface or a layer, in um or as a share; NaN where the device marks none. An A-scan counts where the
device has a height, and so has the prediction: a decoder has heights everywhere, mean heights of a surface
that no training volume has are NaN, another grader may leave A-scans out.
"""

from __future__ import annotations

import numpy as np
from scipy.spatial import cKDTree

HD_PERCENTILE = 95


def boundary_error_um(predicted_SDW: np.ndarray, truth_SDW: np.ndarray, spacing_h_mm: float) -> np.ndarray:
    """Mean distance along the A-scan of every surface, um [S]."""
    distance = np.abs(predicted_SDW - truth_SDW) * spacing_h_mm * 1000
    count = (~np.isnan(distance)).sum(axis=(1, 2))
    return np.divide(
        np.nansum(distance, axis=(1, 2)), count, out=np.full(len(count), np.nan), where=count > 0
    )


def layer_overlap(predicted_SDW: np.ndarray, truth_SDW: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(Dice, IoU) of the layers between neighbouring surfaces over the whole volume, [S - 1] each.

    Layers are lengths along A-scans, not voxels, so a surface between two voxels counts where it is.
    """
    upper, lower = truth_SDW[:-1], truth_SDW[1:]
    is_known = ~np.isnan(truth_SDW[:-1] + truth_SDW[1:] + predicted_SDW[:-1] + predicted_SDW[1:])
    shared = np.minimum(predicted_SDW[1:], lower) - np.maximum(predicted_SDW[:-1], upper)
    both, truth, predicted = (
        np.where(is_known, np.clip(length, 0, None), 0).sum(axis=(1, 2))
        for length in (shared, lower - upper, predicted_SDW[1:] - predicted_SDW[:-1])
    )
    dice, iou = (np.full(len(both), np.nan) for _ in range(2))
    np.divide(2 * both, truth + predicted, out=dice, where=truth > 0)
    np.divide(both, truth + predicted - both, out=iou, where=truth > 0)
    return dice, iou


def hausdorff95_um(
    predicted_DW: np.ndarray, truth_DW: np.ndarray, spacing_mm: tuple[float, float, float]
) -> float:
    """95th percentile of the distances between two surfaces in space, the larger of both directions, um."""
    d, w = np.nonzero(~np.isnan(truth_DW) & ~np.isnan(predicted_DW))
    if not len(d):
        return float("nan")
    scale = np.array(spacing_mm) * 1000
    truth, predicted = (
        np.column_stack([d, surface[d, w], w]) * scale for surface in (truth_DW, predicted_DW)
    )
    there, back = (cKDTree(b).query(a)[0] for a, b in ((predicted, truth), (truth, predicted)))
    return float(max(np.percentile(there, HD_PERCENTILE), np.percentile(back, HD_PERCENTILE)))
