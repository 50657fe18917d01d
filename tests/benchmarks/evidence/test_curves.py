"""Label curves: who is labelled, how many people a curve needs, and the endpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.evidence import curves, differences
from benchmarks.evidence.cohorts import FOLDS, Truth
from benchmarks.evidence.curves import (
    Curve,
    counts_of,
    multiplier,
    people_needed,
    score_curves,
    training_masks,
    with_labels,
    write_curves,
)
from benchmarks.evidence.differences import Scored
from benchmarks.evidence.scores import Scores, masks_of_folds, score
from models.probes import hidden
from tests.support.evidence_factory import small_truth
from utils.errors import UserError


def test_labelled_people_are_of_the_training_folds_and_of_every_class() -> None:
    truth = small_truth()
    assert counts_of(truth) == [3, 10, 24]
    before: list[set[str]] = [set()] * FOLDS
    for count in (3, 10, 24):
        labelled = with_labels(truth, count, 0)
        for number, (masks, whole) in enumerate(
            zip(masks_of_folds(labelled), training_masks(truth), strict=True)
        ):
            train, val, test = masks
            people = set(truth.person[train])
            assert len(people) == count
            assert not (train & (val | test)).any()
            assert not (train & ~whole).any()
            assert before[number] <= people  # nested
            assert len(set(truth.label[train])) == min(count, 4)
            before[number] = people
            # both volumes of a person, or none
            assert set(truth.person[~train]) & people == set()
    one, other = (with_labels(truth, 3, draw).labelled for draw in (0, 1))
    assert not np.array_equal(one, other)


def test_people_are_needed_linearly_in_their_logarithm_between_the_ends() -> None:
    curve = np.array([[0.2], [0.4], [0.3], [0.8]])  # it never falls: the third counts as the second
    wanted = {0.1: 3.0, 0.3: np.sqrt(30), 0.4: 10.0, 0.6: np.sqrt(30 * 100), 0.8: 100.0, 0.9: 100.0}
    for value, people in wanted.items():
        assert people_needed(curve, (3, 10, 30, 100), np.array([value]))[0] == pytest.approx(people)


def curve(label: str, values: list[float], is_free: bool) -> Curve:
    score = np.array([values] * 3) + np.array([[-0.001], [0.0], [0.001]])
    draws = score[..., None] + np.linspace(-0.02, 0.02, 50) * (1 if is_free else -1)
    return Curve(label, not is_free, is_free, score, draws, np.zeros(40), [40])


@pytest.mark.parametrize(
    ("encoder", "value", "bound"), [(0.5, 3.0, ""), (0.9, 10.0, "at least"), (0.05, 0.3, "at most")]
)
def test_the_multiplier_is_that_of_the_best_row_without_pretraining(
    encoder: float, value: float, bound: str
) -> None:
    counts = [3, 10, 30, 100]
    others = [curve("weak", [0.0, 0.1, 0.2, 0.3], True), curve("strong", [0.1, 0.3, 0.5, 0.8], True)]
    result = multiplier("occupancy", curve("encoder", [0, encoder, 0, 0], False), others, counts)
    assert (result.against, result.bound) == ("strong", bound)
    assert result.value == pytest.approx(value, rel=0.02)
    assert result.ci95[0] <= result.value <= result.ci95[1]
    assert (result.doubt, "cannot say" in result.text) == ("", False)


def test_a_multiplier_of_few_people_or_without_variance_cannot_be_said() -> None:
    free, row = curve("free", [0.1, 0.3, 0.5], True), curve("encoder", [0, 0.5, 0], False)
    still = replace(row, draws_NCS=free.draws_NCS + 0.2)
    signs = replace(row, gains_P=np.array([1.0, -1.0] * 7 + [0.5]), people=[15])
    cases = ((replace(row, people=[12, 11]), "11 participants in the smallest class are too few"),)
    for one, because in (*cases, (still, "every resample gives the same"), (signs, "an exact test by sign")):
        result = multiplier("occupancy", one, [replace(free, gains_P=0 * one.gains_P)], [3, 10, 30])
        assert f"of free; cannot say, because {because}" in result.text


def noisy(truth: Truth, share: float) -> np.ndarray:
    """Features of tokens that hold some of the truth."""
    noise = np.random.default_rng(7).normal(size=truth.occupancy.shape)
    return share * truth.occupancy + (1 - share) * 0.3 * noise


def test_curves_are_scored_once_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden, "MOST_STEPS", 15)
    monkeypatch.setattr(curves, "DRAWS", 2)
    monkeypatch.setattr(differences, "BOOTSTRAP_SAMPLES", 40)
    truth = small_truth()
    whole = {
        name: score(truth, None, lambda _, share=share: noisy(truth, share), (2, 2, 2))
        for name, share in (("vjepa2", 0.9), ("place", 0.3))
    }
    rows = [
        Scored("vjepa2", "the recipe", "recipe", [(whole["vjepa2"], {})]),
        Scored("place", "a row without an encoder", "baseline", [(whole["place"], {})]),
    ]
    asked = []

    def scorer(name: str, seed: int) -> Callable[[Truth], Scores]:
        asked.append(name)
        features = noisy(truth, 0.9 if name == "vjepa2" else 0.3)
        return lambda labels: score(labels, None, lambda _: features, (2, 2, 2))

    score_curves(tmp_path, truth, rows, scorer)
    score_curves(tmp_path, truth, rows, scorer)
    assert asked == ["vjepa2", "place"]
    page = write_curves(tmp_path, truth, rows)
    assert page.count("## ") == 2
    line = next(line for line in page.splitlines() if line.startswith("| the recipe"))
    values = [float(cell.split()[0]) for cell in line.split("|")[2:-1]]
    assert values[0] < values[-1]
    assert "cannot say" not in page
    assert "* the recipe: label multiplier at 10 people at least 2.40 (2.40 to 2.40) of a row without" in page
    few = replace(
        truth, person=np.repeat([f"{i}" for i in range(10)], 8), fold=np.repeat(np.arange(10) % 5, 8)
    )
    with pytest.raises(UserError, match="expected more than 10 training people a fold, found 6"):
        write_curves(tmp_path, few, rows)
