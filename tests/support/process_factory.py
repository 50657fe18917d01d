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
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, ClassVar

import pytest
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


FEW_UPDATES = """import benchmarks.evidence.cli
from benchmarks.evidence import scratch
from models.probes import hidden
scratch.LEAST_STEPS, hidden.MOST_STEPS = 60, 60"""


def copies_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of the evidence's queue are copies, of few updates of what learns from labels."""

    def start(command: list[str], stdout: IO[bytes], env: dict[str, str], **_: Any) -> Copy:
        assert command[:2] == [sys.executable, "-m"]
        return Copy(command[2:], Path(str(stdout.name)), env=env, imports=FEW_UPDATES)

    monkeypatch.setattr("benchmarks.evidence.queue.subprocess", SimpleNamespace(Popen=start, STDOUT=None))


MODULE_OF_WORDS = """
import runpy
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


SERVER = """
import gc, json, os, sys
gc.freeze()  # or the end of each copy walks through all objects, and so copies their memory
for line in sys.stdin:
    asked = json.loads(line)
    if isinstance(asked, int):
        pid, status = os.waitpid(asked, os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
    elif os.fork() == 0:
        script, sys.argv[1:], places, env = asked
        os.environ.clear()
        os.environ.update(env)
        os.setsid()
        files = [os.open(file, os.O_CREAT | os.O_APPEND | os.O_RDWR) for file in (os.devnull, *places)]
        os.write(1, b"%d\\n" % os.getpid())  # who waits for it may read the files at once
        for number, file in enumerate(files):
            os.dup2(file, number)
        break
else:
    sys.exit()
exec(script)
"""
TRAINING = "import wandb, torch._dynamo, pretraining.train"  # the optimizer imports the second


@cache
def server(imports: str) -> subprocess.Popen[str]:
    """A process that has imported what takes seconds, and makes copies of itself; it ends with this one."""
    words, pipe = [sys.executable, "-c", imports + SERVER], subprocess.PIPE
    return subprocess.Popen(words, cwd=ROOT, env=environment(), text=True, bufsize=1, stdin=pipe, stdout=pipe)


class Copy:
    """The Popen of `python -m` with these words, or of a script, as a copy of a process that has imported the
    most of it; `outputs`: files for stdout and stderr, or one for both.
    """

    def __init__(
        self,
        words: Sequence[str],
        *outputs: Path,
        env: dict[str, str] | None = None,
        imports: str = TRAINING,
        script: str = MODULE_OF_WORDS,
    ) -> None:
        self._server = server(imports)
        self.returncode: int | None = None
        places = [str(outputs[0]), str(outputs[-1])]
        self.pid = int(self._ask([script, words, places, env or environment()]))

    def _ask(self, asked: Any) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(asked) + "\n")
        return json.loads(self._server.stdout.readline())

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.returncode is None:
            self.returncode = self._ask(self.pid)
        return self.returncode

    def wait(self, seconds: float = PATIENCE_S) -> int:
        """The exit code; raises TimeoutExpired."""
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), seconds)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Running:
    """A run that has been started; what it says goes into a file beside its run directory.

    `end_all` ends what a failed test left behind.
    """

    _started: ClassVar[list[Running]] = []

    def __init__(self, argv: Sequence[str], run: Path, planted: dict[str, Any] | None = None) -> None:
        self.run = run
        self._said = run.with_suffix(".txt")
        env = environment(planted)
        self.process: Copy | subprocess.Popen[bytes]
        if argv[:2] == [sys.executable, "-m"] and "PJRT_DEVICE" not in os.environ:
            self.process = Copy(argv[2:], self._said, env=env)
        else:
            with self._said.open("a") as file:
                self.process = subprocess.Popen(
                    argv, cwd=ROOT, stdout=file, stderr=file, env=env, start_new_session=True
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


def run_copies(
    imports: str, script: str, each: Sequence[Sequence[str]], folder: Path, in_turn: bool = False
) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of a script with each of these words, all at once or in turn."""
    ends, places = [], [(folder / f"{n}_out", folder / f"{n}_err") for n in range(len(each))]
    for words, outputs in zip(each, places, strict=True):
        ends.append(Copy(words, *outputs, imports=imports, script=script).wait)
        if in_turn:
            ends[-1]()
    return [(end(), o.read_text(), e.read_text()) for end, (o, e) in zip(ends, places, strict=True)]


def run_two(module: str, words: Sequence[str], place: Path) -> None:
    """Run a module as the two processes of one group, as torchrun would; both must succeed."""
    place.mkdir(exist_ok=True)
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    outputs = [place / f"rank_{rank}.txt" for rank in range(2)]
    envs = [environment() | meet | {"RANK": str(rank)} for rank in range(2)]
    both = [Copy([module, *words], output, env=env) for output, env in zip(outputs, envs, strict=True)]
    codes = [copy.wait() for copy in both]
    assert codes == [0, 0], "".join(output.read_text()[-3000:] for output in outputs)


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
