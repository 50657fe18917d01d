"""Nothing waits without limit: a process in which nothing moves ends by itself, whatever holds it."""

from __future__ import annotations

import subprocess
import sys
import time

from tests.support.pipeline_factory import ROOT
from tests.support.process_factory import environment

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
