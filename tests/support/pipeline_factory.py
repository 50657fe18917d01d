"""A small phantom, its store and a run on it, made once per module of tests from the real stages."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evidence.arms import VJEPA2
from data_setup import prepare
from data_setup.phantom import __main__ as phantom
from utils.config.load import load_config
from utils.config.schema import Config

ROOT = Path(__file__).resolve().parents[2]
SMOKE = ROOT / "configs" / "smoke_test.yaml"
# Of a run whose W&B files are read, or could break it: W&B takes longer than the eight steps of such a run.
WITH_WANDB = "wandb.mode=offline"
# after VJEPA2: what the demo has
SURROUNDINGS = (
    *("method.recipe=surroundings", "method.regulariser=none", "method.regulariser_weight=0"),
    *("method.neighbour_weight=0", "method.mask_blocks=null"),
    *("method.context_ratio=null", "method.target_ratio=null"),
)


def make_phantom(root: Path, participants: int = 12, *extra: str) -> Path:
    """Write a phantom tree of small scans in this process; returns its root."""
    phantom.main(
        ["--out", str(root), "--participants", str(participants), "--seed", "0", "--workers", "0", *extra]
    )
    return root


def pipeline_overrides(folder: Path) -> list[str]:
    """Phantom, store and run under one folder; grid 2 x 3 x 4, a step in well under a second."""
    return [
        f"data.gcs_root={folder / 'phantom'}",
        f"data.store={folder / 'store'}",
        f"run.dir={folder / 'run'}",
        "spatial.target_spacing=[0.75,0.096,0.1875]",
        "spatial.image_size=[8,24,32]",
        *VJEPA2,
        "method.predictor_width=64",
        "train.global_batch_size=4",
        "train.per_core_batch_size=4",
        "train.max_steps=8",
        "train.val_every_steps=4",
        "train.ckpt_every_steps=2",
        "train.log_every_steps=1",
        "val.max_volumes=256",
        "data.workers=0",
        "train.use_bf16=false",
        "optim.base_lr=5e-4",
        "wandb.mode=disabled",
    ]


@contextmanager
def stop_after(updates: int | None) -> Iterator[None]:
    """A pre-training in this process is asked to stop after so many updates of the run, as by SIGTERM."""
    from pretraining import train as loop  # here: worker processes import this module, and need no torch

    real = loop.train_step

    def step_then_signal(*arguments: Any) -> Any:
        result = real(*arguments)
        if arguments[5].step + 1 == updates:
            arguments[4].stop_requested = True
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", step_then_signal)
        yield


def make_store(folder: Path) -> None:
    """Phantom and prepared store under the folder."""
    make_phantom(folder / "phantom")
    assert prepare.main(["--config", str(SMOKE), "--workers", "0", *pipeline_overrides(folder)]) == 0


def pipeline_config(folder: Path, *overrides: str) -> Config:
    return load_config(SMOKE, [*pipeline_overrides(folder), *overrides])
