"""A process in which nothing moves any more ends by itself, so that what restarts it can.

In: the phases that a run goes through, as they begin. Out: where one takes longer than the limit, the stacks
of all threads on stderr, a line in the log, and exit code 75. Waits that nothing else bounds are a device
that does not answer, and a collective whose peer is silent but there. Nor does `leave` wait: a normal end
runs exit handlers that wait for threads and devices, without limit where a collective of a lost process is
still queued (PyTorch/XLA, NCCL).
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import os
import sys
import threading
import time
from types import TracebackType
from typing import NoReturn

from utils.errors import EXIT_TRY_AGAIN

log = logging.getLogger(__name__)
STDERR = 2
SHOW_CURSOR = "\x1b[?25h"
GRACE_S = 10.0  # for the log's last line; the thread that hangs may hold its lock


def leave(code: int) -> NoReturn:
    """Flush the logs and end this process now, with this exit code."""
    with contextlib.suppress(OSError, ValueError):  # a console that is gone, or was closed
        for handler in logging.getLogger().handlers:
            handler.flush()
        if sys.stderr.isatty():
            sys.stderr.write(SHOW_CURSOR)  # a live line hides it
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


class Watchdog:
    """Watches from a separate thread while it is entered; until then, and after, it only takes notes."""

    def __init__(self, limit_s: float = math.inf) -> None:
        self.limit_s = limit_s
        self._phase, self._began = "start", time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, phase: str) -> None:
        """Something has ended, and this begins."""
        self._phase, self._began = phase, time.monotonic()

    def __enter__(self) -> Watchdog:
        self.beat("start")
        self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        wait_s = self.limit_s / 20
        while not self._is_over.wait(wait_s):
            rest_s = self.limit_s - (time.monotonic() - self._began)
            # where the interpreter's lock is never given back, or the log's, this thread stops too, and only
            # a timer in C is left: it knows no exit code but 1, so this thread looks again before it ends
            faulthandler.dump_traceback_later(max(0, rest_s) + GRACE_S, exit=True, file=STDERR)
            if rest_s <= 0:
                self._end()
            wait_s = min(self.limit_s / 20, rest_s)

    def _end(self) -> None:
        faulthandler.dump_traceback(file=STDERR, all_threads=True)
        quiet_s = time.monotonic() - self._began
        text = "stopped: %s takes %.0f s, expected at most %g s; all threads are on stderr"
        log.error(text, self._phase, quiet_s, self.limit_s)
        leave(EXIT_TRY_AGAIN)
