"""Bootstrap intervals over participants, paired differences, and the sentence that they allow.

In: predictions of models.probes.participants. Intervals resample participants, never volumes; a comparison of
two encoders uses the same draws for both. `doubt` is the one rule of every table on who claims a difference.
Without one the percentile interval excludes zero in half of all cohorts of 2 people, 26 % of 3, 14 % of 5 and
8 % of 20. Sign flips: Fisher, R. A. (1935): The design of experiments. Where a difference is a mean over few
people, the exact test decides, and `could_show` says what it could have shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import t as student

from models.probes.participants import Prediction

BOOTSTRAP_SAMPLES = 2000  # resamples of an interval in the answers of finetuning
ALPHA = 0.05
# Measured with simulate of tests/finetuning/test_power.py, 1,500 to 2,000 cohorts a size, disagreement .15 to
# .7, both kinds of resamples. Without a difference the interval excludes zero in up to 11 % of cohorts with 5
# people in the smallest class, 8 % with 8, 7.5 % with 12 (one small class beside large ones), 6.6 % with 12.
MIN_PER_CLASS = 12
EXACT_BELOW = 21  # people: below, sign flips must agree with the interval, which alone claims too much
POWER = 0.8  # of the difference that a cohort could have shown


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


def recall_parts(labels_U: np.ndarray, classes_U: np.ndarray) -> np.ndarray:
    """What each unit adds to balanced accuracy [U], which is their sum."""
    _, number_U, count = np.unique(labels_U, return_inverse=True, return_counts=True)
    return (labels_U == classes_U) / (count[number_U] * len(count))


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


def sign_flip_p(gains_P: np.ndarray | None) -> float | None:
    """Exact two-sided p of no difference: the share of all 2^P choices of signs whose sum is as far from 0.

    `gains_P`: what each person adds to a paired difference; None: it is no sum over people. None of
    EXACT_BELOW people or more.
    """
    if gains_P is None or len(gains_P) >= EXACT_BELOW:
        return None
    sums = np.zeros(1)
    for gain in gains_P:
        sums = np.concatenate([sums + gain, sums - gain])
    return float(np.mean(np.abs(sums) >= abs(gains_P.sum()) - 1e-12 * np.abs(gains_P).sum()))


def smallest_p(num_people: int) -> float:
    """The least two-sided p that sign flips of so many people can give: all of one sign."""
    return min(1.0, 2.0 ** (1 - num_people))


def could_show(gains_P: np.ndarray) -> float | None:
    """About the mean of a paired difference that so many people, who differ as these do, show with POWER
    (Student's t); None where sign flips of so few are never below ALPHA.
    """
    count = len(gains_P)
    if (least := smallest_p(min(count, 2 * EXACT_BELOW))) >= ALPHA:
        return None
    level = ALPHA // least * least  # the p of sign flips are multiples of the least
    errors = float(student.ppf(1 - level / 2, count - 1) + student.ppf(POWER, count - 1))
    return errors * float(gains_P.std(ddof=1)) / math.sqrt(count)


def too_few(people: Sequence[int]) -> str:
    """The words where a class (or all, without classes) has too few people for intervals; else "".

    `people`: of each class; of all as the only number, where there are no classes.
    """
    if min(people) >= MIN_PER_CLASS:
        return ""
    where = " in the smallest class" if len(people) > 1 else ""
    return f"{min(people)} participants{where} are too few"


def doubt(ci95: Sequence[float], people: Sequence[int], gains_P: np.ndarray | None = None) -> str:
    """Why an interval that excludes zero shows no difference, in words after "because"; "" where it does.

    `people`: as in too_few; of one number, which has no classes, the exact test decides where there is one.
    `gains_P`: as in sign_flip_p.
    """
    low, high = ci95
    if low <= 0 <= high:
        return ""
    p, flips = sign_flip_p(gains_P), ""
    if p is not None and gains_P is not None:
        flips = f"an exact test by sign flips gives p {p:.3g}"
        if (least := smallest_p(len(gains_P))) >= ALPHA:
            flips += f", and {len(gains_P)} participants can give none below {least:.3g}"
    is_decided = p is not None and len(people) == 1
    if not is_decided and (few := too_few(people)):
        return f"{few}: {MIN_PER_CLASS} are needed" + (f"; {flips}" if flips else "")
    if p is not None and p >= ALPHA:
        return flips
    is_constant = high - low <= 1e-12
    return "every resample gives the same difference, so chance was not measured" if is_constant else ""


def side(ci95: Sequence[float], doubt: str) -> int:
    """1 or -1 where the first or the second of two is shown to be better; 0 where that cannot be said."""
    return 0 if doubt else int(ci95[0] > 0) - int(ci95[1] < 0)


def verdict(
    mean: float,
    ci95: Sequence[float],
    first: str = "Pre-training",
    second: str = "random initialisation",
    metric: str = "balanced accuracy",
    doubt: str = "",
) -> str:
    """The sentence that a paired interval of `first` minus `second` allows, either way; `doubt`: see above.

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
    if doubt:
        return f"{first} against {second}: cannot say, because {doubt} ({numbers})."
    words = {1: "beats", -1: "is worse than"}.get(side(ci95, doubt))
    if words:
        return f"{first} {words} {second}: {numbers}."
    return f"No difference shown: the interval includes zero ({numbers})."


def _signed(value: float) -> str:
    return f"{value:+.3f}" if value == 0 or abs(value) >= 5e-4 else f"{value:+.1e}"
