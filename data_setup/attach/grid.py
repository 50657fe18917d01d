"""From a scan's acquired field to its volume's grid, and back.

In: arrays over the field, with as many samples as they like, and the volume's row of the index. Out: the same
on the grid, NaN or 0 outside the field. Heights go through the weights that made the volume
(data_setup/resample.py), over valid heights alone; classes are those of the scan's voxel under the centre.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from data_setup.resample import axis_weights

LEAST_WEIGHT = 0.5  # share of valid heights under an A-scan


def length_mm(record: Mapping[str, Any], axis: str) -> float:
    """Of the field along d, h or w."""
    return float(record[f"shape_before_{axis}"] * record[f"spacing_before_{axis}"])


def box(record: Mapping[str, Any], axes: str) -> tuple[slice, ...]:
    """The field on the grid, along these axes."""
    return tuple(slice(int(record[f"valid_{axis}0"]), int(record[f"valid_{axis}1"])) for axis in axes)


def field_to_grid(shape: Sequence[int], record: pd.Series, image_size: Sequence[int]) -> list[np.ndarray]:
    """Weights along D and W of an array over the field, [A-scans of the grid, samples]."""
    return [
        axis_weights(
            count,
            length_mm(record, axis) / count,
            image_size["dhw".index(axis)],
            float(record[f"spacing_after_{axis}"]),
        ).weights
        for axis, count in zip("dw", shape, strict=True)
    ]


def lay_on_grid(values_SDW: np.ndarray, record: pd.Series, geometry: Mapping[str, Any]) -> np.ndarray:
    """Rows of the acquired scan [S, Dm, Wm] -> voxels of its stored volume, float32 [S, D, W].

    The map's B-scans come in the store's order. NaN outside the field.
    """
    size = geometry["image_size"]
    rows = _mean_of_valid(values_SDW, field_to_grid(values_SDW.shape[1:], record, size))
    # both fields are centred on each other; row r has its centre at r + 1/2 spacings
    mm = (rows + 0.5 - record.shape_before_h / 2) * record.spacing_before_h
    return (mm / record.spacing_after_h + size[1] / 2 - 0.5).astype(np.float32)


def means_on_scan(
    values_SDW: np.ndarray, record: Mapping[str, Any], geometry: Mapping[str, Any]
) -> np.ndarray:
    """Values of a stored volume [S, D, W] at the A-scans of its acquired scan, float64 [S, B-scans, A-scans],
    with the scan's B-scans in the order of its file. NaN where no A-scan of the grid lies.
    """
    weights = [
        axis_weights(
            geometry["image_size"]["dhw".index(axis)],
            float(record[f"spacing_after_{axis}"]),
            int(record[f"shape_before_{axis}"]),
            float(record[f"spacing_before_{axis}"]),
        ).weights
        for axis in "dw"
    ]
    means = _mean_of_valid(values_SDW, weights)
    return means[:, ::-1] if record["flipped_d"] else means


def lay_on_scan(values_SDW: np.ndarray, record: Mapping[str, Any], geometry: Mapping[str, Any]) -> np.ndarray:
    """Voxels of a stored volume [S, D, W] -> rows of its acquired scan, float32 [S, B-scans, A-scans].

    The way back of lay_on_grid, in the order of means_on_scan.
    """
    means, height = means_on_scan(values_SDW, record, geometry), geometry["image_size"][1]
    mm = (means + 0.5 - height / 2) * float(record["spacing_after_h"])
    rows = mm / float(record["spacing_before_h"]) + record["shape_before_h"] / 2 - 0.5
    return rows.astype(np.float32)


def _mean_of_valid(values_SDW: np.ndarray, weights: Sequence[np.ndarray]) -> np.ndarray:
    """Weighted means along D and W of what is not NaN; NaN where less than LEAST_WEIGHT of it is."""
    is_valid = ~np.isnan(values_SDW)
    sums, shares = (
        weights[0] @ part @ weights[1].T
        for part in (np.where(is_valid, values_SDW, 0).astype(np.float64), is_valid.astype(np.float64))
    )
    return np.divide(sums, shares, out=np.full(sums.shape, np.nan), where=shares >= LEAST_WEIGHT)


def nearest_voxels(
    values_DHW: np.ndarray, record: pd.Series, geometry: Mapping[str, Any]
) -> tuple[np.ndarray, float]:
    """Classes of the acquired scan in the store's order -> (classes of its stored volume uint8 [D, H, W], the
    share of labelled voxels outside the grid). 0 outside the acquired field.
    """
    result = np.zeros(geometry["image_size"], np.uint8)
    sources, targets, covered = [], [], []
    for axis, count, size in zip("dhw", values_DHW.shape, result.shape, strict=True):
        spacing, target = float(record[f"spacing_before_{axis}"]), float(record[f"spacing_after_{axis}"])
        start, stop = axis_weights(count, spacing, size, target).valid
        centre = (np.arange(start, stop) + 0.5 - size / 2) * target / spacing + count / 2  # in voxels
        sources.append(np.clip(np.floor(centre).astype(int), 0, count - 1))
        targets.append(slice(start, stop))
        own = np.abs((np.arange(count) + 0.5 - count / 2) * spacing)
        covered.append(own <= size * target / 2)
    result[tuple(targets)] = values_DHW[np.ix_(*sources)]
    total = np.count_nonzero(values_DHW)
    inside = np.count_nonzero(values_DHW[np.ix_(*covered)])
    return result, 1 - inside / total if total else 0.0
