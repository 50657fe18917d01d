"""Probes of a cohort: for each task kind the one that fits it, by the protocol of models.probes.participants.

In: cohorts (one with the official splits, one a fold with crossfit) and features of volumes. Out: `Scored`
with the C that validation chose. Classes: logistic; a value: ridge; several labels: a logistic probe each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL, Cohort
from finetuning.cohort.predictions import Scored
from models.probes.hidden import fit_hidden_classes, fit_hidden_value
from models.probes.participants import Fitted, Fold, fit_logistic, fit_ridge, require_disjoint
from utils.errors import UserError

Features = Callable[[Cohort], np.ndarray]  # [n, F] in the order of the cohort's rows


@dataclass(frozen=True)
class Probed:
    """What one probe says of every volume, and how it was chosen."""

    scored: Scored
    chosen_c: float | None  # median over cohorts and labels; None: a hidden layer
    val_score: float  # their mean: balanced accuracy, or minus the squared error of a value
    num_features: int


def probe(cohorts: Sequence[Cohort], features: Features, is_hidden: bool = False) -> Probed:
    """Fit on TRAIN, choose C (of a hidden layer the step) on VAL, score all; UserError for one class."""
    scores, fitted, width = [], [], 0
    for cohort in cohorts:
        features_nF = features(cohort)
        width = features_nF.shape[1]
        parts = _fit(cohort, features_nF, is_hidden)
        scores.append(_volume_scores(cohort, parts, features_nF))
        fitted += parts
    return Probed(
        Scored(tuple(cohorts), tuple(scores)),
        None if is_hidden else float(np.median([part.chosen_c for part in fitted])),
        float(np.mean([part.val_score for part in fitted])),
        width,
    )


def of_rows(rows: np.ndarray, values_nF: np.ndarray) -> Features:
    """Features of store rows, ascending, for any cohort of them."""
    return lambda cohort: values_nF[np.searchsorted(rows, cohort.rows)]


def _fit(cohort: Cohort, features_nF: np.ndarray, is_hidden: bool) -> list[Fitted]:
    """One probe, or one a label; weights are of people, and validation pools the units of a prediction."""
    train, val, evaluated = (cohort.fold == fold for fold in (TRAIN, VAL, EVALUATED))
    require_disjoint(cohort.person[train], cohort.person[val], cohort.person[evaluated])
    linear, hidden = (
        (fit_ridge, fit_hidden_value) if cohort.kind == "regression" else (fit_logistic, fit_hidden_classes)
    )
    fit = hidden if is_hidden else linear
    parts = []
    for column in range(cohort.target.shape[1]):
        target = cohort.target[:, column]
        labels = target if cohort.kind == "regression" else target.astype(int)
        if len(np.unique(labels[train])) < 2 and cohort.kind != "regression":
            name = cohort.names[column] if cohort.kind == "multilabel" else "the label"
            raise UserError(f"{name}: expected two classes among the training participants, found one")
        parts.append(
            fit(
                Fold(features_nF[train], labels[train], cohort.person[train]),
                Fold(features_nF[val], labels[val], cohort.unit[val]),
            )
        )
    return parts


def _volume_scores(cohort: Cohort, parts: Sequence[Fitted], features_nF: np.ndarray) -> np.ndarray:
    """Scores of all volumes [n, C]: a column for every class, also for one that the training fold lacks."""
    if cohort.kind == "multilabel":
        return np.stack([part.score(features_nF)[:, 1] for part in parts], axis=1)
    scores = parts[0].score(features_nF)
    lacking = np.zeros((len(scores), cohort.num_outputs - scores.shape[1]))
    return np.concatenate([scores, lacking], axis=1)
