"""Two processes of torchrun fine-tune as one does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.finetune_factory import config, make_world, save_checkpoint
from tests.support.process_factory import ROOT, environment, without_clock
from utils.checkpoint import load_checkpoint


def command(world: Path, run: Path, processes: int) -> list[str]:
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"] if processes > 1 else []
    settings = {
        "model.checkpoint": world / "pretrained",
        "run.dir": run,
        "train.global_batch_size": 8,
        "train.per_core_batch_size": 2,
        "train.epochs": 2,
        "train.use_bf16": "false",
        "train.log_every_steps": 1,
        "optim.base_lr": 1e-3,
        "data.workers": 0,
        "wandb.mode": "disabled",
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    return [
        sys.executable,
        *launcher,
        "-m",
        "finetuning.train",
        "--config",
        "configs/cls_finetune.yaml",
        *words,
    ]


@pytest.fixture(scope="module", autouse=True)
def _two_blocks() -> None:
    """None of them here: other processes read the checkpoint, with sizes of their own."""


@pytest.mark.slow
def test_two_processes_fine_tune_as_one_does(tmp_path: Path) -> None:
    world = make_world(tmp_path / "world")
    (world / "store" / "prepare_report.json").write_text("{}")
    save_checkpoint(config(world, world / "pretrained"))
    for processes in (1, 2):
        done = subprocess.run(
            command(world, tmp_path / f"run{processes}", processes),
            cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    alone, shared = without_clock(tmp_path / "run1"), without_clock(tmp_path / "run2")
    assert [row["step"] for row in alone] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    assert len(shared) == len(alone)
    for row, expected in zip(shared, alone, strict=True):
        assert row == pytest.approx(expected, rel=2e-3), row["step"]
    assert shared[0]["train/loss"] == pytest.approx(alone[0]["train/loss"], rel=1e-6)
    assert shared[0]["train/grad_norm"] == pytest.approx(alone[0]["train/grad_norm"], rel=1e-5)
    heads = [load_checkpoint(str(tmp_path / f"run{n}/checkpoints/head.pt")) for n in (1, 2)]
    torch.testing.assert_close(heads[1]["head"], heads[0]["head"], rtol=0.02, atol=1e-3)
