"""Heads: what is trained on an encoder's features for one task.

In: pooled features [B, 2E] (models.probes.features: mean and standard deviation over valid tokens), or all
tokens [B, N, E] with their validity [B, N]. Out: [B, C], C = num_outputs. The attentive head follows V-JEPA's
attentive probe (Bardes et al. 2024, arXiv:2404.08471, section 4): a learned query, one cross-attention
block, one linear layer. Legend: models/vit3d.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from models.vit3d import NORM_EPS, Mlp

HEAD_DIM = 64  # of an attention head, as in the encoders of models.vit3d
# of a linear head, as fine-tuning of MAE has it (He et al. 2022): what a low learning rate would not unlearn
INIT_STD = 2e-5
MLP_RATIO = 4  # hidden units of the attentive head's MLP per unit of width, as in the encoders


class LinearHead(nn.Module):
    """One linear layer on pooled features."""

    def __init__(self, width: int, num_outputs: int) -> None:
        super().__init__()
        self.last = nn.Linear(2 * width, num_outputs)
        nn.init.trunc_normal_(self.last.weight, std=INIT_STD)
        nn.init.zeros_(self.last.bias)

    def forward(self, features_BF: Tensor) -> Tensor:
        return self.last(features_BF)


class MlpHead(nn.Module):
    """One hidden layer on pooled features."""

    def __init__(self, width: int, num_outputs: int, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(2 * width, hidden)
        self.last = nn.Linear(hidden, num_outputs)

    def forward(self, features_BF: Tensor) -> Tensor:
        return self.last(F.gelu(self.first(features_BF)))


class AttentiveHead(nn.Module):
    """A learned query that looks at the valid tokens, a residual MLP, one linear layer."""

    def __init__(self, width: int, num_outputs: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD_DIM)
        self.query = nn.Parameter(torch.zeros(1, 1, width))
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPS)
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS)
        self.mlp = Mlp(width, MLP_RATIO * width)
        self.last = nn.Linear(width, num_outputs)
        nn.init.trunc_normal_(self.query, std=0.02)

    def attention(self, tokens_BNE: Tensor, valid_BN: Tensor) -> Tensor:
        """How much the query looks at each token [B, N], the mean over its heads; a volume adds up to 1."""
        tokens = self.norm1(tokens_BNE.to(self.norm1.weight.dtype))
        q = rearrange(self.q(self.query), "b t (h c) -> b h t c", h=self.heads)
        k, _ = rearrange(self.kv(tokens), "b n (two h c) -> two b h n c", two=2, h=self.heads)
        scores_BHN = (k @ q.transpose(-1, -2)).squeeze(-1) / q.shape[-1] ** 0.5
        scores_BHN = scores_BHN.masked_fill(~valid_BN.to(torch.bool)[:, None], -torch.inf)
        return scores_BHN.softmax(dim=-1).mean(dim=1)

    def forward(self, tokens_BNE: Tensor, valid_BN: Tensor) -> Tensor:
        """Tokens that are not valid are not looked at; a volume needs one valid token or more."""
        tokens = self.norm1(tokens_BNE.to(self.norm1.weight.dtype))
        q = rearrange(self.q(self.query).expand(len(tokens), -1, -1), "b t (h c) -> b h t c", h=self.heads)
        k, v = rearrange(self.kv(tokens), "b n (two h c) -> two b h n c", two=2, h=self.heads)
        seen_B11N = valid_BN.to(torch.bool)[:, None, None, :]
        looked = F.scaled_dot_product_attention(q, k, v, attn_mask=seen_B11N)
        x_BE = (self.query + self.proj(rearrange(looked, "b h t c -> b t (h c)")))[:, 0]
        x_BE = x_BE + self.mlp(self.norm2(x_BE))
        return self.last(x_BE)


def build_head(kind: str, width: int, num_outputs: int, hidden: int) -> nn.Module:
    """A randomly initialised head (torch's global generator) for an encoder of this width E.

    linear and mlp read pooled features [B, 2E], attentive tokens [B, N, E] and validity [B, N]. `hidden` is
    only the mlp's. Every head ends with the linear layer `last`.
    """
    if kind == "linear":
        return LinearHead(width, num_outputs)
    if kind == "mlp":
        return MlpHead(width, num_outputs, hidden)
    if kind == "attentive":
        return AttentiveHead(width, num_outputs)
    raise ValueError(f"head: expected linear, mlp or attentive, found {kind}")


def reads_tokens(kind: str) -> bool:
    """Whether a head of this kind reads all tokens rather than pooled features."""
    return kind == "attentive"


def rescale_output(head: nn.Module, mean: float, std: float) -> None:
    """Let a head that predicts standardised values predict value * std + mean, in place."""
    last = head.last
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.weight.mul_(std)
        last.bias.mul_(std).add_(mean)
