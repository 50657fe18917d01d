"""The decoders of layers, classes and slabs, and what surfaces are learnt by.

In: tokens of one plane of the token grid [B, gh, gw, E], E = 0 for none, and the voxels of its B-scans
[B, d, H, W] (d: patch size). Out: outputs [B, S, d, H, W] at full size. Legend: models/vit3d.py.

  unetr       a U-shaped network on the voxels, which tokens join. The voxels, and beside them their row, go
              down four halvings and up again, what came down added on the way (Ronneberger et al. 2015,
              U-Net), so that the deepest level sees 112 rows and more; columns are read some at a time.
              Tokens of several blocks of the encoder join at the level whose stride is nearest to theirs
              (Hatamizadeh et al. 2022, UNETR, which this is within B-scans)
  linear      one layer: a token gives the logits of the voxels of its patch
  upsampling  convolutions within B-scans, doubling to full size; `voxels`: beside features of the voxels

Of surfaces, the outputs are logits over the H voxels of an A-scan; a height is the mean of their softmax, and
a surface is nowhere above the one before it (He et al. 2021, Structured layer surface segmentation for retina
OCT using fully convolutional regression networks: soft-argmax, then the running maximum in place of their
rectifier).
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
STEM = 16  # features of a voxel
CLASS_WEIGHT = 2.0  # of the cross-entropy of layers, beside that of surfaces


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
        """`width` of the tokens; 0: only voxels."""
        super().__init__()
        spatial, is_layers = cfg.spatial, cfg.task.kind == "layers"
        patch, (_, row_mm, column_mm) = spatial.patch_size, spatial.target_spacing
        self.planes, self.num_outputs, self.keeps_columns = patch[0], num_outputs, is_layers
        self.is_relative = is_layers  # the brightness of voxels within their B-scan is what is read
        apart_w = 2 ** max(0, round(math.log2(COLUMN_MM / column_mm)))  # columns, the nearest power of two
        self.stride = 2 if row_mm < FINE_ROW_MM else 1, math.gcd(apart_w, patch[2])
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


def reads_blocks(cfg: Config) -> Config:
    """A dense task's configuration; UNETR reads several blocks unless model.feature_blocks says which."""
    if cfg.head.kind != UNETR or cfg.model.feature_blocks is not None:
        return cfg
    depth = SIZES[cfg.model.size].depth
    blocks = sorted({math.ceil(depth * part / BLOCKS_READ) for part in range(1, BLOCKS_READ + 1)})
    return replace(cfg, model=replace(cfg.model, feature_blocks=blocks))


class LinearDecoder(nn.Module):
    """One linear layer on every token."""

    def __init__(self, width: int, num_surfaces: int, patch: tuple[int, int, int]) -> None:
        super().__init__()
        d, h, w = patch
        self.patch, self.num_surfaces = patch, num_surfaces
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, num_surfaces * d * h * w)

    def forward(self, tokens_BhwE: Tensor, voxels_BdHW: Tensor) -> Tensor:
        """Logits [B, S, d, H, W]; the voxels are not looked at."""
        d, h, w = self.patch
        return rearrange(
            self.last(self.norm(tokens_BhwE)),
            "b gh gw (s d h w) -> b s d (gh h) (gw w)",
            s=self.num_surfaces,
            d=d,
            h=h,
            w=w,
        )


class UpsamplingDecoder(nn.Module):
    """Doubling convolutions from the token grid to full size, within each B-scan."""

    def __init__(
        self, width: int, num_surfaces: int, patch: tuple[int, int, int], hidden: int, voxels: bool
    ) -> None:
        super().__init__()
        self.planes, self.hidden, self.reads_voxels = patch[0], hidden, voxels
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, self.planes * hidden)  # each B-scan of a token has features of its own
        num_doublings = max(1, (max(patch[1:]) - 1).bit_length())
        self.blocks = nn.ModuleList(nn.Conv2d(hidden, hidden, 3, padding=1) for _ in range(num_doublings))
        self.stem = nn.ModuleList([nn.Conv2d(1, STEM, 3, padding=1), nn.Conv2d(STEM, STEM, 3, padding=1)])
        if not voxels:
            self.stem = nn.ModuleList()
        self.join = nn.Conv2d(hidden + (STEM if voxels else 0), hidden, 3, padding=1)
        self.last = nn.Conv2d(hidden, num_surfaces, 1)

    def forward(self, tokens_BhwE: Tensor, voxels_BdHW: Tensor) -> Tensor:
        size = voxels_BdHW.shape[2:]
        x = rearrange(
            self.first(self.norm(tokens_BhwE)), "b gh gw (d c) -> (b d) c gh gw", d=self.planes, c=self.hidden
        )
        for block in self.blocks:
            grown = [min(2 * n, whole) for n, whole in zip(x.shape[2:], size, strict=True)]
            x = F.gelu(block(F.interpolate(x, grown, mode="bilinear", align_corners=False)))
        if self.reads_voxels:
            seen = rearrange(voxels_BdHW, "b d h w -> (b d) 1 h w")
            for layer in self.stem:
                seen = F.gelu(layer(seen))
            x = torch.cat([x, seen], dim=1)
        logits = self.last(F.gelu(self.join(x)))
        return rearrange(logits, "(b d) s h w -> b s d h w", d=self.planes)


def build_decoder(
    kind: str, width: int, num_surfaces: int, patch: tuple[int, int, int], hidden: int, voxels: bool
) -> nn.Module:
    """The decoder of a configuration's head.kind; raises ValueError for another one."""
    if kind == "linear":
        return LinearDecoder(width, num_surfaces, patch)
    if kind == "upsampling":
        return UpsamplingDecoder(width, num_surfaces, patch, hidden, voxels)
    raise ValueError(f"head.kind: expected linear or upsampling with task.kind layers, found {kind}")


def heights_of(logits_BSdHW: Tensor) -> Tensor:
    """Ordered heights [B, S, d, W] in voxels: the mean place of each surface, never above the one before."""
    places = torch.arange(logits_BSdHW.shape[3], dtype=torch.float32, device=logits_BSdHW.device)
    mean = torch.einsum("bsdhw,h->bsdw", logits_BSdHW.float().softmax(dim=3), places)
    return mean.cummax(dim=1).values


def surface_loss(logits_BSdHW: Tensor, truth_BSdW: Tensor) -> Tensor:
    """Cross-entropy of the place, and the distance of the mean place in voxels; the mean over known heights.

    A height between two voxels is a probability of both. NaN, and heights outside the grid, are not known.
    Outputs beyond the surfaces are classes of voxels: `layer_loss`. Where they have fewer columns than the
    truth, each is of several.
    """
    size, num_surfaces = logits_BSdHW.shape[3], truth_BSdW.shape[1]
    logits_BSdHW, classes = logits_BSdHW[:, :num_surfaces], logits_BSdHW[:, num_surfaces:]
    if (columns := logits_BSdHW.shape[4]) != truth_BSdW.shape[3]:
        truth_BSdW = truth_BSdW.unflatten(3, (columns, -1)).nanmean(dim=4)
    known = (truth_BSdW >= 0) & (truth_BSdW <= size - 1)  # False for NaN
    truth = torch.where(known, truth_BSdW, 0.0)
    log_p = logits_BSdHW.float().log_softmax(dim=3)
    low = truth.floor().clamp(max=size - 2)
    share = truth - low
    at = low.long().unsqueeze(3)
    entropy = -((1 - share) * log_p.gather(3, at).squeeze(3) + share * log_p.gather(3, at + 1).squeeze(3))
    distance = (heights_of(logits_BSdHW) - truth).abs()
    count = known.sum().clamp(min=1)
    loss = torch.where(known, entropy + distance, 0.0).sum() / count
    return loss + layer_loss(classes.float(), truth_BSdW) if classes.shape[1] else loss


def layer_loss(logits_BSdHW: Tensor, truth_BSdW: Tensor) -> Tensor:
    """Cross-entropy and soft Dice of the layers between surfaces as classes, 0 above the first and below the
    last, in the A-scans whose surfaces are all known.
    """
    size, num_surfaces = logits_BSdHW.shape[3], truth_BSdW.shape[1]
    known = ~truth_BSdW.isnan().any(dim=1)[:, :, None]
    rows = torch.arange(size, device=truth_BSdW.device)[:, None]
    place = (rows >= truth_BSdW.unsqueeze(3)).sum(dim=1)
    place = torch.where(place == num_surfaces, 0, place)
    log_p = logits_BSdHW.log_softmax(dim=1)
    mask = known.expand(place.shape)
    entropy = F.nll_loss(log_p, place, reduction="none")
    hot = F.one_hot(place, num_surfaces).movedim(-1, 1) * mask.unsqueeze(1)
    p = log_p.exp() * mask.unsqueeze(1)
    both, total = (x.sum(dim=(0, 2, 3, 4)) for x in (p * hot, p + hot))
    dice = 1 - ((2 * both + 1) / (total + 1)).mean()
    return CLASS_WEIGHT * (entropy * mask).sum() / mask.sum().clamp(min=1) + dice
