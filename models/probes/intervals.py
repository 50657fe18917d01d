"""Bootstrap intervals over participants, paired differences, and the sentence that an interval allows.

In: predictions of models.probes.participants. Intervals resample participants, never volumes; a comparison of
two encoders uses the same draws for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from models.probes.participants import Prediction, balanced_accuracy


def participant_draws(num_participants: int, samples: int, seed: int) -> np.ndarray:
    """How often each resample of the bootstrap draws each participant, int [samples, P]; rows sum to P."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(num_participants, np.full(num_participants, 1 / num_participants), size=samples)


def balanced_accuracy_draws(prediction: Prediction, draws_SP: np.ndarray) -> np.ndarray:
    """Balanced accuracy [S] of every resample; a class that a resample lacks is left out of its mean."""
    is_class_PC = prediction.labels[:, None] == np.unique(prediction.labels)[None, :]
    hit_P = prediction.labels == prediction.classes
    total_SC = draws_SP @ is_class_PC
    hits_SC = draws_SP @ (is_class_PC & hit_P[:, None])
    recall_SC = np.divide(hits_SC, total_SC, out=np.zeros(total_SC.shape), where=total_SC > 0)
    return recall_SC.sum(axis=1) / (total_SC > 0).sum(axis=1)


def interval95(values: np.ndarray) -> tuple[float, float]:
    """The central 95 % of bootstrap values (percentile interval)."""
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


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


def verdict(mean: float, ci95: Sequence[float]) -> str:
    """The sentence that a paired interval of pre-trained minus random initialisation allows, either way.

    Raises ValueError for an interval that is not ordered or not finite.
    """
    low, high = ci95
    if not (math.isfinite(mean) and math.isfinite(low) and math.isfinite(high) and low <= high):
        raise ValueError(
            f"verdict: expected a finite difference and an ordered interval, found {mean}, {ci95}"
        )
    numbers = (
        f"paired difference of balanced accuracy {_signed(mean)}, "
        f"95 % interval {_signed(low)} to {_signed(high)}"
    )
    if low > 0:
        return f"Pre-training beats random initialisation: {numbers}."
    if high < 0:
        return f"Pre-training is worse than random initialisation: {numbers}."
    return f"No difference shown: the interval includes zero ({numbers})."


def _signed(value: float) -> str:
    return f"{value:+.3f}" if value == 0 or abs(value) >= 5e-4 else f"{value:+.1e}"
