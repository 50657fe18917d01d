"""Train decoders on the tokens of an encoder: task.kind layers, segmentation and translation.

In: what to train for (`Objective`), volumes of three folds, an encoder for each arm. Out: the best decoder
of each arm on validation, metrics.jsonl and the line on the terminal. A step reads train.global_batch_size
planes of the token grid, each of one training volume; an epoch has every plane once. All arms start from the
same weights and see the same planes in the same order. The steps of a second arm follow those of the first,
and its metrics have its name before theirs.

The encoder is frozen, and its tokens are kept; or finetune.encoder=trained moves it with its decoder, layer
by layer at different rates (finetuning.heads.tuned). Then a batch is made of whole volumes, since tokens
are.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import TRAIN, VAL
from finetuning.cohort.source import Source, check_fit
from finetuning.dense.folds import DenseVolumes, refuse_overlap
from finetuning.dense.head import LOCAL, PRETRAINED, RANDOM, dense_state, encoder_of, new_decoder
from finetuning.dense.layers.planes import Planes
from finetuning.features.kept import KeptFeatures, features_folder
from finetuning.features.yardsticks import LocalTokens, Neighbourhoods
from finetuning.heads.epochs import Best, Epochs, hand_over
from finetuning.heads.tuned import is_read, layer_groups
from models.optimizer import warmup_cosine
from models.vit3d import VisionTransformer3D
from utils.config.schema import Config
from utils.errors import EXIT_FINISHED, UserError
from utils.run.folder import held_run
from utils.run.log import AnyLog, log_anew
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
class Trained:
    """A trained arm: what was kept of its best epoch, and how it came there."""

    best: Best[tuple[nn.Module, nn.Module]] = field(default_factory=Best)  # encoder and decoder
    history: list[dict[str, float]] = field(default_factory=list)

    def facts(self, objective: Objective) -> dict[str, Any]:
        """What the head's file says of it."""
        return {
            objective.metric: objective.sign * self.best.rank[0],
            "epoch": self.best.epoch,
            "step": self.best.step,
            "history": self.history,
        }


def arms_of(cfg: Config) -> tuple[str, ...]:
    """The encoders that decoders are trained on."""
    if not cfg.finetune.against_random:
        return (PRETRAINED,)
    return PRETRAINED, RANDOM, *(LOCAL if cfg.finetune.encoder == "frozen" else ())


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
    total = len(arms_of(cfg)) * batches_of(cfg, volumes)[1].calendar.total
    synthetic = bool(volumes.store.attrs["synthetic"])
    with held_run(cfg, runtime), log_anew(cfg, total, synthetic=synthetic) as run_log:
        trained: dict[str, Trained] = {}
        for name in arms_of(cfg):
            steps_before = sum(int(arm.history[-1]["step"]) for arm in trained.values())
            trained[name] = train_arm(name, source, volumes, objective, runtime, run_log, steps_before)
        validation = {name: arm.facts(objective) for name, arm in trained.items()}
        arms = {name: arm.best.weights for name, arm in trained.items() if arm.best.weights is not None}
        state = dense_state(source, volumes.store, volumes, arms, validation)
        url = hand_over(cfg, state | more(arms[PRETRAINED][0]), runtime, run_log)
    print(format_arms(validation, *shown, objective.metric))
    print(f"head: {url}\nnext: python -m finetuning.evaluate --head {url}")
    return EXIT_FINISHED


def batches_of(cfg: Config, volumes: DenseVolumes) -> tuple[list[list[tuple[int, int]]], Epochs]:
    """What batches are made of, (row, plane) pairs that stay together, and the batches of these."""
    rows, planes = volumes.of(TRAIN).tolist(), range(cfg.grid[0])
    if cfg.finetune.encoder == "trained":  # a volume's tokens are made together
        units = [[(row, plane) for plane in planes] for row in rows]
    else:
        units = [[(row, plane)] for row in rows for plane in planes]
    return units, Epochs.of(cfg, len(units), len(units[0]))


def train_arm(
    name: str,
    source: Source,
    volumes: DenseVolumes,
    objective: Objective,
    runtime: Runtime,
    run_log: AnyLog,
    steps_before: int = 0,
    encoder: VisionTransformer3D | LocalTokens | KeptFeatures | None = None,
) -> Trained:
    """Train one decoder, and its encoder where the configuration says so; returns its best epoch on the
    validation volumes. `encoder`: in the place of that of the arm's name. Raises UserError.
    """
    cfg, prefix, clock = source.cfg, "" if name == PRETRAINED else f"{name}/", time.process_time()
    mean = None
    if name in LOCAL and LOCAL[name] is not None:
        rows = np.unique(volumes.of(TRAIN))
        mean = Neighbourhoods(cfg, volumes.store, rows, runtime).mean(np.ones(len(rows), bool))
    if encoder is None:
        encoder = encoder_of(name, cfg, source.state, source.url, mean)
    module = encoder.encoder if isinstance(encoder, KeptFeatures) else encoder
    planes = objective.planes(cfg, _token_source(encoder, cfg, volumes, runtime), volumes, runtime.device)
    units, epochs = batches_of(cfg, volumes)
    calendar = epochs.calendar
    with torch.random.fork_rng(devices=[runtime.device] if runtime.device.type == "cuda" else []):
        torch.manual_seed(cfg.seed)
        decoder = new_decoder(cfg, encoder.feature_width, objective.num_outputs).to(runtime.device)
    optimizer = _optimizer(module, decoder, cfg)

    def copies() -> tuple[nn.Module, nn.Module]:
        kept = module if cfg.finetune.encoder == "frozen" else copy.deepcopy(module)
        return kept, copy.deepcopy(decoder)

    result, start, losses = Trained(), time.perf_counter(), list[float]()
    for step, places in epochs.batches():
        chosen, done = [pair for place in places for pair in units[place]], step + 1
        rate = warmup_cosine(cfg.optim, step, calendar.total)
        losses.append(_step(decoder, optimizer, objective, planes.batch(chosen), cfg, rate))
        run_log.advance()
        if calendar.logs(done):
            values = {"train/loss": losses[-1], "train/lr": rate}
            run_log.metrics(steps_before + done, _named(prefix, values))
        if calendar.validates(done):
            value, epoch = objective.score(decoder, planes), epochs.number(done)
            line = {"epoch": epoch, "step": done, "loss": float(np.mean(losses)), objective.metric: value}
            seconds = {"seconds": round(time.perf_counter() - start, 1)}
            seconds["processor_seconds"] = round(time.process_time() - clock, 2)
            result.history.append(line | seconds)
            run_log.metrics(steps_before + done, _named(prefix, {f"val/{objective.metric}": value}))
            losses = []
            result.best.offer((objective.sign * value,), epoch, done, copies)
            if epochs.is_over(done, [result.best]):
                break
    if result.best.weights is None:
        raise UserError(f"optim.base_lr: expected one that trains, found no numbers with {cfg.optim.base_lr}")
    return result


def _named(prefix: str, values: Mapping[str, float]) -> dict[str, float | None]:
    return {f"{prefix}{key}": value for key, value in values.items()}


def _token_source(
    encoder: VisionTransformer3D | LocalTokens | KeptFeatures,
    cfg: Config,
    volumes: DenseVolumes,
    runtime: Runtime,
) -> KeptFeatures | Callable[[Tensor], Tensor]:
    """A frozen encoder's kept tokens; or what runs an encoder that is trained, which is made ready for it;
    or a yardstick, which is faster computed than kept.
    """
    if isinstance(encoder, LocalTokens):
        return encoder.to(runtime.device)
    if isinstance(encoder, KeptFeatures) or cfg.finetune.encoder == "frozen":
        kept = (
            encoder
            if isinstance(encoder, KeptFeatures)
            else KeptFeatures(encoder, cfg, volumes.store, runtime, features_folder(cfg))
        )
        kept.keep_tokens(np.unique(np.concatenate([volumes.of(TRAIN), volumes.of(VAL)])))
        return kept
    encoder.to(runtime.device)
    for name, parameter in encoder.named_parameters():
        parameter.requires_grad_(is_read(encoder, name))

    def tokens_of(view_BCDHW: Tensor) -> Tensor:
        with runtime.autocast():
            return encoder(view_BCDHW).float()

    return tokens_of


def _optimizer(encoder: nn.Module, decoder: nn.Module, cfg: Config) -> torch.optim.AdamW:
    """AdamW whose weight decay is of matrices alone; the decoder, and the last block of an encoder that is
    trained, have the full rate.
    """
    moved = None
    if cfg.finetune.encoder == "trained":
        assert isinstance(encoder, VisionTransformer3D)
        moved = encoder
    groups = layer_groups(moved, decoder, cfg.optim.weight_decay, cfg.finetune.layer_decay)
    return torch.optim.AdamW(groups, lr=cfg.optim.base_lr, betas=cfg.optim.betas, eps=cfg.optim.eps)


def _step(
    decoder: nn.Module,
    optimizer: torch.optim.AdamW,
    objective: Objective,
    batch: tuple[Tensor, Tensor, Tensor],
    cfg: Config,
    rate: float,
) -> float:
    """One update with tokens, voxels and truth, at this learning rate; returns the loss."""
    tokens, voxels, truth = batch
    decoder.train()
    optimizer.zero_grad()
    loss = objective.loss(decoder(tokens, voxels), truth)
    loss.backward()
    moved = [p for group in optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(moved, cfg.optim.clip_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate_share"]
    optimizer.step()
    return float(loss.detach())


def format_arms(validation: Mapping[str, Mapping[str, Any]], title: str, form: str, metric: str) -> str:
    """The best epoch of each arm; `form`: of the metric's value, 26 characters wide."""
    lines = [f"{'encoder':<14} {'epoch':>6} {title:>26}"]
    for name, best in validation.items():
        lines.append(f"{name:<14} {best['epoch']:>6} {form.format(best[metric]):>26}")
    return "\n".join([*lines, "Chosen on validation alone; the evaluated participants were not looked at."])
