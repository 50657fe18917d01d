"""Predictions of one head or probe: a row for every unit (volume, eye or participant).

In: scores of volumes. Out: scores of units, the mean over their volumes; predictions.parquet.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from finetuning.cohort import Cohort


@dataclass(frozen=True)
class Predictions:
    """Scores of units, sorted by unit.

    classification, ordinal: probabilities of the classes; multilabel: one probability a label; regression:
    one value in the label's own unit.
    """

    kind: str
    names: tuple[str, ...]
    unit: np.ndarray  # str [U]
    person: np.ndarray  # str [U]
    truth: np.ndarray  # float64 [U, T], as in Cohort.target
    scores: np.ndarray  # float64 [U, C]


def pool(cohort: Cohort, fold: int, scores_nC: np.ndarray) -> Predictions:
    """Mean score of each unit of a fold; `scores_nC` has a row for each volume of that fold, in its order."""
    chosen = cohort.fold == fold
    if len(scores_nC) != int(chosen.sum()):
        raise ValueError(f"expected {int(chosen.sum())} volumes of the fold, found {len(scores_nC)}")
    unit, first, inverse = np.unique(cohort.unit[chosen], return_index=True, return_inverse=True)
    total = np.zeros((len(unit), scores_nC.shape[1]))
    np.add.at(total, inverse, scores_nC)
    return Predictions(
        cohort.kind,
        cohort.names,
        unit,
        cohort.person[chosen][first],
        cohort.target[chosen][first],
        total / np.bincount(inverse)[:, None],
    )
