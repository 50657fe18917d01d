"""What travels through a full fine-tuning, its batches, what is saved of it, and its trial step.

In: a source, its store and cohort. Out: a `Tuning` with the batch size that fits; `Examples`, the augmented
volumes of data_setup.loader, each with `truth` and `weight` [B, T], in the order of pre-training, so that
world size, accumulation and workers change nothing; its `Progress`, restored from the newest checkpoint,
which holds everything that the next step depends on.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from data_setup.loader import Batch, Loader
from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import TRAIN, Cohort
from finetuning.cohort.source import Source
from finetuning.features.pooled import load_strictly, pretrained_encoder
from finetuning.heads.objective import Task
from finetuning.heads.tuned import TunedModel, layer_groups, update_model
from models.engine_kernels import choose_kernels
from models.optimizer import build_adamw, keep_state
from utils.batch_size import settle_batch
from utils.checkpoint import CheckpointError, load_newest, to_host
from utils.config.load import accumulation_steps, config_of_yaml, to_yaml
from utils.config.schema import Config, keys_with
from utils.errors import UserError
from utils.run.calendar import Calendar
from utils.run.folder import refuse_changes, refuse_lost_checkpoints, require_one_run
from utils.run.progress import RunProgress
from utils.runtime.processes import ALONE
from utils.runtime.single import Runtime

log = logging.getLogger(__name__)
KIND = "finetune"  # of a checkpoint; pre-training's has none
# what an update reads of a batch; masks stay behind
FIELDS = (
    *("volume", "matrix", "valid_box", "mean", "std", "intensity", "noise_seed"),
    *("sample_seed", "token_valid"),
)


class Examples:
    """The training volumes, and what a prediction of each should be."""

    def __init__(self, cfg: Config, store: PreparedStore, cohort: Cohort) -> None:
        chosen = cohort.fold == TRAIN
        self.cfg, self.store, self.rows = cfg, store, cohort.rows[chosen]
        task = Task.of(cfg, cohort, torch.device("cpu"))
        self.scale, self.truth, self.weight = task.scale, task.target[chosen], task.weight[chosen]
        self.place_of = {int(row): place for place, row in enumerate(self.rows)}

    def __len__(self) -> int:
        return len(self.rows)

    def with_settings(self, cfg: Config) -> Examples:
        """The same volumes and truth, read as this configuration says."""
        other = copy.copy(self)
        other.cfg = cfg
        return other

    def batches(self, runtime: Runtime, start: int, total: int) -> tuple[Loader, Iterator[list[Batch]]]:
        """The loader of steps start..total, and for each this process's micro-batches on the host."""
        loader = Loader(
            self.cfg,
            self.store,
            self.rows,
            rank=runtime.rank,
            world=runtime.world_size,
            accum=accumulation_steps(self.cfg.train, runtime.num_devices),
            start_step=start,
            num_steps=total - start,
        )
        return loader, ([self.labelled(batch) for batch in step] for step in loader)

    def labelled(self, batch: Batch) -> Batch:
        """What an update reads of a batch, with truth and weight of its volumes."""
        places = [self.place_of[row] for row in batch["row"].tolist()]
        return {name: batch[name] for name in FIELDS} | {
            "truth": self.truth[places],
            "weight": self.weight[places],
        }


@dataclass(frozen=True)
class Tuning:
    """One fine-tuning on this process."""

    source: Source
    store: PreparedStore
    cohort: Cohort
    examples: Examples
    model: TunedModel
    optimizer: torch.optim.AdamW
    runtime: Runtime
    calendar: Calendar

    @property
    def cfg(self) -> Config:
        return self.source.cfg


def open_tuning(source: Source, store: PreparedStore, cohort: Cohort, runtime: Runtime) -> Tuning:
    """The checkpoint's encoder with a new head."""
    cfg = source.cfg
    examples = Examples(cfg, store, cohort)
    torch.manual_seed(cfg.seed)
    encoder = pretrained_encoder(cfg, source.state, source.url)
    model = TunedModel(encoder, cohort.num_outputs, cfg).to(runtime.device)
    choose_kernels(model, cfg, runtime)
    groups = layer_groups(model.encoder, model.top, cfg.optim.weight_decay, cfg.finetune.layer_decay)
    optimizer = build_adamw(groups, cfg.optim, runtime.device)
    calendar = Calendar.of(cfg, len(examples))
    return Tuning(source, store, cohort, examples, model, optimizer, runtime, calendar)


class Progress(RunProgress):
    """The counters of every run, and the best validation: metric, score, loss, epoch and step of it."""

    def __init__(self, runtime: Runtime, state: Mapping[str, Any] | None = None) -> None:
        state = state or {"step": 0, "best": None, "bad_run": 0, "bad_total": 0}
        super().__init__(runtime, state)
        self.best: dict[str, Any] | None = state["best"]

    def is_better(self, score: float, loss: float) -> bool:
        """Whether a validation beats all before it; equal scores go by the loss."""
        return self.best is None or (score, -loss) > (self.best["score"], -self.best["loss"])

    def is_over(self, tuning: Tuning) -> bool:
        """Whether all updates are made, or no epoch of finetune.patience was better than the best."""
        if self.owes_validation:
            return False
        patience, calendar = tuning.cfg.finetune.patience, tuning.calendar
        is_tired = (
            patience is not None
            and self.best is not None
            and self.step - self.best["step"] >= patience * calendar.epoch
        )
        return self.step >= calendar.total or is_tired

    def state_dict(self) -> dict[str, Any]:
        """Plain values for the checkpoint."""
        return {**super().state_dict(), "best": self.best}


def cohort_checksum(cohort: Cohort, store: PreparedStore) -> str:
    """Which volumes are trained and validated on, in which order, with which truth."""
    volumes = store.index.loc[cohort.rows, "checksum"].tolist()
    parts = (cohort.fold.tolist(), cohort.target.tolist(), cohort.unit.tolist(), cohort.names)
    return hashlib.sha256(repr((volumes, *parts)).encode()).hexdigest()


def checkpoint_state(tuning: Tuning, progress: Progress) -> dict[str, Any]:
    """Everything that the next step depends on."""
    return {
        "kind": KIND,
        "step": progress.step,
        "model": tuning.model.state_dict(),
        "optimizer": tuning.optimizer.state_dict(),
        "progress": progress.state_dict(),
        "config": to_yaml(tuning.cfg),
        "total_steps": tuning.calendar.total,
        "encoder_checksum": tuning.source.state["checksum"],
        "normalisation": tuning.store.attrs["normalisation"],
        "synthetic": bool(tuning.store.attrs["synthetic"]),
        "cohort_sha256": cohort_checksum(tuning.cohort, tuning.store),
    }


def restore(tuning: Tuning) -> Progress:
    """The progress of this run's newest intact checkpoint, if any, which one process reads and all load."""
    runtime = tuning.runtime
    group = runtime.group
    runtime.mark_step()
    state = _read(tuning) if group.is_first else None
    if group.size > 1:
        require_one_run(tuning.cfg, group, "labelled", cohort_checksum(tuning.cohort, tuning.store))
        if group.is_first and state is None:
            parts = to_host((tuning.model.state_dict(), tuning.optimizer.state_dict()))
            state = dict(zip(("model", "optimizer"), parts, strict=True)) | {"progress": None}
        state = group.broadcast(state)
    if state is None:
        return Progress(runtime)
    load_strictly(tuning.model, state["model"], str(tuning.cfg.train.ckpt_dir))
    tuning.optimizer.load_state_dict(state["optimizer"])
    return Progress(runtime, state["progress"])


def _read(tuning: Tuning) -> dict[str, Any] | None:
    """Weights, moments, progress of the newest intact checkpoint, if any; UserError for another run's."""
    cfg, source = tuning.cfg, tuning.source
    where = str(cfg.train.ckpt_dir)
    state = load_newest(where, cfg.data.storage_options)
    if state is None:
        refuse_lost_checkpoints(cfg)
        return None
    if state.get("kind") != KIND:
        raise CheckpointError(
            f"{where}: expected checkpoints of a fine-tuning, found those of a pre-training"
        )
    refuse_changes(
        config_of_yaml(state["config"], where, to_go_on=True), cfg, where, moved=keys_with("is_place")
    )
    data, truth = cfg.data.store, cohort_checksum(tuning.cohort, tuning.store)
    expected = {
        "total_steps": (tuning.calendar.total, f"a run of {state['total_steps']} updates"),
        "encoder_checksum": (source.state["checksum"], f"the checkpoint {source.url}"),
        "cohort_sha256": (truth, f"the labelled volumes of {data}"),
        "normalisation": (tuning.store.attrs["normalisation"], f"the normalisation of {data}"),
    }
    for key, (value, text) in expected.items():
        if state[key] != value:
            raise UserError(f"{where}: expected {text} as the run began, found another; use another run.dir")
    log.info("resuming from step %d of %s", state["step"], where)
    return {name: state[name] for name in ("model", "optimizer", "progress")}


def settle_memory(tuning: Tuning, step: int) -> Tuning:
    """The fine-tuning with the largest per-core batch that fits every process; UserError where none does."""
    model, runtime = tuning.model, tuning.runtime

    def work_of(cfg: Config) -> Callable[[], None]:
        _, batches = tuning.examples.with_settings(cfg).batches(runtime, step, step + 1)
        return partial(trial_step, tuning, cfg, runtime.to_device(next(batches)[0]))

    put_back = keep_state(model, tuning.optimizer, runtime)
    cfg = settle_batch(tuning.cfg, runtime, work_of, put_back)
    source = replace(tuning.source, cfg=cfg)
    return replace(tuning, source=source, examples=tuning.examples.with_settings(cfg))


def trial_step(tuning: Tuning, cfg: Config, micro: Batch) -> None:
    """A whole update of one micro-batch that moves nothing: what a step needs of memory, moments included. It
    needs no other process, since another may be the only one to run out of memory.
    """
    model, optimizer = tuning.model, tuning.optimizer
    alone = replace(tuning.runtime, group=ALONE)
    try:
        update_model(model, optimizer, [micro], cfg, alone, 0.0, enabled=False)
        alone.synchronise()
    finally:
        optimizer.zero_grad(set_to_none=True)
