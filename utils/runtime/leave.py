"""End a process that must not wait for anything: after a lost peer, or where nothing moves any more.

In: an exit code. A normal end runs exit handlers that wait for threads and devices, without limit where a
collective of a lost process is still queued (PyTorch/XLA, NCCL).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import NoReturn

SHOW_CURSOR = "\x1b[?25h"


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
