"""The embed command: right features, right rows, bad files by name, and the same folder after a kill."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import zarr

from data_setup.store.format import chunk_key
from data_setup.store.reader import PreparedStore
from finetuning.embed import main
from finetuning.pooled import embed_rows, pretrained_encoder
from tests.support.finetune_factory import RUNTIME, config, make_world, save_checkpoint
from utils.checkpoint import load_checkpoint
from utils.errors import ConfigError, UserError

PEOPLE = {"train": 2, "val": 1, "test": 2}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"), PEOPLE)


@pytest.fixture(scope="module")
def checkpoint(world: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    cfg = config(world, tmp_path_factory.mktemp("pretrained"))
    return save_checkpoint(cfg, participants=["train00", "train01"])


def features(table: pd.DataFrame) -> np.ndarray:
    """Mean and standard deviation [n, 2E]."""
    return np.concatenate([np.stack(table[name].to_list()) for name in ("mean", "std")], axis=1)


@pytest.fixture(scope="module")
def done(world: Path, checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole store, patches too."""
    out = tmp_path_factory.mktemp("done") / "features"
    words = ["--checkpoint", checkpoint, "--store", str(world / "store"), "--out", str(out), "--patches"]
    assert main(words) == 0
    return out


def test_rows_and_features_are_those_of_the_store(world: Path, checkpoint: str, done: Path) -> None:
    store = PreparedStore.open(str(world / "store"))
    table = pd.read_parquet(done / "features.parquet")
    pd.testing.assert_frame_equal(table[list(store.index)], store.index.reset_index(drop=True))
    assert table["seen_in_pretraining"].tolist() == [True] * 4 + [False] * 6
    cfg, state = config(world, world / "run"), load_checkpoint(checkpoint)
    expected = embed_rows(pretrained_encoder(cfg, state, checkpoint), cfg, store, store.kept, RUNTIME)
    np.testing.assert_allclose(features(table), expected, atol=1e-5)
