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

from models.attention import attention
from models.stochastic import Stochastic


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
ROPE_BASE = 10_000.0
RopeForm = Literal["interleaved", "tiled", "interpolated"]
INTERPOLATED_ROWS = (16, 16)  # H and W of the grid over which `interpolated` spreads its positions
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Gather = Callable[[Tensor, Tensor], Tensor]  # as gather_tokens
Recompute = Callable[..., Tensor]  # (function, *arguments) -> function(*arguments), computed again backward
Rotary = tuple[Tensor, Tensor]


def rotary_tables(
    ids_BT: Tensor,
    grid: tuple[int, int, int],
    head_dim: int,
    form: RopeForm,
    rope_grid: tuple[int, int, int] | None = None,
) -> Rotary:
    """Cosines and signed sines [B, 1, T, head_dim] of the 3D rotary embedding at raster token ids.

    Each axis owns 2 * ((head_dim // 3) // 2) dimensions in the order D, H, W; the rest stay unrotated.
    `interleaved` gives both members of a pair one frequency; `tiled` repeats the published 2.0 checkpoints'
    layout; `interpolated` is interleaved with H and W spread over 16 x 16, as in the 2.1 checkpoints.
    `rope_grid` interpolates: positions 0..n-1 of an axis are spread over 0..m-1 of that grid.
    """
    _, grid_h, grid_w = grid
    pairs = (head_dim // 3) // 2
    omega = ROPE_BASE ** (-torch.arange(pairs, device=ids_BT.device, dtype=torch.float32) / pairs)
    plane = grid_h * grid_w
    if form == "interpolated":
        rope_grid = (grid[0], *INTERPOLATED_ROWS)
    coordinates = (
        ids_BT.div(plane, rounding_mode="floor"),
        ids_BT.remainder(plane).div(grid_w, rounding_mode="floor"),
        ids_BT.remainder(grid_w),
    )
    angles = []
    for axis, position_BT in enumerate(coordinates):
        stretch = 1.0
        if rope_grid is not None and grid[axis] > 1:
            stretch = (rope_grid[axis] - 1) / (grid[axis] - 1)
        angle = (position_BT.float() * stretch).unsqueeze(-1) * omega
        angles.append(angle.repeat(1, 1, 2) if form == "tiled" else angle.repeat_interleave(2, dim=-1))
    angle_BTR = F.pad(torch.cat(angles, dim=-1), (0, head_dim - 6 * pairs))
    sign = torch.tensor((-1.0, 1.0), device=ids_BT.device).repeat(head_dim // 2)
    return angle_BTR.cos().unsqueeze(1), (angle_BTR.sin() * sign).unsqueeze(1)


def apply_rotary(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the pairs (0, 1), (2, 3) ... of x [B, heads, T, head_dim]."""
    cos, signed_sin = (table.to(x.dtype) for table in rotary)
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x * cos, swapped, signed_sin)


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

    def compile_branches(self) -> None:
        """In training, both branches through torch.compile. The stochastic layers between them stay as they
        are (each draws other numbers), and so does evaluation, whose last batches have shapes of their own:
        each would be another program. A deep copy would go on with this block's weights.
        """
        attend, feed = (torch.compile(f, dynamic=False, fullgraph=True) for f in (self.attend, self.feed))
        self.compiled = attend, feed


def recompute_block(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """Call `function(*arguments)` and keep only the arguments: the backward pass computes it again."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def run_blocks(
    blocks: nn.ModuleList,
    x: Tensor,
    rotary: Rotary | None,
    noise: Stochastic | None = None,
    recompute: Recompute | None = None,
    layers: Sequence[int] = (),
    outputs: dict[int, Tensor] | None = None,
) -> Tensor:
    """x [B, T, width] through all blocks; stochastic depth grows linearly over them. `recompute` (activation
    checkpointing) keeps the inputs of the blocks alone for the backward pass. `outputs` takes what the
    blocks of these numbers (1 is the first) return.
    """
    for i, block in enumerate(blocks):
        rate = noise.drop_path_rate * i / max(1, len(blocks) - 1) if noise is not None else 0.0
        if recompute is None or not torch.is_grad_enabled():
            x = block(x, rotary, noise, rate)
        else:
            x = recompute(_Rewound(block, noise, rate), x, rotary)
        if outputs is not None and i + 1 in layers:
            outputs[i + 1] = x
    return x


class _Rewound:
    """A block whose stochastic layers draw the same numbers at every call."""

    def __init__(self, block: nn.Module, noise: Stochastic | None, drop_path: float) -> None:
        self.block, self.noise, self.drop_path = block, noise, drop_path
        self.drawn = noise.drawn if noise is not None else 0

    def __call__(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        if self.noise is not None:
            self.noise.drawn = self.drawn
        return self.block(x, rotary, self.noise, self.drop_path)


class PatchEmbed(nn.Module):
    """Linear embedding of non-overlapping patches, by matrix product on the kept patches alone.

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
    return x_BNE.gather(1, ids_BT.unsqueeze(-1).expand(-1, -1, x_BNE.shape[-1]))


class VisionTransformer3D(nn.Module):
    """Encoder. Positions are rotary or a learned table; `has_mask_token`: it can be called with `masked_BN`.

    `forward(volume_BCDHW, keep_BK=None)` returns the features [B, K, E] of the kept tokens, or of all N;
    `masked_BN` (bool) instead replaces those tokens by the learned mask token, so that nothing of them is
    read. With `layers` (1 is the first block) it returns the outputs of these blocks side by side, [B, K,
    len(layers) E]; the last block's is normalised, as the features are.
    """

    def __init__(
        self,
        size: str | Size,
        grid: tuple[int, int, int],
        patch: tuple[int, int, int],
        channels: int = 1,
        positions: Literal["rotary", "learned"] = "rotary",
        rope: RopeForm = "interleaved",
        rope_grid: tuple[int, int, int] | None = None,
        has_mask_token: bool = False,
    ) -> None:
        super().__init__()
        shape = SIZES[size] if isinstance(size, str) else size
        self.depth, self.width, self.heads = shape.depth, shape.width, shape.heads
        self.grid, self.rope, self.rope_grid = grid, rope, rope_grid
        self.num_tokens = math.prod(grid)
        self.patch_embed = PatchEmbed(channels, patch, self.width)
        self.pos_embed: nn.Parameter | None = None
        self.mask_token: nn.Parameter | None = None
        if positions == "learned":
            self.pos_embed = nn.Parameter(torch.zeros(1, self.num_tokens, self.width))
        if has_mask_token:
            self.mask_token = nn.Parameter(torch.zeros(1, 1, self.width))
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
        layers: Sequence[int] = (),
    ) -> Tensor:
        x = self.patch_embed(volume_BCDHW, keep_BK)
        if masked_BN is not None:
            assert self.mask_token is not None, "masked_BN needs an encoder with a mask token"
            x = torch.where(masked_BN.unsqueeze(-1), self.mask_token.to(x.dtype), x)
        rotary = None
        if self.pos_embed is not None:
            positions = self.pos_embed.expand(x.shape[0], -1, -1)
            x = x + (positions if keep_BK is None else self.patch_embed.gather(positions, keep_BK))
        else:
            ids = keep_BK
            if ids is None:
                ids = torch.arange(self.num_tokens, device=x.device).unsqueeze(0)
            rotary = rotary_tables(ids, self.grid, self.width // self.heads, self.rope, self.rope_grid)
        if noise is not None:
            x = noise.dropout(x)
        outputs: dict[int, Tensor] = {}
        features = self.norm(run_blocks(self.blocks, x, rotary, noise, self.recompute, layers, outputs))
        if not layers:
            return features
        outputs[self.depth] = features
        return torch.cat([outputs[number] for number in layers], dim=-1)


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
        if name in ("pos_embed", "mask_token"):
            nn.init.trunc_normal_(parameter, std=0.02)
    for i, block in enumerate(blocks, start=1):
        assert isinstance(block, Block)
        with torch.no_grad():
            block.attn.proj.weight.div_(math.sqrt(2 * i))
            block.mlp.fc2.weight.div_(math.sqrt(2 * i))
