"""Estimates over participants of what was measured in their volumes, and cells of tables.

In: a line for every arm, volume and name. Out: means over a participant's volumes, then over participants,
with intervals of the bootstrap over participants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from models.probes.intervals import interval95


def per_person(lines: pd.DataFrame, column: str, people: Sequence[str]) -> np.ndarray:
    """Mean over the names of a volume, then over the volumes of each person [P]; NaN without one."""
    of_volume = lines.groupby(["person_id", "row"])[column].mean()
    return of_volume.groupby("person_id").mean().reindex(list(people)).to_numpy(float)


def estimate(values_P: np.ndarray, draws_SP: np.ndarray) -> dict[str, Any]:
    """Mean over people and its interval; people without a value are left out."""
    known = ~np.isnan(values_P)
    if not known.any():
        return {"value": None, "ci95": None, "people": 0}
    weights = draws_SP[:, known].astype(float)
    drawn = weights.sum(axis=1) > 0
    means = weights[drawn] @ values_P[known] / weights[drawn].sum(axis=1)
    return {
        "value": float(values_P[known].mean()),
        "ci95": list(interval95(means)),
        "people": int(known.sum()),
    }


def by_name(
    lines: pd.DataFrame, columns: Sequence[str], people: Sequence[str], draws: np.ndarray
) -> dict[str, dict[str, dict[str, Any]]]:
    """arm -> name -> column -> estimate."""
    result: dict[str, dict[str, dict[str, Any]]] = {}
    for (arm, name), part in lines.groupby(["arm", "name"], sort=False):
        cells = {column: estimate(per_person(part, column, people), draws) for column in columns}
        result.setdefault(str(arm), {})[str(name)] = cells
    return result


def cell(estimated: Mapping[str, Any], digits: int = 2) -> str:
    """`value | low to high`, the two last cells of a line."""
    if estimated["value"] is None:
        return "- | -"
    low, high = estimated["ci95"]
    return f"{estimated['value']:.{digits}f} | {low:.{digits}f} to {high:.{digits}f}"
