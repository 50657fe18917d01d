"""Models in training for the tests of the XLA engine, and comparisons with plain torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from data_setup.loader import Batch
from models.engine_kernels import choose_kernels
from pretraining.gauges.monitor import Gauges
from pretraining.gauges.skill import SkillGauge
from pretraining.progress import ema_momentum, learning_rate
from pretraining.step import Update, Watch, build_optimizer, train_step
from tests.support.model_factory import nano_model, uint8_batch
from tests.support.process_factory import losses, metrics
from utils.checkpoint import to_host
from utils.config.schema import Config
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime

BATCH, STEPS, TOTAL = 16, 20, 40
BAD_STEP = STEPS  # the step after those whose losses are compared has no finite loss


def open_xla() -> Runtime:
    """The engine, opened before the first backward pass of plain torch: autograd would not find it later."""
    assert os.environ.get("PJRT_DEVICE") == "CPU", "make test-xla sets it"
    assert os.environ.get("CPU_NUM_DEVICES") == "4", "make test-xla sets it"
    return open_runtime(use_bf16=False, data_timeout_s=60.0)


class Run(NamedTuple):
    """A model in training, and what its steps said."""

    cfg: Config
    model: Any
    optimizer: torch.optim.AdamW
    gauges: Gauges
    runtime: Runtime

    @classmethod
    def begin(cls, cfg: Config, runtime: Runtime) -> Run:
        model = nano_model(cfg).to(runtime.device).train()
        skill = SkillGauge.of_model(model, runtime.device)
        gauges = Gauges(
            skill, BATCH, runtime.group, runtime.to_torch, has_fixed_targets=model.recipe.has_fixed_targets
        )
        run = cls(cfg, model, build_optimizer(model, cfg), gauges, runtime)
        choose_kernels(model, cfg, runtime)
        runtime.mark_step()
        return run

    def steps(self, runtime: Runtime, steps: range, micro: int = 1) -> list[torch.Tensor]:
        losses = []
        for step in steps:
            lr, momentum = learning_rate(self.cfg, step, TOTAL), ema_momentum(self.cfg, step, TOTAL)
            batches = [runtime.to_device(b) for b in micro_batches(self.cfg, step, micro)]
            self.gauges.begin(measure=False)
            parts = self.model, self.optimizer, batches, self.cfg, runtime, Update(step, lr, momentum)
            losses.append(train_step(*parts, Watch(self.gauges.observe)).loss)
            self.gauges.finish()
            runtime.mark_step()
        return losses

    def state(self) -> dict[str, Any]:
        parts = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "gauge": self.gauges.state_dict(),
        }
        return to_host(parts)


def micro_batches(cfg: Config, step: int, micro: int) -> list[Batch]:
    batch = uint8_batch(cfg, BATCH, step)
    batch["row"] = batch["row"] + BATCH * step
    if step == BAD_STEP:
        batch["std"] = torch.zeros(BATCH)
    size = BATCH // micro
    return [{k: v[i * size : (i + 1) * size] for k, v in batch.items()} for i in range(micro)]


def assert_same_weights(state: dict[str, Any], expected: dict[str, Any]) -> None:
    """Weights, buffers and moments, bit for bit."""
    torch.testing.assert_close(state["model"], expected["model"], rtol=0, atol=0)
    for name, values in expected["optimizer"]["state"].items():
        torch.testing.assert_close(state["optimizer"]["state"][name], values, rtol=0, atol=0)


def assert_close(state: dict[str, Any], expected: dict[str, Any]) -> None:
    """Weights and buffers, moments and step counts, and the ring of targets, within rounding."""
    assert state["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    # a bias before batch normalisation has no gradient but rounding, of which AdamW makes steps
    weights, wanted = (
        {name: value for name, value in s["model"].items() if name != "predictor.fc1.bias"}
        for s in (state, expected)
    )
    torch.testing.assert_close(weights, wanted, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        state["optimizer"]["state"], expected["optimizer"]["state"], rtol=1e-2, atol=1e-5
    )
    ring, other = state["gauge"]["skill"], expected["gauge"]["skill"]
    assert torch.equal(ring["row"], other["row"])
    assert torch.equal(ring["valid"], other["valid"])
    assert ring["added"] == other["added"]
    torch.testing.assert_close(ring["ring"], other["ring"], rtol=1e-2, atol=1e-3)


def assert_same_metrics(run: Path, expected: Path) -> None:
    """Losses of every step, and what a validation and the gauges say, but for rounding."""
    measured, wanted = losses(run), losses(expected)
    assert list(measured) == list(wanted)
    assert measured == pytest.approx(wanted, rel=1e-3)
    assert [measured[s] for s in range(1, 6)] == pytest.approx([wanted[s] for s in range(1, 6)], rel=1e-4)
    for row, other in zip(metrics(run), metrics(expected), strict=True):
        for key in {"val/loss", "val/rankme", "train/rankme", "train/skill_position", "ema/drift"} & set(row):
            is_known = other[key] is not None
            place = row["step"], key
            assert row[key] == (pytest.approx(other[key], rel=0.01) if is_known else None), place
