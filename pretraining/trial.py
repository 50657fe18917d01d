"""The trial step, and the loader of a run.

In: a run. Out: the run with the batch size that fits; global batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from data_setup.loader import Batch, Loader
from data_setup.normalisation import view
from models.engine_kernels import uncompiled
from models.optimizer import keep_state
from models.predictor import MlpPredictor
from pretraining.gauges.monitor import check_disjoint, check_no_leak
from pretraining.run import Run
from pretraining.step import trial_step
from utils.batch_size import settle_batch
from utils.config.load import accumulation_steps
from utils.config.schema import Config


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

    Raises UserError when one volume does not fit. The first batch also proves that the context encoder sees
    no target. From here on batch normalisation is over all processes.
    """
    model, optimizer, runtime = run.model, run.optimizer, run.runtime
    batch: Batch = {}

    def work_of(cfg: Config) -> Callable[[], None]:
        nonlocal batch
        cpu_batch = next(iter(open_loader(replace(run, cfg=cfg), step, step + 1)))[0]
        if model.recipe.hidden == "all_but_context":
            check_disjoint(cpu_batch)
        batch = runtime.to_device(cpu_batch)
        work = partial(trial_step, model, optimizer, batch, cfg, runtime)
        return work if cfg.train.compile else uncompiled(model)(work)

    cfg = settle_batch(run.cfg, runtime, work_of, keep_state(model, optimizer, runtime))
    model.eval()
    check_no_leak(model, view(batch, 0), batch["context"], batch["target"], runtime.mark_step)
    model.train()
    if isinstance(model.predictor, MlpPredictor):
        model.predictor.norm.total = runtime.group.sum_with_gradient
    return replace(run, cfg=cfg)
