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
    `put_back` is called after each failure: what it left of weights and moments may be lost. `work_of` is
    given a configuration without workers, whose start a trial step need not wait for.
    """
    while not runtime.attempt(work_of(replace(cfg, data=replace(cfg.data, workers=0)))):
        put_back()
        cfg = _smaller_batch(cfg, runtime)
    return cfg


def _smaller_batch(cfg: Config, runtime: Runtime) -> Config:
    """The next smaller per-core batch that divides the global one; raises UserError after a batch of 1, or of
    2 where targets are those of another volume of the batch.
    """
    least = 2 if cfg.method.control in MISMATCHED else 1
    share = cfg.train.global_batch_size // runtime.num_devices
    half = cfg.train.per_core_batch_size // 2
    smaller = max((n for n in range(least, half + 1) if share % n == 0), default=0)
    if smaller == 0:
        what = "one volume" if least == 1 else "a batch of two volumes"
        raise UserError(
            f"out of memory: {what} of spatial.image_size {list(cfg.spatial.image_size)} does not "
            f"fit on {runtime.device}; a smaller image_size or model.size, or a larger patch_size, would"
        )
    log.warning("out of memory: per_core_batch_size %d -> %d", cfg.train.per_core_batch_size, smaller)
    if cfg.train.compile:
        torch.compiler.reset()  # the programs of the larger batch would count towards its limit
    return replace(cfg, train=replace(cfg.train, per_core_batch_size=smaller))
