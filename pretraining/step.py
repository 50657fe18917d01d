"""One optimizer update: forward and backward over the accumulation steps, clip, update, target update.

No Python branch here depends on a tensor and nothing is read back to the host. A non-finite loss or
gradient skips the update by a select on the device: parameters, optimizer state, target and buffers keep
their values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from data_setup.loader import Batch
from data_setup.normalisation import view
from models.losses import Statistics, VicReg, surrogate
from models.optimizer import build_adamw, parameter_groups
from models.vjepa3d import VJEPA3D, Output
from utils.config.schema import Config
from utils.runtime.processes import ALONE
from utils.runtime.single import Runtime


class Update(NamedTuple):
    """Which update this is. With `enabled=False` it does all of its work and moves nothing."""

    step: int
    lr: float
    momentum: float
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

    # They stay on the device: a number read here would make the host wait before it hands over the next step.
    loss: Tensor
    regulariser: Tensor | None
    grad_norm: Tensor
    is_finite: Tensor
    neighbour: Tensor | None  # the loss of neighbours, without its weight
    penalty_to_prediction: Tensor | None = None  # where `Watch.measures`: see Balance


class Balance:
    """Which of two losses pulls harder: the norms of the penalty's and of the prediction's gradient at the
    context encoder's output, over all context tokens of the global batch.
    """

    def __init__(self) -> None:
        self.squares: list[Tensor] = []  # of the penalty, of the prediction; a micro-batch each

    def watch(self, penalty: Tensor, tokens_BKE: Tensor) -> None:
        """Take part in the backward pass that comes next: its gradient at the tokens is the sum of both."""
        # Before the backward pass, which frees the graph and leaves only the sum of both.
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
    """AdamW, fused where the device has that kernel; weight decay on matrices only."""
    groups = parameter_groups(model, cfg.optim.weight_decay, cfg.optim.layer_decay, model.encoder.depth)
    return build_adamw(groups, cfg.optim, next(model.parameters()).device)


def predict(
    model: VJEPA3D, batch: Batch, runtime: Runtime, *, stochastic: bool, replica: nn.Module | None = None
) -> Output:
    """Forward pass of one micro-batch, through the group's replica of the model where gradients follow."""
    # Both views are made here, on the device, from one uint8 volume: the loader sends an eighth of the bytes
    # that the model reads.
    context_view = view(batch, 0)
    target_view = view(batch, 1) if model.reads_target_view else None
    seed = batch["sample_seed"] if stochastic else None
    with runtime.autocast():
        return (model if replica is None else replica)(
            context_view,
            target_view,
            batch["context"],
            batch["target"],
            batch["token_valid"],
            seed,
        )


def global_means(
    regulariser: VicReg, model: VJEPA3D, batches: list[Batch], runtime: Runtime, samples: int
) -> Statistics:
    """The statistics' mean over the global batch, without gradient: a forward pass of only the
    context encoder.
    """
    # The samples' own seeds are those of the pass with gradients, so dropout draws the same and the means are
    # of the tokens that pass will have.
    total: Statistics | None = None
    with torch.no_grad():
        for batch in batches:
            with runtime.autocast():
                tokens = model.encode_context(
                    view(batch, 0), batch["context"], batch["target"], batch["sample_seed"]
                )
            part = regulariser.statistics(tokens.float(), batch["context_valid"])
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
    teaches = 0.0 if cfg.method.control == "penalty_only" else 1.0

    # The penalty is of the global batch. Where that is more than one micro-batch, its means are needed before
    # the first backward pass, so they have a forward pass for themselves.
    regulariser = VicReg() if cfg.method.regulariser == "vicreg" else None
    means: Statistics | None = None
    if regulariser is not None and len(batches) > 1:
        means = global_means(regulariser, model, batches, runtime, samples)

    # Forward and backward, one micro-batch at a time: gradients add up, activations do not.
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    optimizer.zero_grad(set_to_none=True)
    loss_sum = torch.zeros((), device=runtime.device)
    neighbour_sum: Tensor | None = None
    penalty: Tensor | None = None
    balance = Balance()
    for number, batch in enumerate(batches, 1):
        # processes exchange gradients once, in the last backward pass
        replica = runtime.group.replica(model, sums=number == len(batches))
        output = predict(model, batch, runtime, stochastic=True, replica=replica)
        prediction_loss = output.loss_B.sum() / samples
        objective = teaches * prediction_loss
        if output.neighbour_B is not None:
            neighbour_loss = output.neighbour_B.sum() / samples
            objective = objective + teaches * cfg.method.neighbour_weight * neighbour_loss
            so_far = 0.0 if neighbour_sum is None else neighbour_sum
            neighbour_sum = so_far + neighbour_loss.detach()

        # The penalty's gradient reaches this micro-batch through its own statistics (models/losses.py).
        if regulariser is not None:
            statistics = regulariser.statistics(output.context_BKE.float(), batch["context_valid"])
            local = tuple(s / samples for s in statistics)
            if means is None:  # the global batch has one micro-batch on each process, so no pass of its own
                means = tuple(runtime.group.sum(s.detach()) for s in local)
            penalty, gradient = surrogate(regulariser, means)
            terms = [(g * s).sum() for g, s in zip(gradient, local, strict=True)]
            linear = cfg.method.regulariser_weight * torch.stack(terms).sum()
            objective = objective + linear
            if watch.measures():
                balance.watch(linear, output.context_BKE)
        watch.lap("forward")
        runtime.group.backward(objective)
        watch.lap("backward")
        watch.observe(output, batch)
        watch.lap("logging")
        loss_sum = loss_sum + prediction_loss.detach()

    loss_sum = runtime.group.sum(loss_sum)
    if neighbour_sum is not None:
        neighbour_sum = runtime.group.sum(neighbour_sum)
    grad_norm, is_finite = move(model, optimizer, cfg, runtime, update, loss_sum, buffers)
    watch.lap("update")
    return StepResult(loss_sum, penalty, grad_norm, is_finite, neighbour_sum, balance.ratio(runtime))


def move(
    model: VJEPA3D,
    optimizer: torch.optim.AdamW,
    cfg: Config,
    runtime: Runtime,
    update: Update,
    loss: Tensor,
    buffers: dict[str, Tensor],
) -> tuple[Tensor, Tensor]:
    """Clip the gradients and move everything, or nothing where they or the loss are not finite; `buffers`:
    those from before the forward passes. Returns the norm before clipping, and whether all moved.
    """
    # The norm is of the whole batch, so it is taken once the last backward pass has summed the gradients.
    parameters = [p for _, p in model.trained_parameters()]
    grad_norm = nn.utils.clip_grad_norm_(parameters, cfg.optim.clip_grad_norm)
    is_finite = torch.isfinite(grad_norm) & torch.isfinite(loss) & update.enabled
    for group in optimizer.param_groups:
        # the groups of an older checkpoint have no share: they had one rate
        group["lr"] = update.lr * group.get("rate_share", 1.0)
    # the optimizer's own select: with found_inf = 1 neither parameters nor moments nor its step count move
    optimizer.found_inf = 1.0 - is_finite.float()  # type: ignore[attr-defined]  # read by the fused kernels
    optimizer.step()

    # The target follows the encoder that has just moved. The forward passes have moved the buffers already,
    # so those of a skipped update go back.
    model.update_target(runtime.scalar(update.momentum), is_finite)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(torch.where(is_finite, buffer, buffers[name]))
    return grad_norm, is_finite


def trial_step(
    model: VJEPA3D, optimizer: torch.optim.AdamW, batch: Batch, cfg: Config, runtime: Runtime
) -> None:
    """A whole update of one micro-batch that moves nothing: what a step needs of memory, moments included.

    Leaves no trace either when it runs out of memory half-way. It needs no other process, since another may
    be the only one to run out of memory.
    """
    # The real step, so that nothing it needs is forgotten; `enabled=False` keeps every weight where it is.
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
