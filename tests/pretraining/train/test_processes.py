"""Of several processes, other settings are refused, and one that fails leaves with a message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pretraining import train as loop
from pretraining.resume import restore
from pretraining.run import open_run
from tests.support.pipeline_factory import pipeline_config
from utils.errors import UserError
from utils.run import guard
from utils.runtime.processes import Group
from utils.runtime.single import Runtime

pytestmark = pytest.mark.usefixtures("small_encoder")


class OfTwo(Group):
    """The first of two processes; `change` says how what the other one sends differs."""

    size = 2
    messages: list[tuple[str, int]]

    def __init__(self, change: Callable[[Any], Any] = lambda value: value) -> None:
        self.change, self.messages = change, []

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, self.change(value)]

    def leave_message(self, text: str, exit_code: int) -> None:
        self.messages.append((text, exit_code))


@pytest.mark.parametrize("differs", [True, False])
def test_processes_with_other_settings_are_refused_before_they_run(
    folder: Path, tmp_path: Path, differs: bool
) -> None:
    def change(value: Any) -> Any:
        return {**value, "optim.base_lr": "0.1"} if differs and isinstance(value, dict) else value

    runtime = Runtime(torch.device("cpu"), use_bf16=False, group=OfTwo(change))
    changes = f"run.dir={tmp_path / 'two'}", "train.per_core_batch_size=2"
    run = open_run(pipeline_config(folder, *changes), runtime)
    if differs:
        with pytest.raises(
            UserError, match=r"optim.base_lr: expected .* on process 0, found 0.1 on process 1"
        ):
            restore(run, loop.open_gauges(run))
    else:
        assert restore(run, loop.open_gauges(run)).step == 0


@pytest.mark.parametrize("error", [ValueError("a fault"), UserError("a mistake")])
def test_a_failing_process_of_several_leaves_at_once_with_a_message(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(guard, "leave", codes.append)
    group = OfTwo()
    guard._leave_word(Runtime(torch.device("cpu"), use_bf16=False, group=group), type(error), error, None)
    if isinstance(error, UserError):  # utils.cli says it in one line, and leaves
        assert error.leaves_at_once
        assert (group.messages, codes) == ([("a mistake", 2)], [])
    else:
        assert (group.messages, codes) == ([("ValueError: a fault", 1)], [1])
