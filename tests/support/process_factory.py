"""Training runs in processes of their own: start, watch, signal, and read what they left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from tests.support.pipeline_factory import ROOT, SMOKE, pipeline_overrides
from utils.checkpoint import load_checkpoint

MODULE = "pretraining.train"
PLANTED = "tests.support.planted"
SPOT_S = 30.0  # what a spot machine gives between SIGTERM and its end
PATIENCE_S = 900.0  # a start takes seconds, and minutes on a machine that is busy with other things


def environment(planted: dict[str, Any] | None = None) -> dict[str, str]:
    """One thread each, so that sums have one order; without the W&B service of this process."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    ours = {"OMP_NUM_THREADS": "1", "WANDB_SILENT": "true", "PYTHONPATH": str(ROOT)}
    return {**kept, **ours, "PLANTED": json.dumps(planted or {})}


def command(folder: Path, *overrides: str, processes: int = 1, module: str = MODULE) -> list[str]:
    """The documented command line, on the phantom of this folder."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    return [*launcher, "-m", module, "--config", str(SMOKE), *pipeline_overrides(folder), *overrides]


def documented_nodes(folder: Path, *overrides: str) -> list[list[str]]:
    """The command of docs/guides/pretraining.md for two machines, as two launchers of one process each."""
    text = (ROOT / "docs/guides/pretraining.md").read_text()
    (line,) = re.findall(r"^torchrun (--nnodes=2 .+) -m pretraining\.train ", text, re.MULTILINE)
    places = {"HOST0": "127.0.0.1", "29500": str(free_port()), "per-node=8": "per-node=1"}
    for word, here in places.items():
        assert word in line, word
        line = line.replace(word, here)
    _, *rest = command(folder, *overrides)
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    return [[*launcher, *line.replace("NODE", str(node)).split(), *rest] for node in range(2)]


class Running:
    """A run that has been started; what it says goes into a file beside its run directory.

    `end_all` ends what a failed test left behind.
    """

    _started: ClassVar[list[Running]] = []

    def __init__(self, argv: Sequence[str], run: Path, planted: dict[str, Any] | None = None) -> None:
        self.run = run
        self._said = run.with_suffix(".txt")
        with self._said.open("a") as file:
            self.process = subprocess.Popen(
                argv, cwd=ROOT, stdout=file, stderr=file, env=environment(planted), start_new_session=True
            )

        self._started.append(self)

    @classmethod
    def end_all(cls) -> None:
        """Kill every run that is still going on, with all that it started in its process group."""
        for running in cls._started:
            if running.process.poll() is None:
                os.killpg(running.process.pid, signal.SIGKILL)
                running.process.wait()
        cls._started.clear()

    @property
    def output(self) -> str:
        return self._said.read_text()

    def wait_for(self, condition: Callable[[], Any], seconds: float = PATIENCE_S) -> None:
        """Until the condition holds; the run must still be going on then."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                assert condition(), f"the run ended early: {self.output[-3000:]}"
                return
            assert time.monotonic() < deadline, f"waited {seconds:g} s for {condition}: {self.output[-3000:]}"
            time.sleep(0.005)

    def wait_for_step(self, step: int) -> None:
        """Until this many updates are in the metrics."""
        self.wait_for(lambda: steps_logged(self.run) >= step)

    def kill(self) -> None:
        """kill -9 of the training process; what it started ends by itself."""
        fork_servers = [pid for pid, argv in descendants(self.process.pid).items() if "forkserver" in argv]
        self.process.kill()
        assert self.process.wait() in (0, -signal.SIGKILL), self.output[-3000:]
        deadline = time.monotonic() + PATIENCE_S
        while any(is_running(pid) for pid in fork_servers):
            assert time.monotonic() < deadline, f"loader workers outlive their run: {fork_servers}"
            time.sleep(0.05)

    def wait(self, seconds: float = PATIENCE_S) -> int:
        """The exit code."""
        return self.process.wait(seconds)


COPIES = """
import gc, json, os, sys
folder, in_turn, each = sys.argv[1], sys.argv[2] == "True", json.loads(sys.argv[3])
gc.freeze()  # or the end of each copy walks through all objects, and so copies their memory
code_of, copies = lambda copy: os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]), []
for number, words in enumerate(each):
    if (copy := os.fork()) == 0:
        for output in (1, 2):
            os.dup2(os.open(f"{folder}/{number}_{output}", os.O_CREAT | os.O_WRONLY), output)
        sys.argv[1:] = words
        break
    copies.append(code_of(copy) if in_turn else copy)
else:
    print(*(copies if in_turn else map(code_of, copies)))
    sys.exit()
"""
MODULE_OF_WORDS = """
import runpy
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def run_copies(
    imports: str, script: str, each: Sequence[Sequence[str]], folder: Path, in_turn: bool = False
) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of a script with each of these words, all at once or in turn: copies of one
    process, which has imported what takes seconds.
    """
    words = [sys.executable, "-c", imports + COPIES + script, str(folder), str(in_turn), json.dumps(each)]
    codes = subprocess.check_output(words, cwd=ROOT, env=environment(), text=True, timeout=3000).split()
    outputs, errors = ([(folder / f"{n}_{m}").read_text() for n in range(len(each))] for m in (1, 2))
    return list(zip(map(int, codes), outputs, errors, strict=True))


def run_two(module: str, words: Sequence[str], place: Path) -> None:
    """Run a module as the two processes of one group, as torchrun would; both must succeed."""
    place.mkdir(exist_ok=True)
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    imports = f"import os, pretraining.train\nos.environ |= {meet}"
    script = "os.environ['RANK'] = sys.argv.pop(1)" + MODULE_OF_WORDS
    ends = run_copies(imports, script, [(rank, module, *words) for rank in "01"], place)
    assert [code for code, _, _ in ends] == [0, 0], "".join(errors[-3000:] for _, _, errors in ends)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_running(pid: int) -> bool:
    """Whether it is there and no zombie, which nobody may reap in a container."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def run_to_end(argv: Sequence[str], run: Path, planted: dict[str, Any] | None = None) -> str:
    """Run a command that must succeed; returns all that was said in this run directory."""
    running = Running(argv, run, planted)
    assert running.wait() == 0, running.output[-5000:]
    return running.output


def metrics(run: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics so far."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def without_clock(run: Path) -> list[dict[str, Any]]:
    """The metrics that a rerun gives again."""
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in metrics(run)]


def losses(run: Path) -> dict[int, float]:
    """Training loss by step."""
    return {row["step"]: row["train/loss"] for row in metrics(run) if "train/loss" in row}


def steps_logged(run: Path) -> int:
    return max(losses(run), default=0)


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_checkpoint(str(run / "checkpoints" / f"step_{step:08d}.pt"))["model"]


def assert_same_run(run: Path, other: Path, step: int) -> None:
    """The same weights, bit for bit, and the same metrics but for the clock."""
    for (name, a), b in zip(weights(run, step).items(), weights(other, step).values(), strict=True):
        assert torch.equal(a, b), name
    assert without_clock(run) == without_clock(other)


def processes() -> dict[int, tuple[int, str]]:
    """Parent and command line of every process of this machine."""
    children = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                argv = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            children[int(entry.name)] = parent, argv
    return children


def descendants(pid: int) -> dict[int, str]:
    """Command lines of the processes below one."""
    everybody = processes()
    below = {pid}
    while True:
        more = {child for child, (parent, _) in everybody.items() if parent in below} - below
        if not more:
            return {child: everybody[child][1] for child in below - {pid}}
        below |= more


def worker_of_rank(launcher: int, rank: int) -> int:
    """The process that torchrun started for a rank."""
    for pid, (parent, _) in processes().items():
        if parent == launcher and f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(
            b"\0"
        ):
            return pid
    raise AssertionError(f"no process of rank {rank} below {launcher}")


def loader_workers(pid: int) -> list[int]:
    """Loader workers of a training process: what its fork server started."""
    everybody = processes()
    parents = {child: everybody.get(child, (0, ""))[0] for child in descendants(pid)}
    return [c for c, p in parents.items() if "multiprocessing.forkserver" in everybody.get(p, (0, ""))[1]]
