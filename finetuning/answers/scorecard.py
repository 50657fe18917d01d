"""One answer in a run's folder, and what it says of one head or probe: metrics with intervals, as plain
values.

In: all that an answer depends on, as a fingerprint; `Scored`. Out: what the folder holds, if it answers the
same question: then nobody looks at the evaluated participants again. Else STEM.md with its tables and
STEM.json with its numbers, the JSON last, so that where it is the other files of the answer are. An estimate
in it is {value, ci95}; a metric that does not exist is None, never 0. Intervals: 95 %, bootstrap over people
(finetuning.cohort.metrics.bootstrap_counts).

Subgroups are the same predictions by device, laterality, site and age: whom a head or probe serves worse. For
every group its people and the metrics of their units, pooled over the volumes of only the group. A group of
fewer than MIN_PEOPLE people, or of one class, has no metrics: None. `few` says why the intervals of another
are too narrow.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from finetuning.cohort.cohort import EVALUATED, VAL
from finetuning.cohort.metrics import (
    PRIMARY,
    Measures,
    Predictions,
    Scored,
    at_threshold,
    bootstrap_counts,
    decided,
    interval,
    measure,
    observed,
    reliability,
    youden_threshold,
)
from finetuning.power import NUM_ERRORS, pilot_disagreement, smallest_difference
from models.probes.intervals import confusion_draws, doubt, recall_parts, too_few
from utils import storage
from utils.config.load import flatten, keys_of_features
from utils.config.schema import Config

Content = dict[str, Any]  # of STEM.json
Estimate = dict[str, Any]  # {value, ci95}
log = logging.getLogger(__name__)
COLUMNS = {"device": "device", "laterality": "laterality", "site": "clinical_site", "age": "age"}
AGE_EDGES = (50, 60, 70, 80)  # years at which the next band begins
BANDS = ("under 50", "50-59", "60-69", "70-79", "80 and over")
MIN_PEOPLE = 10
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Answer:
    """Where an answer lies, and to which question."""

    folder: str
    stem: str  # of its files
    fingerprint: str  # of all that it depends on

    def known(self) -> Content | None:
        """What the folder holds, where it answers the same question."""
        url = storage.join(self.folder, f"{self.stem}.json")
        if not storage.exists(url):
            return None
        content = json.loads(storage.read_text(url))
        if content.get("fingerprint") != self.fingerprint:
            return None
        log.info("%s already answers this question: reused", url)
        return content

    def write(self, content: Content, page: str | None = None) -> Content:
        """Write both files, the page first; returns the content with its fingerprint."""
        content = content | {"fingerprint": self.fingerprint}
        if page is not None:
            storage.write_text(storage.join(self.folder, f"{self.stem}.md"), page)
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        storage.write_text(storage.join(self.folder, f"{self.stem}.json"), text)
        return content


def protocol_of(cfg: Config) -> dict[str, Any]:
    """The keys that decide how something is judged."""
    sections, keys = (
        ("task.", "probe.", "eval."),
        {*keys_of_features(dict(flatten(cfg))), "seed", "train.use_bf16"},
    )
    return {key: value for key, value in flatten(cfg) if key.startswith(sections) or key in keys}


def estimated(value: float, ci95: Sequence[float] | None) -> Estimate:
    """A number with its interval as plain values; NaN does not exist."""
    if math.isnan(value):
        return {"value": None, "ci95": None}
    return {"value": float(value), "ci95": None if ci95 is None else [float(end) for end in ci95]}


def looks(content: Content) -> list[str]:
    """What every page says of its look at the participants."""
    seen, look = content["overlap"], content["look"]
    lines = [f"**{seen} evaluated participants were seen in training.**"] if seen else []
    return [*lines, *([] if look is None else [f"This is look {look} at these test participants."])]


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
