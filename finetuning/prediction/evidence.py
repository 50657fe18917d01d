"""Where in a volume the evidence for a prediction lies, token by token.

In: a head and the tokens of a volume. Out: `Evidence`: a number a token, how it was made, and what it is for.

* contributions: heads that read pooled features. Mean and standard deviation over valid tokens are sums over
  tokens, so the output splits into a part of each: of a linear head exactly (the parts and the bias add up to
  the output), of an mlp to first order, its gradient at this volume. Parts count from the mean training
  features, where the head's file holds them.
* attention: attentive heads. How much the learned query looks at a token, which says nothing of what for.
* occlusion (occlusion.py): all heads. What the output loses when a block of the volume is hidden.

A class is explained against the mean of the others. That a map is faithful to the head does not mean that it
shows the disease.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from finetuning.heads.head_file import Head, Standardise
from models.heads import AttentiveHead
from models.probes.features import pool_tokens, token_moments

CONTRIBUTIONS, GRADIENT, ATTENTION = "token contributions", "token contributions, first order", "attention"
OCCLUSION = "occlusion"
_CHEAP = {"linear": CONTRIBUTIONS, "mlp": GRADIENT, "attentive": ATTENTION}


class Reads(Protocol):
    """A head on an encoder's tokens."""

    @property
    def module(self) -> nn.Module:
        """Of models.heads."""

    @property
    def standardise(self) -> Standardise | None:
        """Of pooled features, None where there is none."""


def cheap_method(head_kind: str) -> str:
    """The map of one forward pass that a head of this kind has."""
    return _CHEAP[head_kind]


def outputs_of(head: Reads, tokens_BNE: Tensor, valid_BN: Tensor) -> Tensor:
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
    return Evidence(values[0], cheap_method(head.state["head_kind"]), name)


def cheap_map(head: Reads, tokens_BNE: Tensor, valid_BN: Tensor, weights_C: Tensor) -> Tensor:
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
