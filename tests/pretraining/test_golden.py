"""Golden losses: 20 steps per recipe, float32 on a CPU. A refactor moves no number.

Regenerate only in a commit that says why: `python -m tests.pretraining.test_golden` writes
tests/golden/NAME.txt of every recipe, `python -m tests.pretraining.test_golden mae` that of one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from pretraining.progress import ema_momentum, learning_rate
from pretraining.step import Update, build_optimizer, train_step
from tests.support.model_factory import nano_model, small_config, uint8_batch
from utils.runtime.single import Runtime

GOLDEN = Path(__file__).parents[1] / "golden"
RECIPES = {
    "vjepa2": ["method.regulariser_weight=0.05"],
    "mae": [],
    "neighbour": ["method.regulariser_weight=0.05"],  # as shipped
    "surroundings": [],
    "methods": ["method.dropout=0.1", "method.drop_path=0.1", "optim.clip_grad_norm=0.01"],
}
STEPS = 20


def losses(name: str) -> list[float]:
    cfg = small_config(name, *RECIPES[name])
    runtime = Runtime(torch.device("cpu"), use_bf16=False)
    model = nano_model(cfg).train()
    optimizer = build_optimizer(model, cfg)
    values = []
    for step in range(STEPS):
        lr, momentum = learning_rate(cfg, step, STEPS), ema_momentum(cfg, step, STEPS)
        batch = uint8_batch(cfg, 16, step)
        result = train_step(model, optimizer, [batch], cfg, runtime, Update(step, lr, momentum))
        values += [float(loss) for loss in (result.loss, result.neighbour) if loss is not None]
    return values


@pytest.mark.parametrize("name", list(RECIPES))
def test_losses_have_not_moved(name: str) -> None:
    golden = [float(line) for line in (GOLDEN / f"{name}.txt").read_text().split()]
    assert losses(name) == pytest.approx(golden, rel=1e-4)


if __name__ == "__main__":
    for recipe in sys.argv[1:] or RECIPES:
        (GOLDEN / f"{recipe}.txt").write_text("".join(f"{value:.8f}\n" for value in losses(recipe)))
