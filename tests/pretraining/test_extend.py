"""A run that is made longer: refused without a word of how, and then the same whether interrupted or not."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from pretraining import train as loop
from pretraining.train import train
from tests.support.pipeline_factory import pipeline_config
from utils.checkpoint import load_checkpoint
from utils.errors import UserError

pytestmark = pytest.mark.usefixtures("small_encoder")


def values(run: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


def test_a_longer_run_needs_a_word_and_is_exact_across_a_stop(folder: Path, tmp_path: Path) -> None:
    small = ("train.val_every_steps=100", "optim.warmup_ratio=0.25", "wandb.mode=disabled")
    run = f"run.dir={tmp_path / 'run'}"
    assert train(pipeline_config(folder, run, *small, "train.max_steps=4")) == 0
    with pytest.raises(UserError, match=r"at most 4 updates.*found 8.*optim\.extend"):
        train(pipeline_config(folder, run, *small, "train.max_steps=8"))
    longer = (*small, "optim.extend=cooldown_from_here")
    assert train(pipeline_config(folder, run, *longer, "train.max_steps=8")) == 0
    rates = values(tmp_path / "run", "train/lr")
    assert len(rates) == 8
    assert all(a >= b for a, b in pairwise(rates))

    # the same, stopped at step 6, as SIGTERM does it; the checkpoint knows the extension to 8
    other = f"run.dir={tmp_path / 'other'}"
    assert train(pipeline_config(folder, other, *small, "train.max_steps=4")) == 0
    calls = 0
    real = loop.next_or_stop

    def stop_after_two(*args):
        nonlocal calls
        calls += 1
        return None if calls > 2 else real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "next_or_stop", stop_after_two)
        train(pipeline_config(folder, other, *longer, "train.max_steps=8"))
    assert (
        train(pipeline_config(folder, other, *small, "train.max_steps=8")) == 0
    )  # nothing is left to decide
    states = [
        load_checkpoint(str(tmp_path / name / "checkpoints" / "step_00000008.pt"))
        for name in ("run", "other")
    ]
    for name, value in states[0]["model"].items():
        assert torch.equal(value, states[1]["model"][name]), name
    assert states[0]["progress"]["schedule"] == {"total": 4, "extensions": [[4, 8, "cooldown_from_here"]]}
