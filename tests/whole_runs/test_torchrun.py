"""torchrun: two processes are one run. The same losses, files, decisions and end, whoever is hit or dies."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch

from data_setup.store.reader import PreparedStore
from pretraining import train as loop
from pretraining.run import open_rows
from tests.support.pipeline_factory import ROOT, WITH_WANDB, pipeline_config
from tests.support.process_factory import (
    PLANTED,
    SPOT_S,
    Running,
    command,
    documented_nodes,
    free_port,
    is_running,
    loader_workers,
    losses,
    metrics,
    run_to_end,
    steps_logged,
    weights,
    worker_of_rank,
)
from tests.support.wandb_reader import run_ids
from utils.checkpoint import list_steps
from utils.errors import EXIT_STOPPED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
STEPS = 12
LIMIT_S = 120.0  # for a start of two processes, on a machine that is busy with other things
TWO = (f"train.max_steps={STEPS}", "train.per_core_batch_size=2")
ONE_SET = (*TWO, WITH_WANDB)  # whose files are counted
ONE = (f"train.max_steps={STEPS}",)
RECIPES = {"vjepa2": (), "mae": ("method.recipe=mae",)}  # all of them: tests/utils/test_group.py
FILES = {"config.yaml", "log.txt", "metrics.jsonl", "prepare_report.json", "provenance.json", "wandb_id.txt"}


@pytest.fixture(autouse=True)
def no_run_stays() -> Iterator[None]:
    yield
    Running.end_all()


def train_alone(folder: Path, run: Path, *overrides: str, ends_with: int = 0) -> None:
    """One process, one thread, as torchrun's have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert loop.train(pipeline_config(folder, f"run.dir={run}", *overrides)) == ends_with
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    """An uninterrupted run of one process."""
    train_alone(folder, folder / "alone", *ONE)
    return folder / "alone"


def assert_same_numbers(run: Path, other: Path) -> None:
    """Every metric of every line, but for the clock; what is not finite is text."""
    for row, expected in zip(metrics(run), metrics(other), strict=True):
        timed = {key for key in row.keys() | expected.keys() if key.startswith("perf/")}
        assert row.keys() - timed == expected.keys() - timed
        for key in row.keys() - timed:
            if expected[key] is None or isinstance(expected[key], str):
                assert row[key] == expected[key], (row["step"], key)
            elif key.endswith("/loss"):
                assert row[key] == pytest.approx(expected[key], rel=1e-5), (row["step"], key)
            else:
                assert row[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-6), (row["step"], key)


def assert_one_set_of_files(run: Path) -> None:
    assert {p.name for p in run.iterdir() if p.is_file()} == FILES
    assert {p.name for p in run.iterdir() if p.is_dir()} == {"checkpoints", "snapshots", "wandb"}
    assert len(run_ids(run)) == 1
    assert list_steps(str(run / "checkpoints"))[-1] == STEPS


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_processes_have_the_losses_of_one(
    folder: Path, tmp_path: Path, recipe: str, request: pytest.FixtureRequest
) -> None:
    one, two = tmp_path / f"one_{recipe}", tmp_path / f"two_{recipe}"
    if recipe == "vjepa2":
        one = request.getfixturevalue("alone")
    else:
        train_alone(folder, one, *ONE, *RECIPES[recipe])
    overrides = (f"run.dir={two}", *ONE_SET, *RECIPES[recipe])
    if recipe == "mae":  # on what could be two machines
        nodes = [Running(argv, two) for argv in documented_nodes(folder, *overrides)]
        assert [node.wait() for node in nodes] == [0, 0], nodes[0].output[-5000:]
        output = nodes[0].output
    else:
        output = run_to_end(command(folder, *overrides, processes=2), two)
    assert "2 per device x 2 processes x 1 accumulated" in output
    assert output.count("finished at step") == 1  # the second process is silent
    assert len(metrics(two)) > STEPS
    assert_same_numbers(two, one)
    assert_one_set_of_files(two)
    assert len(list((two / "wandb").glob("offline-run-*"))) == 1


def test_two_one_two_processes_over_resumes(
    folder: Path, tmp_path: Path, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both stops by SIGTERM, the first to the second process only."""
    run = tmp_path / "two_one_two"
    two = command(folder, f"run.dir={run}", *ONE_SET, processes=2)
    running = Running(two, run)
    running.wait_for_step(2)
    os.kill(worker_of_rank(running.process.pid, 1), signal.SIGTERM)
    assert running.wait(SPOT_S) == 1, running.output[-3000:]  # torchrun's, whatever its processes end with
    first = list_steps(str(run / "checkpoints"))[-1]
    assert first == max(losses(run)) < STEPS - 3
    assert f"stopped by SIGTERM at step {first} of {STEPS}; run the same command again" in running.output

    real = loop.train_step

    def step_then_signal(*args):
        if args[5].step == first + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    monkeypatch.setattr(loop, "train_step", step_then_signal)
    train_alone(folder, run, *ONE, WITH_WANDB, ends_with=EXIT_STOPPED)
    assert list_steps(str(run / "checkpoints"))[-1] == first + 2
    run_to_end(two, run)
    assert f"resuming from step {first + 2}" in (run / "log.txt").read_text()
    assert_same_numbers(run, alone)
    assert_one_set_of_files(run)


def documented_rule(argv: list[str], rank: int | None = None, port: int = 0) -> list[str]:
    """The restart rule of docs/guides/unattended.md with short sleeps, and a rank on one of two hosts."""
    page = (ROOT / "docs" / "guides" / "unattended.md").read_text()
    (rule,) = re.findall(r"^```\n(until python -m pretraining\.train .*?^done\n)```$", page, re.M | re.S)
    shell = 'argv=("$@")\npython() { "${argv[@]}"; }\nsleep() { command sleep 1; }\n' + rule
    place = f"RANK={rank} WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}".split()
    return ["env", *(place if rank is not None else []), "bash", "-c", shell, "rule", *argv]


def test_the_documented_rule_restarts_two_hosts_to_their_end_and_leaves_a_finished_run_alone(
    folder: Path, tmp_path: Path, alone: Path
) -> None:
    """Host 1 is killed; later it is frozen, and host 0 waits in a collective until its watchdog ends it."""
    run = tmp_path / "hosts"
    argv = command(folder, f"run.dir={run}", *TWO, module=PLANTED)
    planted = {"pause_s": 0.3, "stall_s": 15, "data_s": 10}
    port = free_port()
    hosts = [
        Running(documented_rule(argv, rank, port), tmp_path / f"host_{rank}", planted) for rank in range(2)
    ]
    hosts[0].wait_for(lambda: steps_logged(run) >= 3, LIMIT_S)
    os.kill(worker_of_rank(hosts[1].process.pid, 1), signal.SIGKILL)
    log = run / "log.txt"
    hosts[0].wait_for(lambda: "stopped: rank 0 lost another of the 2 processes" in log.read_text(), LIMIT_S)
    newest = list_steps(str(run / "checkpoints"))[-1]
    assert f"The last good checkpoint is {run}/checkpoints/step_{newest:08d}.pt" in log.read_text()
    hosts[0].wait_for(lambda: log.read_text().count("resuming from step") == 1, LIMIT_S)
    hosts[0].wait_for(lambda: steps_logged(run) >= newest + 3, LIMIT_S)
    frozen = worker_of_rank(hosts[1].process.pid, 1)
    os.kill(frozen, signal.SIGSTOP)
    hosts[0].wait_for(lambda: "stopped: step " in log.read_text(), LIMIT_S)
    assert "expected at most 15 s" in log.read_text()
    assert "Current thread" in hosts[0].output, "the stacks"
    os.kill(frozen, signal.SIGKILL)
    assert [host.wait(LIMIT_S) for host in hosts] == [0, 0]
    assert f"finished at step {STEPS}" in log.read_text()
    assert_same_numbers(run, alone)
    before = (run / "metrics.jsonl").read_bytes()
    output = run_to_end(documented_rule(argv), tmp_path / "again")
    assert output.count(f"nothing to do: the run is at step {STEPS} of {STEPS}") == 1
    output = run_to_end(documented_rule([*argv, "seed=5"]), tmp_path / "changed")
    assert output.count("error: ") == 1  # and the rule has ended
    assert (run / "metrics.jsonl").read_bytes() == before


def test_both_take_the_same_decisions(folder: Path, tmp_path: Path) -> None:
    """Out of memory or NaN on one process is both's; an epoch visits each volume once; no pickle."""
    store = tmp_path / "nan_store"
    shutil.copytree(folder / "store", store)
    index = pd.read_parquet(store / "index.parquet")
    rows = open_rows(pipeline_config(folder), PreparedStore.open(str(folder / "store"))).train
    index.loc[index.index[rows[0]], "intensity_mean"] = float("nan")
    index.to_parquet(store / "index.parquet")
    steps = 2 * len(rows) // 4
    bad = (f"data.store={store}", f"train.max_steps={steps}")
    one, two, seen = tmp_path / "decides_alone", tmp_path / "decides", tmp_path / "seen"
    seen.mkdir()
    train_alone(folder, one, *bad)
    planted = {"rank": 1, "out_of_memory_above": 1, "seen": str(seen), "no_pickle": True}
    argv = command(folder, f"run.dir={two}", *TWO, *bad, processes=2, module=PLANTED)
    output = run_to_end(argv, two, planted)
    assert output.count("per_core_batch_size 2 -> 1") == 1
    assert metrics(one)[-1]["step"] == steps
    skipped = [line for line in output.splitlines() if "update skipped" in line]
    assert [s.split("WARNING")[1] for s in skipped] == [
        s.split("WARNING")[1] for s in (one / "log.txt").read_text().splitlines() if "update skipped" in s
    ]
    assert 1 <= len(skipped) == metrics(two)[-2]["train/bad_steps"] <= 3
    assert all(bool(torch.isfinite(w).all()) for w in weights(two, steps).values())
    assert_same_numbers(two, one)
    visits = [
        list(map(int, line.split())) for rank in "01" for line in (seen / rank).read_text().splitlines()
    ]
    for epoch in range(2):
        inside = [r for step, *r in visits if epoch * steps <= 2 * step < (epoch + 1) * steps]
        assert sorted(r for part in inside for r in part) == sorted(rows)


def test_a_loader_worker_that_hangs_is_named_by_the_first_process(folder: Path, tmp_path: Path) -> None:
    """The second process's worker hangs; all end with code 2 and the reason is in the one log."""
    run = tmp_path / "hangs"
    overrides = (*TWO, "data.workers=1", "train.max_steps=4000")
    argv = command(folder, f"run.dir={run}", *overrides, processes=2, module=PLANTED)
    running = Running(argv, run, {"grace_s": 30, "data_s": 4})
    running.wait_for_step(2)
    (hung,) = loader_workers(worker_of_rank(running.process.pid, 1))
    os.kill(hung, signal.SIGSTOP)
    start = time.monotonic()
    assert running.wait() != 0
    assert time.monotonic() - start < 120
    (line,) = [line for line in (run / "log.txt").read_text().splitlines() if "stopped: " in line]
    assert "stopped: rank 1" in line
    assert "expected a batch within 4 s" in line
    assert "The last good checkpoint is" in line
    assert not is_running(hung)


HANGS = """
import sys, time, torch
from utils.runtime.processes import LostPeer, join
group = join(torch.device("cpu"), 4.0)
assert group.any(group.rank == 1)
model = torch.nn.Linear(3, 1)
if group.rank == 1:
    time.sleep(600)
try:
    if sys.argv[1] == "sum":
        group.sum(torch.ones(3))
    else:
        group.backward(group.replica(model, sums=True)(torch.ones(3)).sum())
except LostPeer as error:
    print(error, flush=True)
    sys.exit(2)
"""


UPLOADS = """
import sys, time, torch
from utils import checkpoint
from utils.checkpoint import CheckpointWriter, wait_together
from utils.runtime.processes import join

real = CheckpointWriter._write
def slow(*args):
    time.sleep(8)
    real(*args)

CheckpointWriter._write, checkpoint.CLOSE_WAIT_S = slow, 0.5
group = join(torch.device("cpu"), 3.0)
writer = CheckpointWriter(sys.argv[1], 1) if group.is_first else None
if writer is not None:
    writer.save({"step": 1}, ["step_00000001"])
wait_together(group, writer, lambda: None)
group.close()
"""


def test_nobody_gives_up_while_the_first_process_uploads(tmp_path: Path) -> None:
    """The last upload takes longer than a silent process is given."""
    script = tmp_path / "uploads.py"
    script.write_text(UPLOADS)
    launcher = ["torch.distributed.run", "--nproc-per-node=2", str(script), str(tmp_path / "checkpoints")]
    run_to_end([sys.executable, "-m", *launcher], tmp_path / "uploads")
    assert list_steps(str(tmp_path / "checkpoints")) == [1]


@pytest.mark.parametrize("where", ["sum", "gradients"])
def test_a_process_that_hangs_is_given_up_after_its_time(tmp_path: Path, where: str) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script), where]
    running = Running(argv, tmp_path / "hangs")
    assert running.wait(100) != 0
    assert "rank 0 lost another of the 2 processes of this run" in running.output
    assert "silent for 4 s" in running.output
