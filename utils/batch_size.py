"""The batch that fits, settled by a trial step before the first update: shapes stay as they are after it.

In: a configuration, and the work of a step with it. Out: the configuration with the largest
per_core_batch_size that every process can do; the global batch stays, and so do the numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from utils.config.schema import MISMATCHED, Config
from utils.errors import UserError
from utils.runtime.single import Runtime

log = logging.getLogger(__name__)


def settle_batch(
    cfg: Config,
    runtime: Runtime,
    work_of: Callable[[Config], Callable[[], None]],
    put_back: Callable[[], None],
) -> Config:
    """Halve per_core_batch_size until the work fits every process; raises UserError when one volume does not.
    `auto` begins with one volume and grows as long as there is room. `put_back` is called after each failure:
    what it left of weights and moments may be lost. `work_of` is given a configuration without workers, whose
    start a trial step does not have to wait for.
    """

    def fits(tried: Config) -> bool:
        is_fitting = runtime.attempt(work_of(replace(tried, data=replace(tried.data, workers=0))))
        if not is_fitting:
            put_back()
        return is_fitting

    if cfg.train.per_core_batch_size == "auto":
        cfg = _largest_batch(cfg, runtime, fits)
    while not fits(cfg):
        cfg = _smaller_batch(cfg, runtime)
    return cfg


def _with_batch(cfg: Config, size: int, *, compiles: bool) -> Config:
    return replace(cfg, train=replace(cfg.train, per_core_batch_size=size, compile=compiles))


def _least(cfg: Config) -> int:
    return 2 if cfg.method.control in MISMATCHED else 1


def _largest_batch(cfg: Config, runtime: Runtime, fits: Callable[[Config], bool]) -> Config:
    """The largest batch of about a doubling each that divides the global one, for which there is room."""
    share, size = cfg.train.global_batch_size // runtime.num_devices, _least(cfg)
    # On XLA each size is a program of minutes: benchmarks.tpu_fit finds it beforehand.
    has_room = runtime.device.type != "xla" and fits(_with_batch(cfg, size, compiles=False))
    while has_room:
        larger = [n for n in range(size + 1, share + 1) if share % n == 0]
        step = max((n for n in larger if n <= 2 * size), default=min(larger, default=size))
        # what a step needs is at most proportional to its batch
        has_room = step > size and runtime.has_room(step / size)
        # eager: a compiler would take a minute for each size
        has_room = has_room and fits(_with_batch(cfg, step, compiles=False))
        size = step if has_room else size
    log.info("train.per_core_batch_size: auto -> %d", size)
    return _with_batch(cfg, size, compiles=cfg.train.compile)


def _smaller_batch(cfg: Config, runtime: Runtime) -> Config:
    """The next smaller per-core batch that divides the global one; raises UserError after a batch of 1, or of
    2 where targets are those of another volume of the batch.
    """
    least = _least(cfg)
    share = cfg.train.global_batch_size // runtime.num_devices
    half = cfg.train.at_once // 2
    smaller = max((n for n in range(least, half + 1) if share % n == 0), default=0)
    if smaller == 0:
        what = "one volume" if least == 1 else "a batch of two volumes"
        raise UserError(
            f"out of memory: {what} of spatial.image_size {list(cfg.spatial.image_size)} does not "
            f"fit on {runtime.device}; a smaller image_size or model.size, or a larger patch_size, would"
        )
    log.warning("out of memory: per_core_batch_size %d -> %d", cfg.train.at_once, smaller)
    if cfg.train.compile:
        torch.compiler.reset()  # the programs of the larger batch would count towards its limit
    return replace(cfg, train=replace(cfg.train, per_core_batch_size=smaller))
