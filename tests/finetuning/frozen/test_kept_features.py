"""Features are computed once for an encoder, its precision and a volume, and kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from data_setup.store.reader import PreparedStore
from finetuning.features.kept import KeptFeatures, features_folder, random_encoder
from tests.support.finetune_factory import RUNTIME, config, embed_rows
from utils.errors import UserError


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
