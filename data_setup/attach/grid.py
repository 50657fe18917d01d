"""From a scan's acquired field to its volume's grid, and back.

In: arrays over the field, with as many samples as they like, and the volume's row of the index. Out: the same
on the grid, NaN or 0 outside the field. Heights go through the weights that made the volume
(data_setup/resample.py), only over valid heights; classes are those of the scan's voxel under the centre.
Along D both are of the B-scans that the volume's planes are, by the rule of its store's geometry.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from data_setup.resample import (
    BLENDED,
    AxisWeights,
    axis_weights,
    is_nearest,
    plane_weights,
    rule_of,
    scan_weights,
)

LEAST_WEIGHT = 0.5  # share of valid heights under an A-scan


def length_mm(record: Mapping[str, Any], axis: str) -> float:
    """Of the field along d, h or w."""
    return float(record[f"shape_before_{axis}"] * record[f"spacing_before_{axis}"])


def box(record: Mapping[str, Any], axes: str) -> tuple[slice, ...]:
    """The field on the grid, along these axes."""
    return tuple(slice(int(record[f"valid_{axis}0"]), int(record[f"valid_{axis}1"])) for axis in axes)


def _axis(
    record: Mapping[str, Any], geometry: Mapping[str, Any], axis: str, count: int | None = None
) -> tuple[int, float, int, float]:
    """Of the scan (`count`: its voxels) and of its volume: voxels and spacing along d, h or w."""
    size = int(geometry["image_size"]["dhw".index(axis)])
    own = int(record[f"shape_before_{axis}"]) if count is None else count
    return own, float(record[f"spacing_before_{axis}"]), size, float(record[f"spacing_after_{axis}"])


def along_d(count: int, record: Mapping[str, Any], geometry: Mapping[str, Any]) -> AxisWeights:
    """Weights along D of `count` lines over the field, in the store's order. Where a plane of the volume is
    one B-scan, it is that B-scan's own line, where each has one.
    """
    size, spacing, target_size, target = of_scan = _axis(record, geometry, "d")
    own = length_mm(record, "d") / count
    if not is_nearest(spacing, target, rule_of(geometry)):
        return axis_weights(count, own, target_size, target)
    of_planes = plane_weights(*of_scan)
    if count == size:
        return of_planes
    return AxisWeights(of_planes.weights @ axis_weights(count, own, size, spacing).weights, of_planes.valid)


def field_to_grid(
    shape: Sequence[int], record: Mapping[str, Any], geometry: Mapping[str, Any]
) -> list[np.ndarray]:
    """Weights along D and W of an array over the field, [A-scans of the grid, samples]."""
    count, (_, _, size, target) = shape[1], _axis(record, geometry, "w")
    along_w = axis_weights(count, length_mm(record, "w") / count, size, target)
    return [along_d(shape[0], record, geometry).weights, along_w.weights]


def lay_on_grid(values_SDW: np.ndarray, record: pd.Series, geometry: Mapping[str, Any]) -> np.ndarray:
    """Rows of the acquired scan [S, Dm, Wm] -> voxels of its stored volume, float32 [S, D, W]. The map's
    B-scans come in the store's order. NaN outside the field.
    """
    size = geometry["image_size"]
    rows = _mean_of_valid(values_SDW, field_to_grid(values_SDW.shape[1:], record, geometry))
    # both fields are centred on each other; row r has its centre at r + 1/2 spacings
    mm = (rows + 0.5 - record.shape_before_h / 2) * record.spacing_before_h
    return (mm / record.spacing_after_h + size[1] / 2 - 0.5).astype(np.float32)


def at_scan(values_SDW: np.ndarray, record: Mapping[str, Any]) -> np.ndarray:
    """Samples over the field at the scan's own B-scans and A-scans: themselves, or means of neighbours."""
    counts = [int(record[f"shape_before_{axis}"]) for axis in "dw"]
    if values_SDW.shape[1:] == tuple(counts):
        return values_SDW
    weights = [
        axis_weights(
            own, length_mm(record, axis) / own, count, float(record[f"spacing_before_{axis}"])
        ).weights
        for axis, own, count in zip("dw", values_SDW.shape[1:], counts, strict=True)
    ]
    return _mean_of_valid(values_SDW, weights)


def reach(record: Mapping[str, Any], geometry: Mapping[str, Any], axes: str) -> tuple[slice, ...]:
    """The voxels of the acquired scan to which its grid reaches, along these axes, in the store's order."""
    ends = []
    for axis in axes:
        own = _axis(record, geometry, axis)
        rule = rule_of(geometry) if axis == "d" else BLENDED
        there = np.flatnonzero(scan_weights(*own, rule).any(axis=1))
        ends.append(slice(int(there[0]), int(there[-1]) + 1))
    return tuple(ends)


def means_on_scan(
    values_SDW: np.ndarray, record: Mapping[str, Any], geometry: Mapping[str, Any]
) -> np.ndarray:
    """Values of a stored volume [S, D, W] at the A-scans of its acquired scan, float64 [S, B-scans, A-scans],
    with the scan's B-scans as its reader gives them. NaN where no A-scan of the grid lies.
    """
    rules = {"d": rule_of(geometry), "w": BLENDED}
    weights = [scan_weights(*_axis(record, geometry, axis), rule) for axis, rule in rules.items()]
    means = _mean_of_valid(values_SDW, weights)
    return means[:, ::-1] if record["flipped_d"] else means


def lay_on_scan(values_SDW: np.ndarray, record: Mapping[str, Any], geometry: Mapping[str, Any]) -> np.ndarray:
    """Voxels of a stored volume [S, D, W] -> rows of its acquired scan, float32 [S, B-scans, A-scans]. The
    way back of lay_on_grid, in the order of means_on_scan.
    """
    means, height = means_on_scan(values_SDW, record, geometry), geometry["image_size"][1]
    mm = (means + 0.5 - height / 2) * float(record["spacing_after_h"])
    rows = mm / float(record["spacing_before_h"]) + record["shape_before_h"] / 2 - 0.5
    return rows.astype(np.float32)


def _mean_of_valid(values_SDW: np.ndarray, weights: Sequence[np.ndarray]) -> np.ndarray:
    """Weighted means along D and W of the known values; NaN where they weigh less than LEAST_WEIGHT."""
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
    for axis, count in zip("dhw", values_DHW.shape, strict=True):
        own = _, spacing, size, target = _axis(record, geometry, axis, count)
        if axis == "d" and is_nearest(spacing, target, rule_of(geometry)):
            laid = plane_weights(*own)
            start, stop = laid.valid
            nearest = laid.weights[start:stop].argmax(axis=1)
            inside = (np.arange(count) >= nearest[0]) & (np.arange(count) <= nearest[-1])
        else:
            start, stop = axis_weights(*own).valid
            centre = (np.arange(start, stop) + 0.5 - size / 2) * target / spacing + count / 2  # in voxels
            nearest = np.clip(np.floor(centre).astype(int), 0, count - 1)
            inside = np.abs((np.arange(count) + 0.5 - count / 2) * spacing) <= size * target / 2
        sources.append(nearest)
        targets.append(slice(start, stop))
        covered.append(inside)
    result[tuple(targets)] = values_DHW[np.ix_(*sources)]
    total = np.count_nonzero(values_DHW)
    inside = np.count_nonzero(values_DHW[np.ix_(*covered)])
    return result, 1 - inside / total if total else 0.0
