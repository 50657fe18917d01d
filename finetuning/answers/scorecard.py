"""What evaluation.json says of one head or probe: its metrics with intervals, as plain values.

In: `Scored`. Out: dictionaries for JSON. A metric that does not exist is None, never 0. Intervals: 95 %,
bootstrap over people (finetuning.cohort.metrics.bootstrap_counts).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from finetuning.answers.answer import estimated
from finetuning.cohort.cohort import VAL
from finetuning.cohort.metrics import (
    PRIMARY,
    Measures,
    at_threshold,
    bootstrap_counts,
    decided,
    interval,
    measure,
    observed,
    reliability,
    youden_threshold,
)
from finetuning.cohort.predictions import Predictions, Scored
from finetuning.power import NUM_ERRORS, pilot_disagreement, smallest_difference
from models.probes.intervals import confusion_draws, doubt, recall_parts


def metrics_of(values: Measures, draws: Measures) -> dict[str, Any]:
    """{metrics: {name: {value, ci95}}, by_class: {name: one of these a class}}."""
    return {
        "metrics": {
            name: estimated(value[0], interval(draws.overall[name])) for name, value in values.overall.items()
        },
        "by_class": {
            name: [
                estimated(value, interval(draws.by_class[name][:, c])) for c, value in enumerate(value_1C[0])
            ]
            for name, value_1C in values.by_class.items()
        },
    }


def scorecard(scored: Scored, samples: int, seed: int) -> dict[str, Any]:
    """Metrics, confusion matrix, reliability points and, of two classes, the decision at a threshold."""
    predictions = scored.evaluated()
    counts = bootstrap_counts(predictions, samples, seed)
    result = metrics_of(observed(predictions), measure(predictions, counts))
    if predictions.kind == "regression":
        return result
    result["reliability"] = {name: values.tolist() for name, values in reliability(predictions).items()}
    if predictions.kind == "multilabel":
        return result
    num_classes = len(predictions.names)
    once = np.ones((1, len(predictions.unit)))
    confusion_SCC = confusion_draws(predictions.truth[:, 0], decided(predictions.scores), num_classes, once)
    result["confusion"] = confusion_SCC[0].astype(int).tolist()
    if num_classes == 2:
        result["threshold"] = _threshold(scored, predictions, counts)
    return result


def difference(
    first: Predictions, second: Predictions, samples: int, seed: int
) -> tuple[float, tuple[float, float], float, str]:
    """Observed first - second of the kind's primary metric, its interval under shared resamples, the smallest
    difference that these units could have shown with 80 % power, and the doubt of models.probes.intervals.

    Raises ValueError unless both predict the same units with the same truth.
    """
    if not (np.array_equal(first.unit, second.unit) and np.array_equal(first.truth, second.truth)):
        raise ValueError("difference: expected the same units and truth in both predictions")
    name = PRIMARY[first.kind]
    counts = bootstrap_counts(first, samples, seed)
    draws_S = measure(first, counts).overall[name] - measure(second, counts).overall[name]
    value = float(observed(first).overall[name][0] - observed(second).overall[name][0])
    ci95 = interval(draws_S)
    if ci95 is None or math.isnan(value):
        raise ValueError(f"difference: expected {name} to exist, found none: a class has no unit")
    unclear = doubt(ci95, people_of_classes(first), gains([first], [second]))
    return value, ci95, could_have_shown([first], [second], draws_S), unclear


def people_of_classes(predictions: Predictions) -> list[int]:
    """How many people have a unit of each class, or of each label a yes and a no; of a value all people."""
    person, truth = predictions.person, predictions.truth
    if predictions.kind == "regression":
        return [len(np.unique(person))]
    if predictions.kind == "multilabel":
        return [len(np.unique(person[column == value])) for column in truth.T for value in (0, 1)]
    return [len(np.unique(person[truth[:, 0] == c])) for c in range(len(predictions.names))]


def gains(first: Sequence[Predictions], second: Sequence[Predictions]) -> np.ndarray | None:
    """What each person adds to first - second of the primary metric, of means over seeds [P]; None of macro
    AUROC, which is no sum over people.
    """
    one = first[0]
    if one.kind == "multilabel":
        return None
    truth_U, spread = one.truth[:, 0], np.sum((one.truth - one.truth.mean()) ** 2)

    def parts(p: Predictions) -> np.ndarray:
        if p.kind == "regression":
            return -((p.scores[:, 0] - truth_U) ** 2) / spread
        return recall_parts(truth_U, decided(p.scores))

    gains_U = np.mean([parts(p) for p in first], axis=0) - np.mean([parts(p) for p in second], axis=0)
    return np.bincount(np.unique(one.person, return_inverse=True)[1], gains_U)


def could_have_shown(
    first: Sequence[Predictions], second: Sequence[Predictions], draws_S: np.ndarray
) -> float:
    """The one place that says how small a difference of the primary metric, of two means over seeds, would
    have been shown with 80 % power at the 5 % level; before correction for many pairs.

    Balanced accuracy: finetuning.power, from the units of each class and how often exactly one side is right.
    Others, and several units of a person, which agree: 2.8 standard errors of the resampled difference.
    """
    is_one_each = len(np.unique(first[0].person)) == len(first[0].person)
    if PRIMARY[first[0].kind] != "balanced_accuracy" or not is_one_each:
        return float(NUM_ERRORS * np.nanstd(draws_S))
    labels_U = first[0].truth[:, 0]
    right = [np.mean([decided(p.scores) == labels_U for p in seeds], axis=0) for seeds in (first, second)]
    counts = [int(np.sum(labels_U == c)) for c in np.unique(labels_U)]
    return smallest_difference(counts, pilot_disagreement(labels_U, *right))


def _threshold(scored: Scored, predictions: Predictions, counts: np.ndarray) -> dict[str, Any] | None:
    """Of two classes: each cohort's threshold from its own validation fold; None where one has no choice."""
    thresholds = [youden_threshold(p.truth[:, 0], p.scores[:, 1]) for p in scored.by_cohort(VAL)]
    values = [value for value in thresholds if value is not None]
    if len(values) < len(thresholds):
        return None
    threshold_U = np.array(values)[scored.cohort_of_units()]
    once = np.ones((1, len(predictions.unit)))
    measured = (at_threshold(predictions, threshold_U, n) for n in (once, counts))
    return {
        "positive": predictions.names[1],
        "rule": "highest sensitivity + specificity on validation (Youden)",
        "values": values,
        **metrics_of(*measured),
    }
