"""One answer in a run's folder, what it says of one head or probe, and rows against each other.

In: all that an answer depends on, as a fingerprint; `Scored`. Out: what the folder holds, if it answers the
same question: then nobody looks at the evaluated participants again. Else STEM.md with its tables and
STEM.json with its numbers, the JSON last, so that where it is the other files of the answer are. An estimate
in it is {value, ci95}; a metric that does not exist is None, never 0. Intervals: 95 %, bootstrap over people
(finetuning.cohort.metrics.bootstrap_counts).

Subgroups are the same predictions by device, laterality, site and age: whom a head or probe serves worse,
over the volumes of only the group. A group of fewer than MIN_PEOPLE people, or of one class, has no metrics:
None. `few` says why the intervals of another are too narrow.

Comparisons are of rows that predict the same units, a `Predictions` a seed: paired differences of the primary
metric, all under the same resamples of participants. p is that of the same bootstrap: twice the smaller share
of resamples on one side of zero; below models.probes.intervals.EXACT_BELOW people that of sign flips, and of
a difference without variance there is none. Holm, S. (1979): A simple sequentially rejective multiple test
procedure.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from finetuning.cohort import metrics
from finetuning.cohort.cohort import EVALUATED, VAL
from finetuning.power import NUM_ERRORS, pilot_disagreement, smallest_difference
from models.probes.intervals import (
    ALPHA,
    confusion_draws,
    doubt,
    mean_recall,
    recall_parts,
    sign_flip_p,
    too_few,
)
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
RESAMPLES_PER_PAIR = 100  # at least, or Holm's smallest possible p could never be below .05


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
    keys = {*keys_of_features(dict(flatten(cfg))), "seed", "train.use_bf16"}
    return {key: value for key, value in flatten(cfg) if key.startswith(("task.", "eval.")) or key in keys}


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


def metrics_of(values: metrics.Measures, draws: metrics.Measures) -> dict[str, Any]:
    """{metrics: {name: {value, ci95}}, by_class: {name: one of these a class}}."""
    return {
        "metrics": {
            name: estimated(value[0], metrics.interval(draws.overall[name]))
            for name, value in values.overall.items()
        },
        "by_class": {
            name: [
                estimated(value, metrics.interval(draws.by_class[name][:, c]))
                for c, value in enumerate(value_1C[0])
            ]
            for name, value_1C in values.by_class.items()
        },
    }


def scorecard(scored: metrics.Scored, samples: int, seed: int) -> dict[str, Any]:
    """Metrics, confusion matrix, reliability points and, of two classes, the decision at a threshold."""
    predictions = scored.evaluated()
    counts = metrics.bootstrap_counts(predictions, samples, seed)
    result = metrics_of(metrics.observed(predictions), metrics.measure(predictions, counts))
    if predictions.kind == "regression":
        return result
    result["reliability"] = {
        name: values.tolist() for name, values in metrics.reliability(predictions).items()
    }
    if predictions.kind == "multilabel":
        return result
    num_classes = len(predictions.names)
    once = np.ones((1, len(predictions.unit)))
    confusion_SCC = confusion_draws(
        predictions.truth[:, 0], metrics.decided(predictions.scores), num_classes, once
    )
    result["confusion"] = confusion_SCC[0].astype(int).tolist()
    if num_classes == 2:
        result["threshold"] = _threshold(scored, predictions, counts)
    return result


def people_of_classes(predictions: metrics.Predictions) -> list[int]:
    """How many people have a unit of each class, or of each label a yes and a no; of a value all people."""
    person, truth = predictions.person, predictions.truth
    if predictions.kind == "regression":
        return [len(np.unique(person))]
    if predictions.kind == "multilabel":
        return [len(np.unique(person[column == value])) for column in truth.T for value in (0, 1)]
    return [len(np.unique(person[truth[:, 0] == c])) for c in range(len(predictions.names))]


def gains(first: Sequence[metrics.Predictions], second: Sequence[metrics.Predictions]) -> np.ndarray | None:
    """Each person's part of first - second of the primary metric, mean over seeds [P]; not of macro AUROC."""
    one = first[0]
    if one.kind == "multilabel":
        return None
    truth_U, spread = one.truth[:, 0], np.sum((one.truth - one.truth.mean()) ** 2)

    def parts(p: metrics.Predictions) -> np.ndarray:
        if p.kind == "regression":
            return -((p.scores[:, 0] - truth_U) ** 2) / spread
        return recall_parts(truth_U, metrics.decided(p.scores))

    gains_U = np.mean([parts(p) for p in first], axis=0) - np.mean([parts(p) for p in second], axis=0)
    return np.bincount(np.unique(one.person, return_inverse=True)[1], gains_U)


def could_have_shown(
    first: Sequence[metrics.Predictions], second: Sequence[metrics.Predictions], draws_S: np.ndarray
) -> float:
    """The one place that says how small a difference of the primary metric, of two means over seeds, would
    have been shown with 80 % power at the 5 % level; before correction for many pairs.

    Balanced accuracy: finetuning.power, from the units of each class and how often exactly one side is right.
    Others, and several units of a person, which agree: 2.8 standard errors of the resampled difference.
    """
    is_one_each = len(np.unique(first[0].person)) == len(first[0].person)
    if metrics.PRIMARY[first[0].kind] != "balanced_accuracy" or not is_one_each:
        return float(NUM_ERRORS * np.nanstd(draws_S))
    labels_U = first[0].truth[:, 0]
    right = [
        np.mean([metrics.decided(p.scores) == labels_U for p in seeds], axis=0) for seeds in (first, second)
    ]
    counts = [int(np.sum(labels_U == c)) for c in np.unique(labels_U)]
    return smallest_difference(counts, pilot_disagreement(labels_U, *right))


def _threshold(
    scored: metrics.Scored, predictions: metrics.Predictions, counts: np.ndarray
) -> dict[str, Any] | None:
    """Of two classes: each cohort's threshold from its own validation fold; None where one has no choice."""
    thresholds = [metrics.youden_threshold(p.truth[:, 0], p.scores[:, 1]) for p in scored.by_cohort(VAL)]
    values = [value for value in thresholds if value is not None]
    if len(values) < len(thresholds):
        return None
    threshold_U = np.array(values)[scored.cohort_of_units()]
    once = np.ones((1, len(predictions.unit)))
    measured = (metrics.at_threshold(predictions, threshold_U, n) for n in (once, counts))
    return {
        "positive": predictions.names[1],
        "rule": "highest sensitivity + specificity on validation (Youden)",
        "values": values,
        **metrics_of(*measured),
    }


def subgroups(
    scored: metrics.Scored, index: pd.DataFrame, samples: int, seed: int
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
    scored: metrics.Scored, index: pd.DataFrame, column: str, samples: int, seed: int
) -> list[dict[str, Any]]:
    groups = [group_of_volumes(index, cohort.rows, column) for cohort in scored.cohorts]
    names = {g for of, c in zip(groups, scored.cohorts, strict=True) for g in of[c.fold == EVALUATED]}
    result = []
    # bands from the youngest on, other names by alphabet, at last the unknown
    for name in sorted(names, key=lambda n: (n == UNKNOWN, BANDS.index(n) if n in BANDS else 0, n)):
        p = scored.evaluated(tuple(of == name for of in groups))
        people, own = len(np.unique(p.person)), None
        if people >= MIN_PEOPLE and (p.kind == "multilabel" or len(np.unique(p.truth)) > 1):
            draws = metrics.measure(p, metrics.bootstrap_counts(p, samples, seed))
            own = metrics_of(metrics.observed(p), draws)["metrics"]
        group = {"group": str(name), "n_participants": people, "n_units": len(p.unit)}
        group |= {"few": too_few(people_of_classes(p)), "primary": metrics.PRIMARY[p.kind], "metrics": own}
        result.append(group)
    return result


@dataclass(frozen=True)
class Comparison:
    """First - second of a column; `shown`: Holm's p over all pairs is below .05, and there is no doubt."""

    column: str
    first: str
    second: str
    value: float
    ci95: tuple[float, float]
    p: float | None  # None: no resample differs from another
    p_holm: float
    could_have_shown: float
    doubt: str  # of models.probes.intervals
    is_floor: bool  # p is the least that so many resamples can show

    @property
    def p_texts(self) -> list[str]:
        """p and Holm's p; `<= 0.0120` at the floor, which is no measurement."""
        if self.p is None:
            return ["not computable"] * 2
        return [f"{'<= ' if self.is_floor else ''}{p:.4f}" for p in (self.p, self.p_holm)]

    @property
    def shown(self) -> bool:
        return self.p_holm < ALPHA and not self.doubt


def estimate(seeds: Sequence[metrics.Predictions], samples: int, seed: int) -> Estimate:
    """The primary metric, mean over seeds, with the interval of the mean under shared resamples."""
    value = float(np.mean([metrics.observed(p).overall[metrics.PRIMARY[p.kind]][0] for p in seeds]))
    counts = metrics.bootstrap_counts(seeds[0], samples, seed)
    return estimated(value, metrics.interval(mean_draws(seeds, counts)))


def mean_draws(seeds: Sequence[metrics.Predictions], counts_SU: np.ndarray) -> np.ndarray:
    """The primary metric of every resample, mean over seeds [S]; of balanced accuracy only what it needs."""
    draws, name = [], metrics.PRIMARY[seeds[0].kind]
    for p in seeds:
        if name == "balanced_accuracy":
            given_U = metrics.decided(p.scores)
            draws.append(mean_recall(confusion_draws(p.truth[:, 0], given_U, len(p.names), counts_SU)))
        else:
            draws.append(metrics.measure(p, counts_SU).overall[name])
    return np.mean(draws, axis=0)


def compare(
    columns: Mapping[str, Mapping[str, Sequence[metrics.Predictions]]],
    samples: int,
    seed: int,
    free: Collection[str] = (),
) -> list[Comparison]:
    """Every pair of rows in every column {column: {row: predictions a seed}}, corrected over all of them; but
    none of two rows without an encoder, `free`.

    Raises ValueError where rows predict different units, or a class has none.
    """
    pairs = [
        (column, *pair)
        for column, rows in columns.items()
        for pair in combinations(rows, 2)
        if not set(pair) <= set(free)
    ]
    samples = max(samples, RESAMPLES_PER_PAIR * len(pairs))
    draws, values = {}, {}
    counts: np.ndarray | None = None
    for column, rows in columns.items():
        first = next(iter(rows.values()))[0]
        for row, seeds in rows.items():
            for p in seeds:
                if not (np.array_equal(p.unit, first.unit) and np.array_equal(p.truth, first.truth)):
                    raise ValueError(f"{column}: expected the units of all rows to be the same, not so {row}")
            if counts is None:
                counts = metrics.bootstrap_counts(first, samples, seed)
            draws[column, row] = mean_draws(seeds, counts)
            values[column, row] = float(
                np.mean([metrics.observed(p).overall[metrics.PRIMARY[p.kind]][0] for p in seeds])
            )
    raw = []
    for column, one, other in pairs:
        draws_S = draws[column, one] - draws[column, other]
        ci95 = metrics.interval(draws_S)
        if ci95 is None:
            raise ValueError(f"{column}: expected a metric that exists, found none: a class has no unit")
        value = values[column, one] - values[column, other]
        sides = columns[column][one], columns[column][other]
        smallest, gains_P = could_have_shown(*sides, draws_S), gains(*sides)
        unclear = doubt(ci95, people_of_classes(sides[0][0]), gains_P)
        flipped = sign_flip_p(gains_P)  # exact: it has no floor
        chance = bootstrap_p(draws_S) if flipped is None else flipped
        is_floor = flipped is None and not ((draws_S <= 0).any() and (draws_S >= 0).any())
        raw.append((column, one, other, value, ci95, chance, smallest, unclear, is_floor))
    adjusted = holm([1.0 if item[5] is None else item[5] for item in raw])
    return [Comparison(*item[:6], p_holm, *item[6:]) for item, p_holm in zip(raw, adjusted, strict=True)]


def bootstrap_p(draws_S: np.ndarray) -> float | None:
    """Two-sided p of no difference, never 0, from the resamples that have one; None where none varies."""
    known = draws_S[~np.isnan(draws_S)]
    if np.ptp(known) <= 1e-12 and abs(known[0]) > 1e-12:
        return None
    sides = (int(np.sum(known <= 0)), int(np.sum(known >= 0)))
    return min(1.0, 2 * (min(sides) + 1) / (len(known) + 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p of each, in the same order: the k-th smallest times (m - k + 1), never falling."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, number in enumerate(sorted(range(len(p_values)), key=lambda n: p_values[n])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[number]))
        adjusted[number] = highest
    return adjusted
