"""Rows without an encoder: what they read, that they learn nothing of evaluated people, and two readouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from data_setup.loader import evaluation_batches
from data_setup.normalisation import plain_view
from data_setup.store.reader import PreparedStore
from finetuning.features import yardsticks as module
from finetuning.features.yardsticks import Neighbourhoods, around, patches_of, random_widths, yardsticks
from models.probes.hidden import fit_hidden_classes, hidden_probe, hidden_rows
from models.probes.participants import Fold, balanced_accuracy, logistic_probe
from models.probes.tokens import Rows, mean_r2, ridge_rows
from tests.support.finetune_factory import RUNTIME, config


def test_a_token_has_its_26_neighbours_and_zeros_beyond_the_grid() -> None:
    grid = (2, 3, 4)
    ids = torch.arange(1, 25, dtype=torch.float32).view(1, 24, 1)
    wide = np.pad(np.arange(1, 25).reshape(grid), 1)
    seen = around(ids, grid)[0].numpy()
    for token, (i, j, k) in enumerate(np.ndindex(*grid)):
        np.testing.assert_array_equal(seen[token], wide[i : i + 3, j : j + 3, k : k + 3].ravel())


def test_rows_of_tokens_and_of_volumes(world: Path, tmp_path: Path) -> None:
    cfg = config(world, tmp_path)
    store = PreparedStore.open(cfg.data.store)
    rows = np.array([4, 0, 7])
    count = int(np.prod(cfg.grid))
    tokens = np.stack([np.arange(5), np.arange(count - 5, count), np.r_[1, 2, 3, -1, -1]])
    is_training = np.array([True, True, False])
    made = {row.name: row for row in yardsticks(cfg, store, rows, RUNTIME, tokens)}
    near, wide = random_widths(cfg)
    assert list(made) == ["place", "own_voxels", "27_patches", f"{near}_random_of_27", f"{wide}_random_of_27"]
    patch = cfg.spatial.patch_size
    (batch,) = evaluation_batches(cfg, store, rows, 3)
    voxels = patches_of(plain_view(batch)[:, 0], patch).flatten(2).numpy()
    own = made["own_voxels"].tokens(is_training)
    np.testing.assert_array_equal(own[1], voxels[1, -5:])
    sizes = {name: row.tokens(is_training).shape[2] for name, row in made.items()}
    averaged = np.prod([min(a, b) for a, b in zip(patch, module.AVERAGED, strict=True)])
    assert list(sizes.values()) == [0, np.prod(patch), 27 * averaged, near, wide]
    assert averaged <= 32
    for name, row in made.items():
        if row.volumes is not None:
            assert row.volumes(is_training).shape == (3, 2 * sizes[name])
    # mean and spread are over valid tokens alone
    valid = batch["context_valid"].numpy() > 0
    pooled = made["own_voxels"].volumes(is_training)
    inside = voxels[2][valid[2]]
    expected = np.concatenate([inside.mean(0), inside.std(0)])
    np.testing.assert_allclose(pooled[2], expected, atol=1e-5)
    assert all(row.tokens is None for row in yardsticks(cfg, store, rows, RUNTIME))


def test_random_features_learn_nothing_of_evaluated_people(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A voxel of 1e6 in a volume that does not train: the features of all others stay."""
    cfg = config(world, tmp_path)
    store = PreparedStore.open(cfg.data.store)
    rows, is_training = np.arange(6), np.arange(6) < 4
    before = Neighbourhoods(cfg, store, rows, RUNTIME)
    features = before.volumes(48, is_training)

    def spoiled(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        view = plain_view(batch)
        view[batch["row"] == 5, 0, 0, 0, 0] = 1e6
        return view

    monkeypatch.setattr(module, "plain_view", spoiled)
    after = Neighbourhoods(cfg, store, rows, RUNTIME)
    changed = after.volumes(48, is_training)
    np.testing.assert_array_equal(changed[:5], features[:5])
    assert np.abs(changed[5] - features[5]).max() > 1
    assert not np.array_equal(after.volumes(48, np.arange(6) > 1)[0], before.volumes(48, np.arange(6) > 1)[0])


def rows_of(rng: np.random.Generator, people: int, spoil: float = 0.0) -> Rows:
    """Values that are no linear function of the features."""
    x = rng.normal(size=(people * 20, 4))
    y = np.stack([np.abs(x[:, 0]), x[:, 1] * x[:, 2]], axis=1)
    return Rows(x + spoil, y, np.repeat([f"{spoil}{people}_{i}" for i in range(people)], 20))


def test_a_hidden_layer_finds_what_a_line_does_not() -> None:
    rng = np.random.default_rng(0)
    train, val, test = rows_of(rng, 60), rows_of(rng, 15), rows_of(rng, 30)
    assert mean_r2(ridge_rows(train, val, test).errors) < 0.1
    first = hidden_rows(train, val, test)
    assert mean_r2(first.errors) > 0.7
    assert first.chosen_c is None
    np.testing.assert_array_equal(first.predicted, hidden_rows(train, val, test).predicted)
    # noise ends where it began: at what is usual
    noise = [Rows(rng.normal(size=f.features.shape), f.targets, f.participants) for f in (train, val, test)]
    assert mean_r2(hidden_rows(*noise).errors) > -0.05
    with pytest.raises(ValueError, match="no participant in both"):
        hidden_rows(train, val, train)


def fold_of(rng: np.random.Generator, people: int, labels: tuple[int, ...]) -> Fold:
    """Two volumes a person; the class is whether two features have one sign."""
    x = rng.normal(size=(2 * people, 3))
    is_one = x[:, 0] * x[:, 1] > 0
    ids = [f"{people}_{i}" for i in range(2 * people)]
    return Fold(x, np.where(is_one, labels[1], labels[0]), np.array(ids))


def test_classes_by_a_hidden_layer_have_the_columns_of_the_linear_probe() -> None:
    rng = np.random.default_rng(1)
    train, val, test = (fold_of(rng, n, (0, 2)) for n in (200, 51, 82))
    linear, hidden = logistic_probe(train, val, test), hidden_probe(train, val, test)
    assert hidden.scores.shape == linear.scores.shape
    assert (hidden.scores[:, 1] == 0).all()  # a class that nobody in training has
    assert balanced_accuracy(linear) < 0.7 < 0.85 < balanced_accuracy(hidden)
    assert fit_hidden_classes(train, val).val_score == hidden.val_score


@pytest.mark.parametrize("width", [5, 90])
def test_ridge_is_the_same_from_features_and_from_fewer_rows(width: int) -> None:
    rng = np.random.default_rng(2)
    weights = rng.normal(size=(width, 2))
    folds = []
    for name, count in (("a", 40), ("b", 30), ("c", 30)):
        x = rng.normal(size=(count, width))
        people = np.array([f"{name}{i // 3}" for i in range(count)])
        folds.append(Rows(x, x @ weights + rng.normal(size=(count, 2)), people))
    for c in (1e-2, 1.0):
        got = ridge_rows(*folds, c_grid=(c,)).predicted
        from sklearn.linear_model import Ridge
        from sklearn.preprocessing import StandardScaler

        from models.probes.participants import participant_weights

        scaler = StandardScaler().fit(folds[0].features)
        model = Ridge(alpha=1 / c, solver="cholesky").fit(
            scaler.transform(folds[0].features), folds[0].targets, participant_weights(folds[0].participants)
        )
        np.testing.assert_allclose(got, model.predict(scaler.transform(folds[2].features)), atol=1e-6)
