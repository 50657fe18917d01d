"""What the runtime does to the process; where nothing moves any more it ends by itself, whatever holds it."""

from __future__ import annotations

import math
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from data_setup.loader import LostWorkerError
from tests.support.pipeline_factory import ROOT
from tests.support.process_factory import environment
from utils.runtime import single
from utils.runtime import watchdog as module
from utils.runtime.open import has_bf16, open_runtime
from utils.runtime.single import Runtime, StopRequested
from utils.runtime.watchdog import Watchdog

FAULTS = """
import resource, torch
from utils.runtime.open import open_runtime
if {tuned}: open_runtime(use_bf16=False)
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for step in range(20):
    if step == 10: start = faults()
    torch.ones(8 * 2**20)
print(faults() - start)
"""


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu avx512f avx512_bf16", True), ("fpu amx_bf16 amx_tile", True), ("fpu avx2", False), (None, False)],
)
def test_bfloat16_where_the_processor_has_it(flags: str | None, expected: bool, tmp_path: Path) -> None:
    cpu = tmp_path / "cpuinfo"
    if flags is not None:
        cpu.write_text(f"processor : 0\nflags\t\t: {flags}\n")
    assert has_bf16(torch.device("cpu"), cpu) is expected


def test_auto_is_decided_by_the_device() -> None:
    runtime = open_runtime("auto")
    assert runtime.use_bf16 is has_bf16(runtime.device)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of glibc is what is tuned")
def test_memory_is_kept_between_steps() -> None:
    """Ten more tensors of 32 MiB, one after the other, get pages that are there."""
    counts = {}
    for tuned in (True, False):
        code = FAULTS.format(tuned=tuned)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        counts[tuned] = int(done.stdout)
    assert counts[True] < 100 < counts[False]


def test_the_commit_is_this_projects_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the files may lie inside the checkout of something else."""
    from utils import provenance

    copied = tmp_path / "copy" / "utils" / "provenance.py"
    copied.parent.mkdir(parents=True)
    for words in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "Another project")):
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *author, *words], check=True)
    monkeypatch.setattr(provenance, "__file__", str(copied))
    monkeypatch.delenv("OCT_COMMIT", raising=False)
    assert provenance.git_commit() is None
    monkeypatch.setenv("OCT_COMMIT", "")  # of an image that was built without one
    assert provenance.git_commit() is None
    monkeypatch.setenv("OCT_COMMIT", "abc")
    assert provenance.git_commit() == "abc"
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "utils" / "provenance.py"))
    assert len(provenance.git_commit() or "") == 40


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_sigterm_that_also_ends_the_loaders_workers_is_a_stop(is_stopped: bool) -> None:
    """As one to a whole process group, in a validation; without it a dead worker is an error."""
    runtime = Runtime(torch.device("cpu"), use_bf16=False)

    def batches() -> Iterator[int]:
        yield 1
        runtime.stop_requested = is_stopped
        raise LostWorkerError("evaluation batch 2 of 3: found a dead worker")

    with pytest.raises(StopRequested if is_stopped else LostWorkerError):
        list(runtime.until_stopped("validation", batches()))


def test_a_second_ctrl_c_leaves_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(single, "leave", codes.append)
    before = signal.getsignal(signal.SIGTERM)
    runtime = Runtime(torch.device("cpu"), use_bf16=False)
    runtime.catch_signals()
    try:
        signal.raise_signal(signal.SIGTERM)
        assert (runtime.stop_requested, runtime.stopped_by, codes) == (True, "SIGTERM", [])
        signal.raise_signal(signal.SIGINT)
        assert (runtime.stopped_by, codes) == ("Ctrl-C", [])
        assert "once more leaves at once" in capfd.readouterr().err
        signal.raise_signal(signal.SIGTERM)  # which may follow: torchrun sends it
        assert codes == []
        signal.raise_signal(signal.SIGINT)
        assert codes == [130]
    finally:
        signal.signal(signal.SIGTERM, before)


# --- what hangs ---

LIMIT_S = 1.0
HANGS = """
import ctypes, logging, sys, threading, time
from utils.runtime.watchdog import Watchdog
logging.basicConfig(format="%(message)s")
with Watchdog(float(sys.argv[1])) as watchdog:
    for step in range(4):  # longer than the limit in all
        watchdog.beat(f"step {step}")
        time.sleep(float(sys.argv[1]) / 2)
    if sys.argv[2] == "waits":
        threading.Event().wait()
    elif sys.argv[2] == "holds the log":
        logging.getLogger().handlers[0].acquire()
        threading.Event().wait()
    elif sys.argv[2] == "holds the interpreter":
        ctypes.PyDLL(None).sleep(600)
time.sleep(float(sys.argv[1]) * 2)  # nobody watches any more
print("the end")
"""


def test_what_hangs_ends_within_its_limit() -> None:
    """With 75 where the watching thread can still speak, else by the timer in C, which has 1 alone."""
    codes = {"waits": 75, "holds the log": 1, "holds the interpreter": 1, "ends": 0}
    script = f"import utils.runtime.watchdog as w\nw.GRACE_S = 1.0\n{HANGS}"
    pipe = subprocess.PIPE
    running = {
        how: subprocess.Popen(
            [sys.executable, "-c", script, str(LIMIT_S), how],
            cwd=ROOT, env=environment(), stdout=pipe, stderr=pipe, text=True,
        )
        for how in codes
    }  # fmt: skip
    start = time.monotonic()
    for how, process in running.items():
        output, errors = process.communicate(timeout=60)
        assert process.returncode == codes[how], (how, errors)
        assert ("the end" in output) == (how == "ends")
        assert ('File "<string>"' in errors) == (how != "ends"), "the stacks"
        line = f"stopped: step 3 takes {LIMIT_S:.0f} s, expected at most {LIMIT_S:g} s"
        assert (line in errors) == (how == "waits"), errors
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("age_s", [0.0, 37.0, 89.9, 2000.0])  # the last: frozen before its first look
def test_the_thread_looks_before_the_timer_in_c_ends_the_process(
    age_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has another code, and no word: at the default limit, wherever in its rhythm the phase began."""
    now, ends, waits = 1000.0, [math.inf], []
    watchdog = Watchdog(1800.0)

    class Clock:
        def wait(self, seconds: float) -> bool:
            nonlocal now
            now += seconds
            waits.append(seconds)
            assert now < ends[-1]
            return False

    class Ended(Exception):
        pass

    def leave(code: int) -> None:
        assert code == 75
        raise Ended

    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    monkeypatch.setattr(module.faulthandler, "dump_traceback_later", lambda s, **_: ends.append(now + s))
    monkeypatch.setattr(module.faulthandler, "dump_traceback", lambda **_: None)
    monkeypatch.setattr(module, "leave", leave)
    monkeypatch.setattr(watchdog, "_is_over", Clock())
    watchdog._began = now - age_s
    with pytest.raises(Ended):
        watchdog._watch()
    assert sum(waits) == pytest.approx(max(90.0, 1800.0 - age_s))
    assert ends[-1] == now + module.GRACE_S  # for what holds the log
