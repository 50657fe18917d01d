"""Nothing waits without limit: a process in which nothing moves ends by itself, whatever holds it."""

from __future__ import annotations

import math
import subprocess
import sys
import time

import pytest

from tests.support.pipeline_factory import ROOT
from tests.support.process_factory import environment
from utils.runtime import watchdog as module
from utils.runtime.watchdog import Watchdog

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
