"""Every recipe goes through the same loop, with its own momentum, covariance and alarms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from data_setup.store.reader import PreparedStore
from finetuning.pooled import check_fit, pretrained_encoder
from pretraining import train as loop
from pretraining.gauges.alarms import NEIGHBOUR_RANK_FALL
from pretraining.gauges.validation import validate
from pretraining.run import open_run
from pretraining.schedules import ema_momentum
from pretraining.train import train
from tests.pretraining.train.runs import METHODS, metrics
from tests.support.pipeline_factory import pipeline_config
from utils.checkpoint import load_checkpoint
from utils.errors import UserError
from utils.runtime.single import Runtime

pytestmark = pytest.mark.usefixtures("small_encoder")


@pytest.mark.parametrize("predictor", ["null", "mlp"])
def test_vjepa2_with_parts_of_another_recipe_runs_the_same_loop(
    folder: Path, tmp_path: Path, predictor: str
) -> None:
    run = tmp_path / f"dense_{predictor}"
    parts = ("method.context=dense", f"method.predictor={predictor}", "method.loss=normalised_l2")
    cfg = pipeline_config(folder, f"run.dir={run}", *parts)
    assert train(cfg) == 0
    assert np.isfinite([r["train/loss"] for r in metrics(run) if "train/loss" in r]).all()
    url = str(run / "checkpoints" / "step_00000008.pt")
    state = load_checkpoint(url)
    assert pretrained_encoder(cfg, state, url).mask_token is not None
    with pytest.raises(UserError, match=r"method\.context: expected None of the configuration, found dense"):
        check_fit(pipeline_config(folder), PreparedStore.open(str(folder / "store")), state, url)


@pytest.mark.parametrize("recipe", ["vjepa2", "mae"])
def test_the_alarms_know_whether_the_targets_are_voxels(
    folder: Path, tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, real = [], loop.Gauges
    monkeypatch.setattr(loop, "Gauges", lambda *a, **k: built.append(real(*a, **k)) or built[-1])
    mae = ("method.recipe=mae", "method.mae_target=plain", "method.regulariser=none")
    changes = (*mae, "method.regulariser_weight=0") if recipe == "mae" else ()
    run = tmp_path / f"alarms_{recipe}"
    assert train(pipeline_config(folder, f"run.dir={run}", "train.max_steps=1", *changes)) == 0
    assert [g.alarms.has_fixed_targets for g in built] == [recipe == "mae"]
    assert [g.alarms.rank_fall for g in built] == [NEIGHBOUR_RANK_FALL]


def test_the_methods_recipe_runs_the_same_loop(finished_methods: Path) -> None:
    losses = [r["train/loss"] for r in metrics(finished_methods) if "train/loss" in r]
    assert np.isfinite(losses).all()
    assert len(losses) == 8


def test_an_update_uses_its_own_momentum(folder: Path, finished_methods: Path) -> None:
    """Update s moves the target by the momentum of s, not by that of the update before."""
    cfg = pipeline_config(folder, *METHODS)
    rows = {r["step"]: r for r in metrics(finished_methods) if "train/loss" in r}
    expected = [ema_momentum(cfg, step, 8) for step in range(8)]
    assert [rows[done]["train/ema_momentum"] for done in range(1, 9)] == pytest.approx(expected, abs=1e-12)


def test_an_update_has_its_share_of_the_covariance(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, shares = loop.train_step, []

    def step_and_note(*args):
        shares.append(args[5].covariance_share)
        return real(*args)

    monkeypatch.setattr(loop, "train_step", step_and_note)
    keys = "optim.warmup_ratio=0.25", "method.regulariser=vicreg", "method.regulariser_weight=0.05"
    overrides = f"run.dir={tmp_path / 'ramp'}", *keys, "method.covariance_ramp=0.5", "train.max_steps=8"
    assert train(pipeline_config(folder, *overrides)) == 0
    assert shares == [0, 0, 0, 0.25, 0.5, 0.75, 1, 1]


def test_validation_leaves_the_model_in_training_mode(folder: Path) -> None:
    cfg = pipeline_config(folder)
    run = open_run(cfg, Runtime(torch.device("cpu"), use_bf16=False))
    validate(run)
    assert run.model.training
