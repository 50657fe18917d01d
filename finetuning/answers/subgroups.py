"""The same predictions by device, laterality, site and age: whom a head or probe serves worse.

In: `Scored` and the store's index. Out: for every group its people and the metrics of their units, pooled
over the volumes of only the group. A group of fewer than MIN_PEOPLE people, or of one class, has no
metrics: None. `few` says why the intervals of another are too narrow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from finetuning.answers.scorecard import metrics_of, people_of_classes
from finetuning.cohort.cohort import EVALUATED
from finetuning.cohort.metrics import PRIMARY, bootstrap_counts, measure, observed
from finetuning.cohort.predictions import Predictions, Scored
from models.probes.intervals import too_few

COLUMNS = {"device": "device", "laterality": "laterality", "site": "clinical_site", "age": "age"}
AGE_EDGES = (50, 60, 70, 80)  # years at which the next band begins
BANDS = ("under 50", "50-59", "60-69", "70-79", "80 and over")
MIN_PEOPLE = 10
UNKNOWN = "unknown"


def subgroups(
    scored: Scored, index: pd.DataFrame, samples: int, seed: int
) -> dict[str, list[dict[str, Any]]]:
    """{device, laterality, site, age: groups}, each {group, n_participants, n_units, metrics or None}."""
    return {name: _groups(scored, index, column, samples, seed) for name, column in COLUMNS.items()}


def group_of_volumes(index: pd.DataFrame, rows: np.ndarray, column: str) -> np.ndarray:
    """The group of each store row, str [n]; `unknown` where the store has no value."""
    values = index.loc[rows, column]
    if column == "age":
        values = pd.cut(values.astype(float), (-np.inf, *AGE_EDGES, np.inf), right=False, labels=BANDS)
    return values.astype(object).fillna(UNKNOWN).to_numpy(str)


def _groups(
    scored: Scored, index: pd.DataFrame, column: str, samples: int, seed: int
) -> list[dict[str, Any]]:
    groups = [group_of_volumes(index, cohort.rows, column) for cohort in scored.cohorts]
    names = {g for of, c in zip(groups, scored.cohorts, strict=True) for g in of[c.fold == EVALUATED]}
    # bands from the youngest on, other names by alphabet, at last the unknown
    ranked = sorted(names, key=lambda n: (n == UNKNOWN, BANDS.index(n) if n in BANDS else 0, n))
    return [
        _group(name, scored.evaluated(tuple(of == name for of in groups)), samples, seed) for name in ranked
    ]


def _group(name: str, predictions: Predictions, samples: int, seed: int) -> dict[str, Any]:
    people = len(np.unique(predictions.person))
    group: dict[str, Any] = {"group": str(name), "n_participants": people, "n_units": len(predictions.unit)}
    group["few"] = too_few(people_of_classes(predictions))
    is_one_class = predictions.kind != "multilabel" and len(np.unique(predictions.truth)) < 2
    if people < MIN_PEOPLE or is_one_class:
        return group | {"primary": PRIMARY[predictions.kind], "metrics": None}
    draws = measure(predictions, bootstrap_counts(predictions, samples, seed))
    metrics = metrics_of(observed(predictions), draws)["metrics"]
    return group | {"primary": PRIMARY[predictions.kind], "metrics": metrics}
