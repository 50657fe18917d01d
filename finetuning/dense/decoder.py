"""The decoder of layers, classes and slabs: a U-shaped network on the voxels of a B-scan, which tokens join.

In: tokens of one plane of the token grid [B, gh, gw, E], E = 0 for none, and the voxels of its B-scans
[B, d, H, W] (d: patch size). Out: outputs [B, S, d, H, W] at full size. Legend: models/vit3d.py.

The voxels, and beside them their row, go down four halvings and up again, what came down added on the way
(Ronneberger et al. 2015, U-Net), so that the deepest level sees 112 rows and more; columns are read some at a
time. Tokens of several blocks of the encoder join at the level whose stride is nearest to theirs
(Hatamizadeh et al. 2022, UNETR, which this is within B-scans).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from models.vit3d import SIZES
from utils.config.schema import Config

UNETR = "unetr"  # of head.kind
WIDTHS = (1, 2, 3, 4, 4)  # of the levels, times head.hidden
TOKEN_WIDTH = 32  # few, or a few labelled eyes are learnt by heart
TOKENS_READ = 0.5  # share of the B-scans whose tokens are read in training, for the same reason
COLUMN_MM = 0.09  # about as far apart columns are read
FINE_ROW_MM = 0.005  # rows that are nearer are read two at a time
BLOCKS_READ = 4  # of the encoder, evenly spaced, the last among them


class Convolutions(nn.Sequential):
    """Two 3x3 convolutions, a norm before the last activation."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )


class UnetrDecoder(nn.Module):
    """A U-Net within B-scans, one level of which reads the tokens too. In evaluation it is the mean of a
    plane and its mirror, and of a surface the median. For surfaces it has classes of the layers beside them
    in training, which help it to learn, and then its columns are those that are read.
    """

    def __init__(self, cfg: Config, width: int, num_outputs: int) -> None:
        """`width` of the tokens; 0: voxels alone."""
        super().__init__()
        spatial, is_layers = cfg.spatial, cfg.task.kind == "layers"
        patch, (_, row_mm, column_mm) = spatial.patch_size, spatial.target_spacing
        self.planes, self.num_outputs, self.keeps_columns = patch[0], num_outputs, is_layers
        self.is_relative = is_layers  # the brightness of voxels within their B-scan is what is read
        self.stride = 2 if row_mm < FINE_ROW_MM else 1, math.gcd(_power(COLUMN_MM / column_mm), patch[2])
        widths = [cfg.head.hidden * factor for factor in WIDTHS]
        apart = [
            abs(math.log2(math.prod(self.stride) * 4**n / patch[1] / patch[2])) for n in range(len(widths))
        ]
        self.level = apart.index(min(apart))  # where tokens join
        self.tokens = nn.ModuleList()
        if width:  # each B-scan of a token has separate features
            narrow = nn.Linear(width, self.planes * TOKEN_WIDTH)
            self.tokens.extend([nn.LayerNorm(width), narrow, nn.Conv2d(TOKEN_WIDTH, widths[self.level], 1)])
        self.stem = nn.Conv2d(2, widths[0], 3, padding=1, stride=self.stride)
        self.down = nn.ModuleList(map(Convolutions, [widths[0], *widths[:-1]], widths))
        self.across = nn.ModuleList(map(nn.Conv2d, widths[1:], widths[:-1], [1] * len(widths)))
        self.up = nn.ModuleList(map(Convolutions, widths[:-1], widths[:-1]))
        self.last = nn.Conv2d(widths[0], num_outputs * (2 if is_layers else 1), 1)

    def forward(self, tokens_BhwE: Tensor, voxels_BdHW: Tensor) -> Tensor:
        """Outputs [B, S, d, H, W]."""
        if self.training:
            return self.outputs(tokens_BhwE, voxels_BdHW)
        mirrored = self.outputs(tokens_BhwE.flip(2), voxels_BdHW.flip(3)).flip(4)
        both = ((self.outputs(tokens_BhwE, voxels_BdHW) + mirrored) / 2)[:, : self.num_outputs]
        return at_median(both) if self.keeps_columns else both

    def outputs(self, tokens_BhwE: Tensor, voxels_BdHW: Tensor) -> Tensor:
        """All outputs, those beside among them, of planes that are not mirrored."""
        height, width = voxels_BdHW.shape[2:]
        voxels = rearrange(voxels_BdHW, "b d h w -> (b d) 1 h w")
        if self.is_relative:  # a volume has bright and dark B-scans
            voxels = F.layer_norm(voxels, (height, width))
        rows = torch.linspace(-1, 1, height, dtype=voxels.dtype, device=voxels.device)
        x = torch.cat([voxels, rows[:, None].expand_as(voxels)], dim=1)
        x = self.stem(x.contiguous(memory_format=torch.channels_last))
        seen: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2, ceil_mode=True) if level else x)
            if self.tokens and level == self.level:
                x = x + self._joined(tokens_BhwE, x.shape[2], x.shape[3])
            seen.append(x)
        for level in reversed(range(len(self.up))):
            size = seen[level].shape[2:]
            x = self.up[level](F.interpolate(self.across[level](x), size) + seen[level])
        x = self.last(x)
        if self.training and self.keeps_columns:
            width = x.shape[3]
        if x.shape[2:] != (height, width):
            x = F.interpolate(x, (height, width), mode="bilinear", align_corners=False)
        return rearrange(x, "(b d) s h w -> b s d h w", d=self.planes)

    def _joined(self, tokens_BhwE: Tensor, height: int, width: int) -> Tensor:
        """Features [B d, c, h, w] of the tokens on a level of this size."""
        norm, narrow, wide = self.tokens
        x = rearrange(narrow(norm(tokens_BhwE)), "b h w (d c) -> (b d) c h w", d=self.planes)
        x = wide(x)
        if self.training:
            x = x * (torch.rand(len(x), 1, 1, 1, device=x.device) < TOKENS_READ)
        return F.interpolate(x, (height, width), mode="bilinear", align_corners=False)


def at_median(logits_BSdHW: Tensor) -> Tensor:
    """Logits whose weight lies on the two rows about the median of each surface, in such shares that their
    mean is the median: the place of the least expected distance, where the mean lies between two candidates.
    """
    below = logits_BSdHW.float().softmax(3).cumsum(3)
    size = below.shape[3]
    row = (below < 0.5).sum(3, keepdim=True).clamp(max=size - 1)
    before = torch.where(row > 0, below.gather(3, (row - 1).clamp(min=0)), 0.0)
    share = (0.5 - before) / (below.gather(3, row) - before).clamp(min=1e-6)
    median = (row + share.clamp(0, 1) - 0.5).clamp(0, size - 1)
    places = torch.arange(size, device=below.device)[:, None]
    return (1 - (places - median).abs()).clamp(min=1e-12).log()


def _power(ratio: float) -> int:
    """The power of two that is nearest to a ratio, at least 1."""
    return 2 ** max(0, round(math.log2(ratio)))


def reads_blocks(cfg: Config) -> Config:
    """The configuration of a dense task, whose UNETR decoder reads several blocks of the encoder unless
    model.feature_blocks says which.
    """
    if cfg.head.kind != UNETR or cfg.model.feature_blocks is not None:
        return cfg
    depth = SIZES[cfg.model.size].depth
    blocks = sorted({math.ceil(depth * part / BLOCKS_READ) for part in range(1, BLOCKS_READ + 1)})
    return replace(cfg, model=replace(cfg.model, feature_blocks=blocks))
