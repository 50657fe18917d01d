"""A full fine-tuning: the model, the learning rate of each layer, one update, its batches, what is saved of
it.

In: a source, its store and cohort. Out: a `Tuning` with the batch size that fits; `Examples`, the augmented
volumes of data_setup.loader, each with `truth` and `weight` [B, T], in the order of pre-training, so that
world size, accumulation and workers change nothing; its `Progress`, restored from the newest checkpoint,
which holds everything that the next step depends on. Of normalised volumes [B, C, D, H, W], the validity of
their tokens [B, N] and, in training, the samples' own seeds the model gives the head's outputs
[B, num_outputs]. Layer-wise decay of the rates: Clark et al. 2020 (arXiv:2003.10555), as BEiT and MAE
fine-tune. Legend: models/vit3d.py.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from data_setup.loader import Batch, Loader
from data_setup.normalisation import view
from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import TRAIN, Cohort
from finetuning.cohort.source import Source
from finetuning.features.kept import load_strictly, pretrained_encoder
from finetuning.heads.epochs import newest_of_run
from finetuning.heads.objective import Task, row_losses
from models.engine_kernels import choose_kernels
from models.heads import AttentiveHead, build_head
from models.optimizer import blocks_above, build_adamw, keep_state
from models.probes.features import token_moments
from models.stochastic import Stochastic
from models.vit3d import Recompute, VisionTransformer3D, recompute_block
from utils.batch_size import settle_batch
from utils.checkpoint import to_host
from utils.config.load import accumulation_steps, to_yaml
from utils.config.schema import Config
from utils.run.calendar import Calendar
from utils.run.folder import require_one_run
from utils.run.progress import RunProgress
from utils.runtime.processes import ALONE
from utils.runtime.single import Runtime

LEAST_VARIANCE = 1e-12  # of a feature over the tokens: the gradient of a root has no value at 0
MASK_TOKEN = "mask_token"  # which no whole volume meets
# parameters of two axes or more that are no matrices, so do not decay
TABLES = ("pos_embed", "prefix_tokens", "query")
KIND = "finetune"  # of a checkpoint; pre-training's has none
# what an update reads of a batch; masks stay behind
FIELDS = (
    *("volume", "matrix", "valid_box", "mean", "std", "intensity", "noise_seed"),
    *("sample_seed", "token_valid"),
)


class HeadOnTokens(nn.Module):
    """A head of models.heads on the tokens of an encoder, whose features are not standardised."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, tokens_BNE: Tensor, valid_BN: Tensor) -> Tensor:
        if isinstance(self.head, AttentiveHead):
            return self.head(tokens_BNE, valid_BN)
        mean_BE, variance_BE = token_moments(tokens_BNE, valid_BN)
        return self.head(torch.cat([mean_BE, variance_BE.clamp(min=LEAST_VARIANCE).sqrt()], dim=1))


class TunedModel(nn.Module):
    """Encoder and head. With `seed_B` a pass draws dropout and stochastic depth from the samples' seeds."""

    def __init__(self, encoder: VisionTransformer3D, num_outputs: int, cfg: Config) -> None:
        """The head is drawn from torch's global generator; the encoder's mask token, never met, stays."""
        super().__init__()
        self.encoder = encoder
        self.top = HeadOnTokens(
            build_head(cfg.head.kind, encoder.feature_width, num_outputs, cfg.head.hidden)
        )
        self.dropout, self.drop_path = cfg.method.dropout, cfg.method.drop_path
        if cfg.train.activation_checkpointing:
            self.checkpoint_activations(recompute_block)
        for name, parameter in encoder.named_parameters():
            parameter.requires_grad_(is_read(encoder, name))

    def checkpoint_activations(self, recompute: Recompute) -> None:
        """Keep only the blocks' inputs for the backward pass; an engine may bring its own `recompute`."""
        self.encoder.recompute = recompute

    def forward(self, view_BCDHW: Tensor, valid_BN: Tensor, seed_B: Tensor | None = None) -> Tensor:
        noise = None
        if seed_B is not None and (self.dropout > 0 or self.drop_path > 0):
            noise = Stochastic(seed_B, self.dropout, self.drop_path)
        return self.top(self.encoder(view_BCDHW, noise=noise), valid_BN)


def is_read(encoder: VisionTransformer3D, name: str) -> bool:
    """Whether features rest on this parameter: not on the mask token, nor on blocks after their last one."""
    last = max(encoder.feature_blocks, default=encoder.depth)
    return name != MASK_TOKEN and (not name.startswith("blocks.") or int(name.split(".")[1]) < last)


def layer_groups(
    encoder: VisionTransformer3D | None, top: nn.Module, weight_decay: float, layer_decay: float
) -> list[dict[str, Any]]:
    """AdamW groups, each with `rate_share`: layer_decay to the power of the number of blocks above.

    `top`, last norm and last block have the full rate, patches and positions the smallest; an encoder that is
    never trained is None. Weight decay on matrices only. Every parameter that is ever trained is in one
    group.
    """
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}

    def add(name: str, parameter: nn.Parameter, above: int) -> None:
        is_matrix = parameter.ndim > 1 and name.split(".")[-1] not in TABLES
        groups.setdefault((above, is_matrix), []).append(parameter)

    moved = {}
    if encoder is not None:
        moved = {name: p for name, p in encoder.named_parameters() if is_read(encoder, name)}
        depth = max(encoder.feature_blocks, default=encoder.depth)
    for name, parameter in moved.items():
        add(name, parameter, blocks_above(name, depth))
    for name, parameter in top.named_parameters():
        add(name, parameter, 0)
    return [
        {
            "params": parameters,
            "weight_decay": weight_decay if is_matrix else 0.0,
            "rate_share": layer_decay**above,
        }
        for (above, is_matrix), parameters in groups.items()
    ]


@dataclass
class UpdateResult:
    """Device tensors of one update."""

    loss: Tensor
    grad_norm: Tensor
    is_finite: Tensor


def update_model(
    model: TunedModel,
    optimizer: torch.optim.AdamW,
    batches: list[Batch],
    cfg: Config,
    runtime: Runtime,
    rate: float,
    *,
    enabled: bool = True,
) -> UpdateResult:
    """One update from this process's micro-batches of one global batch; the result is the whole batch's.

    With `enabled=False` the update does all of its work and moves nothing. No branch here depends on a tensor
    and nothing is read back to the host: an update that is not finite is skipped by a select on the device.
    """
    samples, kind = cfg.train.global_batch_size, cfg.task.kind
    model.train()
    optimizer.zero_grad(set_to_none=True)
    loss_sum = torch.zeros((), device=runtime.device)
    for number, batch in enumerate(batches, 1):
        volume, valid_BN = view(batch, 0), batch["token_valid"].float()
        sums = number == len(batches)
        with runtime.autocast():
            outputs_BC = runtime.group.replica(model, sums=sums)(volume, valid_BN, batch["sample_seed"])
        losses_BT = row_losses(kind, outputs_BC.float(), batch["truth"])  # of labels the mean
        objective = (losses_BT * batch["weight"]).mean(dim=1).sum() / samples
        runtime.group.backward(objective)
        loss_sum = loss_sum + objective.detach()

    loss_sum = runtime.group.sum(loss_sum)
    trained = [p for p in model.parameters() if p.requires_grad]
    grad_norm = torch.nn.utils.clip_grad_norm_(trained, cfg.optim.clip_grad_norm)
    is_finite = torch.isfinite(grad_norm) & torch.isfinite(loss_sum) & enabled
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate_share"]
    # the optimizer's own select: with found_inf = 1 neither parameters nor moments nor its step count move
    optimizer.found_inf = 1.0 - is_finite.float()  # type: ignore[attr-defined]  # read by the fused kernels
    optimizer.step()
    return UpdateResult(loss_sum, grad_norm, is_finite)


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
    data, truth = cfg.data.store, cohort_checksum(tuning.cohort, tuning.store)

    def expected_of(state: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        return {
            "total_steps": (tuning.calendar.total, f"a run of {state['total_steps']} updates"),
            "encoder_checksum": (source.state["checksum"], f"the checkpoint {source.url}"),
            "cohort_sha256": (truth, f"the labelled volumes of {data}"),
            "normalisation": (tuning.store.attrs["normalisation"], f"the normalisation of {data}"),
        }

    state = newest_of_run(cfg, KIND, ("a fine-tuning", "a pre-training"), expected_of)
    return None if state is None else {name: state[name] for name in ("model", "optimizer", "progress")}


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
