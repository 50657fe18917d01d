"""Batches of prepared volumes: the global batch is a function of (seed, step) and of nothing else.

In: an open store, its rows, the configuration. Out: dicts of plain tensors, one per micro-batch:
  volume uint8 [B,D,H,W], matrix [B,3,4], valid_box [B,6], mean, std [B], intensity [B,2,3], noise_seed [B,2],
  sample_seed [B], context, context_valid [B,K], target, target_valid [B,M], token_valid [B,N],
  row, position [B]
Step s holds the global positions s*G .. (s+1)*G - 1. Position p is volume p % n of epoch p // n, each epoch a
seeded permutation, so a batch may span epochs; its random draws come from (seed, step, p). Rank, accumulation
index and worker only say who computes p, so changing their numbers, or resuming, changes no batch.
"""

import math
import multiprocessing
import signal
import threading
import time
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data_setup.masks import MaskPlan
from data_setup.order import open_order
from data_setup.store.reader import PreparedStore
from data_setup.transforms import (
    NEUTRAL_INTENSITY,
    SEED_LIMIT,
    STREAM_MASK,
    STREAM_MODEL,
    JEPAMaskd,
    identity_matrix,
    random_stream,
    token_valid,
    training_transforms,
)
from utils.config.schema import Config, DataConfig
from utils.errors import ConfigError, TransientError, UserError
from utils.runtime import patience
from utils.runtime.open import keep_freed_memory
from utils.runtime.single import Runtime
from utils.workers import count_loaders, follow_parent

Batch = dict[str, Tensor]
_T = TypeVar("_T")
Sample = dict[Hashable, Any]  # the keys are those of MONAI's transforms

VALIDATION_SEED = 0  # validation masks depend on the row alone, so runs with different seeds are comparable
GRACE_S = 60.0  # the loader's own limit comes first and says more; and the workers' start counts here alone
EVALUATION_BATCH = 16  # volumes that an encoder computes at once where it is not trained
PREFETCH = 2  # batches that a worker has ready
POLL_SECONDS = 5.0  # how often the training process looks whether its loader workers are alive


class LoaderError(UserError):
    """A sample that cannot be had: names the step and what a worker met."""


class LostWorkerError(LoaderError, TransientError):
    """A loader worker died, hangs, or waits for storage that is away: names it, the step and the time."""


# ---- read: a row as it is stored. What is drawn comes after it, so that evaluation shares the reading.


class RowReader:
    """A store row as a sample without augmentation: volume, spacing, valid box and statistics."""

    def __init__(self, store: PreparedStore, rows: np.ndarray) -> None:
        """Takes from the store what these rows need and no more: workers get a copy, 80 bytes a row."""
        index = store.index.loc[np.unique(rows)]
        # Copies: pandas hands out read-only views, which torch warns about.
        self.box = np.array(index[[f"valid_{axis}{end}" for axis in "dhw" for end in "01"]], np.float32)
        self.spacing = np.array(index[[f"spacing_after_{axis}" for axis in "dhw"]], np.float64)
        self.statistics = np.array(index[["intensity_mean", "intensity_std"]], np.float32)
        self.volumes = store.volumes.of(np.array(index.row))

    def __call__(self, row: int) -> Sample:
        """The sample of one row, in the stored geometry."""
        place = np.searchsorted(self.volumes.rows, row)
        mean, std = self.statistics[place]
        return {
            "volume": torch.from_numpy(self.volumes.read(row)),
            "matrix": identity_matrix(),
            "valid_box": self.box[place],
            "spacing": self.spacing[place],
            "mean": mean,
            "std": std,
            "intensity": np.array(NEUTRAL_INTENSITY, np.float32),
            "noise_seed": np.zeros(2, np.int64),
            "sample_seed": 0,
            "row": row,
            "position": row,
        }


def _finish(sample: Sample) -> Sample:
    """The sample without `spacing`, which only the transforms need."""
    return {key: value for key, value in sample.items() if key != "spacing"}


# ---- draw: geometry before the mask, which counts only tokens that the moved field leaves valid. Each has a
# stream of (seed, step, position): who draws, and what was drawn before, changes nothing.


class TrainingSamples(Dataset[Sample]):
    """The augmented, masked sample of a (step, global position)."""

    def __init__(self, cfg: Config, store: PreparedStore, rows: np.ndarray) -> None:
        self.seed = cfg.seed
        self.read = RowReader(store, rows)
        self.order = open_order(cfg, store, rows)
        self.transforms = training_transforms(cfg)

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        step, position = key
        sample = self.read(self.order.row(position))
        for stream, transform in self.transforms:
            transform.set_random_state(state=random_stream(self.seed, step, position, stream))
            sample = transform(sample)
        model_stream = random_stream(self.seed, step, position, STREAM_MODEL)
        sample["sample_seed"] = int(model_stream.randint(0, SEED_LIMIT, dtype=np.int64))
        sample["position"] = position
        return _finish(sample)


# ---- deal: a step's positions go to micro-batches first and to ranks within each, so that each micro-batch
# is one stretch of the order, whatever the number of processes.


@dataclass(frozen=True)
class MicroBatches:
    """(step, position) of every sample of one rank, one list per micro-batch."""

    steps: range
    global_batch: int
    rank: int
    world: int
    accum: int

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        size = self.global_batch // (self.world * self.accum)
        for step in self.steps:
            for micro in range(self.accum):
                first = step * self.global_batch + (micro * self.world + self.rank) * size
                yield [(step, first + b) for b in range(size)]


class Loader:
    """Iterate over steps; each is the list of this rank's `accum` micro-batches.

    Micro-batch a of rank r holds the positions step*G + (a*world + r)*B + b with B = G / (world * accum),
    G = train.global_batch_size. Yields `num_steps` steps from `start_step`. Raises LostWorkerError when a
    worker dies or is silent for patience.DATA_S, LoaderError for a sample that cannot be read.
    """

    def __init__(
        self,
        cfg: Config,
        store: PreparedStore,
        rows: np.ndarray,
        *,
        rank: int = 0,
        world: int = 1,
        accum: int = 1,
        start_step: int = 0,
        num_steps: int,
    ) -> None:
        # Refused before a worker starts: with a remainder, the last samples of each step would reach nobody.
        if cfg.train.global_batch_size % (world * accum):
            raise ConfigError(
                f"train.global_batch_size: expected a multiple of world size {world} x accumulation {accum}, "
                f"found {cfg.train.global_batch_size}"
            )
        assert 0 <= rank < world, (rank, world)
        self.rank, self.world, self.accum = rank, world, accum
        self.global_batch = cfg.train.global_batch_size
        self.steps = range(start_step, start_step + num_steps)
        self.data = cfg.data
        self.dataset = TrainingSamples(cfg, store, np.asarray(rows))

    def __len__(self) -> int:
        return len(self.steps)

    def rows_of_step(self, step: int) -> list[int]:
        """The store rows of the whole global batch, whichever processes hold them."""
        # From the order again, so nobody asks the processes that hold them.
        first = step * self.global_batch
        return [self.dataset.order.row(position) for position in range(first, first + self.global_batch)]

    @cached_property
    def _batches(self) -> DataLoader[Sample]:
        # Made at the first batch and kept: workers take seconds to start, so they start once.
        sampler = MicroBatches(self.steps, self.global_batch, self.rank, self.world, self.accum)
        return _data_loader(self.data, self.dataset, sampler, persistent=True)

    def __iter__(self) -> Iterator[list[Batch]]:
        batches = iter(self._batches)
        for index, step in enumerate(self.steps):
            yield [self._next(batches, step, index * self.accum + micro) for micro in range(self.accum)]

    def _next(self, batches: Iterator[Batch], step: int, number: int) -> Batch:
        where = f"rank {self.rank}, step {step}"
        return _next_batch(batches, self.data, number, where, f", micro-batch {number % self.accum}")


# ---- workers: forked from a server that has neither threads nor a device. It starts before the model is
# built, since it imports for seconds.


def start_early(data: DataConfig) -> None:
    """Start the process that loader workers are forked from, if any: it imports for seconds beside others."""
    if count_loaders(data.workers) > 0:
        _fork_server()
        forkserver.ensure_running()


def _fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _data_loader(
    data: DataConfig,
    dataset: Dataset[Sample],
    sampler: Iterable[Any],
    *,
    persistent: bool,
    generator: torch.Generator | None = None,
) -> DataLoader[Sample]:
    """torch's loader of batches of keys by data.workers processes; `generator` seeds them, or torch's."""
    options: dict[str, Any] = {"batch_sampler": sampler}
    workers = count_loaders(data.workers)
    if workers > 0:
        # A fork server, not fork: the training process has threads (torch, fsspec, zarr) and maybe a device.
        context = _fork_server()
        options |= {
            "num_workers": workers,
            "prefetch_factor": PREFETCH,
            "persistent_workers": persistent,
            "timeout": min(POLL_SECONDS, patience.DATA_S),
            "worker_init_fn": _start_worker,
            "multiprocessing_context": context,
        }
    return DataLoader(dataset, generator=generator, **options)


def _next_batch(batches: Iterator[Batch], data: DataConfig, number: int, where: str, part: str = "") -> Batch:
    """The next batch; polls at torch's timeout, and names a dead or silent worker in one line: the one that
    owes the batch, since workers deliver in turn; a dead one may be another.
    """
    start, workers = time.monotonic(), count_loaders(data.workers)
    owing = f"{where}{part}, waiting for loader worker {number % max(1, workers)} of {workers}"
    while True:
        try:
            return next(batches)
        except UserError as error:
            if workers == 0:
                raise
            # torch wraps a worker's exception in its traceback; the last line is the message
            message = str(error).strip().splitlines()[-1]
            kind = LostWorkerError if isinstance(error, TransientError) else LoaderError
            raise kind(f"{where}: {message}") from error
        except (ConnectionError, EOFError) as error:
            if workers == 0 or "DataLoader worker" in str(error):  # raised by its own code
                raise
            message = f"expected a batch, found a worker that died handing it over: {error}"
            raise LostWorkerError(f"{owing}: {message}") from error
        except RuntimeError as error:
            if workers == 0:
                raise
            waited = time.monotonic() - start
            if "exited unexpectedly" in str(error) or "is killed by signal" in str(error):
                raise LostWorkerError(f"{owing}: expected a batch, found a dead worker: {error}") from error
            if "timed out" not in str(error):
                raise
            if waited >= patience.DATA_S:
                raise LostWorkerError(
                    f"{owing}: expected a batch within {patience.DATA_S:g} s, found none after {waited:.1f} s"
                ) from error


def _start_worker(worker: int) -> None:
    """Set up a worker process: one torch thread, since the workers are the parallelism."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; the parent decides
    keep_freed_memory()  # volumes come and go at one size
    follow_parent()  # and the fork server with it: each would keep the other alive


# ---- evaluate: the same rows without drawing, by a separate generator: no random number of the training
# moves, so a run that validates more often trains the same.


class StoredSamples(Dataset[Sample]):
    """The sample of a row, not augmented; `mask` adds context and target, the same at every call and seed."""

    def __init__(self, store: PreparedStore, rows: np.ndarray, mask: JEPAMaskd | None = None) -> None:
        self.read = RowReader(store, rows)
        self.mask = mask

    def __getitem__(self, row: int) -> Sample:
        sample = self.read(row)
        if self.mask is not None:
            self.mask.set_random_state(state=random_stream(VALIDATION_SEED, 0, row, STREAM_MASK))
            sample = self.mask(sample)
        return _finish(sample)


def evaluation_batches(
    cfg: Config, store: PreparedStore, rows: np.ndarray, batch_size: int
) -> Iterator[Batch]:
    """Rows in the given order, not augmented, without target: context is every token, valid or not. The last
    batch is smaller when batch_size does not divide the rows; `position` repeats `row`.
    """
    # No mask is drawn: what a volume's features are must not depend on who computes them.
    everything = torch.arange(math.prod(cfg.grid))
    for batch in _stored_batches(cfg.data, StoredSamples(store, rows), rows, batch_size):
        valid = token_valid(batch["matrix"], batch["valid_box"], cfg.grid, cfg.spatial.patch_size)
        batch["context"] = everything.repeat(len(batch["row"]), 1)
        batch["context_valid"] = valid.to(torch.float32)
        yield batch


def validation_batches(
    cfg: Config, store: PreparedStore, rows: np.ndarray, batch_size: int
) -> Iterator[Batch]:
    """Rows in the given order, not augmented, each with one fixed mask: the same at every call and seed."""
    mask = JEPAMaskd(MaskPlan.from_config(cfg), cfg.spatial.patch_size)
    yield from _stored_batches(cfg.data, StoredSamples(store, rows, mask), rows, batch_size)


def _stored_batches(
    data: DataConfig, samples: StoredSamples, rows: np.ndarray, batch_size: int
) -> Iterator[Batch]:
    """Batches of rows, read by workers that live as long as this; in this process where there are none."""
    keys = [rows[start : start + batch_size].tolist() for start in range(0, len(rows), batch_size)]
    workers = min(count_loaders(data.workers), len(keys))  # with no row there is none to start
    data = replace(data, workers=workers)
    own_seeds = torch.Generator()  # an evaluation moves no random number of the training
    batches = iter(_data_loader(data, samples, keys, persistent=False, generator=own_seeds))
    for number in range(len(keys)):
        yield _next_batch(batches, data, number, f"evaluation batch {number + 1} of {len(keys)}")


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

    # After GRACE_S more than the loader's own limit, whose message names the worker that owes the batch.
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
    """This process's micro-batches of the next step; None where SIGTERM reached any of the processes. Raises
    LoaderError where the loader fails or gives none for about `timeout_s`.
    """
    # All agree after the fetch, so that a signal in it ends them before the same step, and none waits for
    # another in a sum.
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
