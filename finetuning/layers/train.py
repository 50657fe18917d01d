"""Train decoders of surfaces on a frozen encoder: what finetuning.train does with task.kind=layers.

In: a checkpoint with a task's configuration, a store with height maps. Out: `${train.ckpt_dir}/head.pt`
(finetuning.layers.head). A step reads train.global_batch_size planes of the token grid, each of one training
volume; an epoch has every plane once. After each epoch the boundary error of the validation volumes decides
which weights are kept. With finetune.against_random a second decoder starts from the same weights, sees the
same planes in the same order, and reads the tokens of a randomly initialised encoder.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from data_setup.store.reader import PreparedStore
from finetuning.cohort import EVALUATED, TRAIN, VAL
from finetuning.familiarity import Familiarity, fit_familiarity
from finetuning.features.kept import KeptFeatures, features_folder, pooled_of_tokens
from finetuning.frozen import num_updates, schedule
from finetuning.head_file import write_head
from finetuning.layers.decoder import surface_loss
from finetuning.layers.head import PRETRAINED, RANDOM, encoder_of, layers_state, new_decoder
from finetuning.layers.metrics import boundary_error_um
from finetuning.layers.planes import Planes
from finetuning.layers.volumes import LayerVolumes, read_volumes
from finetuning.pooled import check_fit
from finetuning.source import Source
from utils.config.schema import Config
from utils.errors import EXIT_FINISHED, UserError
from utils.run_dir import claim_run_dir, held_run
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime

OF_ALL = ""  # the protocol of mean_heights that stands for every other
log = logging.getLogger(__name__)


@dataclass
class Best:
    """The best epoch of an arm."""

    error_um: float = math.inf
    epoch: int = 0
    step: int = 0
    decoder: nn.Module | None = None
    history: list[dict[str, float]] = field(default_factory=list)


def train_layers(source: Source) -> int:
    """Train what the configuration asks for; returns the exit code. Raises UserError."""
    cfg = source.cfg
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    check_fit(cfg, store, source.state, source.url)
    volumes = read_volumes(cfg, store)
    refuse_overlap(cfg, volumes, source.state["participants"], source.url, "pre-training")
    log.info("surfaces: %s; %s", ", ".join(volumes.names), summary(volumes))
    runtime = open_runtime(cfg.train.use_bf16)
    names = (PRETRAINED, RANDOM) if cfg.finetune.against_random else (PRETRAINED,)
    with held_run(cfg, runtime):
        bests = {name: train_arm(name, source, store, volumes, runtime) for name in names}
        decoders = {name: best.decoder for name, best in bests.items() if best.decoder is not None}
        validation = {
            name: {"error_um": b.error_um, "epoch": b.epoch, "step": b.step, "history": b.history}
            for name, b in bests.items()
        }
        familiarity = familiarity_of(source, store, volumes, runtime)
        state = layers_state(source, store, volumes, decoders, validation, mean_heights(volumes), familiarity)
        url = write_head(cfg, state)
        claim_run_dir(cfg, runtime)
    print(format_training(validation))
    print(f"head: {url}\nnext: python -m finetuning.evaluate --head {url}")
    return EXIT_FINISHED


def refuse_overlap(cfg: Config, volumes: LayerVolumes, seen: list[str], url: str, stage: str) -> int:
    """How many evaluated participants were seen; UserError unless that is 0 or allowed."""
    shared = sorted(set(volumes.people(EVALUATED)) & set(seen))
    if shared and not cfg.eval.allow_overlap:
        raise UserError(
            f"{url}: expected no participant of split {cfg.eval.split} in its {stage}, found "
            f"{len(shared)} ({', '.join(shared[:3])}); eval.allow_overlap=true evaluates them all the same, "
            "and the table says so"
        )
    return len(shared)


def summary(volumes: LayerVolumes) -> str:
    """Volumes and participants of the folds in one line."""
    parts = []
    for name, fold in (("train", TRAIN), ("val", VAL), ("evaluated", EVALUATED)):
        parts.append(f"{name} {len(volumes.of(fold))} volumes of {len(volumes.people(fold))}")
    return f"{', '.join(parts)} participants"


def train_arm(
    name: str, source: Source, store: PreparedStore, volumes: LayerVolumes, runtime: Runtime
) -> Best:
    """Train one decoder; returns its best epoch on the validation volumes. Raises UserError."""
    cfg = source.cfg
    encoder = encoder_of(name, cfg, source.state, source.url)
    kept = KeptFeatures(encoder, cfg, store, runtime, features_folder(cfg))
    kept.keep_tokens(np.unique(np.concatenate([volumes.of(TRAIN), volumes.of(VAL)])))
    planes = Planes(cfg, kept, volumes, runtime.device)
    pairs = [(int(row), plane) for row in volumes.of(TRAIN) for plane in range(cfg.grid[0])]
    size = min(cfg.train.global_batch_size, len(pairs))
    per_epoch = math.ceil(len(pairs) / size)
    total = num_updates(cfg, per_epoch)
    gpus = [runtime.device] if runtime.device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(cfg.seed)
        decoder = new_decoder(cfg, encoder.width, len(volumes.names)).to(runtime.device)
    optimizer = _optimizer(decoder, cfg)
    best, start, losses = Best(), time.perf_counter(), []
    for step in range(total):
        epoch, place = divmod(step, per_epoch)
        if place == 0:
            order = np.random.default_rng([cfg.seed, epoch]).permutation(len(pairs))
        chosen = [pairs[i] for i in order[place * size : (place + 1) * size]]
        share = 1.0
        if cfg.optim.use_scheduler:
            share = schedule(step, total, cfg.optim.warmup_ratio, cfg.optim.min_lr_ratio)
        losses.append(_step(decoder, optimizer, planes, chosen, cfg, share))
        if place + 1 == per_epoch or step + 1 == total:
            error = validation_error(decoder, planes, volumes)
            seconds = round(time.perf_counter() - start, 1)
            line = {"epoch": epoch + 1, "loss": float(np.mean(losses)), "error_um": error, "seconds": seconds}
            best.history.append(line)
            log.info("%s: epoch %d: loss %.3f, validation %.2f um, %.0f s", name, *line.values())
            losses = []
            if error < best.error_um:
                best.error_um, best.epoch, best.step = error, epoch + 1, step + 1
                best.decoder = copy.deepcopy(decoder)
            if cfg.finetune.patience is not None and epoch + 1 - best.epoch >= cfg.finetune.patience:
                break
    if best.decoder is None:
        raise UserError(f"optim.base_lr: expected one that trains, found no numbers with {cfg.optim.base_lr}")
    return best


def _optimizer(decoder: nn.Module, cfg: Config) -> torch.optim.AdamW:
    """AdamW whose weight decay is of matrices alone."""
    groups = [
        {
            "params": [p for p in decoder.parameters() if (p.ndim > 1) == is_matrix],
            "weight_decay": cfg.optim.weight_decay if is_matrix else 0.0,
        }
        for is_matrix in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=cfg.optim.base_lr, betas=cfg.optim.betas, eps=cfg.optim.eps)


def _step(
    decoder: nn.Module,
    optimizer: torch.optim.AdamW,
    planes: Planes,
    chosen: list[tuple[int, int]],
    cfg: Config,
    share: float,
) -> float:
    """One update with these planes, at this share of the learning rate; returns the loss."""
    decoder.train()
    optimizer.zero_grad()
    loss = surface_loss(decoder(*planes.inputs(chosen)), planes.truth(chosen))
    loss.backward()
    nn.utils.clip_grad_norm_(decoder.parameters(), cfg.optim.clip_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = cfg.optim.base_lr * share
    optimizer.step()
    return float(loss.detach())


def validation_error(decoder: nn.Module, planes: Planes, volumes: LayerVolumes) -> float:
    """Mean boundary error of the validation volumes in um: over surfaces, then over volumes."""
    errors = []
    for row in map(int, volumes.of(VAL)):
        axial = volumes.spacing_mm(row)[1]
        each = boundary_error_um(planes.predict(decoder, row), volumes.read(row), axial)
        errors.append(each[volumes.marked(row)].mean())
    return float(np.mean(errors))


def familiarity_of(
    source: Source, store: PreparedStore, volumes: LayerVolumes, runtime: Runtime
) -> Familiarity | None:
    """Of the training volumes' pooled features, from the tokens that the pre-trained arm has kept."""
    cfg = source.cfg
    encoder = encoder_of(PRETRAINED, cfg, source.state, source.url)
    kept = KeptFeatures(encoder, cfg, store, runtime, features_folder(cfg))
    rows, is_train = volumes.of(TRAIN), volumes.fold == TRAIN
    return fit_familiarity(pooled_of_tokens(kept, rows), volumes.person[is_train])


def mean_heights(volumes: LayerVolumes) -> dict[str, list[float | None]]:
    """Protocol -> mean height of each surface over the training volumes: what knows no image. OF_ALL: any."""
    by_protocol: dict[str, list[np.ndarray]] = {}
    for row in volumes.of(TRAIN):
        values = volumes.read(int(row))
        count = (~np.isnan(values)).sum(axis=(1, 2))
        mean = np.divide(
            np.nansum(values, axis=(1, 2)), count, out=np.full(len(count), np.nan), where=count > 0
        )
        for protocol in (str(volumes.store.index.protocol[row]), OF_ALL):
            by_protocol.setdefault(protocol, []).append(mean)
    result: dict[str, list[float | None]] = {}
    for protocol, means in by_protocol.items():
        table = np.stack(means)
        known = (~np.isnan(table)).sum(axis=0)
        sums = np.nansum(table, axis=0)
        result[protocol] = [float(s / n) if n else None for s, n in zip(sums, known, strict=True)]
    return result


def format_training(validation: dict[str, dict[str, Any]]) -> str:
    """The best epoch of each arm."""
    lines = [f"{'encoder':<14} {'epoch':>6} {'validation boundary error':>26}"]
    for name, best in validation.items():
        lines.append(f"{name:<14} {best['epoch']:>6} {best['error_um']:>23.2f} um")
    return "\n".join([*lines, "Chosen on validation alone; the evaluated participants were not looked at."])
