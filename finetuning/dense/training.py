"""Train decoders on the tokens of an encoder: task.kind layers, segmentation and translation.

In: what to train for (`Objective`), volumes of three folds, an encoder for each arm. Out: the best decoder
of each arm on validation, metrics.jsonl and the line on the terminal. A step reads train.global_batch_size
planes of the token grid, each of one training volume; an epoch has every plane once. All arms start from the
same weights and see the same planes in the same order. The steps of a second arm follow those of the first,
and its metrics have its name before theirs.

The encoder is frozen, and its tokens are kept; or finetune.encoder=trained moves it with its decoder, layer
by layer at rates of their own (finetuning.heads.tuned). Then a batch is made of whole volumes, since tokens
are.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import TRAIN, VAL
from finetuning.cohort.source import Source, check_fit
from finetuning.dense.folds import DenseVolumes, refuse_overlap
from finetuning.dense.head import PRETRAINED, RANDOM, dense_state, encoder_of, new_decoder
from finetuning.dense.layers.planes import Planes
from finetuning.features.kept import KeptFeatures, features_folder
from finetuning.heads.frozen import num_updates, schedule
from finetuning.heads.head_file import write_head
from finetuning.heads.tuned import MASK_TOKEN, layer_groups
from models.vit3d import VisionTransformer3D
from utils.config.schema import Config
from utils.dashboards.run_log import NoLog, RunLog
from utils.errors import EXIT_FINISHED, UserError
from utils.run.folder import claim_run_dir, held_run
from utils.run.history import NO_CHECKPOINT_YET, WANDB_ID
from utils.runtime.single import Runtime

log = logging.getLogger(__name__)
Volumes = TypeVar("Volumes", bound=DenseVolumes)


@dataclass(frozen=True)
class Objective:
    """What decoders are trained for, and how the best epoch is told."""

    num_outputs: int
    metric: str  # its name in metrics.jsonl, below val/, and in the head's file
    sign: int  # 1 where more is better, else -1
    planes: type[Planes]
    loss: Callable[[Tensor, Tensor], Tensor]  # of outputs and truth of some planes
    score: Callable[[nn.Module, Planes], float]  # of the validation volumes


@dataclass
class Best:
    """The best epoch of an arm."""

    metric: str
    value: float = math.nan
    epoch: int = 0
    step: int = 0
    decoder: nn.Module | None = None
    encoder: nn.Module | None = None
    history: list[dict[str, float]] = field(default_factory=list)

    @property
    def facts(self) -> dict[str, Any]:
        """What the head's file says of it."""
        return {
            self.metric: self.value,
            "epoch": self.epoch,
            "step": self.step,
            "history": self.history,
        }


def arms_of(cfg: Config) -> tuple[str, ...]:
    """The encoders that decoders are trained on."""
    return (PRETRAINED, RANDOM) if cfg.finetune.against_random else (PRETRAINED,)


def open_volumes(source: Source, read: Callable[[Config, PreparedStore], Volumes]) -> Volumes:
    """What `read` gives of the source's store; UserError for people that pre-training saw."""
    cfg = source.cfg
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    check_fit(cfg, store, source.state, source.url)
    volumes = read(cfg, store)
    refuse_overlap(cfg, volumes, source.state["participants"], source.url, "pre-training")
    return volumes


def train_head(
    source: Source,
    volumes: DenseVolumes,
    objective: Objective,
    runtime: Runtime,
    more: Callable[[nn.Module], dict[str, Any]],
    shown: tuple[str, str],
) -> int:
    """Train every arm and write their file, with what `more` adds to it for the pre-trained arm's encoder;
    returns the exit code.

    `shown`: title and format of the metric in the printed table. Raises UserError.
    """
    cfg = source.cfg
    with held_run(cfg, runtime), open_run_log(source, volumes) as run_log:
        bests = train_arms(source, volumes, objective, runtime, run_log)
        validation = validations(bests)
        arms = trained_arms(bests)
        state = dense_state(source, volumes.store, volumes, arms, validation)
        url = write_head(cfg, state | more(arms[PRETRAINED][0]))
        claim_run_dir(cfg, runtime)
        head_is_written(cfg)
        run_log.artifact("head", url)
    print(format_arms(validation, *shown, objective.metric))
    print(f"head: {url}\nnext: python -m finetuning.evaluate --head {url}")
    return EXIT_FINISHED


def train_arms(
    source: Source, volumes: DenseVolumes, objective: Objective, runtime: Runtime, run_log: RunLog | NoLog
) -> dict[str, Best]:
    """The best epoch of every arm. Raises UserError."""
    bests: dict[str, Best] = {}
    for name in arms_of(source.cfg):
        steps_before = sum(int(best.history[-1]["step"]) for best in bests.values())
        bests[name] = train_arm(name, source, volumes, objective, runtime, run_log, steps_before)
    return bests


def open_run_log(source: Source, volumes: DenseVolumes) -> RunLog:
    """The log of a training that begins anew; `with` closes it."""
    cfg = source.cfg
    (Path(cfg.run.dir) / WANDB_ID).unlink(missing_ok=True)  # nothing is resumed: a training is a run
    total = len(arms_of(cfg)) * num_updates(cfg, _batches(cfg, volumes)[2])
    return RunLog(cfg, 0, total, synthetic=bool(volumes.store.attrs["synthetic"]))


def head_is_written(cfg: Config) -> None:
    """The run has what it was for."""
    (Path(cfg.run.dir) / NO_CHECKPOINT_YET).unlink(missing_ok=True)


def _batches(cfg: Config, volumes: DenseVolumes) -> tuple[list[list[tuple[int, int]]], int, int]:
    """What batches are made of, (row, plane) pairs that stay together; how many of these, and updates of an
    epoch.
    """
    rows, planes = volumes.of(TRAIN).tolist(), range(cfg.grid[0])
    if cfg.finetune.encoder == "trained":  # a volume's tokens are made together
        units = [[(row, plane) for plane in planes] for row in rows]
    else:
        units = [[(row, plane)] for row in rows for plane in planes]
    size = min(cfg.train.global_batch_size // len(units[0]), len(units))
    return units, size, math.ceil(len(units) / size)


def train_arm(
    name: str,
    source: Source,
    volumes: DenseVolumes,
    objective: Objective,
    runtime: Runtime,
    run_log: RunLog | NoLog,
    steps_before: int = 0,
) -> Best:
    """Train one decoder, and its encoder where the configuration says so; returns its best epoch on the
    validation volumes. Raises UserError.
    """
    cfg, prefix = source.cfg, "" if name == PRETRAINED else f"{name}/"
    encoder = encoder_of(name, cfg, source.state, source.url)
    planes = objective.planes(cfg, _token_source(encoder, cfg, volumes, runtime), volumes, runtime.device)
    units, size, per_epoch = _batches(cfg, volumes)
    total = num_updates(cfg, per_epoch)
    with torch.random.fork_rng(devices=[runtime.device] if runtime.device.type == "cuda" else []):
        torch.manual_seed(cfg.seed)
        decoder = new_decoder(cfg, encoder.width, objective.num_outputs).to(runtime.device)
    optimizer = _optimizer(encoder, decoder, cfg)
    best, start, losses = Best(objective.metric), time.perf_counter(), list[float]()
    for step in range(total):
        epoch, place = divmod(step, per_epoch)
        done = step + 1
        if place == 0:
            order = np.random.default_rng([cfg.seed, epoch]).permutation(len(units))
        chosen = [pair for i in order[place * size : (place + 1) * size] for pair in units[i]]
        share = schedule(step, total, cfg.optim.warmup_ratio, cfg.optim.min_lr_ratio)
        losses.append(_step(decoder, optimizer, objective, planes.batch(chosen), cfg, share))
        run_log.advance()
        if done % cfg.train.log_every_steps == 0 or done in (1, total):
            values = {"train/loss": losses[-1], "train/lr": cfg.optim.base_lr * share}
            run_log.metrics(steps_before + done, _named(prefix, values))
        if place + 1 == per_epoch or done == total:
            value = objective.score(decoder, planes)
            line = {"epoch": epoch + 1, "step": done, "loss": float(np.mean(losses)), objective.metric: value}
            best.history.append(line | {"seconds": round(time.perf_counter() - start, 1)})
            run_log.metrics(steps_before + done, _named(prefix, {f"val/{objective.metric}": value}))
            losses = []
            if _is_better(value, best.value, objective.sign):
                best.value, best.epoch, best.step = value, epoch + 1, done
                best.decoder = copy.deepcopy(decoder)
                best.encoder = encoder if cfg.finetune.encoder == "frozen" else copy.deepcopy(encoder)
            if cfg.finetune.patience is not None and epoch + 1 - best.epoch >= cfg.finetune.patience:
                break
    if best.decoder is None:
        raise UserError(f"optim.base_lr: expected one that trains, found no numbers with {cfg.optim.base_lr}")
    return best


def _is_better(value: float, best: float, sign: int) -> bool:
    """NaN is never better, and every number is better than NaN."""
    return math.isfinite(value) and (math.isnan(best) or sign * value > sign * best)


def _named(prefix: str, values: Mapping[str, float]) -> dict[str, float | None]:
    return {f"{prefix}{key}": value for key, value in values.items()}


def _token_source(
    encoder: VisionTransformer3D, cfg: Config, volumes: DenseVolumes, runtime: Runtime
) -> KeptFeatures | Callable[[Tensor], Tensor]:
    """A frozen encoder's kept tokens; or what runs an encoder that is trained, which is made ready for it."""
    if cfg.finetune.encoder == "frozen":
        kept = KeptFeatures(encoder, cfg, volumes.store, runtime, features_folder(cfg))
        kept.keep_tokens(np.unique(np.concatenate([volumes.of(TRAIN), volumes.of(VAL)])))
        return kept
    encoder.to(runtime.device)
    for name, parameter in encoder.named_parameters():
        parameter.requires_grad_(name != MASK_TOKEN)

    def tokens_of(view_BCDHW: Tensor) -> Tensor:
        with runtime.autocast():
            return encoder(view_BCDHW).float()

    return tokens_of


class EncoderAndDecoder(nn.Module):
    """Both, for the optimizer alone."""

    def __init__(self, encoder: VisionTransformer3D, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def moves(self, name: str) -> bool:
        """Whether this parameter of the encoder is trained."""
        return self.encoder.get_parameter(name).requires_grad


def _optimizer(encoder: VisionTransformer3D, decoder: nn.Module, cfg: Config) -> torch.optim.AdamW:
    """AdamW whose weight decay is of matrices alone; the decoder, and the last block of an encoder that is
    trained, have the full rate.
    """
    both = EncoderAndDecoder(encoder, decoder)
    groups = layer_groups(both, cfg.optim.weight_decay, cfg.finetune.layer_decay)
    return torch.optim.AdamW(groups, lr=cfg.optim.base_lr, betas=cfg.optim.betas, eps=cfg.optim.eps)


def _step(
    decoder: nn.Module,
    optimizer: torch.optim.AdamW,
    objective: Objective,
    batch: tuple[Tensor, Tensor, Tensor],
    cfg: Config,
    share: float,
) -> float:
    """One update with tokens, voxels and truth, at this share of the learning rate; returns the loss."""
    tokens, voxels, truth = batch
    decoder.train()
    optimizer.zero_grad()
    loss = objective.loss(decoder(tokens, voxels), truth)
    loss.backward()
    moved = [p for group in optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(moved, cfg.optim.clip_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = cfg.optim.base_lr * share * group["rate_share"]
    optimizer.step()
    return float(loss.detach())


def format_arms(validation: Mapping[str, Mapping[str, Any]], title: str, form: str, metric: str) -> str:
    """The best epoch of each arm; `form`: of the metric's value, 26 characters wide."""
    lines = [f"{'encoder':<14} {'epoch':>6} {title:>26}"]
    for name, best in validation.items():
        lines.append(f"{name:<14} {best['epoch']:>6} {form.format(best[metric]):>26}")
    return "\n".join([*lines, "Chosen on validation alone; the evaluated participants were not looked at."])


def validations(bests: Mapping[str, Best]) -> dict[str, dict[str, Any]]:
    """What the head's file says of every arm."""
    return {name: best.facts for name, best in bests.items()}


def trained_arms(bests: Mapping[str, Best]) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Arm -> the encoder and decoder of its best epoch."""
    return {
        name: (best.encoder, best.decoder)
        for name, best in bests.items()
        if best.encoder is not None and best.decoder is not None
    }
