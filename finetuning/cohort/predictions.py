"""Predictions of one head or probe: a row for every unit (volume, eye or participant).

In: scores of volumes. Out: scores of units, the mean over their volumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from finetuning.cohort.cohort import EVALUATED, Cohort


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

    def where(self, chosen_U: np.ndarray) -> Predictions:
        """Some of the units."""
        parts = (part[chosen_U] for part in (self.unit, self.person, self.truth, self.scores))
        return Predictions(self.kind, self.names, *parts)


@dataclass(frozen=True)
class Scored:
    """Scores of volumes, in one cohort (official splits) or one a fold (crossfit)."""

    cohorts: tuple[Cohort, ...]
    scores: tuple[np.ndarray, ...]  # [n, C] in the order of each cohort's rows; NaN where nobody asks

    def evaluated(self, volumes: tuple[np.ndarray, ...] | None = None) -> Predictions:
        """The units of all cohorts; `volumes`, bool [n] of each cohort: pooled over these only."""
        return join(self.by_cohort(EVALUATED, volumes))

    def by_cohort(self, fold: int, volumes: tuple[np.ndarray, ...] | None = None) -> list[Predictions]:
        """The units of a fold in each cohort."""
        masks = volumes or tuple(np.ones(len(cohort.rows), bool) for cohort in self.cohorts)
        return [
            pool(cohort, fold, scores[(cohort.fold == fold) & mask], mask)
            for cohort, scores, mask in zip(self.cohorts, self.scores, masks, strict=True)
        ]

    def cohort_of_units(self) -> np.ndarray:
        """The number of the cohort that evaluates each unit of `evaluated()` [U]."""
        parts = self.by_cohort(EVALUATED)
        unit = np.concatenate([p.unit for p in parts])
        number = np.repeat(np.arange(len(parts)), [len(p.unit) for p in parts])
        return number[np.argsort(unit)]


def pool(cohort: Cohort, fold: int, scores_nC: np.ndarray, volumes: np.ndarray | None = None) -> Predictions:
    """Mean score of each unit of a fold; `scores_nC` has a row for each volume of that fold, in its order.

    `volumes`, bool over all volumes of the cohort: only these count, and `scores_nC` has rows for these.
    """
    chosen = cohort.fold == fold
    if volumes is not None:
        chosen = chosen & volumes
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
        total / np.bincount(inverse, minlength=len(unit))[:, None],
    )


def join(parts: Sequence[Predictions]) -> Predictions:
    """The predictions of folds that share no person, sorted by unit; ValueError where one is in two."""
    people = np.concatenate([np.unique(p.person) for p in parts])
    if len(np.unique(people)) != len(people):
        raise ValueError("expected every person in one evaluated fold, found some in several")
    order = np.argsort(np.concatenate([p.unit for p in parts]))
    columns = (
        np.concatenate([getattr(p, name) for p in parts])[order]
        for name in ("unit", "person", "truth", "scores")
    )
    return Predictions(parts[0].kind, parts[0].names, *columns)
