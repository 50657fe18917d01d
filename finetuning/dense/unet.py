"""A plain U-Net on B-scans, trained from scratch: what a head has to beat at equal processor time.

In: B-scans float32 [N, H, W] and the class of every voxel uint8 [N, H, W] (IGNORED: unknown). Out: a network
of logits. Ronneberger et al. 2015, with batch norm and the row's place as a second channel; cross-entropy
and soft Dice; mirror, shift and gain; the weights with the best Dice on other B-scans are kept.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (16, 32, 48, 64, 64)
RATE, DECAY, BATCH, SHIFT, GAIN, CHECKS = 4e-3, 1e-2, 8, 24, 0.3, 25
IGNORED = 255
Go = Callable[[], None]
Pair = tuple[Tensor, Tensor]  # B-scans and their classes


def _block(before: int, width: int) -> nn.Sequential:
    first, second = (nn.Conv2d(channels, width, 3, padding=1) for channels in (before, width))
    return nn.Sequential(first, nn.ReLU(), second, nn.BatchNorm2d(width), nn.ReLU())


class UNet(nn.Module):
    """Logits [N, C, H, W] of B-scans [N, H, W] of any size."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(_block(a, b) for a, b in zip((2, *WIDTHS), WIDTHS, strict=False))
        self.up = nn.ModuleList(_block(a + b, b) for a, b in zip(WIDTHS[:0:-1], WIDTHS[-2::-1], strict=True))
        self.last = nn.Conv2d(WIDTHS[0], num_classes, 1)

    def forward(self, x_NHW: Tensor) -> Tensor:
        h, w = x_NHW.shape[1:]
        place = torch.linspace(-1, 1, h, device=x_NHW.device)[:, None].expand_as(x_NHW)
        side, skips = 2 ** (len(WIDTHS) - 1), list[Tensor]()
        x = F.pad(torch.stack([x_NHW, place], dim=1), (0, -w % side, 0, -h % side))
        for number, layer in enumerate(self.down):
            x = layer(F.max_pool2d(x, 2) if number else x)
            skips.append(x)
        for layer, skip in zip(self.up, skips[-2::-1], strict=True):
            x = layer(torch.cat([F.interpolate(x, scale_factor=2.0), skip], dim=1))
        return self.last(x)[..., :h, :w]


def losses_of(logits_NCHW: Tensor, truth_NHW: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy, and 1 - Dice of the classes that are there, over the voxels that are known."""
    known, truth = truth_NHW != IGNORED, torch.where(truth_NHW == IGNORED, 0, truth_NHW).long()
    entropy = F.cross_entropy(logits_NCHW, truth, reduction="none")[known].mean()
    p = logits_NCHW.softmax(dim=1) * known[:, None]
    hot = F.one_hot(truth, p.shape[1]).movedim(-1, 1) * known[:, None]
    both, sizes = (p * hot).sum((0, 2, 3)), (p + hot).sum((0, 2, 3))
    return entropy, 1 - (2 * both / sizes.clamp(min=1))[hot.sum((0, 2, 3)) > 0].mean()


def moved(x_NHW: Tensor, truth_NHW: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each B-scan mirrored or not, shifted along both axes, and brighter or darker."""
    pairs = []
    for x, truth in zip(x_NHW, truth_NHW, strict=True):
        mirror, up, along = torch.randint(-SHIFT, SHIFT + 1, (3,), generator=draw).tolist()
        rows = (torch.arange(len(x)) - up).clamp(0, len(x) - 1)
        columns = (torch.arange(x.shape[1]) - along).clamp(0, x.shape[1] - 1)
        columns = columns.flip(0) if mirror % 2 else columns
        gain, bias = (1 + GAIN * (2 * float(torch.rand(1, generator=draw)) - 1) for _ in range(2))
        pairs.append((x[rows][:, columns] * gain + bias - 1, truth[rows][:, columns]))
    moved_x, moved_truth = zip(*pairs, strict=True)
    return torch.stack(moved_x), torch.stack(moved_truth)


def train(known: Pair, val: Pair, num_classes: int, seconds: float, seed: int, go_on: Go) -> UNet:
    """The network that so many seconds of the processor train; its rate rises, then falls as a cosine."""
    torch.manual_seed(seed)
    draw, net = torch.Generator().manual_seed(seed), UNet(num_classes).to(known[0].device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY, betas=(0.9, 0.99))
    start, best, kept, checked = time.process_time(), math.inf, copy.deepcopy(net), 0
    while (share := (time.process_time() - start) / seconds) < 1:
        go_on()  # raises where somebody wants to stop
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(share / 0.05 + 0.01, 0.5 + 0.5 * math.cos(math.pi * share))
        chosen = torch.randint(0, len(known[0]), (BATCH,), generator=draw)
        x, truth = moved(known[0][chosen], known[1][chosen], draw)
        optimizer.zero_grad()
        torch.stack(losses_of(net.train()(x), truth)).sum().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if (time.process_time() - start) / seconds * CHECKS >= checked + 1:
            checked += 1
            with torch.no_grad():
                pairs = ((net.eval()(x[None]), y[None]) for x, y in zip(*val, strict=True))
                value = sum(losses_of(*pair)[1].item() for pair in pairs)
            best, kept = (value, copy.deepcopy(net)) if value < best else (best, kept)
    return kept.eval()
