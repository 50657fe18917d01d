"""run_tpu_xla.sh trains: clones of this tree are the workers, which gloo joins on their CPUs.

The launcher, its worker's half, the training and its checkpoints are the real ones; gcloud is played, and
plain torch stands where PyTorch/XLA would take a TPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_setup.store.reader import PreparedStore
from pretraining.run import open_rows
from pretraining.train import train
from tests.support.launcher_factory import Pod, copy_tree, wait_for
from tests.support.pipeline_factory import SMOKE, WITH_WANDB, pipeline_config, pipeline_overrides
from tests.support.process_factory import free_port, is_running, losses, steps_logged
from tests.support.wandb_reader import run_ids
from utils.checkpoint import list_steps
from utils.config.load import load_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # seconds of CPU, minutes on a busy machine
WORKERS, BATCH = 2, 4
EPOCHS = 4
CONFIG = "configs/smoke_test.yaml"

# The workers' interpreter: what finds the other hosts on a TPU is told here to torch.distributed.
PYTHON = """#!/usr/bin/env bash
case "$*" in
*torch_xla*) exit ;;
"-m pretraining.train "*)
    unset PJRT_DEVICE OCT_DEVICE_GLOB
    export RANK=${HOME##*_} WORLD_SIZE=%d MASTER_ADDR=127.0.0.1 MASTER_PORT=$(<../../port) ;;
esac
exec %s "$@"
"""

# Each process writes down the rows of its batches, in its worker's home.
SPY = """
import os
from pathlib import Path

from data_setup.loader import Loader

_batches = Loader.__iter__


def _noted(self):
    for step, batches in zip(self.steps, _batches(self), strict=True):
        rows = [int(row) for batch in batches for row in batch["row"]]
        with Path.home().joinpath("rows").open("a") as file:
            print(len(self.steps), step, *rows, file=file)
        yield batches


Loader.__iter__ = _noted
"""


@pytest.fixture(scope="module")
def pod(folder: Path) -> Iterator[Pod]:
    devices = str(folder / "pod" / "accel*")
    pod = Pod(folder / "pod", WORKERS, OMP_NUM_THREADS="1", WANDB_SILENT="true", OCT_DEVICE_GLOB=devices)
    (pod.folder / "accel0").touch()
    copy_tree(pod.source)
    python = pod.folder / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON % (WORKERS, sys.executable))
    python.chmod(0o755)
    package = "pretraining/__init__.py"
    pod.commit(**{package: (pod.source / package).read_text() + SPY})
    yield pod
    if any(is_running(pid) for pid in pod.started()):
        pod.launch("stop", "--kill", OCT_STOP_WAIT_S="1")


def choose_port(pod: Pod) -> None:
    (pod.folder / "port").write_text(str(free_port()))


def test_workers_are_one_run_that_stops_and_resumes(folder: Path, pod: Pod) -> None:
    venv = {"OCT_VENV": str(pod.folder / "venv")}
    rows = open_rows(pipeline_config(folder), PreparedStore.open(str(folder / "store"))).train
    assert len(rows) % BATCH == 0
    steps = EPOCHS * len(rows) // BATCH
    run = folder / "run"
    words = [
        *pipeline_overrides(folder),
        *(f"train.max_steps={steps}", "train.val_every_steps=1000"),
        f"train.per_core_batch_size={BATCH // WORKERS}",
    ]

    done = pod.launch("sync")
    assert done.returncode == 0, done
    start = ("start", CONFIG, *words, WITH_WANDB)
    choose_port(pod)
    done = pod.launch(*start, **venv)
    assert done.returncode == 0, done
    pids = [pod.pid(worker) for worker in range(WORKERS)]
    again = pod.launch(*start, **venv)
    assert again.returncode == 1
    assert again.stdout.count("error: a run is in progress here, pid") == WORKERS
    wait_for(lambda: steps_logged(run) >= 2 or not all(map(is_running, pids)), seconds=450)
    assert all(map(is_running, pids)), pod.log_text(0)

    done = pod.launch("stop")
    assert done.returncode == 0, done
    assert done.stdout.count("stopped, pid") == WORKERS, done.stdout
    (stopped,) = list_steps(str(run / "checkpoints"))[-1:]
    assert stopped == steps_logged(run) < steps - 1
    assert (
        f"stopped by SIGTERM at step {stopped} of {steps}; run the same command again to go on"
        in pod.log_text(0)
    )
    assert not any(map(is_running, pids))

    choose_port(pod)
    done = pod.launch(*start, **venv)
    assert done.returncode == 0, done
    wait_for(lambda: not any(map(is_running, pod.started())), seconds=450)
    status = pod.launch("status")
    assert status.returncode == 5
    assert status.stdout.count("with exit code 0 (finished): ") == WORKERS, status.stdout
    assert f"resuming from step {stopped}" in pod.log_text(0)
    assert f"{WORKERS} processes" in pod.log_text(0)

    # one W&B run, one set of checkpoints, and nothing of the run in any clone
    assert len(run_ids(run)) == 1
    assert list_steps(str(run / "checkpoints"))[-1] == steps
    assert list(losses(run)) == list(range(1, steps + 1))
    for worker in range(WORKERS):
        assert [p.name for p in (pod.clone(worker) / "runs").iterdir()] == ["launcher"]

    # each volume once per epoch, over all workers and both starts
    seen: dict[int, list[int]] = {}
    for worker in range(WORKERS):
        for line in (pod.home(worker) / "rows").read_text().splitlines():
            first_pid, step, *own = map(int, line.split())
            trial = first_pid == 1  # before the first update, the trial step reads the batch that is next
            first = first_pid == steps
            if not trial and step < (stopped if first else steps):
                seen.setdefault(step, []).extend(own)
    assert sorted(seen) == list(range(steps))
    order = [row for step in range(steps) for row in seen[step]]
    for epoch in range(EPOCHS):
        assert sorted(order[epoch * len(rows) :][: len(rows)]) == sorted(rows)

    # and the numbers are those of one process
    alone = folder / "alone"
    changes = [*words, f"train.per_core_batch_size={BATCH}", f"run.dir={alone}"]
    assert train(load_config(SMOKE, changes)) == 0
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)
