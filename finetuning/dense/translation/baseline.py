"""What the structural scan shows of flow without an encoder: a linear projection of its A-scans.

In: volumes and slabs of the training fold. Out: slabs [S, D, W] of a volume. The features of an A-scan are
its mean brightness in bins below the first bright row, and the same less their mean nearby (contrast: vessels
are bright above and cast shadows below); ridge regression (scikit-learn) projects them on each slab.
"""

from __future__ import annotations

import numpy as np
from scipy.ndimage import gaussian_filter, gaussian_filter1d
from sklearn.linear_model import Ridge

from finetuning.cohort.cohort import TRAIN
from finetuning.dense.translation.volumes import FlowVolumes

NUM_BINS = 16
BIN_MM = 0.035
ABOVE_MM = 0.035  # where the first bin begins, above the first bright row
NEAR_MM = 0.3
MOST_ASCANS = 2000  # of a volume, evenly spaced


class StructuralProjection:
    """Fitted on the training volumes; every slab has separate weights."""

    def __init__(self, volumes: FlowVolumes) -> None:
        """Raises StorageError."""
        self.volumes = volumes
        parts: list[list[np.ndarray]] = [[] for _ in volumes.names]
        targets: list[list[np.ndarray]] = [[] for _ in volumes.names]
        for row in map(int, volumes.of(TRAIN)):
            features, truth = structural_features(volumes, row), volumes.read(row)
            for place, image in enumerate(truth):
                known = np.flatnonzero(~np.isnan(image).ravel())
                known = known[:: max(1, len(known) // MOST_ASCANS)]
                parts[place].append(features.reshape(-1, features.shape[-1])[known])
                targets[place].append(image.ravel()[known])
        self.models = [
            Ridge(alpha=1.0).fit(np.concatenate(x), np.concatenate(y))
            for x, y in zip(parts, targets, strict=True)
        ]

    def predict(self, row: int) -> np.ndarray:
        """Slabs of a volume, float32 [S, D, W] in 0..1."""
        features = structural_features(self.volumes, row)
        flat = features.reshape(-1, features.shape[-1])
        images = [model.predict(flat).reshape(features.shape[:2]) for model in self.models]
        return np.clip(np.stack(images), 0, 1).astype(np.float32)


def structural_features(volumes: FlowVolumes, row: int) -> np.ndarray:
    """float64 [D, W, 2 * NUM_BINS] of a stored volume, in its own standard deviations."""
    record = volumes.store.index.loc[row]
    volume = volumes.store.read(row).astype(np.float64)
    volume = (volume - record.intensity_mean) / max(float(record.intensity_std), 1e-6)
    d_mm, h_mm, w_mm = volumes.spacing_mm(row)
    top = first_bright_row(volume, h_mm)
    edges = top[:, None, :] + (np.arange(NUM_BINS + 1)[None, :, None] * BIN_MM - ABOVE_MM) / h_mm
    total = np.concatenate([np.zeros_like(volume[:, :1]), volume.cumsum(axis=1)], axis=1)
    edges = edges.clip(0, volume.shape[1])
    low = np.minimum(edges.astype(int), volume.shape[1] - 1)
    at = np.take_along_axis(total, low, axis=1)
    at = at + (edges - low) * (np.take_along_axis(total, low + 1, axis=1) - at)
    bins = np.diff(at, axis=1) / (BIN_MM / h_mm)
    nearby = gaussian_filter(bins, (NEAR_MM / d_mm, 0, NEAR_MM / w_mm), mode="nearest")
    return np.moveaxis(np.concatenate([bins, bins - nearby], axis=1), 1, 2)


def first_bright_row(volume_DHW: np.ndarray, h_mm: float) -> np.ndarray:
    """The first row of each A-scan half way from its median to its brightest, float64 [D, W]."""
    smooth = gaussian_filter1d(volume_DHW, max(0.01 / h_mm, 0.5), axis=1, mode="nearest")
    floor = np.median(smooth, axis=1, keepdims=True)
    half = floor + 0.5 * (smooth.max(axis=1, keepdims=True) - floor)
    return (smooth >= half).argmax(axis=1).astype(np.float64)
