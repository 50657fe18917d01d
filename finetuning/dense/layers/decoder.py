"""From tokens, and voxels beside them, to ordered surfaces of every A-scan.

In: tokens of one plane of the token grid [B, gh, gw, E], the voxels of its B-scans [B, d, H, W] (d: patch
size). Out: heights [B, S, d, W] in voxels along h, from the vitreous down. Legend: models/vit3d.py.

Each surface has logits over the H voxels of an A-scan; its height is the mean of their softmax, and a surface
is nowhere above the one before it (He et al. 2021, Structured layer surface segmentation for retina OCT using
fully convolutional regression networks: soft-argmax, then the running maximum in place of their rectifier).

  linear      one layer: a token gives the logits of the voxels of its own patch
  upsampling  convolutions within B-scans, doubling to full size; `voxels`: beside features of the voxels
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

STEM = 16  # features of a voxel
CLASS_WEIGHT = 2.0  # of the cross-entropy of layers, beside that of surfaces


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
        """Logits [B, S, d, H, W]."""
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
