"""The trial step of a full fine-tuning.

In: a fine-tuning. Out: the same with the batch size that fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from data_setup.loader import Batch
from finetuning.heads.tuning import Tuning
from finetuning.heads.update import update_model
from models.optimizer import keep_state
from utils.batch_size import settle_batch
from utils.config.schema import Config
from utils.runtime.processes import ALONE


def settle_memory(tuning: Tuning, step: int) -> Tuning:
    """The fine-tuning with the largest per-core batch that fits every process, before the first update. It is
    tried with the whole encoder in training, also where that begins later. Raises UserError when one volume
    does not fit.
    """
    model, runtime = tuning.model, tuning.runtime

    def work_of(cfg: Config) -> Callable[[], None]:
        without_workers = replace(cfg, data=replace(cfg.data, workers=0))
        examples = tuning.examples.with_settings(without_workers)
        _, batches = examples.batches(runtime, step, step + 1)
        return partial(trial_step, tuning, cfg, runtime.to_device(next(batches)[0]))

    put_back = keep_state(model, tuning.optimizer, runtime)
    cfg = settle_batch(tuning.cfg, runtime, work_of, put_back)
    source = replace(tuning.source, cfg=cfg)
    return replace(tuning, source=source, examples=tuning.examples.with_settings(cfg))


def trial_step(tuning: Tuning, cfg: Config, micro: Batch) -> None:
    """A whole update of one micro-batch that moves nothing: what a step needs of memory, moments included. It
    needs no other process, since another may run out of memory alone.
    """
    model, optimizer = tuning.model, tuning.optimizer
    alone = replace(tuning.runtime, group=ALONE)
    model.freeze(is_frozen=False)
    try:
        update_model(model, optimizer, [micro], cfg, alone, 0.0, is_frozen=False, enabled=False)
        alone.synchronise()
    finally:
        optimizer.zero_grad(set_to_none=True)
