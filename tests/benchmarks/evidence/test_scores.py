"""Truth where the pixels are, folds, scores that find what features hold; label curves and their endpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.evidence import cohorts, curves, differences, scores
from benchmarks.evidence.arms import CONFIG
from benchmarks.evidence.cohorts import FOLDS, Truth, tokens_of_another_grid
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
from benchmarks.evidence.scores import Scores, baseline_features, masks_of_folds, score
from benchmarks.truth_tokens import layer_occupancy, sample_tokens, valid_tokens
from data_setup.normalisation import plain_view
from data_setup.phantom.__main__ import write_tree
from data_setup.prepare import main as prepare
from data_setup.store.reader import PreparedStore
from finetuning.features import yardsticks
from finetuning.features.kept import raw_features
from models.probes import hidden
from models.probes.tokens import less_protocol_mean, position_columns
from tests.support.evidence_factory import small_truth
from utils.config.load import load_config
from utils.config.schema import SpatialConfig
from utils.runtime.open import open_runtime


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second readout, enough to find what is linear."""
    monkeypatch.setattr(hidden, "MOST_STEPS", 120)


def test_tokens_of_a_coarser_patch_hold_the_finer_ones() -> None:
    fine, coarse, size = (4, 12, 8), (4, 6, 4), (16, 96, 64)
    voxel_of_fine = np.arange(4 * 12 * 8).reshape(fine)
    voxel_of_coarse = np.arange(4 * 6 * 4).reshape(coarse)
    for axis, n in enumerate(size):
        voxel_of_fine = voxel_of_fine.repeat(n // fine[axis], axis)
        voxel_of_coarse = voxel_of_coarse.repeat(n // coarse[axis], axis)
    token_of_coarse = tokens_of_another_grid(np.arange(4 * 12 * 8), fine, coarse)
    np.testing.assert_array_equal(token_of_coarse[voxel_of_fine], voxel_of_coarse)
    np.testing.assert_array_equal(tokens_of_another_grid(np.arange(384), fine, fine), np.arange(384))
    assert tokens_of_another_grid(np.array([1]), (1, 1, 2), (1, 1, 6)) == 4  # a finer one: that of the centre


SPATIAL = SpatialConfig((0.375, 0.024, 0.09375), (16, 96, 64), (4, 8, 8))


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreparedStore]:
    folder = tmp_path_factory.mktemp("evidence")
    write_tree(folder / "tree", participants=3, seed=5, workers=1)
    places = [f"data.gcs_root={folder / 'tree'}", f"data.store={folder / 'store'}"]
    assert prepare(["--config", str(CONFIG), "--workers", "0", *places]) == 0
    return folder / "tree", PreparedStore.open(str(folder / "store"))


def test_of_few_volumes_every_valid_token_is_asked_about(
    phantom: tuple[Path, PreparedStore], tmp_path: Path
) -> None:
    store, numbers = phantom[1], np.arange(384)[:, None]
    rows = {int(row): numbers for row in store.kept}
    cohorts.save_truth(tmp_path, store, SPATIAL, rows, ("one",), {})
    with np.load(tmp_path / "truth.npz") as truth:
        for row, chosen, shares in zip(rows, truth["tokens"], truth["occupancy"], strict=True):
            valid = np.flatnonzero(valid_tokens(store.index.loc[row], SPATIAL))
            np.testing.assert_array_equal(chosen[chosen >= 0], valid)
            np.testing.assert_array_equal(shares[chosen >= 0, 0], valid)
    assert len(sample_tokens(np.ones(384, bool), 0)) == 96  # of many


def explained(shares_NL: np.ndarray, grey_N: np.ndarray) -> float:
    """R2 of a token's mean grey value from its layer occupancy."""
    x = np.concatenate([shares_NL, np.ones((len(shares_NL), 1))], axis=1)
    residual = grey_N - x @ np.linalg.lstsq(x, grey_N, rcond=None)[0]
    return 1 - float((residual**2).sum() / ((grey_N - grey_N.mean()) ** 2).sum())


def test_occupancy_lies_where_the_stored_pixels_are(phantom: tuple[Path, PreparedStore]) -> None:
    tree, store = phantom
    directions, straight, turned_d, turned_w = set(), [], [], []
    for number in store.kept:
        record = store.index.loc[number]
        with np.load(tree / "truth" / f"{record.sop_instance_uid}.npz") as arrays:
            truth = dict(arrays)
        shares = layer_occupancy(truth, record, SPATIAL)
        valid = valid_tokens(record, SPATIAL)
        assert shares.min() >= 0
        assert shares[valid].sum(axis=1).max() <= 1.02
        grey = store.read(number).reshape(4, 4, 12, 8, 8, 8).mean(axis=(1, 3, 5)).ravel()
        straight.append(explained(shares[valid], grey[valid]))
        cube = shares.reshape(4, 12, 8, -1)
        turned_d.append(explained(cube[::-1].reshape(384, -1)[valid], grey[valid]))
        turned_w.append(explained(cube[:, :, ::-1].reshape(384, -1)[valid], grey[valid]))
        layers = truth["layer_names"].tolist()
        inside = {name: shares[:, layers.index(name)] for name in ("RNFL", "RPE", "ONL")}
        means = {name: float((grey * s).sum() / s.sum()) for name, s in inside.items()}
        assert means["RNFL"] > grey[valid & (shares.sum(axis=1) == 0)].mean()  # brighter than the vitreous
        assert means["RPE"] > means["ONL"]
        directions.add(bool(record.flipped_d))
    assert directions == {True, False}
    assert np.mean(straight) > 0.85
    # the check would notice a reversed axis
    assert np.mean(straight) > np.mean(turned_d) + 0.03
    assert np.mean(straight) > np.mean(turned_w) + 0.03


def test_a_slab_fills_the_tokens_that_it_should(phantom: tuple[Path, PreparedStore]) -> None:
    """A layer between two flat surfaces, 0.48 mm thick and centred: 2.5 tokens of 0.192 mm."""
    record = phantom[1].index.loc[phantom[1].kept[0]]
    rows, spacing = record.shape_before_h, record.spacing_before_h
    edges = np.array([-0.24, 0.24]) / spacing + rows / 2 - 0.5
    field = (int(record.shape_before_d), int(record.shape_before_w))
    truth = {"surfaces": np.broadcast_to(edges[:, None, None], (2, *field)).astype(np.float32)}
    cube = layer_occupancy(truth, record, SPATIAL).reshape(4, 12, 8)
    middle = cube[1:3, :, 3:5].mean(axis=(0, 2))
    np.testing.assert_allclose(middle[4:8], [0.25, 1.0, 1.0, 0.25], atol=0.02)
    assert middle[:4].max() < 0.01
    assert middle[8:].max() < 0.01


def test_folds_are_by_participant_and_every_class_is_in_each() -> None:
    truth = small_truth()
    for person in np.unique(truth.person):
        assert len(set(truth.fold[truth.person == person])) == 1
    evaluated = np.zeros(len(truth.rows), int)
    for masks in masks_of_folds(truth):
        assert (np.sum(masks, axis=0) == 1).all()
        assert all(set(truth.label[m]) == {0, 1, 2, 3} for m in masks)
        evaluated += masks[2]
    assert (evaluated == 1).all()
    assert set(truth.fold) == set(range(FOLDS))


def test_thickness_is_relative_to_the_training_volumes_of_a_protocol() -> None:
    values = np.array([[1.0], [3.0], [10.0], [20.0], [100.0]])
    protocol = np.array(["a", "a", "a", "b", "c"])
    training = np.array([True, True, False, True, False])
    relative = less_protocol_mean(values, protocol, training)
    np.testing.assert_allclose(relative.ravel(), [-1, 1, 8, 0, 92])  # c: less the mean of 1, 3 and 20


def test_scores_find_what_the_features_hold_and_nothing_in_noise() -> None:
    truth = small_truth()
    rng = np.random.default_rng(1)
    known = np.concatenate([np.eye(4)[truth.label], truth.thickness_um, rng.normal(size=(80, 3))], axis=1)
    good = score(truth, lambda _: known, lambda _: truth.occupancy, (2, 2, 2))
    assert good.of("classes") == 1.0
    assert good.of("thickness") > 0.5
    assert good.of("occupancy") > 0.95
    assert good.of("classes_hidden") > 0.9
    assert good.of("occupancy_hidden") > 0.8
    noise = score(truth, lambda _: rng.normal(size=(80, 5)), lambda _: rng.normal(size=(80, 8, 5)), (2, 2, 2))
    assert noise.of("classes") < 0.5
    assert noise.of("thickness") < 0.15
    assert noise.of("occupancy") < 0.15
    # where a token lies counts among its features
    place = position_columns(np.arange(8), (2, 2, 2))[None, :, :3]
    placed = replace(truth, occupancy=np.broadcast_to(place, (80, 8, 3)))
    assert score(placed, None, lambda _: np.zeros((80, 8, 0)), (2, 2, 2)).of("occupancy") > 0.99


def test_a_baseline_learns_nothing_of_evaluated_people(
    phantom: tuple[Path, PreparedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Principal components and the mean of the random features: a voxel of one person who is evaluated."""
    store = phantom[1]
    rows = np.asarray(store.kept)
    truth = replace(small_truth(), rows=rows, tokens=np.tile(np.arange(8), (len(rows), 1)))
    is_training = np.arange(len(rows)) < len(rows) - 1
    cfg = load_config(CONFIG, [f"data.store={store.url}", "data.workers=0"])
    names = "voxel_pca", "27_patches", "192_random_of_27", "1024_random_of_27"
    rows_of = baseline_features(cfg, store, truth)
    before = {name: rows_of[name][1](is_training) for name in names}
    voxels, profile = raw_features(cfg, store, rows, open_runtime(False))
    spoiled = voxels.copy()
    spoiled[-1, 0] = 1e6
    monkeypatch.setattr(scores, "raw_features", lambda *_: (spoiled, profile))
    monkeypatch.setattr(yardsticks, "plain_view", lambda batch: spoil(batch, int(rows[-1])))
    after = baseline_features(cfg, store, truth)
    assert list(after)[-1] == "place"
    for name in names:
        features = after[name][1](is_training)
        np.testing.assert_array_equal(features[:-1], before[name][:-1])
        assert np.abs(features[-1] - before[name][-1]).max() > 1


def spoil(batch: dict[str, torch.Tensor], row: int) -> torch.Tensor:
    """Views with one voxel far away in one row."""
    view = plain_view(batch)
    view[batch["row"] == row, 0, 0, 0, 0] = 1e6
    return view


def test_the_fold_that_is_evaluated_does_not_fit_the_features() -> None:
    truth = small_truth()
    seen = []

    def features(is_training: np.ndarray) -> np.ndarray:
        seen.append(is_training)
        return truth.thickness_um

    score(truth, features, None, (2, 2, 2))
    assert len(seen) == 4 * FOLDS
    assert all(not (t & (truth.fold == f)).any() for t, f in zip(seen[:FOLDS], range(FOLDS), strict=True))


# --- label curves ---


def test_labelled_people_are_of_the_training_folds_and_of_every_class() -> None:
    truth = small_truth()
    assert counts_of(truth) == [3, 10, 24]
    assert counts_of(replace(few_people(), classes=("a", "b"))) == [3, 6]  # one person is of one class
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


def few_people() -> Truth:
    """The same volumes, of ten people, who have no classes: six teach in each fold."""
    number = np.repeat(np.arange(10), 8)
    people = {"person": number.astype(str), "fold": number % FOLDS, "label": 0 * number, "classes": ("",)}
    return replace(small_truth(), **people)


@pytest.mark.parametrize(
    ("truth", "people", "endpoint"),
    [
        (small_truth(), [3, 10, 24], "at 10 people at least 2.40 (2.40 to 2.40) of"),
        (few_people(), [1, 3, 6], None),
    ],
)
def test_curves_are_scored_once_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truth: Truth, people: list[int], endpoint: str | None
) -> None:
    monkeypatch.setattr(hidden, "MOST_STEPS", 15)
    monkeypatch.setattr(curves, "DRAWS", 2)
    monkeypatch.setattr(differences, "BOOTSTRAP_SAMPLES", 40)
    whole = {
        name: score(truth, None, lambda _, share=share: noisy(truth, share), (2, 2, 2))
        for name, share in (("surroundings", 0.9), ("place", 0.3))
    }
    rows = [
        Scored("surroundings", "the recipe", "recipe", [(whole["surroundings"], {})]),
        Scored("place", "a row without an encoder", "baseline", [(whole["place"], {})]),
    ]
    asked = []

    def scorer(name: str, seed: int) -> Callable[[Truth], Scores]:
        asked.append(name)
        features = noisy(truth, 0.9 if name == "surroundings" else 0.3)
        return lambda labels: score(labels, None, lambda _: features, (2, 2, 2))

    score_curves(tmp_path, truth, rows, scorer)
    score_curves(tmp_path, truth, rows, scorer)
    assert asked == ["surroundings", "place"]
    assert len(list(tmp_path.glob("curves/place/seed_0/*"))) == 2 + 2 + 1  # all people are drawn once
    page = write_curves(tmp_path, truth, rows)
    assert page.count("## ") == 2
    assert page.count("| labelled people | " + " | ".join(map(str, people)) + " |") == 2
    line = next(line for line in page.splitlines() if line.startswith("| the recipe"))
    values = [float(cell.split()[0]) for cell in line.split("|")[2:-1]]
    assert values[0] < values[-1]
    assert "cannot say" not in page
    # fewer than ten people to learn from have no endpoint
    assert ("label multiplier" in page) == (endpoint is not None)
    assert endpoint is None or f"* the recipe: label multiplier {endpoint} a row without" in page


def test_the_rival_has_the_readout_that_serves_it_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden, "MOST_STEPS", 15)
    monkeypatch.setattr(differences, "BOOTSTRAP_SAMPLES", 40)

    def scorer(name: str, seed: int) -> Callable[[Truth], Scores]:
        def of(labels: Truth) -> Scores:
            low, high = (
                score(labels, None, lambda _, share=share: noisy(labels, share), (2, 2, 2))
                for share in (0.3, 0.9)
            )
            kept = low if name == "place" else high  # only the rival's hidden layer finds what it holds
            return replace(kept, parts=kept.parts | {"occupancy_hidden": high.parts["occupancy_hidden"]})

        return of

    truth = small_truth()
    rows = [
        Scored(name, name, factor, [(scorer(name, 0)(truth), {})])
        for name, factor in (("surroundings", "recipe"), ("place", "baseline"))
    ]
    score_curves(tmp_path, truth, rows, scorer)
    page = write_curves(tmp_path, truth, rows)
    assert len(re.findall(r"\* surroundings: label multiplier .* of place, hidden layer", page)) == 2
