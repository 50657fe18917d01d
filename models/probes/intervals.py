"""Bootstrap intervals over participants, paired differences, and the sentence that an interval allows.

In: predictions of models.probes.participants. Intervals resample participants, never volumes; a comparison of
two encoders uses the same draws for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import t as student

from models.probes.participants import Prediction, balanced_accuracy

BOOTSTRAP_SAMPLES = 2000  # resamples of an interval in the answers of finetuning


def participant_draws(
    num_participants: int, samples: int, seed: int, strata_P: np.ndarray | None = None
) -> np.ndarray:
    """How often each resample of the bootstrap draws each participant, int [samples, P]; rows sum to P.

    `strata_P` keeps the number of participants of every stratum (a class, say) in every resample.
    """
    rng = np.random.default_rng(seed)
    strata_P = np.zeros(num_participants, int) if strata_P is None else strata_P
    if len(strata_P) != num_participants:
        raise ValueError(f"draws: expected a stratum for {num_participants} people, found {len(strata_P)}")
    draws_SP = np.zeros((samples, num_participants), np.int64)
    for stratum in np.unique(strata_P):
        members = np.flatnonzero(strata_P == stratum)
        share = np.full(len(members), 1 / len(members))
        draws_SP[:, members] = rng.multinomial(len(members), share, size=samples)
    return draws_SP


def confusion_draws(
    labels_U: np.ndarray, classes_U: np.ndarray, num_classes: int, draws_SU: np.ndarray
) -> np.ndarray:
    """How many units of each class (second axis) were given each class (third): float64 [S, C, C]."""
    cell_U = labels_U.astype(int) * num_classes + classes_U.astype(int)
    in_cell_UK = cell_U[:, None] == np.arange(num_classes**2)
    counts_SK = draws_SU.astype(np.float64) @ in_cell_UK.astype(np.float64)
    return counts_SK.reshape(-1, num_classes, num_classes)


def mean_recall(confusion_SCC: np.ndarray) -> np.ndarray:
    """Balanced accuracy [S]; a class that a resample lacks is left out of its mean."""
    total_SC = confusion_SCC.sum(axis=2)
    hits_SC = np.diagonal(confusion_SCC, axis1=1, axis2=2)
    recall_SC = np.divide(hits_SC, total_SC, out=np.zeros(total_SC.shape), where=total_SC > 0)
    return recall_SC.sum(axis=1) / (total_SC > 0).sum(axis=1)


def balanced_accuracy_draws(prediction: Prediction, draws_SP: np.ndarray) -> np.ndarray:
    """Balanced accuracy [S] of every resample; a class that a resample lacks is left out of its mean."""
    num_classes = prediction.scores.shape[1]
    return mean_recall(confusion_draws(prediction.labels, prediction.classes, num_classes, draws_SP))


def interval95(values: np.ndarray) -> tuple[float, float]:
    """The central 95 % of bootstrap values (percentile interval)."""
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def seeds_and_people(score_N: np.ndarray, draws_NS: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of a mean over few seeds: Student's t for the seeds, the variance over people added
    (degrees of freedom by Satterthwaite). score_N: each seed's score, or paired difference; draws_NS: the
    same of every resample of people. One seed has no variance that is known, and adds none.
    """
    count, centre = len(score_N), float(score_N.mean())
    people = float(draws_NS.mean(axis=0).var(ddof=1))
    seeds = float(score_N.var(ddof=1)) / count if count > 1 else 0.0
    freedom = (count - 1) * ((people + seeds) / seeds) ** 2 if seeds > 0 else math.inf
    half = float(student.ppf(0.975, freedom)) * math.sqrt(people + seeds)
    return centre - half, centre + half


def paired_difference(
    first: Prediction, second: Prediction, draws_SP: np.ndarray
) -> tuple[float, tuple[float, float]]:
    """Observed difference first - second of balanced accuracy, and its interval under shared draws.

    Raises ValueError unless both predict the same participants with the same labels.
    """
    same = np.array_equal(first.participants, second.participants)
    if not (same and np.array_equal(first.labels, second.labels)):
        raise ValueError("paired difference: expected the same participants and labels in both predictions")
    draws = balanced_accuracy_draws(first, draws_SP) - balanced_accuracy_draws(second, draws_SP)
    return balanced_accuracy(first) - balanced_accuracy(second), interval95(draws)


def verdict(
    mean: float,
    ci95: Sequence[float],
    first: str = "Pre-training",
    second: str = "random initialisation",
    metric: str = "balanced accuracy",
) -> str:
    """The sentence that a paired interval of `first` minus `second` allows, either way.

    Raises ValueError for an interval that is not ordered or not finite.
    """
    low, high = ci95
    if not (math.isfinite(mean) and math.isfinite(low) and math.isfinite(high) and low <= high):
        raise ValueError(
            f"verdict: expected a finite difference and an ordered interval, found {mean}, {ci95}"
        )
    numbers = (
        f"paired difference of {metric} {_signed(mean)}, 95 % interval {_signed(low)} to {_signed(high)}"
    )
    if low > 0:
        return f"{first} beats {second}: {numbers}."
    if high < 0:
        return f"{first} is worse than {second}: {numbers}."
    return f"No difference shown: the interval includes zero ({numbers})."


def _signed(value: float) -> str:
    return f"{value:+.3f}" if value == 0 or abs(value) >= 5e-4 else f"{value:+.1e}"
