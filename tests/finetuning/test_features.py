"""Features: computed once for an encoder, its precision and a volume, and kept; what stands beside an
encoder's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from data_setup.loader import evaluation_batches
from data_setup.normalisation import plain_view
from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import EVALUATED, Cohort
from finetuning.cohort.metrics import observed
from finetuning.cohort.source import Source
from finetuning.features import entries
from finetuning.features import yardsticks as module
from finetuning.features.entries import Entry, Volumes, best_random, fold_by_fold, probe, short_names
from finetuning.features.kept import KeptFeatures, features_folder, random_encoder
from finetuning.features.slices import SliceEncoder
from finetuning.features.yardsticks import Neighbourhoods, around, patches_of, random_widths, yardsticks
from models.probes.hidden import fit_hidden_classes, hidden_probe, hidden_rows
from models.probes.participants import Fold, balanced_accuracy, fit_logistic, logistic_probe
from models.probes.tokens import Rows, mean_r2, ridge_rows
from tests.support.finetune_factory import (
    RUNTIME,
    assert_no_gain,
    config,
    embed_rows,
    image_encoder,
    noise,
    three_folds,
)
from utils.errors import UserError

NO_VOLUMES = cast(Volumes, SimpleNamespace(cfg=SimpleNamespace(seed=0)))  # the noise stands for features


def of_noise(trial: int) -> Callable[..., Entry]:
    """What makes a random encoder's entry, whose features know nothing."""

    def made(*words: object) -> Entry:
        seed = cast(int, words[-1])
        return Entry(f"random_{seed}", "", f"noise {seed}", lambda: lambda c: noise(trial, seed)[c.rows])

    return made


def test_the_random_seed_is_chosen_on_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "encoder_entry", of_noise(0))
    vals = {"random_0": 0.4, "random_1": 0.7, "random_2": 0.6}
    cohorts = three_folds(0)
    entry, note = best_random(NO_VOLUMES, cohorts[:1], cast(Source, None), lambda e: [vals[e.name]])
    assert entry.name == "random_1"
    assert note == (
        "Random initialisation is the seed that is best on validation participants "
        "(seed 0: 0.400, seed 1: 0.700, seed 2: 0.600)."
    )


def test_choosing_a_random_seed_in_crossfit_gains_nothing_on_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The validation people of a fold are evaluated in another: a mean over folds would have seen them."""
    monkeypatch.setattr(entries, "fit_logistic", partial(fit_logistic, c_grid=(1.0,)))
    gains = []
    for trial in range(60):
        monkeypatch.setattr(entries, "encoder_entry", of_noise(trial))
        folds = three_folds(trial)

        def vals_of(entry: Entry, folds: Sequence[Cohort] = folds) -> list[float]:
            return [probe([cohort], entry.features()).val_score for cohort in folds]

        def value(entry: Entry, folds: Sequence[Cohort] = folds) -> float:
            scored = probe(folds, entry.features()).scored
            return float(observed(scored.evaluated()).overall["balanced_accuracy"][0])

        entry, note = best_random(NO_VOLUMES, folds, cast(Source, None), vals_of)
        assert "in each fold the seed that is best on the fold's own validation participants" in note
        every = [value(of_noise(trial)(seed)) for seed in range(3)]
        gains.append(value(entry) - np.mean(every))
    assert entry.label == "random initialisation (a seed a fold)"
    assert_no_gain(gains)


def test_each_fold_has_its_own_encoder() -> None:
    """A low-shot or a device's part of a fold is still that fold."""
    folds = three_folds(0)
    parts = [
        Entry(
            f"random_{k}",
            "",
            f"seed {k}",
            lambda k=k: lambda c: np.full((len(c.rows), 1), k),
            lambda c, k=k: k,
        )  # type: ignore[arg-type]
        for k in range(3)
    ]
    entry = fold_by_fold(parts, folds, "random_by_fold", "random")
    for number, cohort in enumerate(folds):
        for part in (cohort, cohort.where((cohort.fold != EVALUATED) | (cohort.rows > 25))):
            assert (entry.features()(part) == number).all()
            assert entry.encoder is not None
            assert entry.encoder(part) == number
    assert entry.identity != fold_by_fold(parts[::-1], folds, "random_by_fold", "random").identity


def test_a_2d_encoder_reads_every_bscan_of_the_field(world: Path, tmp_path: Path) -> None:
    folder = image_encoder(tmp_path / "vit")
    store = PreparedStore.open(config(world, tmp_path).data.store)
    encoder = SliceEncoder(folder)
    rows = np.array([5, 0, 9])
    features = encoder.embed(store, rows, RUNTIME)
    assert features.shape == (3, 32)
    assert features.dtype == np.float32
    np.testing.assert_array_equal(features[1:2], encoder.embed(store, rows[1:2], RUNTIME))
    # one B-scan, again and again: its own feature, no spread; what lies outside the field changes nothing
    voxels = np.repeat(store.read(5)[:1], 8, axis=0)
    box = np.array([0, 8, 0, 20, 0, 32])
    repeated = encoder._volume(voxels, box, RUNTIME)
    np.testing.assert_allclose(repeated[16:], 0, atol=1e-5)
    changed = voxels.copy()
    changed[:, 20:] = 255
    np.testing.assert_array_equal(repeated, encoder._volume(changed, box, RUNTIME))
    np.testing.assert_allclose(
        repeated[:16], encoder._volume(voxels, np.array([0, 1, 0, 20, 0, 32]), RUNTIME)[:16], atol=1e-5
    )
    # white is 1 / .5 - .5 / .5 = 1 in every channel
    seen = []
    encoder.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["pixel_values"]), with_kwargs=True
    )
    encoder._volume(np.full((2, 24, 32), 255, np.uint8), np.array([0, 2, 0, 24, 0, 32]), RUNTIME)
    assert seen[0].shape == (2, 3, 32, 32)
    assert torch.allclose(seen[0], torch.ones(()))
    before = encoder.digest()
    image_encoder(tmp_path / "vit")
    assert SliceEncoder(folder).digest() != before
    weights = load_file(tmp_path / "vit" / "model.safetensors")
    lost = next(name for name in weights if name.endswith("query.weight"))
    del weights[lost]
    save_file(weights, tmp_path / "vit" / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UserError, match=r"expected all weights of the encoder, found no layers.0.attention.q_proj"
    ):
        SliceEncoder(folder)
    (tmp_path / "vit" / "preprocessor_config.json").unlink()
    with pytest.raises(UserError, match=r"found no preprocessor_config.json"):
        SliceEncoder(folder)


def test_a_2d_encoder_gives_tokens_where_they_lie(tmp_path: Path) -> None:
    """Each the mean over its B-scans; blocks are joined, and the image may have another size."""
    folder, rng = image_encoder(tmp_path / "vit"), np.random.default_rng(0)
    scans = torch.from_numpy(rng.integers(0, 255, (2, 1, 32, 32)).astype(np.uint8))
    volume = torch.cat([scans[0].repeat(2, 1, 1), scans[0], scans[1]])[
        None
    ]  # its own size: nothing is resized
    encoder, grid = SliceEncoder(folder), (2, 2, 2)
    tokens = encoder.tokens(volume, grid, RUNTIME)
    with torch.no_grad():
        images = [(scan[None].float() / 255 - 0.5).expand(1, 3, -1, -1) / 0.5 for scan in scans]
        first, second = (encoder.model(pixel_values=one).last_hidden_state[0, 1:] for one in images)
    torch.testing.assert_close(tokens[0], torch.cat([first, (first + second) / 2]))
    several = SliceEncoder(folder, size=64, blocks=(1, 1))
    assert several.tokens(volume, grid, RUNTIME).shape == (1, 8, 32)
    assert several.digest() != encoder.digest()
    with pytest.raises(UserError, match="--image-blocks: expected blocks from 1 to 1, found 2"):
        SliceEncoder(folder, blocks=(2,))


def test_tokens_of_a_masked_autoencoder_lie_in_order(tmp_path: Path) -> None:
    """Hugging Face's class draws an order of the patches though it hides none."""
    from transformers import ViTMAEConfig, ViTMAEModel

    folder = image_encoder(tmp_path / "mae")  # for its preprocessor
    tiny = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ViTMAEModel(ViTMAEConfig(**tiny, image_size=32, mask_ratio=0.0)).save_pretrained(folder)
    encoder = SliceEncoder(folder)
    volume = torch.randint(0, 255, (1, 1, 32, 32), dtype=torch.uint8)
    images = ((volume[0][:, None].float() / 255 - 0.5) / 0.5).expand(-1, 3, -1, -1)
    with torch.no_grad():
        out = encoder.model(pixel_values=images, noise=torch.arange(4.0)[None]).last_hidden_state[:, 1:]
    for _ in range(4):
        torch.testing.assert_close(encoder.tokens(volume, (1, 2, 2), RUNTIME), out)


def test_an_image_model_is_a_yardstick_of_tokens(world: Path, tmp_path: Path) -> None:
    cfg = config(world, tmp_path)
    store = PreparedStore.open(cfg.data.store)
    encoder, tokens = SliceEncoder(image_encoder(tmp_path / "vit")), np.array([[0, 3, -1]])
    row = yardsticks(cfg, store, np.array([4]), RUNTIME, tokens, encoder)[-1]
    assert row.name == "slices"
    assert row.tokens is not None
    assert row.volumes is not None
    whole = encoder.tokens(torch.from_numpy(store.read(4))[None], cfg.grid, RUNTIME).numpy()
    np.testing.assert_allclose(row.tokens(np.array([True]))[0, :2], whole[0, [0, 3]], atol=1e-5)
    assert row.volumes(np.array([True])).shape == (1, 32)


def test_a_row_has_the_name_of_its_run_or_of_a_bare_file() -> None:
    def of(*urls: str) -> list[str]:
        return short_names([cast(Source, SimpleNamespace(url=url)) for url in urls])

    assert of("runs/a/checkpoints/best_probe.pt", "b/last.pt", "public.pt") == ["a", "b", "public.pt"]
    assert of("checkpoints/one.pt") == ["one.pt"]
    assert of("x/a/one.pt", "y/a/one.pt") == ["x/a/one.pt", "y/a/one.pt"]


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


class Counted(nn.Module):
    """An encoder that counts the volumes that go through it, and dies after so many batches."""

    def __init__(self, encoder: nn.Module, dies_after: int | None = None) -> None:
        super().__init__()
        self.encoder, self.dies_after = encoder, dies_after
        self.batches: list[int] = []

    def forward(self, volume: Tensor) -> Tensor:
        if len(self.batches) == self.dies_after:
            raise KeyboardInterrupt
        self.batches.append(len(volume))
        return self.encoder(volume)


@pytest.fixture
def kept(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeptFeatures:
    monkeypatch.setattr("finetuning.features.kept.EVALUATION_BATCH", 4)
    cfg = config(world, tmp_path / "runs" / "a", "data.workers=0")
    store = PreparedStore.open(cfg.data.store)
    return KeptFeatures(Counted(random_encoder(cfg, 0)), cfg, store, RUNTIME)


def batches(kept: KeptFeatures) -> list[int]:
    """Sizes of the batches computed since the last call."""
    assert isinstance(kept.encoder, Counted)
    computed, kept.encoder.batches = kept.encoder.batches, []
    return computed


def test_features_are_computed_once(kept: KeptFeatures, tmp_path: Path) -> None:
    rows = np.array([9, 2, 30, 5, 2, 11])
    first = kept.pooled(rows)
    assert batches(kept) == [4, 1]
    assert first.shape == (6, 96)
    assert first.dtype == np.float32
    assert isinstance(kept.encoder, Counted)
    expected = embed_rows(kept.encoder.encoder, kept.cfg, kept.store, rows, RUNTIME)
    np.testing.assert_allclose(first, expected, atol=1e-5)
    again = replace(kept)
    np.testing.assert_array_equal(again.pooled(rows[::-1]), first[::-1])
    assert batches(kept) == []
    again.pooled(np.array([9, 12]))
    assert batches(kept) == [1]
    assert Path(features_folder(kept.cfg)) == tmp_path / "runs" / "features"


def test_tokens_are_computed_once_and_in_half_precision(kept: KeptFeatures) -> None:
    rows = np.array([3, 0, 7, 8, 1])
    kept.keep_tokens(rows)
    assert batches(kept) == [4, 1]
    tokens, valid = kept.tokens(rows), kept.valid(rows)
    kept.keep_tokens(rows[:3])
    assert batches(kept) == []
    assert tokens.shape == (5, 24, 48)
    assert tokens.dtype == np.float16
    computed = {
        int(r): (t, v) for of, ts, vs in kept.compute(rows) for r, t, v in zip(of, ts, vs, strict=True)
    }
    for row, one, seen in zip(rows, tokens, valid, strict=True):
        np.testing.assert_allclose(one, computed[row][0], atol=2e-3)
        np.testing.assert_array_equal(seen, computed[row][1].bool())


def test_another_encoder_precision_or_volume_has_features_of_its_own(kept: KeptFeatures) -> None:
    rows = np.arange(4)
    first = kept.pooled(rows)
    with torch.no_grad():
        next(kept.encoder.parameters()).view(-1)[0] += 1.0
    changed = replace(kept).pooled(rows)
    assert np.abs(changed - first).max() > 1e-4
    assert batches(kept) == [4, 4]
    other = replace(kept, runtime=replace(RUNTIME, use_bf16=True))
    other.pooled(rows)
    assert batches(kept) == [4]
    for column, value in (("checksum", "00" * 16), ("valid_h1", 16.0), ("intensity_mean", 1.0)):
        store = PreparedStore.open(kept.store.url)
        store.index.loc[2, column] = value
        replace(kept, store=store).pooled(rows)
        assert batches(kept) == [1], column
    replace(kept).pooled(rows)
    assert batches(kept) == []


def test_a_kill_costs_one_batch(kept: KeptFeatures) -> None:
    assert isinstance(kept.encoder, Counted)
    rows = np.arange(12)
    for compute in (kept.pooled, kept.keep_tokens):
        kept.encoder.dies_after = 2
        with pytest.raises(KeyboardInterrupt):
            compute(rows)
        assert batches(kept) == [4, 4]
        kept.encoder.dies_after = None
        compute(rows)
        assert batches(kept) == [4]


def test_a_damaged_file_is_computed_again(kept: KeptFeatures, caplog: pytest.LogCaptureFixture) -> None:
    rows = np.arange(8)
    kept.keep_tokens(rows)
    first, tokens = kept.pooled(rows), kept.tokens(rows)
    batches(kept)
    for kind in ("pooled", "tokens"):
        file = sorted(Path(kept.url, kind).iterdir())[0]
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    np.testing.assert_allclose(kept.pooled(rows), first, atol=1e-5)
    assert batches(kept) == [1]
    np.testing.assert_allclose(kept.tokens(rows), tokens, atol=2e-3)
    assert batches(kept) == [1]
    assert len(caplog.records) >= 2
    assert "its features are computed again" in caplog.text
    caplog.clear()
    file = sorted(Path(kept.url, "tokens").iterdir())[0]
    with np.load(file) as content:  # as it was written before there were seconds
        np.savez(file, features=content["features"])
    np.testing.assert_allclose(kept.tokens(rows), tokens, atol=2e-3)
    assert (batches(kept), caplog.text) == ([], "")
    assert (kept.seconds(rows) > 0, batches(kept)) == (True, [1])
    assert "kept without its processor time; its features are computed again" in caplog.text


def test_features_that_are_no_numbers_are_refused(kept: KeptFeatures) -> None:
    with torch.no_grad():
        for p in kept.encoder.parameters():
            p.fill_(np.nan)
    for compute in (kept.pooled, kept.keep_tokens):
        with pytest.raises(UserError, match="expected finite features of the encoder, found NaN"):
            compute(np.arange(2))
