"""Heads on frozen features: the grid, the choice on validation, the kept features, the head's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetuning.head_file import open_head
from finetuning.train import main
from tests.support.finetune_factory import config, make_world, save_checkpoint

TASK = str(Path(__file__).resolve().parents[2] / "configs" / "cls_linear_probe.yaml")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


def test_command(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = save_checkpoint(config(world, tmp_path / "runs" / "pretrained"))
    run = tmp_path / "runs" / "probe"
    assert main(["--config", TASK, "--checkpoint", url, f"run.dir={run}"]) == 0
    print(capsys.readouterr().out)
    head = open_head(str(run))
    print(head.state["validation"])
    assert 0
