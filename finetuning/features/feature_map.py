"""The feature map of a report: pooled features of volumes on their first two principal components.

In: a cohort, its features, the store's index. Out: feature_map.json in the run's folder: coordinates, device,
label and laterality of every volume, and no word about who it is of.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler

from finetuning.cohort.cohort import Cohort
from utils import storage
from utils.indices import evenly_spaced

MAX_POINTS = 2000
THIRDS = 3  # of a value, which is no class


def write_feature_map(
    folder: str, cohort: Cohort, features_nF: np.ndarray, index: pd.DataFrame, about: str
) -> None:
    """Write the map of the volumes of a cohort; `about`: whose they are, in words."""
    content = feature_map(cohort, features_nF, index) | {"about": about}
    text = json.dumps(content, allow_nan=False) + "\n"
    storage.write_text(storage.join(folder, "feature_map.json"), text)


def feature_map(cohort: Cohort, features_nF: np.ndarray, index: pd.DataFrame) -> dict[str, Any]:
    """`x`, `y` of at most MAX_POINTS volumes, `shares` of variance; device, label, laterality of each."""
    scores_n2, shares = _components(StandardScaler().fit_transform(features_nF))
    at = evenly_spaced(len(cohort.rows), MAX_POINTS).numpy()
    columns = {
        name: index.loc[cohort.rows[at], name].fillna("unknown").astype(str).tolist()
        for name in ("device", "laterality")
    }
    return {
        "x": np.round(scores_n2[at, 0], 3).tolist(),
        "y": np.round(scores_n2[at, 1], 3).tolist(),
        "shares": [round(float(share), 4) for share in shares],
        "label": labels_of(cohort)[at].tolist(),
        **columns,
    }


def _components(features_nF: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first two components [n, 2] and their shares of the variance; zeros where nothing varies."""
    if not features_nF.any():  # standardised features that do not vary
        return np.zeros((len(features_nF), 2)), np.zeros(2)
    pca = PCA(2, random_state=0)
    return pca.fit_transform(features_nF), pca.explained_variance_ratio_


def labels_of(cohort: Cohort) -> np.ndarray:
    """A word for the target of every volume [n]: its class, its labels joined, or the third of a value."""
    if cohort.kind == "regression":
        return pd.qcut(cohort.target[:, 0], THIRDS, duplicates="drop").astype(str)
    if cohort.kind == "multilabel":
        names = np.array(cohort.names)
        return np.array(["+".join(names[row > 0]) or "none" for row in cohort.target])
    return np.array(cohort.names)[cohort.target[:, 0].astype(int)]
