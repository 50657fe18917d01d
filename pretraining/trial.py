"""The trial step, and the loader of a run.

In: a run. Out: the run with the batch size that fits; global batches.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import torch

from data_setup.loader import Loader
from data_setup.normalisation import view
from models.optimizer import shard_state
from models.predictor import MlpPredictor
from pretraining.gauges.monitor import check_disjoint, check_no_leak
from pretraining.run import Run
from pretraining.step import trial_step
from utils.checkpoint import to_host
from utils.config.load import accumulation_steps
from utils.config.schema import Config
from utils.errors import UserError
from utils.runtime.single import Runtime

log = logging.getLogger(__name__)


def open_loader(run: Run, start: int, stop: int) -> Loader:
    """Global batches of the steps start..stop, this process's share of each."""
    return Loader(
        run.cfg,
        run.store,
        run.rows.train,
        rank=run.runtime.rank,
        world=run.runtime.world_size,
        accum=accumulation_steps(run.cfg.train, run.runtime.num_devices),
        start_step=start,
        num_steps=stop - start,
    )


def settle_memory(run: Run, step: int) -> Run:
    """The run with the largest per-core batch that fits every process, before the first update.

    Halves per_core_batch_size and doubles the accumulation, so that the global batch stays; raises UserError
    when one volume does not fit. The first batch also proves that the context encoder sees no target. From
    here on batch normalisation is over all processes.
    """
    model, optimizer, runtime, cfg = run.model, run.optimizer, run.runtime, run.cfg
    before = None
    if not runtime.failure_is_clean:
        before = to_host(runtime.full_state((model.state_dict(), optimizer.state_dict())))
    while True:
        trial = replace(run, cfg=replace(cfg, data=replace(cfg.data, workers=0)))
        cpu_batch = next(iter(open_loader(trial, step, step + 1)))[0]
        if model.recipe.hidden == "all_but_context":
            check_disjoint(cpu_batch)
        batch = runtime.to_device(cpu_batch)
        if runtime.attempt(partial(trial_step, model, optimizer, batch, cfg, runtime)):
            break
        if before is not None:
            model.load_state_dict(before[0])
            optimizer.load_state_dict(before[1])
            shard_state(model, optimizer, cfg, runtime)
        cfg = _smaller_batch(cfg, runtime)
    model.eval()
    check_no_leak(model, view(batch, 0), batch["context"], batch["target"], runtime.mark_step)
    model.train()
    if isinstance(model.predictor, MlpPredictor):
        model.predictor.norm.total = runtime.group.sum_with_gradient
    return replace(run, cfg=cfg)


def _smaller_batch(cfg: Config, runtime: Runtime) -> Config:
    """The next smaller per-core batch that divides the global one; raises UserError after a batch of 1."""
    share = cfg.train.global_batch_size // runtime.num_devices
    half = cfg.train.per_core_batch_size // 2
    smaller = max((n for n in range(1, half + 1) if share % n == 0), default=0)
    if smaller == 0:
        raise UserError(
            f"out of memory: one volume of spatial.image_size {list(cfg.spatial.image_size)} does not "
            f"fit on {runtime.device}; a smaller image_size or model.size, or a larger patch_size, would"
        )
    log.warning("out of memory: per_core_batch_size %d -> %d", cfg.train.per_core_batch_size, smaller)
    if cfg.train.compile:
        torch.compiler.reset()  # the programs of the larger batch would count towards its limit
    return replace(cfg, train=replace(cfg.train, per_core_batch_size=smaller, grad_accum_steps=None))
