"""One optimizer update: forward and backward over the accumulation steps, clip, update, target update.

No Python branch here depends on a tensor and nothing is read back to the host. A non-finite loss or
gradient skips the update by a select on the device: parameters, optimizer state, target and buffers keep
their values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from data_setup.loader import Batch
from data_setup.normalisation import view
from models.losses import Centres, Regulariser, SigReg, Statistics, VicReg, surrogate
from models.optimizer import build_adamw
from models.vjepa3d import SECOND_LOSSES, VJEPA3D, Output, parameter_groups
from utils.config.schema import Config
from utils.runtime.processes import ALONE
from utils.runtime.single import Runtime

SIGREG_DIRECTIONS = 256


class Update(NamedTuple):
    """Which update this is. With `enabled=False` it does all of its work and moves nothing."""

    step: int
    lr: float
    momentum: float
    covariance_share: float = 1.0  # of method.covariance_weight
    enabled: bool = True


def ignore(*_: object) -> None:
    """Do nothing: nobody watches."""


class Watch(NamedTuple):
    """Who watches an update: `observe` sees every micro-batch with its output, `lap` hears which part
    (forward, backward, logging, update) has just been handed to the device, `measures` says whether the
    update's numbers will be read.
    """

    observe: Callable[[Output, Batch], None] = ignore
    lap: Callable[[str], None] = ignore
    measures: Callable[[], object] = ignore


UNWATCHED = Watch()


@dataclass
class StepResult:
    """Device tensors of one update."""

    loss: Tensor
    regulariser: Tensor | None
    grad_norm: Tensor
    is_finite: Tensor
    second: dict[str, Tensor] = field(default_factory=dict)  # of SECOND_LOSSES, without their weights
    penalty_to_prediction: Tensor | None = None  # where `Watch.measures`: see Balance


class Balance:
    """Which of two losses pulls harder: the norms of the penalty's and of the prediction's gradient at the
    context encoder's output, over all context tokens of the global batch.
    """

    def __init__(self) -> None:
        self.squares: list[Tensor] = []  # of the penalty, of the prediction; a micro-batch each

    def watch(self, penalty: Tensor, tokens_BKE: Tensor) -> None:
        """Take part in the backward pass that comes next: its gradient at the tokens is the sum of both."""
        (alone,) = torch.autograd.grad(penalty, tokens_BKE, retain_graph=True)

        def split(both: Tensor) -> None:
            parts = alone.float(), both.float() - alone.float()
            self.squares.append(torch.stack([part.square().sum() for part in parts]))

        tokens_BKE.register_hook(split)

    def ratio(self, runtime: Runtime) -> Tensor | None:
        """The penalty's norm over the prediction's; None without a penalty."""
        if not self.squares:
            return None
        penalty, prediction = runtime.group.sum(torch.stack(self.squares).sum(0)).sqrt()
        return penalty / prediction


def build_optimizer(model: VJEPA3D, cfg: Config) -> torch.optim.AdamW:
    """AdamW, fused where there is such a kernel; weight decay on matrices only."""
    groups = parameter_groups(model, cfg.optim.weight_decay)
    return build_adamw(groups, cfg.optim, next(model.parameters()).device)


def predict(
    model: VJEPA3D, batch: Batch, runtime: Runtime, *, stochastic: bool, replica: nn.Module | None = None
) -> Output:
    """Forward pass of one micro-batch, through the group's replica of the model where gradients follow."""
    context_view = view(batch, 0)
    target_view = view(batch, 1) if model.reads_target_view else None
    seed = batch["sample_seed"] if stochastic else None
    with runtime.autocast():
        return (model if replica is None else replica)(
            context_view,
            target_view,
            batch["context"],
            batch["target"],
            batch["target_valid"],
            seed,
            batch["context_valid"],
            batch["token_valid"],
        )


def _centres(model: VJEPA3D) -> Centres | None:
    """A copy of the running means of places, where the penalty is of the tokens less these."""
    if model.centres is None:
        return None
    mean_NE, seen_N = (model.centres.get_buffer(name).clone() for name in ("mean", "seen"))
    return Centres(mean_NE, seen_N)


def _move_centres(model: VJEPA3D, regulariser: Regulariser | None, means: Statistics | None) -> None:
    """Put this global batch into the running means of places."""
    if model.centres is None or means is None:
        return
    assert isinstance(regulariser, VicReg), "a rule of the configuration"
    assert regulariser.centres is not None
    _, sums_NE, weight_N = means
    centres = regulariser.centres.after(sums_NE, weight_N)
    model.centres.get_buffer("mean").copy_(centres.mean_NE)
    model.centres.get_buffer("seen").copy_(centres.seen_N)


def build_regulariser(cfg: Config, model: VJEPA3D, update: Update, runtime: Runtime) -> Regulariser | None:
    """The configured penalty; sigreg draws its directions from (seed, step)."""
    if cfg.method.regulariser == "vicreg":
        weight = cfg.method.covariance_weight
        if not cfg.method.covariance_ramp:
            return VicReg(weight, _centres(model))
        now = runtime.scalar(weight * update.covariance_share)  # or every step would be a program of its own
        return VicReg(torch.as_tensor(now).float(), _centres(model))
    if cfg.method.regulariser == "sigreg":
        rng = np.random.default_rng([cfg.seed, update.step])
        directions = rng.standard_normal((model.encoder.width, SIGREG_DIRECTIONS), dtype=np.float32)
        return SigReg(torch.from_numpy(directions).to(next(model.parameters()).device))
    return None


def global_means(
    regulariser: Regulariser, model: VJEPA3D, batches: list[Batch], runtime: Runtime, samples: int
) -> Statistics:
    """The statistics' mean over the global batch, without gradient: a forward pass of the context encoder
    alone.
    """
    total: Statistics | None = None
    with torch.no_grad():
        for batch in batches:
            with runtime.autocast():
                encoded = model.encode_context(
                    view(batch, 0), batch["context"], batch["target"], batch["sample_seed"]
                )
                tokens = model.context_tokens(encoded, batch["context"])
            part = regulariser.statistics(tokens.float(), batch["context_valid"], batch["context"])
            total = part if total is None else tuple(a + b for a, b in zip(total, part, strict=True))
    assert total is not None, "a global batch holds at least one micro-batch"
    return tuple(runtime.group.sum(t) / samples for t in total)


def train_step(
    model: VJEPA3D,
    optimizer: torch.optim.AdamW,
    batches: list[Batch],
    cfg: Config,
    runtime: Runtime,
    update: Update,
    watch: Watch = UNWATCHED,
) -> StepResult:
    """One update from this process's micro-batches of one global batch; the result is the whole batch's."""
    assert model.training, "outside training there is no loss of neighbours"
    samples = cfg.train.global_batch_size
    regulariser = build_regulariser(cfg, model, update, runtime)
    weight = cfg.method.regulariser_weight
    share = 0.0 if cfg.method.control == "penalty_only" else 1.0
    predictor_share = share * cfg.method.predictor_weight
    means: Statistics | None = None
    if regulariser is not None and len(batches) > 1:
        means = global_means(regulariser, model, batches, runtime, samples)

    buffers = {name: b.clone() for name, b in model.named_buffers()}
    optimizer.zero_grad(set_to_none=True)
    loss_sum = torch.zeros((), device=runtime.device)
    second_weights = {name: getattr(cfg.method, f"{name}_weight") for name in SECOND_LOSSES}
    second_sums: dict[str, Tensor] = {}
    penalty: Tensor | None = None
    balance = Balance()
    for number, batch in enumerate(batches, 1):
        replica = runtime.group.replica(model, sums=number == len(batches))
        output = predict(model, batch, runtime, stochastic=True, replica=replica)
        prediction_loss = output.loss_B.sum() / samples
        objective = predictor_share * prediction_loss
        for name, second_B in output.second_B.items():
            second_loss = second_B.sum() / samples
            objective = objective + share * second_weights[name] * second_loss
            second_sums[name] = second_sums.get(name, 0) + second_loss.detach()
        if regulariser is not None:
            tokens = output.context_BKE.float()
            statistics = regulariser.statistics(tokens, batch["context_valid"], batch["context"])
            local = tuple(s / samples for s in statistics)
            if means is None:  # the global batch has one micro-batch on each process, so no pass of its own
                means = tuple(runtime.group.sum(s.detach()) for s in local)
            penalty, gradient = surrogate(regulariser, means)
            terms = [(g * s).sum() for g, s in zip(gradient, local, strict=True)]
            linear = weight * torch.stack(terms).sum()
            objective = objective + linear
            if watch.measures():
                balance.watch(linear, output.context_BKE)
        watch.lap("forward")
        runtime.group.backward(objective)
        watch.lap("backward")
        watch.observe(output, batch)
        watch.lap("logging")
        loss_sum = loss_sum + prediction_loss.detach()

    _move_centres(model, regulariser, means)
    parameters = [p for _, p in model.trained_parameters()]
    loss_sum = runtime.group.sum(loss_sum)
    second_sums = {name: runtime.group.sum(total) for name, total in second_sums.items()}
    grad_norm = nn.utils.clip_grad_norm_(parameters, cfg.optim.clip_grad_norm)
    is_finite = torch.isfinite(grad_norm) & torch.isfinite(loss_sum) & update.enabled
    for group in optimizer.param_groups:
        group["lr"] = update.lr
    # the optimizer's own select: with found_inf = 1 neither parameters nor moments nor its step count move
    optimizer.found_inf = 1.0 - is_finite.float()  # type: ignore[attr-defined]  # read by the fused kernels
    optimizer.step()
    model.update_target(runtime.scalar(update.momentum), is_finite)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(torch.where(is_finite, buffer, buffers[name]))
    watch.lap("update")
    return StepResult(loss_sum, penalty, grad_norm, is_finite, second_sums, balance.ratio(runtime))


def trial_step(
    model: VJEPA3D, optimizer: torch.optim.AdamW, batch: Batch, cfg: Config, runtime: Runtime
) -> None:
    """A whole update of one micro-batch that moves nothing: what a step needs of memory, moments included.

    Leaves no trace either when it runs out of memory half-way. It needs no other process, since another may
    run out of memory alone.
    """
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    try:
        single_process = replace(runtime, group=ALONE)
        train_step(model, optimizer, [batch], cfg, single_process, Update(0, 0.0, 1.0, enabled=False))
        runtime.synchronise()
    finally:
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
