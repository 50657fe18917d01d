"""Jobs that lay something on the volumes of a store, each by itself: maps, cubes, labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from typing import TypeVar

from utils import storage
from utils.terminal import track
from utils.workers import executor_of

_Job = TypeVar("_Job")


def run_all(
    function: Callable[[_Job], object], jobs: Sequence[_Job], workers: int, name: str, unit: str
) -> list[str]:
    """Run the function on every job; what storage could not do, as texts. Any other error is raised."""
    away: list[str] = []
    with executor_of(workers) as pool:
        futures = [pool.submit(function, job) for job in jobs]
        for future in track(as_completed(futures), len(jobs), name, unit):
            error = future.exception()
            if isinstance(error, storage.StorageError):
                away.append(str(error))
            elif error is not None:
                raise error
    return away
