"""Whole runs with the XLA engine in this process, on four devices of a CPU: `make test-xla`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from models import vit3d
from pretraining import train as loop
from pretraining.gauges import validation
from tests.support.pipeline_factory import pipeline_config, stop_after
from tests.support.process_factory import losses
from tests.support.xla_counters import count_compiled, count_fallbacks, count_read_back
from tests.support.xla_factory import assert_same_metrics
from utils.checkpoint import list_steps
from utils.errors import EXIT_STOPPED
from utils.runtime.open import open_runtime

pytestmark = [pytest.mark.xla, pytest.mark.timeout(3600)]
STEPS = 12
GLOBAL = ("train.global_batch_size=8", "train.per_core_batch_size=8")
SPREAD = ("train.global_batch_size=8", "train.per_core_batch_size=1")  # four devices: two micro-batches


@pytest.fixture(scope="module")
def small() -> Iterator[None]:
    """Encoders of this process are small, so that a program compiles within seconds. And the engine is opened
    before the first backward pass of plain torch: autograd would not find it later.
    """
    open_runtime(use_bf16=False, data_timeout_s=60.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vit3d.SIZES, "ti", vit3d.Size(2, 48, 2))
        yield


def train(folder: Path, name: str, engine: str, stop: int | None = None) -> Path:
    """A run in this process, which asks for the signal's end after so many steps; returns its directory."""
    own = GLOBAL if engine == "torch" else SPREAD
    cfg = pipeline_config(folder, f"run.dir={folder / name}", f"train.max_steps={STEPS}", *own)
    with pytest.MonkeyPatch.context() as patch, stop_after(stop):
        if engine == "torch":
            patch.delenv("PJRT_DEVICE")
        assert loop.train(cfg) == (EXIT_STOPPED if stop else 0)
    return folder / name


@pytest.fixture(scope="module")
def plain(folder: Path, small: None) -> Path:
    return train(folder, "plain", "torch")


@pytest.mark.parametrize(("first", "second"), [("xla", "torch"), ("torch", "xla")])
def test_a_run_goes_on_with_the_other_engine(first: str, second: str, folder: Path, plain: Path) -> None:
    name = f"{first}_then_{second}"
    run = train(folder, name, first, stop=6)
    assert list_steps(str(run / "checkpoints"))[-1] == 6
    assert train(folder, name, second) == run
    assert list(losses(run)) == list(range(1, STEPS + 1))
    assert_same_metrics(run, plain)


def test_no_program_is_compiled_and_nothing_read_back_between_two_lines_of_the_log(
    folder: Path, small: None
) -> None:
    """Steps 3 to 50, with logs, validations and checkpoints between them: the first validation, before the
    first step, compiles what all of them need but the probes, and the second one those.
    """
    counts: dict[int, tuple[int, int, dict[str, int]]] = {}
    evaluations: list[int] = []
    real_step, real_validate = loop.train_step, validation.validate

    def counted_step(*arguments: Any) -> Any:
        counts[arguments[5].step] = count_compiled(), count_read_back(), count_fallbacks()
        return real_step(*arguments)

    def counted_validate(*arguments: Any, **options: Any) -> Any:
        before = count_compiled()
        result = real_validate(*arguments, **options)
        evaluations.append(count_compiled() - before)
        return result

    every = "train.log_every_steps=10", "train.val_every_steps=20", "train.ckpt_every_steps=20"
    # a batch of its own, so that nothing is there from the other tests
    overrides = "train.per_core_batch_size=2", "train.max_steps=52", *every
    # numbers that change from step to step: learning rate and momentum
    overrides += "method.regulariser=vicreg", "method.regulariser_weight=0.05"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", counted_step)
        patch.setattr(validation, "validate", counted_validate)
        cfg = pipeline_config(folder, f"run.dir={folder / 'counted'}", *SPREAD, *overrides)
        assert loop.train(cfg) == 0
    assert len(evaluations) == 4
    assert evaluations[0] > 0
    assert counts[50][0] - counts[3][0] == evaluations[1]
    assert evaluations[2:] == [0, 0]
    quiet = [step for step in range(3, 50) if (step + 1) % 10]
    assert len(quiet) == 42
    for step in quiet:
        assert counts[step + 1][1:] == counts[step][1:], f"step {step}"
