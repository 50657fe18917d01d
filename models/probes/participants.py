"""Probes: what a frozen encoder's features say about a participant.

In: features of volumes `[n, F]`, a label and a participant id per volume, in folds that share no participant.
Out: one prediction per participant; its balanced accuracy.

The protocol is the same for every row of every table. Features are standardised on the training fold. Probes
are fitted on volumes: every participant has the same weight, however many volumes it has, and every class has
the same weight, however many participants it has. The prediction for a participant is the mean over its
volumes of class probabilities (or values), so eyes, devices and protocols are pooled. C (ridge: 1 / penalty)
is chosen per encoder on validation participants.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, Ridge, RidgeClassifierCV
from sklearn.metrics import balanced_accuracy_score, log_loss
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

C_GRID = tuple(10.0**e for e in range(-4, 5))


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
    val_score: float | None = None  # of the chosen C: balanced accuracy, or minus the squared error (ridge)

    @property
    def classes(self) -> np.ndarray:
        """The most probable class number of every participant [P]."""
        return self.scores.argmax(axis=1)


@dataclass(frozen=True)
class Fitted:
    """A probe whose C was chosen on validation participants."""

    score: Callable[[np.ndarray], np.ndarray]  # features [n, F] -> scores of volumes [n, C]
    chosen_c: float | None  # None: a readout without one (models.probes.hidden)
    val_score: float  # as in Prediction


def knn_probe(train: Fold, test: Fold, k: int = 20) -> Prediction:
    """Vote shares of the k nearest training volumes by cosine (k at most their number)."""
    scale, num_classes = _standardise(train), num_classes_of(train)
    model = KNeighborsClassifier(min(k, len(train.labels)), metric="cosine").fit(
        scale(train.features), train.labels
    )
    return pooled_by_person(
        test, all_classes(model.predict_proba(scale(test.features)), model.classes_, num_classes)
    )


def logistic_probe(train: Fold, val: Fold, test: Fold, c_grid: Sequence[float] = C_GRID) -> Prediction:
    """L2 logistic regression; C with the best balanced accuracy on val (ties: lower log loss, smaller C).

    Raises ValueError when train holds one class only or a fold shares participants with train.
    """
    require_disjoint(train.participants, val.participants, test.participants)
    fitted = fit_logistic(train, val, c_grid)
    result = pooled_by_person(test, fitted.score(test.features))
    return replace(result, chosen_c=fitted.chosen_c, val_score=fitted.val_score)


def fit_logistic(train: Fold, val: Fold, c_grid: Sequence[float] = C_GRID) -> Fitted:
    """The probe of logistic_probe; the participants of `val` say whose volumes are pooled there."""
    require_two_classes(train)
    scale, num_classes = _standardise(train), max(num_classes_of(train), num_classes_of(val))
    if len(train.labels) < train.features.shape[1]:
        scale = _in_span(scale, train)
    train_x, weight = scale(train.features), class_weights(train)
    best: tuple[tuple[float, float, float], Callable[[np.ndarray], np.ndarray]] | None = None
    for c in sorted(c_grid):
        model = LogisticRegression(C=c, max_iter=1000)
        with warnings.catch_warnings():
            # separable features with a large C may not converge; val decides among the solutions
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(train_x, train.labels, sample_weight=weight)

        def score(features: np.ndarray, model: LogisticRegression = model) -> np.ndarray:
            return all_classes(model.predict_proba(scale(features)), model.classes_, num_classes)

        on_val = pooled_by_person(val, score(val.features))
        loss = float(log_loss(on_val.labels, on_val.scores, labels=np.arange(num_classes)))
        rank = (balanced_accuracy(on_val), -loss, -c)
        if best is None or rank > best[0]:
            best = rank, score
    assert best is not None
    (val_score, _, minus_c), chosen = best
    return Fitted(chosen, -minus_c, val_score)


def fit_ridge(train: Fold, val: Fold, c_grid: Sequence[float] = C_GRID) -> Fitted:
    """Ridge regression of a value; penalty 1 / C with the lowest squared error over participants of `val`."""
    scale = _standardise(train)
    train_x, weight = scale(train.features), participant_weights(train.participants)
    best: tuple[tuple[float, float], Callable[[np.ndarray], np.ndarray]] | None = None
    for c in sorted(c_grid):
        model = Ridge(alpha=1 / c).fit(train_x, train.labels, sample_weight=weight)

        def score(features: np.ndarray, model: Ridge = model) -> np.ndarray:
            return np.asarray(model.predict(scale(features)))[:, None]

        on_val = pooled_by_person(val, score(val.features))
        rank = (-float(np.mean((on_val.scores[:, 0] - on_val.labels) ** 2)), -c)
        if best is None or rank > best[0]:
            best = rank, score
    assert best is not None
    (val_score, minus_c), chosen = best
    return Fitted(chosen, -minus_c, val_score)


def ridge_classifier_probe(train: Fold, test: Fold, c_grid: Sequence[float] = C_GRID) -> Prediction:
    """Ridge regression on +-1 per class, without a validation fold: cheap enough for every validation.

    The penalty 1 / C has the lowest leave-one-volume-out squared error on train; scores are margins.
    Raises ValueError when train holds one class only or the folds share participants.
    """
    require_two_classes(train)
    require_disjoint(train.participants, test.participants, test.participants)
    scale, num_classes = _standardise(train), num_classes_of(train)
    model = RidgeClassifierCV(alphas=[1 / c for c in c_grid])
    model.fit(scale(train.features), train.labels, sample_weight=class_weights(train))
    margins = model.decision_function(scale(test.features))
    if margins.ndim == 1:  # two classes have one margin
        margins = np.stack([-margins, margins], axis=1)
    scores = np.full((len(margins), num_classes), -np.inf)  # a class that train lacks is never predicted
    scores[:, model.classes_.astype(int)] = margins
    return replace(pooled_by_person(test, scores), chosen_c=1 / float(model.alpha_))


def balanced_accuracy(prediction: Prediction) -> float:
    """Mean recall over the classes that occur among the participants."""
    with warnings.catch_warnings():
        # a small fold may lack a predicted class: it has no recall, and the mean omits it
        warnings.filterwarnings("ignore", message="y_pred contains classes not in y_true")
        return float(balanced_accuracy_score(prediction.labels, prediction.classes))


def participant_weights(participants: np.ndarray) -> np.ndarray:
    """One weight per row [n], mean 1; the rows of every participant add up to the same."""
    _, number, count = np.unique(participants, return_inverse=True, return_counts=True)
    weight = 1 / count[number]
    return weight / weight.mean()


def mean_by_participant(participants: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Mean of values [n, C] over the rows of each participant [P, C], sorted by id."""
    ids, number, count = np.unique(participants, return_inverse=True, return_counts=True)
    sums = np.zeros((len(ids), values.shape[1]))
    np.add.at(sums, number, values)
    return sums / count[:, None]


def require_disjoint(train: np.ndarray, val: np.ndarray, test: np.ndarray) -> None:
    """Raise ValueError if the training fold shares a participant with another; the others may share some."""
    for name, participants in (("validation", val), ("evaluated", test)):
        shared = np.intersect1d(train, participants)
        if len(shared):
            raise ValueError(
                f"expected no participant in both the training and the {name} fold, found {len(shared)}: "
                f"{shared[:3].tolist()}"
            )


def require_two_classes(train: Fold) -> None:
    """Raise ValueError for a training fold of one class."""
    if len(np.unique(train.labels)) < 2:
        raise ValueError(f"training fold: expected two classes or more, found {np.unique(train.labels)}")


def _standardise(train: Fold) -> Callable[[np.ndarray], np.ndarray]:
    scaler = StandardScaler().fit(train.features.astype(np.float64))
    return lambda features: scaler.transform(features.astype(np.float64))


def _in_span(scale: Callable[[np.ndarray], np.ndarray], train: Fold) -> Callable[[np.ndarray], np.ndarray]:
    """Features in the span of the training rows, fewer than they: weights with an L2 penalty lie in it."""
    turn_FK = np.linalg.svd(scale(train.features), full_matrices=False)[2].T
    return lambda features: scale(features) @ turn_FK


def num_classes_of(fold: Fold) -> int:
    """One more than the largest class number."""
    return int(fold.labels.max()) + 1


def class_weights(fold: Fold) -> np.ndarray:
    """Participant weights, scaled so that every class adds up to the same; mean 1."""
    weight = participant_weights(fold.participants)
    _, number = np.unique(fold.labels, return_inverse=True)
    weight = weight / np.bincount(number, weights=weight)[number]
    return weight / weight.mean()


def all_classes(probabilities: np.ndarray, classes: np.ndarray, num_classes: int) -> np.ndarray:
    """A column for every class number; a class that the training fold lacks has probability 0."""
    scores = np.zeros((len(probabilities), num_classes))
    scores[:, classes.astype(int)] = probabilities
    return scores


def pooled_by_person(fold: Fold, scores: np.ndarray) -> Prediction:
    """Mean score over the volumes of each participant; a participant has one label."""
    ids, first, number = np.unique(fold.participants, return_index=True, return_inverse=True)
    labels = fold.labels[first]
    mixed = ids[np.unique(number[fold.labels != labels[number]])]
    if len(mixed):
        raise ValueError(f"expected one label per participant, found several for {mixed[:3].tolist()}")
    return Prediction(ids, labels, mean_by_participant(fold.participants, scores))
