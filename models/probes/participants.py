"""Probes: what a frozen encoder's features say about a participant, with an interval.

In: features of volumes `[n, F]`, a label and a participant id per volume, in folds that share no participant.
Out: one prediction per participant, balanced accuracy, macro AUROC or R2, bootstrap and paired bootstrap
intervals, and the sentence that follows from them.

The protocol is the same for every row of every table. Features are standardised on the training fold. A probe
is fitted on volumes: every participant weighs the same however many volumes it has, and every class the same
however many participants it has. A participant's prediction is the mean of its volumes' class probabilities
(or values), so that eyes, devices and protocols are pooled. C (ridge: 1 / penalty) is chosen per encoder on
validation participants. Intervals resample participants, never volumes; a comparison of two encoders uses
the same draws for both. RankMe: Garrido et al. 2023, on centred features.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, Ridge, RidgeClassifierCV
from sklearn.metrics import balanced_accuracy_score, log_loss, r2_score, roc_auc_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

C_GRID = tuple(10.0**e for e in range(-4, 5))
LIDAR_FLOOR = 1e-4  # of the within-volume covariance, as the paper has it


@dataclass(frozen=True)
class Fold:
    """Volumes of one fold: features [n, F], labels [n] (class numbers; ridge: values), participants [n]."""

    features: np.ndarray
    labels: np.ndarray
    participants: np.ndarray

    def __post_init__(self) -> None:
        n = len(self.labels)
        if not (self.features.ndim == 2 and len(self.features) == n == len(self.participants) and n > 0):
            raise ValueError(
                f"a fold: expected features [n, F] with n labels and n participants, n > 0, found shapes "
                f"{self.features.shape}, {self.labels.shape}, {self.participants.shape}"
            )
        if not np.isfinite(self.features).all():
            raise ValueError("a fold: expected finite features, found NaN or infinity")


@dataclass(frozen=True)
class Prediction:
    """One row per participant, sorted by id: labels [P], scores [P, C] (probabilities; ridge: one value)."""

    participants: np.ndarray
    labels: np.ndarray
    scores: np.ndarray
    chosen_c: float | None = None  # None: the probe has nothing to choose
    val_score: float | None = None  # what chose C: balanced accuracy, or minus the mean squared error (ridge)

    @property
    def classes(self) -> np.ndarray:
        """The most probable class number of every participant [P]."""
        return self.scores.argmax(axis=1)


def pool_tokens(tokens_BNE: torch.Tensor, valid_BN: torch.Tensor) -> torch.Tensor:
    """Mean and standard deviation over valid tokens, [B, 2E] float32; valid_BN are weights in [0, 1].

    Raises ValueError for a volume without a valid token.
    """
    tokens_BNE = tokens_BNE.float()
    weight_BN1 = valid_BN.to(tokens_BNE).unsqueeze(-1)
    total_B1 = weight_BN1.sum(dim=1)
    if not bool((total_B1 > 0).all()):
        empty = torch.nonzero(total_B1.squeeze(1) <= 0).flatten().tolist()
        raise ValueError(f"pooling: expected at least one valid token per volume, found none in {empty}")
    mean_BE = (tokens_BNE * weight_BN1).sum(dim=1) / total_B1
    squares_BNE = (tokens_BNE - mean_BE.unsqueeze(1)).square() * weight_BN1
    return torch.cat([mean_BE, (squares_BNE.sum(dim=1) / total_B1).sqrt()], dim=1)


def rankme(features_NE: torch.Tensor) -> float:
    """Effective rank: exp of the entropy of the centred features' singular value shares; 0 when constant."""
    centred = features_NE.detach().cpu().double()
    centred = centred - centred.mean(dim=0)
    n, width = centred.shape
    gram = centred @ centred.T if n < width else centred.T @ centred  # in float64 as exact as an SVD here
    values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    total = values.sum()
    if total <= 1e-12 * max(1.0, float(features_NE.abs().max())):
        return 0.0
    return _effective_number(values / total)


def lidar(features_NQE: torch.Tensor, within_floor: float = LIDAR_FLOOR) -> float:
    """LDA rank of Q views [N, Q, E] of each of N volumes: effective rank of their means, whitened by the
    spread of views around them; between 1 and N - 1, 0 when all means are equal.

    Thilak et al. 2023 (arXiv:2312.04000): within-class covariance + 1e-4 times the identity. Raises
    ValueError for fewer than two volumes or two views.
    """
    features = features_NQE.detach().cpu().double()
    n, q, width = features.shape
    if n < 2 or q < 2:
        raise ValueError(
            f"LiDAR: expected two volumes or more and two views or more of each, found {n} and {q}"
        )
    means_NE = features.mean(dim=1)
    residual = (features - means_NE[:, None]).flatten(0, 1)
    within_EE = residual.T @ residual / (n * q) + within_floor * torch.eye(width, dtype=torch.float64)
    apart_NE = means_NE - means_NE.mean(dim=0)
    # W^-1/2 B W^-1/2 and the smaller Y W^-1 Y^T / N have the same eigenvalues above 0
    whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(within_EE), apart_NE.T, upper=False)
    values = torch.linalg.eigvalsh(whitened.T @ whitened / n).clamp(min=0)
    if values.sum() <= 1e-20 * max(1.0, float(features.square().max())):
        return 0.0
    return _effective_number(values / values.sum())


def _effective_number(share: torch.Tensor) -> float:
    return float(torch.exp(-torch.xlogy(share, share).sum()))


def knn_probe(train: Fold, test: Fold, k: int = 20) -> Prediction:
    """Vote shares of the k nearest training volumes by cosine (k at most their number)."""
    scale, num_classes = _standardise(train), _num_classes(train)
    model = KNeighborsClassifier(min(k, len(train.labels)), metric="cosine").fit(
        scale(train.features), train.labels
    )
    return _pooled(test, _all_classes(model.predict_proba(scale(test.features)), model.classes_, num_classes))


def logistic_probe(train: Fold, val: Fold, test: Fold, c_grid: Sequence[float] = C_GRID) -> Prediction:
    """L2 logistic regression; C with the best balanced accuracy on val (ties: lower log loss, smaller C).

    Raises ValueError when train holds one class only or a fold shares participants with train.
    """
    _require_disjoint(train, val, test)
    if len(np.unique(train.labels)) < 2:
        raise ValueError(f"training fold: expected two classes or more, found {np.unique(train.labels)}")
    scale, num_classes = _standardise(train), _num_classes(train)
    train_x, val_x, weight = scale(train.features), scale(val.features), _class_weights(train)

    def predict(model: LogisticRegression, fold: Fold, x: np.ndarray) -> Prediction:
        return _pooled(fold, _all_classes(model.predict_proba(x), model.classes_, num_classes))

    best: tuple[tuple[float, float, float], LogisticRegression] | None = None
    for c in sorted(c_grid):
        model = LogisticRegression(C=c, max_iter=1000)
        with warnings.catch_warnings():
            # separable features, large C: stopping early is one more regularisation, and val decides
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(train_x, train.labels, sample_weight=weight)
        seen = predict(model, val, val_x)
        loss = float(log_loss(seen.labels, seen.scores, labels=np.arange(num_classes)))
        rank = (balanced_accuracy(seen), -loss, -c)
        if best is None or rank > best[0]:
            best = rank, model
    assert best is not None
    (val_score, _, minus_c), model = best
    return replace(predict(model, test, scale(test.features)), chosen_c=-minus_c, val_score=val_score)


def ridge_probe(train: Fold, val: Fold, test: Fold, c_grid: Sequence[float] = C_GRID) -> Prediction:
    """Ridge regression of a value per participant; penalty 1 / C with the lowest squared error on val."""
    _require_disjoint(train, val, test)
    scale = _standardise(train)
    train_x, val_x, weight = scale(train.features), scale(val.features), _participant_weights(train)
    best: tuple[tuple[float, float], Ridge] | None = None
    for c in sorted(c_grid):
        model = Ridge(alpha=1 / c).fit(train_x, train.labels, sample_weight=weight)
        seen = _pooled(val, model.predict(val_x)[:, None])
        rank = (-float(np.mean((seen.scores[:, 0] - seen.labels) ** 2)), -c)
        if best is None or rank > best[0]:
            best = rank, model
    assert best is not None
    (val_score, minus_c), model = best
    result = _pooled(test, model.predict(scale(test.features))[:, None])
    return replace(result, chosen_c=-minus_c, val_score=val_score)


def ridge_classifier_probe(train: Fold, test: Fold, c_grid: Sequence[float] = C_GRID) -> Prediction:
    """Ridge regression on +-1 per class, needing no validation fold: cheap enough for every validation.

    The penalty 1 / C has the lowest squared error of leave-one-volume-out on train; scores are margins.
    Raises ValueError when train holds one class only or the folds share participants.
    """
    _require_disjoint(train, test, test)
    if len(np.unique(train.labels)) < 2:
        raise ValueError(f"training fold: expected two classes or more, found {np.unique(train.labels)}")
    scale, num_classes = _standardise(train), _num_classes(train)
    model = RidgeClassifierCV(alphas=[1 / c for c in c_grid])
    model.fit(scale(train.features), train.labels, sample_weight=_class_weights(train))
    margins = model.decision_function(scale(test.features))
    if margins.ndim == 1:  # two classes have one margin
        margins = np.stack([-margins, margins], axis=1)
    scores = np.full((len(margins), num_classes), -np.inf)  # a class that train lacks is never predicted
    scores[:, model.classes_.astype(int)] = margins
    return replace(_pooled(test, scores), chosen_c=1 / float(model.alpha_))


def balanced_accuracy(prediction: Prediction) -> float:
    """Mean recall over the classes that occur among the participants."""
    with warnings.catch_warnings():
        # a small fold may lack a class that is predicted; its recall does not exist, so the mean omits it
        warnings.filterwarnings("ignore", message="y_pred contains classes not in y_true")
        return float(balanced_accuracy_score(prediction.labels, prediction.classes))


def macro_auroc(prediction: Prediction) -> float | None:
    """Mean one-against-rest area under the ROC curve; None when a class has no participant."""
    num_classes = prediction.scores.shape[1]
    if set(prediction.labels.tolist()) != set(range(num_classes)):
        return None
    scores = prediction.scores[:, 1] if num_classes == 2 else prediction.scores
    return float(roc_auc_score(prediction.labels, scores, multi_class="ovr", average="macro"))


def r2(prediction: Prediction) -> float:
    """Explained variance over participants of a ridge prediction; needs two participants or more."""
    return float(r2_score(prediction.labels, prediction.scores[:, 0]))


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


def _standardise(train: Fold) -> Callable[[np.ndarray], np.ndarray]:
    scaler = StandardScaler().fit(train.features.astype(np.float64))
    return lambda features: scaler.transform(features.astype(np.float64))


def _num_classes(train: Fold) -> int:
    return int(train.labels.max()) + 1


def _participant_weights(fold: Fold) -> np.ndarray:
    """One weight per volume, mean 1; the volumes of every participant add up to the same."""
    _, number, count = np.unique(fold.participants, return_inverse=True, return_counts=True)
    weight = 1 / count[number]
    return weight / weight.mean()


def _class_weights(fold: Fold) -> np.ndarray:
    """Participant weights, then scaled so that every class adds up to the same; mean 1."""
    weight = _participant_weights(fold)
    _, number = np.unique(fold.labels, return_inverse=True)
    weight = weight / np.bincount(number, weights=weight)[number]
    return weight / weight.mean()


def _all_classes(probabilities: np.ndarray, classes: np.ndarray, num_classes: int) -> np.ndarray:
    """Columns for every class number; one that the training fold lacks has probability 0."""
    scores = np.zeros((len(probabilities), num_classes))
    scores[:, classes.astype(int)] = probabilities
    return scores


def _pooled(fold: Fold, scores: np.ndarray) -> Prediction:
    """Mean score over the volumes of each participant; a participant has one label."""
    ids, first, number = np.unique(fold.participants, return_index=True, return_inverse=True)
    labels = fold.labels[first]
    mixed = ids[np.unique(number[fold.labels != labels[number]])]
    if len(mixed):
        raise ValueError(f"expected one label per participant, found several for {mixed[:3].tolist()}")
    sums = np.zeros((len(ids), scores.shape[1]))
    np.add.at(sums, number, scores)
    return Prediction(ids, labels, sums / np.bincount(number)[:, None])


def _require_disjoint(train: Fold, val: Fold, test: Fold) -> None:
    """No participant is on both sides of a probe; validation and evaluated may be the same, never train."""
    for name, fold in (("validation", val), ("evaluated", test)):
        shared = np.intersect1d(train.participants, fold.participants)
        if len(shared):
            raise ValueError(
                f"expected no participant in both the training and the {name} fold, found {len(shared)}: "
                f"{shared[:3].tolist()}"
            )
