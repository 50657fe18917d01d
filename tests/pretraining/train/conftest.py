"""Uninterrupted runs of eight steps, one of each recipe, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretraining.train import train
from tests.pretraining.train.runs import METHODS
from tests.support.pipeline_factory import WITH_WANDB, pipeline_config


@pytest.fixture(scope="module")
def finished(folder: Path, small_encoder: None) -> Path:
    """An uninterrupted run of 8 steps."""
    run = folder / "finished"
    assert train(pipeline_config(folder, f"run.dir={run}", WITH_WANDB)) == 0
    return run


@pytest.fixture(scope="module")
def finished_methods(folder: Path, small_encoder: None) -> Path:
    """The same of the other recipe."""
    run = folder / "finished_methods"
    assert train(pipeline_config(folder, f"run.dir={run}", *METHODS)) == 0
    return run
