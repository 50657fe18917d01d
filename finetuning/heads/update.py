"""One update of full fine-tuning: forward and backward over the accumulation steps, clip, AdamW.

No Python branch here depends on a tensor and nothing is read back to the host. A non-finite loss or gradient
skips the update by a select on the device, as in pre-training.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from data_setup.loader import Batch
from data_setup.normalisation import view
from finetuning.heads.objective import row_losses
from finetuning.heads.tuned import TunedModel
from utils.config.schema import Config
from utils.runtime.single import Runtime


@dataclass
class UpdateResult:
    """Device tensors of one update."""

    loss: Tensor
    grad_norm: Tensor
    is_finite: Tensor


def batch_loss(kind: str, outputs_BC: Tensor, batch: Batch, smoothing: float) -> Tensor:
    """Sum of the weighted losses of a micro-batch; of a multilabel task the mean over the labels."""
    losses_BT = row_losses(kind, outputs_BC.float(), batch["truth"], smoothing)
    return (losses_BT * batch["weight"]).mean(dim=1).sum()


def update_model(
    model: TunedModel,
    optimizer: torch.optim.AdamW,
    batches: list[Batch],
    cfg: Config,
    runtime: Runtime,
    rate: float,
    *,
    is_frozen: bool,
    enabled: bool = True,
) -> UpdateResult:
    """One update from this process's micro-batches of one global batch; the result is the whole batch's.

    `is_frozen`: the encoder's tokens are computed without gradient and the head alone is trained. With
    `enabled=False` the update does all of its work and moves nothing.
    """
    samples, kind = cfg.train.global_batch_size, cfg.task.kind
    optimizer.zero_grad(set_to_none=True)
    loss_sum = torch.zeros((), device=runtime.device)
    for number, batch in enumerate(batches, 1):
        volume, valid_BN = view(batch, 0), batch["token_valid"].float()
        sums = number == len(batches)
        with runtime.autocast():
            if is_frozen:
                with torch.no_grad():
                    tokens = model.encoder(volume)
                replica = runtime.group.replica(model.top, sums=sums)
                outputs_BC = replica(tokens, valid_BN, batch["sample_seed"])
            else:
                outputs_BC = runtime.group.replica(model, sums=sums)(volume, valid_BN, batch["sample_seed"])
        objective = batch_loss(kind, outputs_BC, batch, cfg.finetune.label_smoothing) / samples
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
