"""An encoder with a head on it, the learning rate of each layer, and one update of both.

In: normalised volumes [B, C, D, H, W], the validity of their tokens [B, N] and, in training, the samples' own
seeds. Out: the head's outputs [B, num_outputs]; moved weights. Layer-wise decay of the rates: Clark et al.
2020 (arXiv:2003.10555), as BEiT and MAE fine-tune. Legend: models/vit3d.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from data_setup.loader import Batch
from data_setup.normalisation import view
from finetuning.heads.objective import row_losses
from models.heads import AttentiveHead, build_head
from models.optimizer import blocks_above
from models.probes.features import token_moments
from models.stochastic import Stochastic
from models.vit3d import Recompute, VisionTransformer3D, recompute_block
from utils.config.schema import Config
from utils.runtime.single import Runtime

LEAST_VARIANCE = 1e-12  # of a feature over the tokens: the gradient of a root has no value at 0
MASK_TOKEN = "mask_token"  # which no whole volume meets
# parameters of two axes or more that are no matrices, so do not decay
TABLES = ("pos_embed", "prefix_tokens", "query")


class SeededDropout(nn.Module):
    """Dropout whose masks are drawn from the samples' seeds, so that a resumed run draws them again."""

    noise: Stochastic | None = None  # of the forward pass that is going on

    def forward(self, x: Tensor) -> Tensor:
        return x if self.noise is None else self.noise.dropout(x)


class HeadOnTokens(nn.Module):
    """A head of models.heads on the tokens of an encoder, whose features are not standardised."""

    def __init__(self, head: nn.Module, dropout: float) -> None:
        super().__init__()
        self.head, self.rate = head, dropout
        self.head.dropout = SeededDropout()  # in place of one that draws from torch's generator

    def forward(
        self, tokens_BNE: Tensor, valid_BN: Tensor, seed_B: Tensor | None = None, drawn: int = 0
    ) -> Tensor:
        """`drawn`: numbers of each sample's stream that the encoder has used."""
        dropout = self.head.dropout
        assert isinstance(dropout, SeededDropout)
        dropout.noise = None
        if seed_B is not None and self.rate > 0:
            dropout.noise = Stochastic(seed_B, self.rate, 0.0)
            dropout.noise.drawn = drawn
        if isinstance(self.head, AttentiveHead):
            return self.head(tokens_BNE, valid_BN)
        mean_BE, variance_BE = token_moments(tokens_BNE, valid_BN)
        return self.head(torch.cat([mean_BE, variance_BE.clamp(min=LEAST_VARIANCE).sqrt()], dim=1))


class TunedModel(nn.Module):
    """Encoder and head. With `seed_B` a pass draws dropout and stochastic depth from the samples' seeds."""

    def __init__(self, encoder: VisionTransformer3D, num_outputs: int, cfg: Config) -> None:
        """The head is drawn from torch's global generator; the encoder's mask token, which no volume meets
        here, stays as it is.
        """
        super().__init__()
        self.encoder = encoder
        head = build_head(
            cfg.head.kind, encoder.feature_width, num_outputs, cfg.head.hidden, cfg.head.dropout
        )
        self.top = HeadOnTokens(head, cfg.head.dropout)
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
        tokens_BNE = self.encoder(view_BCDHW, noise=noise)
        return self.top(tokens_BNE, valid_BN, seed_B, 0 if noise is None else noise.drawn)


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


def batch_loss(kind: str, outputs_BC: Tensor, batch: Batch) -> Tensor:
    """Sum of the weighted losses of a micro-batch; of a multilabel task the mean over the labels."""
    losses_BT = row_losses(kind, outputs_BC.float(), batch["truth"])
    return (losses_BT * batch["weight"]).mean(dim=1).sum()


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
        objective = batch_loss(kind, outputs_BC, batch) / samples
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
