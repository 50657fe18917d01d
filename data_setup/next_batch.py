"""The next batches of a training, or its end: a loader that hangs is waited for only so long.

In: the iterator of a `Loader`. Out: micro-batches; None where SIGTERM came.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from data_setup.loader import LoaderError, LostWorkerError
from utils.runtime.single import Runtime

_T = TypeVar("_T")
GRACE_S = 60.0  # the loader's own limit comes first and says more; and the workers' start counts here alone


@contextmanager
def watched_workers(timeout_s: float) -> Iterator[None]:
    """End the loader's workers after so long; raises LostWorkerError then.

    The loader notices one that hangs in its work. One that is frozen as a whole, or holds the interpreter's
    lock, also leaves the loader waiting for a batch that it has announced: without limit, as torch has none.
    """
    has_fired = threading.Event()

    def end_workers() -> None:
        has_fired.set()
        for worker in multiprocessing.active_children():
            worker.kill()

    timer = threading.Timer(timeout_s + GRACE_S, end_workers)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (RuntimeError, EOFError, OSError) as error:
        if not has_fired.is_set():
            raise
        raise LostWorkerError(
            f"expected a batch within {timeout_s:g} s, found a loader worker that is "
            f"frozen; killed after {timeout_s + GRACE_S:g} s"
        ) from error
    finally:
        timer.cancel()


def next_or_stop(batches: Iterator[_T], runtime: Runtime, timeout_s: float) -> _T | None:
    """This process's micro-batches of the next step; None where SIGTERM reached any of the processes.

    Raises LoaderError where the loader fails or gives none for about `timeout_s`.
    """
    micro_batches = None
    if not runtime.stop_requested:
        try:
            with watched_workers(timeout_s):
                micro_batches = next(batches)
        except LoaderError:
            # a signal to a whole process group or control group ends the loader's workers too
            if not runtime.stop_requested:
                raise
    return None if runtime.stop_agreed() else micro_batches
