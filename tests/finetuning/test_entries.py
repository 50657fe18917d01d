"""Rows before anything is computed: random encoders chosen on validation, image encoders, names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import EVALUATED, Cohort
from finetuning.cohort.metrics import observed
from finetuning.cohort.source import Source
from finetuning.features import entries
from finetuning.features.entries import Entry, Volumes, best_random, fold_by_fold, probe, short_names
from finetuning.features.slices import SliceEncoder
from finetuning.features.yardsticks import yardsticks
from models.probes.participants import fit_logistic
from tests.support.finetune_factory import RUNTIME, assert_no_gain, config, image_encoder, noise, three_folds
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
