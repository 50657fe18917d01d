"""Two XLA hosts share a run: both execute the same programs from start to end, which SPMD needs, and both
together are one run. `make test-xla`; how one machine plays two hosts is in tests/support/two_hosts.py.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from models import vit3d
from pretraining import train as loop
from tests.support.pipeline_factory import SMOKE, pipeline_config, pipeline_overrides
from tests.support.process_factory import Running, free_port
from tests.support.xla_factory import assert_same_metrics, open_xla
from utils.checkpoint import list_steps
from utils.errors import EXIT_STOPPED

pytestmark = [pytest.mark.xla, pytest.mark.timeout(3600)]
STOP, STEPS, BATCH = 9, 12, 16
EVERY = "train.val_every_steps=4", "train.ckpt_every_steps=3", "wandb.mode=disabled"
GLOBAL = f"train.global_batch_size={BATCH}", f"train.max_steps={STEPS}", *EVERY
PROGRAM = re.compile(r"^(Execution|Compilation) Analysis:   Graph Hash: (\w+)\n.*Graph Inputs: (\d+)", re.M)


@dataclass(frozen=True)
class Host:
    """What one host printed, and its programs in order: compiled or executed, hash, inputs."""

    printed: dict[str, list[Any]]
    programs: list[tuple[str, str, str]]


def start_hosts(folder: Path, name: str, *overrides: str, stop: int = 0) -> list[Host]:
    """Run two hosts to their end, or to the SIGTERM that host 1 gets after update `stop`."""
    port, hosts = free_port(), []
    for rank in range(2):
        place = folder / f"{name}_{rank}"
        debug = "PT_XLA_DEBUG_LEVEL=2", f"PT_XLA_DEBUG_FILE={place}.programs"
        module = sys.executable, "-m", "tests.support.two_hosts", str(rank), str(port), str(stop)
        config = "--config", str(SMOKE), *pipeline_overrides(folder), *GLOBAL, "train.per_core_batch_size=1"
        hosts.append(Running(["env", *debug, *module, *config, *overrides], place))
    try:
        for host in hosts:
            assert host.wait() == (EXIT_STOPPED if stop else 0), host.output[-5000:]
    finally:
        Running.end_all()
    return [read_host(host) for host in hosts]


def read_host(host: Running) -> Host:
    printed: dict[str, list[Any]] = {}
    for line in host.output.splitlines():
        if line.startswith("{"):
            ((key, value),) = json.loads(line).items()
            printed.setdefault(key, []).append(value)
    return Host(printed, PROGRAM.findall(host.run.with_suffix(".programs").read_text()))


def assert_same_programs(hosts: list[Host]) -> None:
    """From start to end, and no execution is missing from the list."""
    first, second = hosts
    # the first difference says more than unequal lengths, which are compared below
    for place, (one, other) in enumerate(zip(first.programs, second.programs, strict=False)):
        assert one == other, f"program {place} of {len(first.programs)} and {len(second.programs)}"
    assert len(first.programs) == len(second.programs)
    for host in hosts:
        executed = sum(kind == "Execution" for kind, *_ in host.programs)
        assert host.printed["executed"] == [executed]
        assert executed > 100


@pytest.fixture(scope="module")
def fresh(folder: Path) -> list[Host]:
    """With a trace, validations and checkpoints; host 1 hears SIGTERM, and both stop."""
    return start_hosts(folder, "fresh", "run.profile=true", stop=STOP)


@pytest.fixture(scope="module")
def resumed(folder: Path, fresh: list[Host]) -> list[Host]:
    return start_hosts(folder, "resumed")


def test_the_hosts_run_the_same_programs(fresh: list[Host], resumed: list[Host]) -> None:
    assert_same_programs(fresh)
    assert_same_programs(resumed)


def test_the_hosts_are_one_run(
    folder: Path, fresh: list[Host], resumed: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mesh holds the devices in the order of the hosts; their slices, one behind the other, are the
    batches of a single process of plain torch, and so are the losses and what validations say.
    """
    assert [host.printed["mesh"] for host in (*fresh, *resumed)] == [[list(range(8))]] * 4
    open_xla()  # before the first backward pass of plain torch
    monkeypatch.delenv("PJRT_DEVICE")
    monkeypatch.setitem(vit3d.SIZES, "ti", vit3d.Size(2, 48, 2))
    batches: list[list[list[int]]] = []
    real_next = loop.next_or_stop

    def next_or_stop(*arguments: Any) -> Any:
        micro_batches = real_next(*arguments)
        batches.append([batch["row"].tolist() for batch in micro_batches])
        return micro_batches

    monkeypatch.setattr(loop, "next_or_stop", next_or_stop)
    plain = folder / "plain"
    cfg = pipeline_config(folder, f"run.dir={plain}", *GLOBAL, "train.per_core_batch_size=8")
    assert loop.train(cfg) == 0
    assert [len(start[0].printed["rows"]) for start in (fresh, resumed)] == [STOP, STEPS - STOP]
    first, second = (fresh[rank].printed["rows"] + resumed[rank].printed["rows"] for rank in range(2))
    together = [
        [one + other for one, other in zip(*micro_batches, strict=True)]
        for micro_batches in zip(first, second, strict=True)
    ]
    assert together == batches
    assert_same_metrics(folder / "run", plain)


def test_the_same_programs_with_weights_of_another_run(folder: Path, fresh: list[Host]) -> None:
    """The file lacks the new run's predictor, so part of the weights stay as they were drawn."""
    checkpoints = folder / "run" / "checkpoints"
    weights = checkpoints / f"step_{list_steps(str(checkpoints))[-1]:08d}.pt"
    options = f"method.init_from={weights}", "method.predictor_depth=1"
    few = "train.max_steps=2", "train.val_every_steps=2", "train.ckpt_every_steps=1"
    assert_same_programs(start_hosts(folder, "started", f"run.dir={folder / 'started'}", *options, *few))


def test_a_second_start_finds_its_programs_among_those_of_the_first(
    fresh: list[Host], resumed: list[Host]
) -> None:
    """All but the trial step: the optimizer's counts of 0 are constants in that of a fresh run."""
    for first, second in zip(fresh, resumed, strict=True):
        ((kept, new),) = first.printed["kept"]
        assert kept == 0 < new
        ((kept, new),) = second.printed["kept"]
        assert kept > 20
        assert new == 1
