"""How far to rely on a head: a temperature for its outputs, and how far a volume is from its training.

In: a head's outputs for volumes of VAL with their targets; pooled features of the training volumes. Out: what
the head's file holds of both.

`Calibration`: a temperature by which outputs are divided, or the reason why there is none. Guo et al. 2017
(arXiv:1706.04599). It moves no volume to another class. A temperature is kept only where it lowers the loss
of validation participants that it was not fitted on. The head was chosen on the same people, which makes the
result a little too confident.

`Familiarity`: a Gaussian (probabilistic PCA, Tipping and Bishop 1999: `components` directions with a variance
each, one for the rest), and percentiles of the distance of training volumes to the Gaussian of other training
people. The distance is Mahalanobis' in it. No volume of a participant can be read back from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from sklearn.decomposition import PCA
from sklearn.model_selection import GroupKFold
from torch import Tensor

from finetuning.heads.objective import row_losses, row_weights, to_scores

MIN_PEOPLE = 20  # of validation, for a temperature
FOLDS = 5
RANGE = (0.05, 20.0)  # at its ends validation says nothing about how confident to be
NO_RECORD = "the head's file holds no calibration: it was trained before heads were calibrated"
OF_VALUES = "a value in the label's unit is no probability"
LEAST_PEOPLE = 10  # of training, for a distance
MAX_COMPONENTS = 32
PEOPLE_PER_COMPONENT = 4
FAR_PERCENTILE = 99.0  # from here on a volume is far from the training
_ARRAYS = ("mean", "scale", "components", "variance", "quantiles")


@dataclass(frozen=True)
class Calibration:
    """What a head's file says of its confidence."""

    temperature: float | None
    reason: str | None  # why there is no temperature
    people: int = 0  # of validation
    loss_before: float | None = None  # log loss of people that the temperature was not fitted on
    loss_after: float | None = None

    def state(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        if self.temperature is None:
            return f"uncalibrated: {self.reason}"
        return (
            f"temperature {self.temperature:.3g}, fitted on {self.people} validation participants; log loss "
            f"of those left out {self.loss_before:.3f} -> {self.loss_after:.3f}"
        )

    def scores(self, kind: str, outputs_BC: Tensor) -> Tensor | None:
        """Calibrated probabilities [B, C]; None without a temperature."""
        return None if self.temperature is None else to_scores(kind, outputs_BC / self.temperature)


def stored_calibration(state: Mapping[str, Any]) -> Calibration:
    """Of a head's file; one that was written before heads were calibrated says so."""
    if "calibration" not in state:
        return Calibration(None, NO_RECORD)
    return Calibration(**state["calibration"])


def calibrate(kind: str, outputs_nC: Tensor, target_nT: np.ndarray, person: np.ndarray) -> Calibration:
    """The temperature from volumes of VAL: outputs [n, C], targets [n, T]; people weigh the same."""
    if kind == "regression":
        return Calibration(None, OF_VALUES)
    people = len(np.unique(person))
    if people < MIN_PEOPLE:
        return Calibration(None, f"expected {MIN_PEOPLE} validation participants, found {people}", people)
    outputs_nC, target = outputs_nC.cpu().double(), torch.from_numpy(np.asarray(target_nT, float))
    weight = torch.from_numpy(row_weights(kind, np.asarray(target_nT), person, "none"))
    of_kind = (
        "multilabel" if kind == "multilabel" else "classification"
    )  # ordinal heads are trained otherwise

    def loss(rows: np.ndarray, temperature: float) -> float:
        """Weighted sum of log losses."""
        losses = row_losses(of_kind, outputs_nC[rows] / temperature, target[rows])
        return float((losses * weight[rows]).sum())

    def fitted(rows: np.ndarray) -> float:
        """The temperature with the least loss of these rows."""
        result = minimize_scalar(
            lambda log_t: loss(rows, math.exp(log_t)),
            bounds=(math.log(RANGE[0]), math.log(RANGE[1])),
            method="bounded",
            options={"xatol": 1e-6},
        )
        return math.exp(float(result.x))

    every, total = np.arange(len(person)), float(weight.sum())
    temperature = fitted(every)
    least = loss(every, temperature) + 1e-6 * total
    if min(loss(every, end) for end in RANGE) <= least:  # without a mistake no confidence is too high
        why = f"no temperature between {RANGE[0]} and {RANGE[1]} fits {people} validation participants best"
        return Calibration(None, why, people)
    before = after = 0.0
    for some, others in GroupKFold(FOLDS).split(every, groups=person):
        before += loss(others, 1.0) / total
        after += loss(others, fitted(some)) / total
    if after >= before:
        why = f"a temperature does not lower the log loss of people left out ({before:.3f} -> {after:.3f})"
        return Calibration(None, why, people, before, after)
    return Calibration(temperature, None, people, before, after)


@dataclass(frozen=True)
class Familiarity:
    """A Gaussian of features [F] with k directions."""

    mean: np.ndarray  # [F]
    scale: np.ndarray  # [F], standard deviations by which features are divided
    components: np.ndarray  # [k, F], orthonormal
    variance: np.ndarray  # [k] along them
    rest: float  # variance along every other direction
    quantiles: np.ndarray  # [101] of the distance of training volumes, held out
    people: int

    def state(self) -> dict[str, Any]:
        arrays = {name: torch.from_numpy(np.asarray(getattr(self, name), np.float32)) for name in _ARRAYS}
        return {**arrays, "rest": self.rest, "people": self.people}

    def distance(self, features_nF: np.ndarray) -> np.ndarray:
        """Mahalanobis distance [n] to the training volumes' mean."""
        centred = (np.asarray(features_nF, np.float64) - self.mean) / self.scale
        along = centred @ self.components.T
        beside = np.maximum(0.0, (centred**2).sum(axis=1) - (along**2).sum(axis=1))
        return np.sqrt((along**2 / self.variance).sum(axis=1) + beside / self.rest)

    def percentile(self, features_nF: np.ndarray) -> np.ndarray:
        """Percent of held-out training volumes [n] that are nearer."""
        return np.interp(self.distance(features_nF), self.quantiles, np.arange(101.0))


def stored_familiarity(state: Mapping[str, Any]) -> Familiarity | None:
    """Of a head's file; None where it holds none."""
    content = state.get("familiarity")
    if content is None:
        return None
    arrays = {name: content[name].double().numpy() for name in _ARRAYS}
    return Familiarity(**arrays, rest=content["rest"], people=content["people"])


def fit_familiarity(features_nF: np.ndarray, person: np.ndarray) -> Familiarity | None:
    """From pooled training features; None of fewer than LEAST_PEOPLE people, or where nothing varies."""
    people = len(np.unique(person))
    features = np.asarray(features_nF, np.float64)
    if people < LEAST_PEOPLE or not (features.std(axis=0) > 0).any():
        return None
    num_components = max(1, min(MAX_COMPONENTS, people // PEOPLE_PER_COMPONENT, features.shape[1] - 1))
    distances = []
    for fitted, others in GroupKFold(FOLDS).split(features, groups=person):
        distances.append(_gaussian(features[fitted], num_components, people).distance(features[others]))
    quantiles = np.quantile(np.concatenate(distances), np.linspace(0, 1, 101))
    whole = _gaussian(features, num_components, people)
    return Familiarity(
        whole.mean, whole.scale, whole.components, whole.variance, whole.rest, quantiles, people
    )


def _gaussian(features: np.ndarray, num_components: int, people: int) -> Familiarity:
    """The Gaussian of these volumes, without quantiles."""
    mean, scale = features.mean(axis=0), features.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    pca = PCA(num_components, svd_solver="full").fit((features - mean) / scale)
    floor = 1e-6 * float(pca.explained_variance_[0])  # of few volumes no variance is left over
    return Familiarity(
        mean,
        scale,
        pca.components_,
        np.maximum(pca.explained_variance_, floor),
        max(float(pca.noise_variance_), floor),
        np.zeros(101),
        people,
    )
