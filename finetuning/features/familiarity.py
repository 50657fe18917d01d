"""How far a volume's features are from those that a head was trained on.

In: pooled features of the training volumes. Out: a `Familiarity`, which the head's file holds: a Gaussian
(probabilistic PCA, Tipping and Bishop 1999: `components` directions with a variance each, one for the rest),
and percentiles of the distance of training volumes to the Gaussian of other training people. The distance is
Mahalanobis' in it. No volume of a participant can be read back from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.decomposition import PCA
from sklearn.model_selection import GroupKFold

MIN_PEOPLE = 10
MAX_COMPONENTS = 32
PEOPLE_PER_COMPONENT = 4
FOLDS = 5
FAR_PERCENTILE = 99.0  # from here on a volume is far from the training
_ARRAYS = ("mean", "scale", "components", "variance", "quantiles")


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
        """Tensors and plain values for the head's file."""
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
    """From pooled training features; None of fewer than MIN_PEOPLE people, or where nothing varies."""
    people = len(np.unique(person))
    features = np.asarray(features_nF, np.float64)
    if people < MIN_PEOPLE or not (features.std(axis=0) > 0).any():
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
