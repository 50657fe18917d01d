"""What a run does when nobody watches: real processes that are stopped, killed, starved and damaged."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from data_setup.order import DataOrder
from data_setup.store.reader import PreparedStore
from pretraining.run import open_rows
from tests.support.cloud_proxy import Proxy, fault_proxy
from tests.support.cloud_servers import BUCKET, log_in, s3_server
from tests.support.pipeline_factory import WITH_WANDB, pipeline_config
from tests.support.process_factory import (
    PLANTED,
    SPOT_S,
    Running,
    assert_same_run,
    command,
    metrics,
    run_to_end,
    steps_logged,
    weights,
)
from tests.support.wandb_reader import run_ids
from utils.checkpoint import list_steps, load_checkpoint
from utils.config.schema import StorageOptions
from utils.errors import EXIT_STOPPED, EXIT_TRY_AGAIN, EXIT_USER_ERROR

pytestmark = pytest.mark.timeout(3600)
STEPS = 12


@pytest.fixture(autouse=True)
def no_run_stays() -> Iterator[None]:
    yield
    Running.end_all()


def argv(folder: Path, run: Path, *overrides: str, module: str = "pretraining.train") -> list[str]:
    every = (f"run.dir={run}", f"train.max_steps={STEPS}", "data.workers=1")
    return command(folder, *every, *overrides, module=module)


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> Callable[[int], Path]:
    """Runs of so many steps that nothing happened to."""

    def run_of(steps: int) -> Path:
        run = folder / f"uninterrupted_{steps}"
        if not run.exists():
            run_to_end(argv(folder, run, f"train.max_steps={steps}"), run)
        return run

    return run_of


@pytest.mark.slow
def test_sigterm_to_everything_of_a_run(
    folder: Path, tmp_path: Path, uninterrupted: Callable[[int], Path]
) -> None:
    """The whole process group is told, as by a scheduler; before, the same command is refused."""
    run = tmp_path / "sigterm"
    step = random.randrange(1, STEPS - 4)
    running = Running(argv(folder, run, WITH_WANDB), run)
    running.wait_for_step(step)
    running.process.send_signal(signal.SIGSTOP)  # it is there, however long the second one takes to start
    second = Running(argv(folder, run), tmp_path / "second")
    assert second.wait() == EXIT_USER_ERROR
    who = f"found process {running.process.pid} on {os.uname().nodename}, since "
    assert f"expected no other training of this run, {who}" in second.output
    running.process.send_signal(signal.SIGCONT)
    os.killpg(running.process.pid, signal.SIGTERM)
    assert running.wait(SPOT_S) == EXIT_STOPPED, running.output[-3000:]
    stopped = list_steps(str(run / "checkpoints"))[-1]
    assert step <= stopped == steps_logged(run) < STEPS
    assert (
        f"stopped by SIGTERM at step {stopped} of {STEPS}; run the same command again to go on"
        in running.output
    )
    run_to_end(argv(folder, run, WITH_WANDB), run)
    assert_same_run(run, uninterrupted(STEPS), STEPS)


def damage(path: Path, kind: str) -> None:
    """Cut the end off, or flip a bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data if kind == "flipped" else data[: len(data) // 3])


@pytest.mark.parametrize(
    ("kills", "steps"),
    [
        pytest.param(3, STEPS, marks=pytest.mark.slow),
        pytest.param(20, 60, marks=[pytest.mark.soak, pytest.mark.timeout(14400)]),
    ],
)
def test_kill_9_at_drawn_moments(
    folder: Path, tmp_path: Path, uninterrupted: Callable[[int], Path], kills: int, steps: int
) -> None:
    """Moments: while it starts, or some time after a step. The newest checkpoint is damaged now and then."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    run = tmp_path / f"killed_{kills}"
    arguments = argv(folder, run, f"train.max_steps={steps}", WITH_WANDB)
    damaged: list[Path] = []
    for kill in range(kills):
        running = Running(arguments, run)
        if kill % 5 == 4:
            time.sleep(rng.uniform(0, 10))
        else:
            goal = steps_logged(run) + rng.randint(1, max(2, 2 * steps // kills))
            running.wait_for(lambda goal=goal: steps_logged(run) >= min(goal, steps - 1))
            time.sleep(rng.uniform(0, 0.4))
        running.kill()
        written = list_steps(str(run / "checkpoints"))
        if len(written) > 1 and rng.random() < 0.5:
            newest = run / "checkpoints" / f"step_{written[-1]:08d}.pt"
            if newest not in damaged[-1:]:  # a kill before the next checkpoint finds it damaged already
                damage(newest, rng.choice(["flipped", "cut"]))
                damaged.append(newest)
    output = run_to_end(arguments, run)
    assert_same_run(run, uninterrupted(steps), steps)
    assert len(run_ids(run)) == 1
    for path in damaged:
        assert f"damaged checkpoint, trying the one before: {path}" in output
    resumed = output.count("resuming from step")
    print(f"{kills} kills, {len(damaged)} damaged checkpoints, resumed {resumed} times")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flipped", "cut"])
def test_kill_during_a_checkpoint_write_and_a_damaged_one_before(
    folder: Path, tmp_path: Path, uninterrupted: Callable[[int], Path], kind: str
) -> None:
    run = tmp_path / f"writing_{kind}"
    checkpoints = run / "checkpoints"

    def is_writing() -> bool:
        return len(list_steps(str(checkpoints))) == 2 and any(checkpoints.glob(".step_*.partial"))

    running = Running(argv(folder, run), run)
    while True:
        running.wait_for(is_writing)
        os.kill(running.process.pid, signal.SIGSTOP)  # before it is done
        if is_writing():
            break
        os.kill(running.process.pid, signal.SIGCONT)
    running.kill()
    written = list_steps(str(checkpoints))
    (unsealed,) = checkpoints.glob(".step_*.partial")
    assert str(written[-1]) not in unsealed.name
    damage(checkpoints / f"step_{written[-1]:08d}.pt", kind)
    output = run_to_end(argv(folder, run), run)
    assert f"step_{written[-1]:08d}.pt: expected" in output
    assert f"resuming from step {written[-2]} of" in output
    assert_same_run(run, uninterrupted(STEPS), STEPS)


def can_mount() -> bool:
    """Whether this process may have file systems of its own."""
    tool = shutil.which("unshare")
    return tool is not None and subprocess.run([tool, "-m", "true"], capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="a disk of its own needs the right to mount one")
@pytest.mark.parametrize("is_freed", [True, False])
def test_disk_full(
    folder: Path, tmp_path: Path, uninterrupted: Callable[[int], Path], is_freed: bool
) -> None:
    """The run directory's disk fills up; training goes on. With space again everything is caught up with."""
    disk = tmp_path / f"disk_{is_freed}"
    disk.mkdir()
    inside = argv(folder, disk / "run", WITH_WANDB, module=PLANTED)
    mount = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size=600m tmpfs {disk} && exec "$@"', "sh"]
    running = Running([*mount, *inside], tmp_path / disk.name, {"pause_s": 0.5})
    outside = Path(f"/proc/{running.process.pid}/root") / disk.relative_to("/")
    running.wait_for((outside / "run").exists)
    descriptor = os.open(outside, os.O_RDONLY)  # keeps the disk when its process has ended
    try:
        run = Path(f"/proc/self/fd/{descriptor}/run")
        running.wait_for((run / "checkpoints" / "step_00000002.json").exists)  # sealed: the first is whole
        ballast = run.parent / "ballast"
        running.process.send_signal(
            signal.SIGSTOP
        )  # the disk is full from one step on, however slow the machine
        fill(ballast)
        running.process.send_signal(signal.SIGCONT)
        running.wait_for(lambda: "checkpoint not written, training goes on" in running.output)
        running.wait_for(lambda: "metrics.jsonl: not written, training goes on" in running.output)
        if is_freed:
            ballast.unlink()
            assert running.wait() == 0, running.output[-3000:]
            assert_same_run(run, uninterrupted(STEPS), STEPS)
            best = "checkpoints/best_val_loss.pt"
            own, theirs = (load_checkpoint(str(r / best))["step"] for r in (run, uninterrupted(STEPS)))
            assert own == theirs
        else:
            assert running.wait() == EXIT_USER_ERROR  # a person has to make room
            assert "the last checkpoint was not written" in running.output
            assert "No space left on device" in running.output
            assert not list((run / "checkpoints").glob(".*.partial"))
            assert load_checkpoint(str(run / "checkpoints" / "step_00000002.pt"))["step"] == 2
    finally:
        os.close(descriptor)


def fill(path: Path) -> None:
    """Grow the file until nothing more goes onto its disk."""
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(2**20))


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    """S3 whose failures are ours to decide."""
    with s3_server() as upstream, fault_proxy(upstream) as proxy, pytest.MonkeyPatch.context() as patch:
        log_in(patch)
        yield proxy


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [True, False])
def test_the_checkpoint_bucket_fails(
    folder: Path, tmp_path: Path, uninterrupted: Callable[[int], Path], proxy: Proxy, comes_back: bool
) -> None:
    run = tmp_path / f"bucket_{comes_back}"
    directory = f"s3://{BUCKET}/{run.name}"
    overrides = [f"train.ckpt_dir={directory}", f"data.storage_options.endpoint_url={proxy.endpoint}"]
    # from the first checkpoint on: a bucket that cannot be written when a run starts is an error there
    fails = re.compile(r"(step|best)_\w+\.pt|history")
    proxy.schedule = lambda method, target: (
        "503" if method in ("PUT", "POST") and fails.search(target) else None
    )
    planted = {"pause_s": 0.3, "impatient": True}
    running = Running(argv(folder, run, *overrides, module=PLANTED), run, planted)
    running.wait_for(lambda: "checkpoint not written, training goes on" in running.output)
    options = StorageOptions(endpoint_url=proxy.endpoint)
    if comes_back:
        proxy.schedule = lambda method, target: None
        assert running.wait() == 0, running.output[-3000:]
        state = load_checkpoint(f"{directory}/step_{STEPS:08d}.pt", options)
        for name, weight in weights(uninterrupted(STEPS), STEPS).items():
            assert torch.equal(state["model"][name], weight), name
        best = uninterrupted(STEPS) / "checkpoints" / "best_val_loss.pt"
        own = load_checkpoint(f"{directory}/best_val_loss.pt", options)
        assert own["step"] == load_checkpoint(str(best))["step"]
    else:
        assert running.wait() == EXIT_TRY_AGAIN
        assert f"{directory}: the last checkpoint was not written" in running.output
        assert steps_logged(run) == STEPS
        assert list_steps(directory, options) == []
    assert f"finished at step {STEPS}" in running.output or not comes_back


@pytest.mark.slow
def test_a_loader_worker_that_hangs_is_named_in_time(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "hangs"
    cfg = pipeline_config(folder)
    order = DataOrder(cfg.seed, open_rows(cfg, PreparedStore.open(str(folder / "store"))).train)
    seen = {order.row(position) for position in range(2 * 4)}
    step, row = next((n // 4, order.row(n)) for n in range(8, 40) if order.row(n) not in seen)
    overrides = ("data.workers=2", "train.max_steps=4000")
    running = Running(argv(folder, run, *overrides, module=PLANTED), run, {"hang_row": row, "data_s": 6})
    assert running.wait() == EXIT_TRY_AGAIN
    (message,) = re.findall(r"^error: (.*)$", running.output, re.MULTILINE)
    match = re.match(
        rf"rank 0, step {step}, micro-batch 0, waiting for loader worker {step % 2} of 2: expected a batch "
        r"within 6 s, found none after ([0-9.]+) s; "
        r"it may pass by itself: run the same command again$",
        message,
    )
    assert match is not None, message
    assert 6 <= float(match[1]) < 30
    assert f"stopped: {message.partition(';')[0]}" in (run / "log.txt").read_text()


@pytest.mark.slow
def test_nan_once_is_skipped_and_nan_for_good_names_the_last_good_checkpoint(
    folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "nan"
    first_bad, allowed = 7, 3
    planted = {"nan_steps": [2, *range(first_bad, STEPS)], "max_bad_steps": allowed}
    running = Running(argv(folder, run, module=PLANTED), run, planted)
    assert running.wait() == EXIT_USER_ERROR
    cfg = pipeline_config(folder)
    order = DataOrder(cfg.seed, open_rows(cfg, PreparedStore.open(str(folder / "store"))).train)
    rows = {step: [order.row(4 * step + i) for i in range(4)] for step in range(STEPS)}
    assert (
        f"update skipped, loss or gradient not finite: step 2: rows {rows[2]} of the store" in running.output
    )
    counted = {row["step"]: row["train/bad_steps"] for row in metrics(run) if "train/loss" in row}
    assert counted == {s: int(s > 2) + max(0, s - first_bad) for s in range(1, first_bad + allowed + 1)}
    last = f"step {first_bad + allowed - 1}: rows {rows[first_bad + allowed - 1]}"
    (message,) = re.findall(r"^error: (.*)$", running.output, re.MULTILINE)
    assert f"not finite in {allowed} updates in a row" in message
    assert last in message
    good = message.partition("The last good checkpoint is ")[2]
    newest = list_steps(str(run / "checkpoints"))[-1]
    assert good == str(run / "checkpoints" / f"step_{newest:08d}.pt")
    assert all(bool(torch.isfinite(w).all()) for w in load_checkpoint(good)["model"].values())
    assert f"stopped: {message}" in (run / "log.txt").read_text()
