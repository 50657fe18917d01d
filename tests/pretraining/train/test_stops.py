"""A run stops by itself on NaN for good, a target that does not move and a leak, and on no less."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from models.vjepa3d import VJEPA3D
from pretraining.gauges.monitor import FrozenTargetError, LeakError, check_no_leak
from pretraining.train import train
from tests.pretraining.train.runs import METHODS, metrics, weights
from tests.support.model_factory import nano_model, small_config, token_ids, volumes
from tests.support.pipeline_factory import pipeline_config
from utils.checkpoint import CheckpointWriter
from utils.errors import UserError

pytestmark = pytest.mark.usefixtures("small_encoder")


def plant_nan(folder: Path, target: Path, rows: slice) -> None:
    shutil.copytree(folder / "store", target)
    path = target / "index.parquet"
    index = pd.read_parquet(path)
    index.loc[index.index[rows], "intensity_mean"] = float("nan")
    index.to_parquet(path)


def test_a_volume_that_gives_nan_is_skipped_and_counted(folder: Path, tmp_path: Path) -> None:
    plant_nan(folder, tmp_path / "nan_one", slice(0, 3))
    run = tmp_path / "nan_run"
    cfg = pipeline_config(
        folder, f"run.dir={run}", f"data.store={tmp_path / 'nan_one'}", "train.max_steps=12"
    )
    assert train(cfg) == 0
    last = [r for r in metrics(run) if "train/loss" in r][-1]
    assert 0 < last["train/bad_steps"] < 12
    assert "update skipped, loss or gradient not finite: step" in (run / "log.txt").read_text()
    assert all(bool(torch.isfinite(w).all()) for w in weights(run, "step_00000012").values())


def test_nan_for_good_stops_with_the_rows_and_the_checkpoint_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when that checkpoint is still being written."""
    real = CheckpointWriter._write

    def slow(*args: Any) -> None:
        time.sleep(1)
        real(*args)

    monkeypatch.setattr(CheckpointWriter, "_write", slow)
    plant_nan(folder, tmp_path / "nan_all", slice(None))
    overrides = [f"data.store={tmp_path / 'nan_all'}", "train.max_steps=30", "train.max_bad_steps=3"]
    names = r"not finite in 3 updates in a row .*step 2: rows \[.* checkpoint is .*/step_00000002\.pt$"
    with pytest.raises(UserError, match=names):
        train(pipeline_config(folder, f"run.dir={tmp_path / 'nan_stop'}", *overrides))


def test_a_target_that_does_not_move_is_an_alarm(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VJEPA3D, "update_target", lambda *_: None)
    with pytest.raises(FrozenTargetError, match="target is not moving"):
        train(pipeline_config(folder, f"run.dir={tmp_path / 'frozen'}"))


@pytest.mark.parametrize("recipe", ["vjepa2", "methods", "dense", "mlp"])
def test_a_leak_is_an_alarm(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = small_config(recipe)
    model = nano_model(cfg).eval()
    context, target = token_ids(cfg, 2)
    check_no_leak(model, volumes(cfg, 2), context, target)
    monkeypatch.setattr(VJEPA3D, "encode_context", lambda self, view, *_: self.encoder(view))
    with pytest.raises(LeakError, match="context sees targets"):
        check_no_leak(model, volumes(cfg, 2), context, target)


def test_a_momentum_of_one_or_a_skipped_update_is_no_alarm(folder: Path, tmp_path: Path) -> None:
    """The last step of methods has momentum 1 and a validation of its own; no update is expected to move."""
    run = tmp_path / "last_step"
    overrides = [f"run.dir={run}", "train.max_steps=3", "train.val_every_steps=2", *METHODS]
    assert train(pipeline_config(folder, *overrides)) == 0
    plant_nan(folder, tmp_path / "nan_half", slice(0, 12))
    overrides = [f"data.store={tmp_path / 'nan_half'}", "train.val_every_steps=1"]
    overrides += [f"run.dir={tmp_path / 'skips'}"]
    assert train(pipeline_config(folder, *overrides)) == 0


def test_a_leaking_encoder_stops_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = VJEPA3D.encode_context

    def leaks(self, view, context, target, seed):
        return real(self, view, context, target, seed) + view.mean()

    monkeypatch.setattr(VJEPA3D, "encode_context", leaks)
    with pytest.raises(LeakError, match="context sees targets"):
        train(pipeline_config(folder, f"run.dir={tmp_path / 'leak'}"))


def test_skipped_updates_leave_the_initialisation_in_the_target(folder: Path, tmp_path: Path) -> None:
    plant_nan(folder, tmp_path / "nan_most", slice(None))
    overrides = [f"data.store={tmp_path / 'nan_most'}", "train.max_steps=4"]
    run = tmp_path / "nothing_moved"
    assert train(pipeline_config(folder, f"run.dir={run}", *overrides)) == 0
    rows = [r for r in metrics(run) if "train/loss" in r]
    assert rows[-1]["train/bad_steps"] == 4
    assert {r["ema/init_weight"] for r in rows} == {1.0}
