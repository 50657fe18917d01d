"""The 3D vision transformer: patches, positions, blocks and the encoder.

In: a normalised volume [B, C, D, H, W] and, optionally, the ids of the tokens to keep. Out: token features
[B, K, E]. Follows V-JEPA 2 (Assran et al. 2025, arXiv:2506.09985) with its parameter names, so that its
weights fit.

Legend: B batch, D H W voxels (B-scan, axial, A-scan), N all tokens, K context tokens, M target tokens,
E encoder width, P predictor width, T tokens of whichever set. Tokens are in raster order of the grid (d, h,
w).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.attention import RopeForm, Rotary, apply_rotary, attention, rotary_tables
from models.stochastic import Rewound, Stochastic


class Size(NamedTuple):
    """The shape of a transformer: number of blocks, width, attention heads, MLP hidden units per unit of
    width.
    """

    depth: int
    width: int
    heads: int
    mlp_ratio: float = 4.0


SIZES: dict[str, Size] = {
    "ti": Size(12, 192, 3),
    "s": Size(12, 384, 6),
    "b": Size(12, 768, 12),
    "l": Size(24, 1024, 16),
    "h": Size(32, 1280, 16),
}
NORM_EPS = 1e-6
Positions = Literal["rotary", "learned", "image"]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Gather = Callable[[Tensor, Tensor], Tensor]  # as gather_tokens
Recompute = Callable[..., Tensor]  # (function, *arguments) -> function(*arguments), computed again backward


class SelfAttention(nn.Module):
    """Multi-head self-attention with an optional rotary embedding."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.attention: Attention = attention  # the runtime may put another kernel here

    def forward(self, x_BTE: Tensor, rotary: Rotary | None) -> Tensor:
        q, k, v = rearrange(self.qkv(x_BTE), "b t (three h c) -> three b h t c", three=3, h=self.heads)
        if rotary is not None:
            q, k = apply_rotary(q, rotary), apply_rotary(k, rotary)
        return self.proj(rearrange(self.attention(q, k, v), "b h t c -> b t (h c)"))


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, width: int, heads: int, mlp_ratio: float = 4.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPS)
        self.attn = SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS)
        self.mlp = Mlp(width, int(width * mlp_ratio))
        # what an engine may put in the place of `attend` and `feed` in training
        self.compiled: tuple[Callable[..., Tensor], Callable[..., Tensor]] | None = None

    def forward(
        self, x: Tensor, rotary: Rotary | None, noise: Stochastic | None = None, drop_path: float = 0.0
    ) -> Tensor:
        attend, feed = self.attend, self.feed
        if self.compiled is not None and self.training:
            attend, feed = self.compiled
        if noise is None:
            x = x + attend(x, rotary)
            return x + feed(x)
        x = x + noise.drop_path(noise.dropout(attend(x, rotary)), drop_path)
        return x + noise.drop_path(noise.dropout(feed(x)), drop_path)

    def attend(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        """The attention branch of x [B, T, width]; the same shape."""
        return self.attn(self.norm1(x), rotary)

    def feed(self, x: Tensor) -> Tensor:
        """The MLP branch of x [B, T, width]; the same shape."""
        return self.mlp(self.norm2(x))


def recompute_block(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """Call `function(*arguments)` and keep only the arguments: the backward pass computes it again."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def run_blocks(
    blocks: nn.ModuleList,
    x: Tensor,
    rotary: Rotary | None,
    noise: Stochastic | None = None,
    recompute: Recompute | None = None,
    kept: dict[int, Tensor] | None = None,
) -> Tensor:
    """x [B, T, width] through all blocks; stochastic depth grows linearly over them. `recompute` (activation
    checkpointing) keeps only the inputs of the blocks for the backward pass. The outputs of the blocks that
    `kept` has, by number from 1, go there.
    """
    for i, block in enumerate(blocks):
        rate = noise.drop_path_rate * i / max(1, len(blocks) - 1) if noise is not None else 0.0
        if recompute is None or not torch.is_grad_enabled():
            x = block(x, rotary, noise, rate)
        else:
            x = recompute(Rewound(block, noise, rate), x, rotary)
        if kept is not None and i + 1 in kept:
            kept[i + 1] = x
    return x


class PatchEmbed(nn.Module):
    """Linear embedding of non-overlapping patches, by matrix product on only the kept patches.

    The weight keeps the shape of a convolution [E, C, d, h, w], as public checkpoints store it.
    """

    def __init__(self, channels: int, patch: tuple[int, int, int], width: int) -> None:
        super().__init__()
        self.patch = patch
        self.proj = nn.Conv3d(channels, width, kernel_size=patch, stride=patch)
        self.gather: Gather = gather_tokens

    def forward(self, volume_BCDHW: Tensor, keep_BK: Tensor | None) -> Tensor:
        d, h, w = self.patch
        patches = rearrange(volume_BCDHW, "b c (gd d) (gh h) (gw w) -> b (gd gh gw) (c d h w)", d=d, h=h, w=w)
        if keep_BK is not None:
            patches = self.gather(patches, keep_BK)
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


def gather_tokens(x_BNE: Tensor, ids_BT: Tensor) -> Tensor:
    """The rows ids [B, T] of x [B, N, E], as [B, T, E]."""
    first_B1 = torch.arange(len(ids_BT), device=ids_BT.device).unsqueeze(1) * x_BNE.shape[1]
    rows = x_BNE.flatten(0, 1).index_select(0, (ids_BT + first_B1).flatten())  # gather would copy by value
    return rows.unflatten(0, ids_BT.shape)


class VisionTransformer3D(nn.Module):
    """Encoder. Positions are rotary, a learned table, or those of an image model: a learned table of one
    B-scan for every d, and rotary along D. `num_prefix` tokens of no place (an image model's class token and
    registers) attend and are attended to. `has_mask_token`: it can be called with `masked_BN`.

    `forward(volume_BCDHW, keep_BK=None)` returns the features [B, K, E] of the kept tokens, or of all N;
    `masked_BN` (bool) instead replaces those tokens by the learned mask token, so that nothing of them is
    read. With `blocks`, by default `feature_blocks`, the normalised outputs of these are joined [B, K, n E].
    """

    def __init__(
        self,
        size: str | Size,
        grid: tuple[int, int, int],
        patch: tuple[int, int, int],
        channels: int = 1,
        positions: Positions = "rotary",
        rope: RopeForm = "interleaved",
        has_mask_token: bool = False,
        num_prefix: int = 0,
    ) -> None:
        super().__init__()
        shape = SIZES[size] if isinstance(size, str) else size
        self.depth, self.width, self.heads = shape.depth, shape.width, shape.heads
        self.grid, self.rope, self.num_prefix = grid, rope, num_prefix
        self.num_tokens = math.prod(grid)
        self.feature_blocks: tuple[int, ...] = ()  # numbers from 1; none: the last
        # H and W of an image model's attention are learned: a rotation there would undo them
        self.rotary_axes = {"rotary": 3, "image": 1, "learned": 0}[positions]
        self.patch_embed = PatchEmbed(channels, patch, self.width)
        self.pos_embed: nn.Parameter | None = None
        self.mask_token: nn.Parameter | None = None
        self.prefix_tokens: nn.Parameter | None = None
        if positions != "rotary":
            num_places = self.num_tokens if positions == "learned" else math.prod(grid[1:])
            self.pos_embed = nn.Parameter(torch.zeros(1, num_places, self.width))
        if has_mask_token:
            self.mask_token = nn.Parameter(torch.zeros(1, 1, self.width))
        if num_prefix:
            self.prefix_tokens = nn.Parameter(torch.zeros(1, num_prefix, self.width))
        self.blocks = nn.ModuleList(Block(self.width, self.heads, shape.mlp_ratio) for _ in range(self.depth))
        self.recompute: Recompute | None = None
        self.norm = nn.LayerNorm(self.width, eps=NORM_EPS)
        initialise(self, self.blocks)

    def forward(
        self,
        volume_BCDHW: Tensor,
        keep_BK: Tensor | None = None,
        masked_BN: Tensor | None = None,
        noise: Stochastic | None = None,
        blocks: Sequence[int] = (),
    ) -> Tensor:
        x = self.patch_embed(volume_BCDHW, keep_BK)
        if masked_BN is not None:
            assert self.mask_token is not None, "masked_BN needs an encoder with a mask token"
            x = torch.where(masked_BN.unsqueeze(-1), self.mask_token.to(x.dtype), x)
        rotary = None
        if self.pos_embed is not None:
            planes = self.num_tokens // self.pos_embed.shape[1]
            positions = self.pos_embed.expand(planes, -1, -1).flatten(0, 1).expand(x.shape[0], -1, -1)
            x = x + (positions if keep_BK is None else self.patch_embed.gather(positions, keep_BK))
        if self.rotary_axes:
            ids = keep_BK
            if ids is None:
                ids = torch.arange(self.num_tokens, device=x.device).unsqueeze(0)
            ids = F.pad(ids, (self.num_prefix, 0))  # the first token's d is 0, which turns nothing
            rotary = rotary_tables(ids, self.grid, self.width // self.heads, self.rope, self.rotary_axes)
        if self.prefix_tokens is not None:
            x = torch.cat((self.prefix_tokens.to(x.dtype).expand(len(x), -1, -1), x), dim=1)
        if noise is not None:
            x = noise.dropout(x)
        kept = dict.fromkeys(blocks or self.feature_blocks or (self.depth,), x)
        run_blocks(self.blocks[: max(kept)], x, rotary, noise, self.recompute, kept)
        parts = [self.norm(part[:, self.num_prefix :]) for part in kept.values()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    @property
    def feature_width(self) -> int:
        return self.width * max(1, len(self.feature_blocks))


def initialise(module: nn.Module, blocks: nn.ModuleList) -> None:
    """V-JEPA's initialisation: truncated normal of std 0.02, biases 0, residual branch i scaled by
    1/sqrt(2 i).
    """
    for m in module.modules():
        if isinstance(m, nn.Linear | nn.Conv3d):
            nn.init.trunc_normal_(m.weight, std=0.02)
            if m.bias is not None:
                nn.init.zeros_(m.bias)
    for name, parameter in module.named_parameters(recurse=False):
        if name in ("pos_embed", "mask_token", "prefix_tokens"):
            nn.init.trunc_normal_(parameter, std=0.02)
    for i, block in enumerate(blocks, start=1):
        assert isinstance(block, Block)
        with torch.no_grad():
            block.attn.proj.weight.div_(math.sqrt(2 * i))
            block.mlp.fc2.weight.div_(math.sqrt(2 * i))
