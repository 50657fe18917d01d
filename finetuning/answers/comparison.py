"""Rows against each other: mean over seeds, its interval, paired differences and Holm's correction.

In: predictions of rows, a `Predictions` a seed, for the same units. Out: estimates and comparisons. The
primary metric of a task's kind is finetuning.cohort.metrics.PRIMARY; all rows share the resamples of
participants. p is that of the same bootstrap: twice the smaller share of resamples on one side of zero; below
models.probes.intervals.EXACT_BELOW people that of sign flips, and of a difference without variance there is
none. Holm, S. (1979): A simple sequentially rejective multiple test procedure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from finetuning.answers.scorecard import Estimate, could_have_shown, estimated, gains, people_of_classes
from finetuning.cohort.metrics import (
    PRIMARY,
    Predictions,
    bootstrap_counts,
    decided,
    interval,
    measure,
    observed,
)
from models.probes.intervals import ALPHA, confusion_draws, doubt, mean_recall, sign_flip_p

RESAMPLES_PER_PAIR = 100  # at least, or Holm's smallest possible p could never be below .05


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


def estimate(seeds: Sequence[Predictions], samples: int, seed: int) -> Estimate:
    """The primary metric, mean over seeds, with the interval of the mean under shared resamples."""
    value = float(np.mean([observed(p).overall[PRIMARY[p.kind]][0] for p in seeds]))
    counts = bootstrap_counts(seeds[0], samples, seed)
    return estimated(value, interval(mean_draws(seeds, counts)))


def mean_draws(seeds: Sequence[Predictions], counts_SU: np.ndarray) -> np.ndarray:
    """The primary metric of every resample, mean over seeds [S]."""
    return np.mean([_primary_draws(p, counts_SU) for p in seeds], axis=0)


def compare(
    columns: Mapping[str, Mapping[str, Sequence[Predictions]]],
    samples: int,
    seed: int,
    free: Collection[str] = (),
) -> list[Comparison]:
    """Every pair of rows in every column {column: {row: predictions a seed}}, corrected over all of them; but
    none of two rows without an encoder, `free`.

    Raises ValueError where rows predict different units.
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
                counts = bootstrap_counts(first, samples, seed)
            draws[column, row] = mean_draws(seeds, counts)
            values[column, row] = float(np.mean([observed(p).overall[PRIMARY[p.kind]][0] for p in seeds]))
    raw = []
    for column, one, other in pairs:
        draws_S = draws[column, one] - draws[column, other]
        ci95 = interval(draws_S)
        assert ci95 is not None
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


def _primary_draws(predictions: Predictions, counts_SU: np.ndarray) -> np.ndarray:
    """As finetuning.cohort.metrics.measure, without the metrics that nobody asks for here."""
    if PRIMARY[predictions.kind] != "balanced_accuracy":
        return measure(predictions, counts_SU).overall[PRIMARY[predictions.kind]]
    classes_U = decided(predictions.scores)
    return mean_recall(confusion_draws(predictions.truth[:, 0], classes_U, len(predictions.names), counts_SU))
