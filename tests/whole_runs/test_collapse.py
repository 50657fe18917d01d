"""Three planted collapses alarm within 200 steps of the real loop on phantom data; healthy runs never do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from data_setup import prepare
from models import vit3d
from models.predictor import Predictor3D
from models.vjepa3d import VJEPA3D
from pretraining import train as loop
from tests.support.pipeline_factory import SMOKE, make_phantom
from utils.config.load import load_config
from utils.report.run_files import _series

SEEDS = (0, 1, 2)
STEPS = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("collapse")
    make_phantom(folder / "phantom", 24)
    assert prepare.main(["--config", str(SMOKE), "--workers", "2", *overrides(folder)]) == 0
    return folder


def overrides(folder: Path) -> list[str]:
    """The smoke test's recipe and schedule on a grid of 4 x 6 x 8, at the default log interval."""
    return [
        f"data.gcs_root={folder / 'phantom'}",
        f"data.store={folder / 'store'}",
        "spatial.target_spacing=[0.375,0.048,0.09375]",
        "spatial.image_size=[16,48,64]",
        "method.predictor_width=64",
        f"train.max_steps={STEPS}",
        f"train.val_every_steps={STEPS}",
        "train.ckpt_dir=null",
        "data.workers=0",
        "wandb.mode=disabled",
    ]


def run(folder: Path, name: str, seed: int, *more: str) -> tuple[list[tuple[int, str]], dict]:
    """Alarms (step, text) and series of a run of a small encoder."""
    run_dir = folder / f"{name}_{seed}"
    cfg = load_config(SMOKE, [*overrides(folder), f"run.dir={run_dir}", f"seed={seed}", *more])
    assert loop.train(cfg) == 0
    path = run_dir / "metrics.jsonl"
    series, _, alarms = _series(path.read_text(), path)
    measured = {key: [round(v, 3) for _, v in points] for key, points in series.items() if key in SHOWN}
    print(json.dumps({"run": run_dir.name, "alarms": alarms, **measured}))
    log_text = (run_dir / "log.txt").read_text()
    assert ("alarm at step" in log_text) == bool(alarms)
    assert ("no alarm" in log_text) == (not alarms)
    return alarms, series


SHOWN = ("train/rankme", "train/feature_std", "train/volume_share", "train/skill_position", "val/rankme")


@pytest.fixture(autouse=True)
def small_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vit3d.SIZES, "ti", vit3d.Size(4, 96, 3))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_healthy_runs_never_alarm(folder: Path, seed: int) -> None:
    alarms, series = run(folder, "healthy", seed)
    assert alarms == []
    assert {value for name in ("collapse", "leak") for _, value in series[f"alarm/{name}"]} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_gradient_through_the_target_alarms(folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def live_targets(self: VJEPA3D, _: torch.Tensor, view: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raw = self.encoder(view).float()
        features = F.layer_norm(raw, raw.shape[-1:])
        return features, features

    monkeypatch.setattr(VJEPA3D, "compute_targets", live_targets)
    alarms, _ = run(folder, "gradient", seed, "method.ema_base=0.0")
    assert alarms, "no alarm"
    assert alarms[0][1].startswith("features collapse")


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_predictor_that_copies_the_target_alarms(
    folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def identity(self: Predictor3D, context: torch.Tensor, _: object, target: torch.Tensor) -> torch.Tensor:
        unused = sum(0 * p.sum() for p in self.parameters())
        fits = context.shape[1] == target.shape[1]  # not so in validation, which is not planted
        return unused + (context if fits else context[:, :1].expand(-1, target.shape[1], -1))

    real = loop.train_step

    def context_is_target(model, optimizer, batches, *rest):
        planted = [{**b, "context": b["target"], "context_valid": b["target_valid"]} for b in batches]
        return real(model, optimizer, planted, *rest)

    monkeypatch.setattr(Predictor3D, "forward", identity)
    monkeypatch.setattr(loop, "train_step", context_is_target)
    alarms, _ = run(folder, "identity", seed)
    assert alarms, "no alarm"
    assert alarms[0][1].startswith("context sees targets")


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_learning_rate_100_times_too_high_alarms(folder: Path, seed: int) -> None:
    rate = load_config(SMOKE, overrides(folder)).optim.base_lr
    alarms, _ = run(folder, "rate", seed, f"optim.base_lr={100 * rate}")
    assert alarms, "no alarm"
    assert alarms[0][1].startswith("features collapse")
