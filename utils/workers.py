"""Worker processes that do not outlive the process that started them."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from utils.errors import UserError

CONNECT_SECONDS = 30.0  # within which a dask scheduler has to answer
STORAGE_THREADS = 16  # calls that wait for storage at the same time
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
MAX_LOADERS = 32  # a host of a TPU has hundreds of CPUs, and its devices take no more than so many give
_T = TypeVar("_T")
_R = TypeVar("_R")


def count_loaders(wanted: int | None) -> int:
    """The loader processes of this process: `wanted`; for None one a CPU of its share, without its own."""
    if wanted is not None:
        return wanted
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if CPU_QUOTA.exists():  # of a container
        quota, _, period = CPU_QUOTA.read_text().partition(" ")
        cpus = cpus if quota == "max" else min(cpus, math.ceil(int(quota) / int(period)))
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


@contextmanager
def executor_of(workers: int, cluster: str | None = None) -> Iterator[Executor]:
    """`pool_of`, or the workers of the dask cluster whose scheduler is at the address `cluster`.

    A cluster runs a call again on another worker when one is lost. Raises UserError where there is none.
    """
    if cluster is None:
        with pool_of(workers) as pool:
            yield pool
        return
    try:
        from distributed import Client
    except ImportError as error:
        raise UserError(
            "--dask: expected the package distributed, found none; pip install distributed"
        ) from error
    try:
        client = Client(cluster, timeout=CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise UserError(f"--dask {cluster}: expected a dask scheduler, found none: {problem}") from error
    with client:
        executor = client.get_executor(pure=False)
        try:
            yield executor
        finally:
            executor.shutdown(wait=False)  # cancels what is not finished


def is_lost_worker(error: BaseException) -> bool:
    """Whether a cluster gave a call up, since every worker that ran it was lost."""
    distributed = sys.modules.get("distributed")
    return distributed is not None and isinstance(error, distributed.KilledWorker)


def in_threads(function: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """[function(item) ...] for calls that wait for storage."""
    with ThreadPoolExecutor(STORAGE_THREADS) as pool:
        return list(pool.map(function, items))
