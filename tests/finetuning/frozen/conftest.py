"""A world of volumes, a pre-trained checkpoint and a probe on it, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetuning.train import main
from tests.finetuning.frozen.probing import QUICK, TASK
from tests.support.finetune_factory import config, save_checkpoint


@pytest.fixture(scope="module")
def checkpoint(world: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(config(world, tmp_path_factory.mktemp("pretrained"), "data.workers=0"))


@pytest.fixture(scope="module")
def probe(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a linear probe, trained by the command."""
    run = tmp_path_factory.mktemp("runs") / "probe"
    assert main(["--config", TASK, "--checkpoint", checkpoint, f"run.dir={run}", *QUICK]) == 0
    return run
