"""Where in a volume the evidence for a prediction lies, token by token.

In: a head and the tokens of a volume. Out: `Evidence`: a number a token, how it was made, and what it is for.

* contributions: heads that read pooled features. Mean and standard deviation over valid tokens are sums over
  tokens, so the output splits into a part of each: of a linear head exactly (the parts and the bias add up to
  the output), of an mlp to first order, its gradient at this volume. Parts count from the mean training
  features, where the head's file holds them.
* attention: attentive heads. How much the learned query looks at a token, which says nothing of what for.
* occlusion: all heads. What the output loses when a block of the volume is hidden: its voxels take the
  volume's mean, which is 0 after normalisation (zscore_valid); the tokens stay valid.

A class is explained against the mean of the others. That a map is faithful to the head does not mean that it
shows the disease.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import repeat
from torch import Tensor, nn

from finetuning.heads.head_file import Head
from models.heads import AttentiveHead
from models.probes.features import pool_tokens, token_moments
from utils.config.schema import Config
from utils.runtime.single import Runtime

CONTRIBUTIONS, GRADIENT, ATTENTION = "token contributions", "token contributions, first order", "attention"
OCCLUSION = "occlusion"
CHEAP = {  # the map of one forward pass that a head of this kind has
    "linear": CONTRIBUTIONS,
    "mlp": GRADIENT,
    "attentive": ATTENTION,
}
MAX_BLOCKS = 128  # forward passes of a volume
BATCH = 8  # hidden volumes that go through the encoder together


def outputs_of(head: Head, tokens_BNE: Tensor, valid_BN: Tensor) -> Tensor:
    """A head's outputs [B, C] for the tokens of volumes."""
    if isinstance(head.module, AttentiveHead):
        return head.module(tokens_BNE, valid_BN)
    pooled = pool_tokens(tokens_BNE, valid_BN)
    return head.module(pooled if head.standardise is None else head.standardise(pooled))


@dataclass(frozen=True)
class Evidence:
    """One number for every token [N]; 0 outside the scan."""

    values: Tensor  # float32, on the host
    method: str  # CONTRIBUTIONS, GRADIENT, ATTENTION or OCCLUSION
    of: str  # what was explained: a class, a label, or the value's name

    @property
    def is_signed(self) -> bool:
        """Whether values are for (above 0) and against (below)."""
        return self.method != ATTENTION

    def centred(self, valid_N: Tensor) -> Tensor:
        """Values for a picture: those of the scan's median token taken off, where they have a sign, so that
        vitreous, most of a scan, has none; 0 outside the scan.
        """
        inside = valid_N > 0
        if not self.is_signed:
            return self.values
        return torch.where(inside, self.values - self.values[inside].median(), 0.0)


def explained_output(head: Head, outputs_C: Tensor) -> tuple[Tensor, str]:
    """(weights [C] of the outputs that are explained, a name): the likeliest class against the mean of the
    others, the likeliest label, or the value.
    """
    place = int(outputs_C.argmax())
    if head.kind == "regression":
        return torch.ones_like(outputs_C), str(head.state["task"]["label_column"])
    if head.kind == "multilabel" or len(outputs_C) == 1:
        return torch.eye(len(outputs_C)).to(outputs_C)[place], head.names[place]
    return against_others(place, len(outputs_C)).to(outputs_C), head.names[place]


def against_others(place: int, num_outputs: int) -> Tensor:
    """Weights [C] of the outputs: one class less the mean of the others."""
    weights = torch.full((num_outputs,), -1.0 / (num_outputs - 1))
    weights[place] = 1.0
    return weights


def evidence_of(head: Head, tokens_BNE: Tensor, valid_BN: Tensor, outputs_C: Tensor) -> Evidence:
    """What the tokens of one volume [1, N, E] say for its prediction."""
    weights_C, name = explained_output(head, outputs_C)
    values = cheap_map(head, tokens_BNE, valid_BN, weights_C)
    return Evidence(values[0], CHEAP[head.state["head_kind"]], name)


def cheap_map(head: Head, tokens_BNE: Tensor, valid_BN: Tensor, weights_C: Tensor) -> Tensor:
    """The map [B, N] of one forward pass, float32 on the host: of a linear head its parts and the bias add
    up to outputs @ weights, of an mlp to first order; of an attentive head it is attention, for any weights.
    """
    if isinstance(head.module, AttentiveHead):
        with torch.no_grad():
            return head.module.attention(tokens_BNE, valid_BN).float().cpu()
    pooled = pool_tokens(tokens_BNE, valid_BN)
    reference, scale = torch.zeros_like(pooled), torch.ones_like(pooled)
    if head.standardise is not None:
        reference, scale = (v.to(pooled) for v in (head.standardise.mean, head.standardise.std))
        reference, scale = reference.expand_as(pooled), scale.expand_as(pooled)
    with torch.enable_grad():
        at = ((pooled - reference) / scale).detach().requires_grad_()
        (slope,) = torch.autograd.grad((head.module(at) * weights_C.to(at)).sum(), at)
    return split_over_tokens(slope / scale, reference, tokens_BNE, valid_BN).float().cpu()


def split_over_tokens(slope_BF: Tensor, reference_BF: Tensor, tokens_BNE: Tensor, valid_BN: Tensor) -> Tensor:
    """slope @ (pooled - reference) as a sum over tokens [B, N]; F = 2E: mean, then standard deviation.

    The standard deviation is the mean of (token - mean)^2 / standard deviation.
    """
    mean_BE, variance_BE = token_moments(tokens_BNE, valid_BN)
    of_mean, of_std = slope_BF.chunk(2, dim=1)
    from_mean, from_std = reference_BF.chunk(2, dim=1)
    std_BE = variance_BE.sqrt().clamp(min=1e-12)
    apart_BNE = tokens_BNE - mean_BE[:, None]
    parts_BN = torch.einsum("bne,be->bn", tokens_BNE - from_mean[:, None], of_mean)
    parts_BN = parts_BN + torch.einsum("bne,be->bn", apart_BNE.square(), of_std / std_BE)
    parts_BN = parts_BN - (from_std * of_std).sum(dim=1, keepdim=True)
    weight_BN = valid_BN.to(parts_BN)
    return parts_BN * weight_BN / weight_BN.sum(dim=1, keepdim=True)


def block_of(grid: tuple[int, int, int]) -> tuple[int, int, int]:
    """Tokens of a block (d, h, w): above MAX_BLOCKS the axis with the most is halved, of equals the first."""
    block = [1, 1, 1]
    while True:
        counts = [-(-size // step) for size, step in zip(grid, block, strict=True)]
        if counts[0] * counts[1] * counts[2] <= MAX_BLOCKS:
            return block[0], block[1], block[2]
        block[counts.index(max(counts))] *= 2


def blocks_of(grid: tuple[int, int, int], block: tuple[int, int, int]) -> Tensor:
    """Which tokens each block has, bool [K, N]; every token is in one block, those at the end are smaller."""
    places = torch.meshgrid(
        *(torch.arange(count) // step for count, step in zip(grid, block, strict=True)), indexing="ij"
    )
    _, number_N = torch.stack([place.flatten() for place in places]).unique(dim=1, return_inverse=True)
    return F.one_hot(number_N).T.bool()


def hide(view_1CDHW: Tensor, hidden_BN: Tensor, cfg: Config) -> Tensor:
    """A normalised volume with these tokens' voxels at the volume's mean, once a row [B, C, D, H, W]."""
    (gd, gh, gw), (d, h, w) = cfg.grid, cfg.spatial.patch_size
    mask = repeat(hidden_BN, "b (gd gh gw) -> b 1 (gd d) (gh h) (gw w)", gd=gd, gh=gh, gw=gw, d=d, h=h, w=w)
    return view_1CDHW.masked_fill(mask.to(view_1CDHW.device), 0.0)


@torch.no_grad()
def occlusion_map(
    encoder: nn.Module,
    head: Head,
    view_1CDHW: Tensor,
    valid_1N: Tensor,
    weights_C: Tensor,
    cfg: Config,
    runtime: Runtime,
) -> Tensor:
    """How much outputs @ weights falls when a token's block is hidden [N]; 0 without valid tokens."""
    blocks_KN, inside_N = blocks_of(cfg.grid, block_of(cfg.grid)), valid_1N[0].cpu() > 0
    used_KN = blocks_KN[(blocks_KN & inside_N).any(dim=1)]
    sets_KN = torch.cat([torch.zeros_like(used_KN[:1]), used_KN])  # first nothing is hidden
    outputs = []
    for hidden_BN in sets_KN.split(BATCH):
        with runtime.autocast():
            tokens_BNE = encoder(hide(view_1CDHW, hidden_BN, cfg)).float()
        outputs.append(outputs_of(head, tokens_BNE, valid_1N.expand(len(hidden_BN), -1)).float().cpu())
    explained_K = torch.cat(outputs) @ weights_C.float().cpu()
    return ((explained_K[0] - explained_K[1:]) @ used_KN.float()) * inside_N
