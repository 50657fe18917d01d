"""Train decoders on the tokens of an encoder: task.kind layers, segmentation and translation.

In: a `Kind`, volumes of three folds, an encoder for each arm. Out: the best decoder
of each arm on validation, metrics.jsonl and the line on the terminal. A step reads train.global_batch_size
planes of the token grid, each of one training volume; an epoch has every plane once. All arms start from the
same weights and see the same planes in the same order, moved in the same way (finetuning.dense.planes, of the
decoder that reads voxels at all levels). The steps of a second arm follow those of the first, and its metrics
have its name before theirs. The same command goes on after a kill, bit for bit on a CPU
(finetuning.dense.resume).

The encoder is frozen, and its tokens are kept; or finetune.encoder=trained moves it with its decoder, layer
by layer at different rates (finetuning.heads.tuning). Then a batch is made of whole volumes, since tokens
are.
"""

from __future__ import annotations

import copy
import logging
import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor, nn

from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL, count_seen, summary
from finetuning.cohort.source import Source, check_fit
from finetuning.dense.decoder import UNETR, reads_blocks
from finetuning.dense.folds import DenseVolumes
from finetuning.dense.head import ALONE, LOCAL, PRETRAINED, RANDOM, dense_state, encoder_of, new_decoder
from finetuning.dense.kind import Kind, Volumes
from finetuning.dense.planes import Moves, Planes
from finetuning.dense.resume import Encoder, Keeper, Moving
from finetuning.features.kept import KeptFeatures, load_strictly
from finetuning.features.yardsticks import LocalTokens, Neighbourhoods
from finetuning.heads.epochs import Best, Epochs
from finetuning.heads.head_file import write_head
from finetuning.heads.tuning import is_read
from models.optimizer import warmup_cosine
from models.vit3d import recompute_block
from utils.config.schema import Config
from utils.errors import EXIT_FINISHED, EXIT_STOPPED, UserError
from utils.run.folder import held_run
from utils.run.log import AnyLog, open_log
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime, StopRequested
from utils.tables import ON_VALIDATION, Table, terminal
from utils.terminal import say

log = logging.getLogger(__name__)
MOST_VALIDATIONS = 40  # of an arm


@dataclass(frozen=True)
class Training(Generic[Volumes]):
    """What the decoders of all arms are trained on and for."""

    kind: Kind[Volumes]
    source: Source
    volumes: Volumes
    runtime: Runtime
    loss: Callable[[Tensor, Tensor], Tensor]  # of outputs and truth of some planes

    @classmethod
    def of(cls, kind: Kind[Volumes], source: Source, volumes: Volumes, runtime: Runtime) -> Training[Volumes]:
        return cls(kind, source, volumes, runtime, kind.loss(source.cfg, volumes, runtime.device))


@dataclass
class Trained:
    """A trained arm: what was kept of its best validation, and how it came there."""

    best: Best[tuple[nn.Module, nn.Module]] = field(default_factory=Best)  # encoder and decoder
    history: list[dict[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # since the last validation
    step: int = 0  # updates made
    is_over: bool = False

    def is_tired(self, cfg: Config) -> bool:
        """Whether finetune.patience validations were no better than the best."""
        patience = cfg.finetune.patience
        since = sum(line["step"] > self.best.step for line in self.history)
        return patience is not None and since >= patience

    def validated(self, epoch: int, scores: Mapping[str, float], seconds: float) -> None:
        """A line of the history, of the updates since the last one."""
        own = {f"val_{name}" if name == "loss" else name: value for name, value in scores.items()}
        line = {"epoch": epoch, "step": self.step, "loss": float(np.mean(self.losses))}
        self.history.append(line | own | {"seconds": round(seconds, 1)})
        self.losses = []

    def state_dict(self, cfg: Config) -> dict[str, Any]:
        """Plain values and tensors for a checkpoint; an encoder that does not move is not among them."""
        best, modules = self.best, list(self.best.weights or ())
        if cfg.finetune.encoder == "frozen":
            modules = modules[1:]
        return {
            "best": [list(best.rank), best.epoch, best.step, [m.state_dict() for m in modules]],
            "history": self.history,
            "losses": self.losses,
            "step": self.step,
            "is_over": self.is_over,
        }

    @classmethod
    def of_state(
        cls, state: Mapping[str, Any], encoder: nn.Module, decoder: nn.Module, where: str
    ) -> Trained:
        """As it was saved; `encoder` and `decoder` give the shapes."""
        rank, epoch, step, weights = state["best"]
        best: Best[tuple[nn.Module, nn.Module]] = Best(tuple(rank), epoch, step)
        if weights:
            modules = [encoder, copy.deepcopy(decoder)]
            if len(weights) == len(modules):
                modules[0] = copy.deepcopy(encoder)
            for module, own in zip(modules[-len(weights) :], weights, strict=True):
                load_strictly(module, own, where)
            best.weights = (modules[0], modules[1])
        return cls(best, list(state["history"]), list(state["losses"]), state["step"], state["is_over"])

    def facts(self, kind: Kind[Any]) -> dict[str, Any]:
        return {
            kind.metric: kind.sign * self.best.rank[0],
            "epoch": self.best.epoch,
            "step": self.best.step,
            "history": self.history,
        }


def arms_of(cfg: Config) -> tuple[str, ...]:
    """The encoders that decoders are trained on; one that reads voxels at all levels needs only its own."""
    if not cfg.finetune.against_random:
        return (PRETRAINED,)
    if cfg.finetune.encoder == "trained":
        return PRETRAINED, RANDOM
    return PRETRAINED, RANDOM, *([ALONE] if cfg.head.kind == UNETR else [n for n in LOCAL if n != ALONE])


def train_head(
    kind: Kind[Volumes], source: Source, volumes: Volumes | None = None, runtime: Runtime | None = None
) -> int:
    """Train every arm and write their file; returns the exit code. `volumes`: in the place of those that the
    splits of the people give. Raises UserError.
    """
    source = replace(source, cfg=reads_blocks(source.cfg))
    cfg, names = source.cfg, arms_of(source.cfg)
    if volumes is None:
        store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
        check_fit(cfg, store, source.state, source.url)
        volumes = kind.read_volumes(cfg, store)
        seen = {"pre-training": source.state["participants"]}
        count_seen(cfg, volumes.people(EVALUATED), seen, source.url)
    log.info("%s: %s; %s", kind.names, ", ".join(volumes.names), summary(volumes.fold, volumes.person))
    runtime = runtime or open_runtime(cfg.train.use_bf16)
    training = Training.of(kind, source, volumes, runtime)
    total = len(names) * batches_of(cfg, volumes)[1].calendar.total
    runtime.catch_signals()
    trained: dict[str, Trained] = {}
    with held_run(cfg, runtime) as leases:
        keeper = Keeper(source, volumes, runtime, total, leases)
        synthetic = bool(volumes.store.attrs["synthetic"])
        with open_log(cfg, runtime, keeper.step, total, synthetic=synthetic) as run_log:
            try:
                for name in names:
                    steps_before = sum(arm.step for arm in trained.values())
                    trained[name] = train_arm(name, training, run_log, steps_before, keeper)
            except StopRequested:
                how = "stopped by %s at step %d of %d; run the same command again to go on"
                log.info(how, runtime.stopped_by, keeper.step, total)
                return EXIT_STOPPED
            finally:
                keeper.checkpoints.close()
            validation = {name: arm.facts(kind) for name, arm in trained.items()}
            arms = {name: arm.best.weights for name, arm in trained.items() if arm.best.weights is not None}
            state = dense_state(source, volumes, arms, validation)
            url = write_head(cfg, state | kind.state(arms[PRETRAINED][0], source, volumes, runtime))
            run_log.artifact("head", url)
    print(format_arms(validation, *kind.shown, kind.metric))
    say(f"head: {url}", f"next: python -m finetuning.evaluate --head {shlex.quote(url)}")
    return EXIT_FINISHED


def batches_of(cfg: Config, volumes: DenseVolumes) -> tuple[list[list[tuple[int, int]]], Epochs]:
    """What batches are made of, (row, plane) pairs that stay together, and the batches of these."""
    rows, planes = volumes.of(TRAIN).tolist(), range(cfg.grid[0])
    if cfg.finetune.encoder == "trained":  # a volume's tokens are made together
        units = [[(row, plane) for plane in planes] for row in rows]
    else:
        units = [[(row, plane)] for row in rows for plane in planes]
    epochs = Epochs.of(cfg, len(units), len(units[0]))
    calendar = epochs.calendar
    # a validation after every epoch, but of small cohorts, whose epochs are few updates
    apart = calendar.epoch * math.ceil(calendar.total / calendar.epoch / MOST_VALIDATIONS)
    apart = cfg.train.val_every_steps or apart
    saves = cfg.train.ckpt_every_steps or apart
    return units, replace(epochs, calendar=replace(calendar, validate_every=apart, save_every=saves))


def train_arm(
    name: str,
    training: Training[Any],
    run_log: AnyLog,
    steps_before: int = 0,
    keeper: Keeper | None = None,
    encoder: Encoder | KeptFeatures | None = None,
) -> Trained:
    """Train one decoder, and its encoder where the configuration says so; returns its best on the validation
    volumes. `encoder`: in the place of that of the arm's name. With `keeper` it is saved, and goes on where
    it was. Raises UserError, and StopRequested.
    """
    kind, source, volumes, runtime = training.kind, training.source, training.volumes, training.runtime
    cfg = source.cfg
    if encoder is None:
        mean: Tensor | None = None
        if LOCAL.get(name):  # random features are centred on the training volumes
            rows = np.unique(volumes.of(TRAIN))
            near = Neighbourhoods(cfg, volumes.store, rows, runtime)
            mean = near.mean(np.ones(len(rows), bool))
        encoder = encoder_of(name, cfg, source.state, source.url, mean)
    module: Any = encoder.encoder if isinstance(encoder, KeptFeatures) else encoder
    with torch.random.fork_rng(devices=[runtime.device] if runtime.device.type == "cuda" else []):
        torch.manual_seed(cfg.seed)
        decoder = new_decoder(cfg, encoder.feature_width, kind.num_outputs(volumes.names)).to(runtime.device)
    state, where = None if keeper is None else keeper.of_arm(name), str(cfg.train.ckpt_dir)
    result = Trained() if state is None else Trained.of_state(state["trained"], module, decoder, where)
    if result.is_over:
        return result
    planes = kind.planes(cfg, _token_source(encoder, training), volumes, runtime.device)
    moving = Moving.of(cfg, module, decoder)
    if state is not None:
        moving.load(state["moving"])
    if keeper is not None:
        keeper.enter(name, lambda: {"moving": moving.state_dict(), "trained": result.state_dict(cfg)})
    # the pass of a frozen encoder is not among these: another run may have made it
    clock = time.process_time() - (result.history[-1]["processor_seconds"] if result.history else 0.0)
    start = time.perf_counter()
    prefix = "" if name == PRETRAINED else f"{name}/"
    # ---- loop: update, log, validate, save
    units, epochs = batches_of(cfg, volumes)
    calendar = epochs.calendar
    for step, places in epochs.batches(result.step):
        if keeper is not None and runtime.stop_requested:
            raise StopRequested
        done, rate = step + 1, warmup_cosine(cfg.optim, step, calendar.total)
        chosen = [units[place] for place in places]
        loss = train_step(moving, training, planes, chosen, step, rate)
        result.losses.append(loss)
        result.step = done
        run_log.advance()
        if calendar.logs(done):
            run_log.metrics(steps_before + done, {f"{prefix}train/loss": loss, f"{prefix}train/lr": rate})
        if calendar.validates(done):
            scores = validate(moving.judged, planes, training)
            run_log.metrics(steps_before + done, {f"{prefix}val/{key}": v for key, v in scores.items()})
            result.validated(epochs.number(done), scores, time.perf_counter() - start)
            result.history[-1]["processor_seconds"] = round(time.process_time() - clock, 2)
            value = kind.sign * scores[kind.metric]
            result.best.offer((value,), epochs.number(done), done, moving.copies)
        if keeper is not None:
            keeper.step = steps_before + done
            if calendar.saves(done) and done < calendar.total:
                keeper.save()
        if result.is_tired(cfg):
            break
    if result.best.weights is None:
        raise UserError(f"optim.base_lr: expected one that trains, found no numbers with {cfg.optim.base_lr}")
    result.is_over = True
    if keeper is not None:
        keeper.leave(name, result.state_dict(cfg))
    return result


def validate(decoder: nn.Module, planes: Planes, training: Training[Any]) -> dict[str, float]:
    """The scores of the validation volumes, and their loss."""
    losses: list[float] = []

    def predicted() -> Iterator[tuple[int, np.ndarray]]:
        for row in map(int, training.volumes.of(VAL)):
            values, loss = planes.judge(decoder, row, training.loss)
            losses.append(loss)
            yield row, values

    scores = training.kind.score(training.volumes, predicted())
    return {"loss": float(np.mean(losses))} | scores


def learnt_from(volumes: DenseVolumes) -> np.ndarray:
    return np.unique(np.concatenate([volumes.of(TRAIN), volumes.of(VAL)]))


def _token_source(
    encoder: Encoder | KeptFeatures, training: Training[Any]
) -> KeptFeatures | Callable[[Tensor], Tensor]:
    """A frozen encoder's kept tokens; or what runs an encoder that is trained, which is made ready for it;
    or a baseline, which is faster computed than kept.
    """
    cfg, volumes, runtime = training.source.cfg, training.volumes, training.runtime
    if isinstance(encoder, LocalTokens):
        return encoder.to(runtime.device)
    if not isinstance(encoder, KeptFeatures) and cfg.finetune.encoder == "frozen":
        encoder = KeptFeatures(encoder, cfg, volumes.store, runtime)
    if isinstance(encoder, KeptFeatures):
        encoder.keep_tokens(learnt_from(volumes))
        return encoder
    encoder.to(runtime.device)
    if cfg.train.activation_checkpointing:
        encoder.recompute = recompute_block
    for name, parameter in encoder.named_parameters():
        parameter.requires_grad_(is_read(encoder, name))

    def tokens_of(view_BCDHW: Tensor) -> Tensor:
        with runtime.autocast():
            return encoder(view_BCDHW).float()

    return tokens_of


def train_step(
    moving: Moving,
    training: Training[Any],
    planes: Planes,
    chosen: Sequence[list[tuple[int, int]]],
    step: int,
    rate: float,
) -> float:
    """Update `step` with units of planes, train.per_core_batch_size at once; returns the loss."""
    cfg, runtime = training.source.cfg, training.runtime
    count, moves = sum(map(len, chosen)), None
    if cfg.head.kind == UNETR and cfg.augment.strength > 0:
        moves = Moves.draw((cfg.seed, step), count, cfg.augment.strength, runtime.device)
    moving.decoder.train()
    moving.optimizer.zero_grad()
    total, at_once, first = 0.0, max(1, cfg.train.at_once // len(chosen[0])), 0
    for place in range(0, len(chosen), at_once):
        pairs = [pair for unit in chosen[place : place + at_once] for pair in unit]
        own = None if moves is None else moves.of(range(first, first + len(pairs)))
        tokens, voxels, truth = planes.batch(pairs, own)
        with runtime.autocast(), drawn(cfg.seed, step, first, runtime.device):
            outputs = moving.decoder(tokens, voxels).float()
        loss = training.loss(outputs, truth) * (len(pairs) / count)
        loss.backward()
        total, first = total + float(loss.detach()), first + len(pairs)
    moving.update(rate, cfg.optim.clip_grad_norm)
    return total


@contextmanager
def drawn(seed: int, step: int, first: int, device: torch.device) -> Iterator[None]:
    """What a decoder draws here depends only on the update and the place of its first plane."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(np.random.SeedSequence([seed, step, first]).generate_state(1)[0]))
        yield


def format_arms(validation: Mapping[str, Mapping[str, Any]], title: str, form: str, metric: str) -> str:
    """The best epoch of each arm; `form`: of the metric's value."""
    rows = [[name, str(best["epoch"]), form.format(best[metric])] for name, best in validation.items()]
    return terminal(Table("", ["encoder", "epoch", title], rows, ON_VALIDATION))
