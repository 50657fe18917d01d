"""The feature map: groups that features tell apart lie apart, and nobody is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from finetuning.cohort.cohort import Cohort
from finetuning.features.feature_map import MAX_POINTS, feature_map, labels_of, write_feature_map

NUM = 30


def cohort_of(kind: str, names: tuple[str, ...], target: np.ndarray) -> Cohort:
    rows = np.arange(len(target)) + 5
    people = np.array([f"patient {row}" for row in rows])
    return Cohort(kind, names, rows, np.zeros(len(rows), int), target, people, people)


def index_of(cohort: Cohort) -> pd.DataFrame:
    """Devices alternate; one laterality is not known."""
    devices = ["zeiss", "topcon"] * len(cohort.rows)
    sides = [None, *["R"] * len(cohort.rows)]
    count = len(cohort.rows)
    columns = {"device": devices[:count], "laterality": sides[:count], "person_id": "secret"}
    return pd.DataFrame(columns, index=cohort.rows)


def test_groups_lie_apart_and_each_point_is_its_own_volume(tmp_path: Path) -> None:
    """A class shifts every feature: it is the first component, whatever the features' units."""
    is_b = np.arange(NUM) % 3 == 0
    cohort = cohort_of("classification", ("a", "b"), is_b[:, None].astype(float))
    features = np.random.default_rng(0).normal(size=(NUM, 8)) + 6 * is_b[:, None]
    features *= np.geomspace(1e-3, 1e3, 8)
    write_feature_map(str(tmp_path), cohort, features, index_of(cohort), "test")
    text = (tmp_path / "feature_map.json").read_text()
    assert "secret" not in text
    assert "patient" not in text
    content = json.loads(text)
    assert content["label"] == ["b" if b else "a" for b in is_b]
    assert content["device"][:2] == ["zeiss", "topcon"]
    assert content["laterality"][:2] == ["unknown", "R"]
    x = np.array(content["x"])
    assert (x[is_b].min() > x[~is_b].max()) or (x[is_b].max() < x[~is_b].min())
    assert content["shares"][0] > 0.7 > content["shares"][1]


def test_a_large_cohort_is_thinned() -> None:
    count = 2 * MAX_POINTS
    cohort = cohort_of("classification", ("a",), np.zeros((count, 1)))
    content = feature_map(cohort, np.random.default_rng(0).normal(size=(count, 3)), index_of(cohort))
    assert {len(content[key]) for key in ("x", "y", "device", "label", "laterality")} == {MAX_POINTS}


@pytest.mark.parametrize(
    ("kind", "names", "target", "expected"),
    [
        ("ordinal", ("mild", "severe"), [[1], [0]], ["severe", "mild"]),
        ("multilabel", ("drusen", "fluid"), [[1, 1], [0, 0], [0, 1]], ["drusen+fluid", "none", "fluid"]),
        ("regression", ("age",), [[10.0], [50.0]], ["(9.999, 23.333]", "(36.667, 50.0]"]),
    ],
)
def test_words_of_targets(kind: str, names: tuple[str, ...], target: list, expected: list[str]) -> None:
    assert labels_of(cohort_of(kind, names, np.array(target, float))).tolist() == expected
