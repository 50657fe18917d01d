"""What travels through a full fine-tuning, when what happens, and what is saved of it.

In: a source, its store and cohort. Out: a `Tuning`; its `Plan`, a pure function of the configuration; its
`Progress`, restored from the newest checkpoint. A checkpoint holds everything that the next step depends on.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import Cohort
from finetuning.cohort.source import Source
from finetuning.features.pooled import load_strictly, pretrained_encoder
from finetuning.heads.examples import Examples
from finetuning.heads.tuned import TunedModel, layer_groups
from models.engine_kernels import choose_kernels
from models.optimizer import build_adamw
from utils.checkpoint import CheckpointError, load_newest, to_host
from utils.config.load import config_of_yaml, to_yaml
from utils.config.schema import Config, keys_with
from utils.errors import UserError
from utils.run.folder import refuse_changes, require_one_configuration, shared_settings
from utils.run.history import refuse_lost_checkpoints
from utils.run.skipped_updates import SkippedUpdates
from utils.runtime.single import Runtime

log = logging.getLogger(__name__)
KIND = "finetune"  # of a checkpoint; pre-training's has none


@dataclass(frozen=True)
class Plan:
    """What happens after how many updates."""

    epoch: int  # updates that read about every training volume once
    total: int
    log_every: int
    validate_every: int
    save_every: int
    keep_every: int
    unfreeze_at: int  # until then the head alone is trained
    patience: int | None  # updates without a better validation

    @classmethod
    def of(cls, cfg: Config, num_volumes: int) -> Plan:
        train, tune = cfg.train, cfg.finetune
        epoch = max(1, round(num_volumes / train.global_batch_size))
        assert train.max_steps is not None or train.epochs is not None, "checked with the configuration"
        total = train.max_steps
        if total is None:
            total = math.ceil((train.epochs or 0) * num_volumes / train.global_batch_size)
        rhythm = train.ckpt_every_epochs * epoch
        return cls(
            epoch=epoch,
            total=total,
            log_every=train.log_every_steps,
            validate_every=train.val_every_steps or epoch,
            save_every=train.ckpt_every_steps or rhythm,
            keep_every=rhythm * max(1, math.ceil(total // rhythm / train.keep_epochs)),
            unfreeze_at=tune.unfreeze_at_epoch * epoch,
            patience=None if tune.patience is None else tune.patience * epoch,
        )

    def logs(self, done: int) -> bool:
        return done % self.log_every == 0 or done in (1, self.total)

    def validates(self, done: int) -> bool:
        return done % self.validate_every == 0 or done == self.total

    def saves(self, done: int) -> bool:
        return done % self.save_every == 0 or done % self.keep_every == 0 or done == self.total

    def is_frozen(self, step: int) -> bool:
        """Whether update number `step` trains the head alone."""
        return step < self.unfreeze_at


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
    plan: Plan

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
    groups = layer_groups(model, cfg.optim.weight_decay, cfg.finetune.layer_decay)
    optimizer = build_adamw(groups, cfg.optim, runtime.device)
    plan = Plan.of(cfg, len(examples))
    return Tuning(source, store, cohort, examples, model, optimizer, runtime, plan)


class Progress:
    """How far a fine-tuning is; all processes count the same."""

    def __init__(self, runtime: Runtime, state: Mapping[str, Any] | None = None) -> None:
        state = state or {"step": 0, "best": None, "owes_validation": False, "bad_run": 0, "bad_total": 0}
        self.step: int = state["step"]  # updates made
        self.best: dict[str, Any] | None = state["best"]  # metric, score, loss, epoch and step of the best
        self.owes_validation: bool = state["owes_validation"]  # SIGTERM cut it short
        self.skipped = SkippedUpdates(runtime, state["bad_run"], state["bad_total"])

    def is_better(self, score: float, loss: float) -> bool:
        """Whether a validation beats all before it; equal scores go by the loss."""
        return self.best is None or (score, -loss) > (self.best["score"], -self.best["loss"])

    def is_over(self, plan: Plan) -> bool:
        """Whether all updates are made, or patience has ended."""
        if self.owes_validation:
            return False
        is_tired = (
            plan.patience is not None
            and self.best is not None
            and self.step - self.best["step"] >= plan.patience
        )
        return self.step >= plan.total or is_tired

    def state_dict(self) -> dict[str, Any]:
        """Plain values for the checkpoint."""
        return {
            "step": self.step,
            "best": self.best,
            "owes_validation": self.owes_validation,
            "bad_run": self.skipped.in_a_row,
            "bad_total": self.skipped.total,
        }


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
        "total_steps": tuning.plan.total,
        "encoder_checksum": tuning.source.state["checksum"],
        "normalisation": tuning.store.attrs["normalisation"],
        "synthetic": bool(tuning.store.attrs["synthetic"]),
        "cohort_sha256": cohort_checksum(tuning.cohort, tuning.store),
    }


def restore(tuning: Tuning) -> Progress:
    """Load this run's newest intact checkpoint, if any; returns the progress.

    The first process of the group reads, and all of them load what it has.
    """
    runtime = tuning.runtime
    group = runtime.group
    runtime.mark_step()
    state = _read(tuning) if group.is_first else None
    if group.size > 1:
        require_one_configuration(group.gather_objects(shared_settings(tuning.cfg)))
        checksum = cohort_checksum(tuning.cohort, tuning.store)
        if len(set(group.gather_objects(checksum))) > 1:
            raise UserError(
                f"{tuning.cfg.data.store}: expected the same labelled volumes on every process, found others"
            )
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
    """Weights, moments and progress of the newest intact checkpoint; None where there is none. Raises
    UserError where it is another run's.
    """
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
    refuse_changes(config_of_yaml(state["config"], where), cfg, where, moved=keys_with("is_place"))
    expected = {
        "total_steps": (
            tuning.plan.total,
            f"a run of {state['total_steps']} updates, which its rates rest on,",
        ),
        "encoder_checksum": (source.state["checksum"], f"the checkpoint {source.url}"),
        "cohort_sha256": (
            cohort_checksum(tuning.cohort, tuning.store),
            f"the labelled volumes of {cfg.data.store}",
        ),
        "normalisation": (tuning.store.attrs["normalisation"], f"the normalisation of {cfg.data.store}"),
    }
    for key, (value, text) in expected.items():
        if state[key] != value:
            raise UserError(f"{where}: expected {text} as the run began, found another; use another run.dir")
    log.info("resuming from step %d of %s", state["step"], where)
    return {name: state[name] for name in ("model", "optimizer", "progress")}
