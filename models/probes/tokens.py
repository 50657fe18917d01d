"""Dense probes: what a frozen encoder's token features say about the place that each token covers.

In: rows (tokens or volumes) with features `[n, F]`, several values to predict `[n, L]` and a participant, in
folds that share no participant. Out: ridge predictions and R2 averaged over the values, for a participant
bootstrap.

The protocol is that of models.probes.participants: features are standardised on the training fold, every
participant has the same weight, C (1 / penalty) is chosen per encoder on validation participants. A token's
features should include its place (`position_columns`), so that knowing where a token lies scores nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.preprocessing import StandardScaler

from models.probes.participants import C_GRID, mean_by_participant, participant_weights, require_disjoint

CONSTANT = 1e-9  # a value whose variance is below this share of its mean square cannot be explained


@dataclass(frozen=True)
class Rows:
    """One fold: features [n, F], targets [n, L], participants [n]."""

    features: np.ndarray
    targets: np.ndarray
    participants: np.ndarray

    def __post_init__(self) -> None:
        n = len(self.participants)
        if not (
            self.features.ndim == self.targets.ndim == 2 and len(self.features) == len(self.targets) == n
        ):
            raise ValueError(
                f"rows: expected features [n, F] and targets [n, L] with n participants, found "
                f"{self.features.shape}, {self.targets.shape}, {self.participants.shape}"
            )
        if n == 0 or not (np.isfinite(self.features).all() and np.isfinite(self.targets).all()):
            raise ValueError(f"rows: expected finite features and targets of one row or more, found {n} rows")


@dataclass(frozen=True)
class Errors:
    """Per participant, sorted by id [P]: mean over its rows of y, y squared and the squared error, [P, L]."""

    participants: np.ndarray
    first: np.ndarray
    second: np.ndarray
    error: np.ndarray


@dataclass(frozen=True)
class DensePrediction:
    """Predictions [n, L] of the evaluated rows, their errors by participant, and how C was chosen."""

    predicted: np.ndarray
    errors: Errors
    chosen_c: float | None  # None: a readout without one (models.probes.hidden)
    val_score: float  # R2 on validation participants


def position_columns(token_ids: np.ndarray, grid: tuple[int, int, int]) -> np.ndarray:
    """(d, h, w) of raster token ids [n], centres in -1..1 of the grid, and their squares: float32 [n, 6]."""
    index = np.stack(np.unravel_index(token_ids, grid), axis=1)
    place = (2 * index + 1) / np.array(grid) - 1
    return np.concatenate([place, place**2], axis=1).astype(np.float32)


def less_protocol_mean(values: np.ndarray, protocol: np.ndarray, is_training: np.ndarray) -> np.ndarray:
    """values [n, L] less their mean over the protocol's training volumes (over all, where it has none)."""
    result = np.empty(values.shape, np.float64)
    for name in np.unique(protocol):
        is_name = protocol == name
        known = is_name & is_training
        result[is_name] = values[is_name] - values[known if known.any() else is_training].mean(axis=0)
    return result


def ridge_rows(train: Rows, val: Rows, test: Rows, c_grid: Sequence[float] = C_GRID) -> DensePrediction:
    """Ridge regression of all values at once; the C with the highest R2 on val (ties: the smaller).

    Raises ValueError when the training fold shares a participant with another.
    """
    require_disjoint(train.participants, val.participants, test.participants)
    scaler = StandardScaler().fit(train.features.astype(np.float64))
    train_x, val_x, test_x = (scaler.transform(f.features.astype(np.float64)) for f in (train, val, test))
    weight_n1 = participant_weights(train.participants)[:, None]
    centre_x = (weight_n1 * train_x).sum(0) / weight_n1.sum()
    centre_y = (weight_n1 * train.targets).sum(0) / weight_n1.sum()
    centred = train_x - centre_x
    root_n1 = np.sqrt(weight_n1)
    rows_x, rows_y = root_n1 * centred, root_n1 * (train.targets - centre_y)
    # one decomposition serves every C: of features, or of rows where they are fewer
    if is_dual := rows_x.shape[0] < rows_x.shape[1]:
        values, vectors = np.linalg.eigh(rows_x @ rows_x.T)
        moment = vectors.T @ rows_y
    else:
        values, vectors = np.linalg.eigh(rows_x.T @ rows_x)
        moment = vectors.T @ (rows_x.T @ rows_y)

    def predict(c: float, x: np.ndarray) -> np.ndarray:
        solved = vectors @ (moment / (values.clip(min=0) + 1 / c)[:, None])
        return (x - centre_x) @ (rows_x.T @ solved if is_dual else solved) + centre_y

    best: tuple[float, float] | None = None
    for c in sorted(c_grid):
        score = mean_r2(errors_by_participant(val, predict(c, val_x)))
        if best is None or score > best[0]:
            best = score, c
    assert best is not None
    predicted = predict(best[1], test_x)
    return DensePrediction(predicted, errors_by_participant(test, predicted), best[1], best[0])


def errors_by_participant(rows: Rows, predicted: np.ndarray) -> Errors:
    """Means over the rows of every participant."""
    y, of = rows.targets.astype(np.float64), rows.participants
    squared_error = (y - predicted) ** 2
    means = (mean_by_participant(of, values) for values in (y, y**2, squared_error))
    return Errors(np.unique(of), *means)


def join_errors(parts: Sequence[Errors]) -> Errors:
    """The errors of folds that share no participant, sorted by id; raises ValueError when they share one."""
    ids = np.concatenate([p.participants for p in parts])
    if len(np.unique(ids)) != len(ids):
        raise ValueError("expected every participant in one evaluated fold, found some in several")
    order = np.argsort(ids)
    first, second, error = (
        np.concatenate([getattr(p, name) for p in parts])[order] for name in ("first", "second", "error")
    )
    return Errors(ids[order], first, second, error)


def mean_r2(errors: Errors) -> float:
    """R2 averaged over the values; participants weigh the same."""
    return float(mean_r2_draws(errors, np.ones((1, len(errors.participants))))[0])


def r2_parts(errors: Errors) -> np.ndarray:
    """What each participant adds to mean_r2 less 1 [P], which is their sum."""
    variance_L = errors.second.mean(axis=0) - errors.first.mean(axis=0) ** 2
    varies_L = variance_L > CONSTANT * np.maximum(errors.second.mean(axis=0), CONSTANT)
    return -(errors.error[:, varies_L] / variance_L[varies_L]).mean(axis=1) / len(errors.participants)


def mean_r2_draws(errors: Errors, draws_SP: np.ndarray) -> np.ndarray:
    """R2 averaged over the values, of every resample of participants: [S].

    A value that does not vary in a resample is left out of its mean; ValueError where none varies.
    """
    count_S1 = draws_SP.sum(axis=1, keepdims=True)
    first_SL, second_SL, error_SL = (
        draws_SP @ part / count_S1 for part in (errors.first, errors.second, errors.error)
    )
    variance_SL = second_SL - first_SL**2
    varies_SL = variance_SL > CONSTANT * np.maximum(second_SL, CONSTANT)
    if not varies_SL.any(axis=1).all():
        raise ValueError("R2: expected a value that varies over the participants, found constants only")
    r2_SL = 1 - np.divide(error_SL, variance_SL, out=np.ones_like(error_SL), where=varies_SL)
    return (r2_SL * varies_SL).sum(axis=1) / varies_SL.sum(axis=1)
