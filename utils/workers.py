"""Worker processes that do not outlive the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

STORAGE_THREADS = 16  # calls that wait for storage at the same time
MAX_LOADERS = 32  # a host of a TPU has hundreds of CPUs, and its devices take no more than so many give
_T = TypeVar("_T")
_R = TypeVar("_R")


def count_loaders(wanted: int | None) -> int:
    """The loader processes of this process: `wanted`; for None one a CPU of its share, without its own."""
    if wanted is not None:
        return wanted
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = cpus // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's processes on this machine
    return min(max(share - 1, 1), MAX_LOADERS)


def follow_parent() -> None:
    """Initializer of a pool's workers: end the process when its parent ends.

    A worker whose parent was killed would wait for work forever, or write where its successor writes.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def spawned_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Spawned workers with one compute thread each, which end when this process is killed."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=follow_parent)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def pool_of(workers: int) -> Iterator[Executor]:
    """`spawned_pool`, or for 0 workers one thread of this process; errors arrive in futures either way."""
    if workers:
        with spawned_pool(workers) as processes:
            yield processes
        return
    thread = ThreadPoolExecutor(1)
    try:
        yield thread
    finally:
        thread.shutdown(cancel_futures=True)


def in_threads(function: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """[function(item) ...] for calls that wait for storage."""
    with ThreadPoolExecutor(STORAGE_THREADS) as pool:
        return list(pool.map(function, items))
