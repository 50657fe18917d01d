"""Rows without an encoder and without training: what a user would take in place of an encoder.

In: a configuration, the prepared store, rows, and, for questions about tokens, which. Out: features by fold,
of tokens [n, T, F] or of volumes [n, 2F] (mean and standard deviation over valid tokens), each with a name
and a label. The same rows stand beside an encoder in benchmarks.phantom_truth, benchmarks.evidence and
finetuning.compare; "gained by training" is said only above the best of them.

  place             where the token lies, which every row of a token has beside its features
  own_voxels        the voxels of the token
  27_patches        the averaged voxels of the token and of the 26 around it
  192_random_of_27  random ReLU features of these, relu(W (x - m) + b): W and b from a fixed seed, m the mean
                    of the training volumes (Rahimi and Recht 2007); as many as the encoder is wide
  1024_random_of_27 more of them than the encoder is wide
  slices            tokens of a 2D image encoder, for each B-scan by itself (finetuning.features.slices)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from data_setup.loader import EVALUATION_BATCH, evaluation_batches
from data_setup.normalisation import plain_view
from data_setup.store.reader import PreparedStore
from finetuning.features.slices import SliceEncoder
from models.probes.features import pool_tokens
from models.vit3d import SIZES
from utils.config.schema import Config
from utils.runtime.single import Runtime

AVERAGED = (2, 8, 2)  # numbers along D, H, W that a patch is averaged down to, at most: 32
NEIGHBOURS = 27
WIDE = 1024  # features of the wider random row, or twice the encoder's width
SEED = 0  # of W and b
HALF_MAX = 65_504.0  # of float16
FoldFeatures = Callable[[np.ndarray], np.ndarray]  # is-training bool [n] -> features


@dataclass(frozen=True)
class Yardstick:
    """A row: `volumes` gives [n, F], `tokens` [n, T, F] of the tokens that were asked for."""

    name: str
    label: str
    volumes: FoldFeatures | None
    tokens: FoldFeatures | None  # None: no tokens were asked about


@dataclass(frozen=True)
class Volumes:
    """Volumes of a store, and how they are read."""

    cfg: Config
    store: PreparedStore
    rows: np.ndarray  # store rows
    runtime: Runtime

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """On the device, in the order of `rows`."""
        batches = evaluation_batches(self.cfg, self.store, self.rows, EVALUATION_BATCH)
        return map(self.runtime.to_device, batches)


class Neighbourhoods(Volumes):
    """The averaged patches of volumes, and features made of each with its 26 neighbours."""

    @cached_property
    def _read(self) -> tuple[Tensor, Tensor]:
        """Averaged patches float16 [n, N, v] (their voxels were 8 bits), and validity bool [n, N]."""
        parts, valid = [], []
        for batch in self.batches():
            small = averaged(plain_view(batch)[:, 0], self.cfg.spatial.patch_size)
            parts.append(small.clamp(-HALF_MAX, HALF_MAX).half().cpu())
            valid.append(batch["context_valid"].cpu() > 0)
        return torch.cat(parts), torch.cat(valid)

    def mean(self, is_training: np.ndarray) -> Tensor:
        """Mean of the neighbourhoods of the training volumes' valid tokens [27 v]."""
        patches, valid = self._read
        total, count = torch.zeros(NEIGHBOURS * patches.shape[2]), 0
        for some in torch.from_numpy(np.flatnonzero(is_training)).split(EVALUATION_BATCH):
            inside = valid[some]
            total += around(patches[some].float(), self.cfg.grid)[inside].sum(dim=0)
            count += int(inside.sum())
        return total / count

    def tokens(self, tokens_nT: np.ndarray, width: int | None, is_training: np.ndarray) -> np.ndarray:
        """Features of some tokens float32 [n, T, F]; `width`: of random ReLU features, None: the voxels."""
        made = self._maker(width, is_training)
        parts = [
            made(take(around(patches, self.cfg.grid), tokens_nT[some])) for some, patches in self._batches()
        ]
        return torch.cat(parts).numpy()

    def volumes(self, width: int | None, is_training: np.ndarray) -> np.ndarray:
        """Mean and standard deviation of the features over valid tokens float32 [n, 2F]."""
        made, valid = self._maker(width, is_training), self._read[1]
        parts = [
            pool_tokens(made(around(patches, self.cfg.grid)), valid[some])
            for some, patches in self._batches()
        ]
        return torch.cat(parts).numpy()

    def _batches(self) -> list[tuple[slice, Tensor]]:
        patches = self._read[0]
        slices = [slice(a, a + EVALUATION_BATCH) for a in range(0, len(patches), EVALUATION_BATCH)]
        return [(some, patches[some].float()) for some in slices]

    def _maker(self, width: int | None, is_training: np.ndarray) -> Callable[[Tensor], Tensor]:
        mean = None if width is None else self.mean(is_training)
        return LocalTokens(self.cfg, width, mean).features


class LocalTokens(nn.Module):
    """A baseline in the place of an encoder: normalised volumes [B, 1, D, H, W] -> tokens [B, N, width]."""

    mean: Tensor
    weight: Tensor
    bias: Tensor

    def __init__(self, cfg: Config, width: int | None = None, mean: Tensor | None = None) -> None:
        """`width`: of random ReLU features; 0: no tokens; None: voxels. `mean` [27 v]: of training."""
        super().__init__()
        self.patch, self.grid, self.is_random = cfg.spatial.patch_size, cfg.grid, width is not None
        numbers = NEIGHBOURS * math.prod(map(min, self.patch, AVERAGED))
        self.width = self.feature_width = numbers if width is None else width
        self.register_buffer("mean", torch.zeros(numbers) if mean is None else mean)
        if width is not None:
            generator = torch.Generator().manual_seed(SEED)
            weight = torch.randn(numbers, width, generator=generator) / numbers**0.5
            self.register_buffer("weight", weight, persistent=False)
            bias = torch.rand(width, generator=generator) * 2 - 1
            self.register_buffer("bias", bias, persistent=False)

    @torch.no_grad()
    def forward(self, view_BCDHW: Tensor) -> Tensor:
        if not self.width:
            return view_BCDHW.new_zeros(len(view_BCDHW), math.prod(self.grid), 0)
        return self.features(around(averaged(view_BCDHW[:, 0], self.patch), self.grid))

    def features(self, around_BNF: Tensor) -> Tensor:
        """Of neighbourhoods that are made already."""
        if not self.is_random:
            return around_BNF
        return torch.relu_(around_BNF @ self.weight + (self.bias - self.mean @ self.weight))


def averaged(volume_BDHW: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """The voxels of every token, averaged down to at most 32 numbers [B, N, v]."""
    patches = patches_of(volume_BDHW, patch)
    ends = min(patch[0], AVERAGED[0]), min(patch[1], AVERAGED[1]), min(patch[2], AVERAGED[2])
    small = F.adaptive_avg_pool3d(rearrange(patches, "b n d h w -> (b n) 1 d h w"), ends)
    return rearrange(small, "(b n) 1 d h w -> b n (d h w)", b=len(patches))


def patches_of(volume_BDHW: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """The voxels of every token [B, N, d, h, w]."""
    d, h, w = patch
    return rearrange(volume_BDHW, "b (gd d) (gh h) (gw w) -> b (gd gh gw) d h w", d=d, h=h, w=w)


def around(patches_BNv: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Every token with its 26 neighbours [B, N, 27 v]; 0 outside the grid."""
    gd, gh, gw = grid
    cube = rearrange(patches_BNv, "b (gd gh gw) v -> b gd gh gw v", gd=gd, gh=gh, gw=gw)
    wide = F.pad(cube, (0, 0, 1, 1, 1, 1, 1, 1))
    parts = [wide[:, i : i + gd, j : j + gh, k : k + gw] for i, j, k in itertools.product(range(3), repeat=3)]
    return rearrange(torch.cat(parts, dim=-1), "b gd gh gw f -> b (gd gh gw) f")


def take(features_BNF: Tensor, tokens_BT: np.ndarray) -> Tensor:
    """Features [B, T, F] of some tokens; of token 0 where there are fewer (-1)."""
    index = torch.from_numpy(tokens_BT.clip(min=0)).unsqueeze(-1)
    return features_BNF.gather(1, index.expand(-1, -1, features_BNF.shape[-1]))


def random_widths(cfg: Config) -> tuple[int, int]:
    """Widths of the random rows: the encoder's, and one beyond it."""
    width = SIZES[cfg.model.size].width
    return width, max(WIDE, 2 * width)


def yardsticks(
    cfg: Config,
    store: PreparedStore,
    rows: np.ndarray,
    runtime: Runtime,
    tokens_nT: np.ndarray | None = None,
    image: SliceEncoder | None = None,
) -> list[Yardstick]:
    """All rows; `tokens_nT`: raster tokens of each volume that are asked about, -1 where there are fewer.
    Nothing is read before a feature is asked for.
    """
    near = Neighbourhoods(cfg, store, rows, runtime)

    def row(name: str, label: str, width: int | None) -> Yardstick:
        return Yardstick(
            name,
            label,
            partial(near.volumes, width),
            None if tokens_nT is None else partial(near.tokens, tokens_nT, width),
        )

    def fixed(name: str, label: str, tokens_of: Callable[[dict[str, Tensor]], Tensor]) -> Yardstick:
        both = cache(lambda: _pooled_and_chosen(near, tokens_nT, tokens_of))
        tokens = None if tokens_nT is None else lambda _: both()[1]
        return Yardstick(name, label, lambda _: both()[0], tokens)

    def own_voxels(batch: dict[str, Tensor]) -> Tensor:
        return patches_of(plain_view(batch)[:, 0], cfg.spatial.patch_size).flatten(2)

    lines = [
        fixed("own_voxels", "voxels of the token", own_voxels),
        row("27_patches", "voxels of 27 tokens, averaged", None),
        *(
            row(f"{w}_random_of_27", f"{w:,} random ReLU features of 27 tokens", w)
            for w in random_widths(cfg)
        ),
    ]
    if tokens_nT is not None:
        nothing = np.zeros((*tokens_nT.shape, 0), np.float32)
        lines.insert(0, Yardstick("place", "place of the token", None, lambda _: nothing))
    if image is not None:
        label = f"image model of each B-scan: {image.folder.name}"
        lines.append(fixed("slices", label, lambda batch: image.tokens(batch["volume"], cfg.grid, runtime)))
    return lines


def _pooled_and_chosen(
    volumes: Volumes, tokens_nT: np.ndarray | None, tokens_of: Callable[[dict[str, Tensor]], Tensor]
) -> tuple[np.ndarray, np.ndarray]:
    """Of volumes [n, 2V], and of tokens [n, T, V] (T = 0 where none were asked about)."""
    wanted = np.zeros((len(volumes.rows), 0), np.int64) if tokens_nT is None else tokens_nT
    pooled, dense, start = [], [], 0
    for batch in volumes.batches():
        tokens_BNV = tokens_of(batch)
        pooled.append(pool_tokens(tokens_BNV, batch["context_valid"]).cpu())
        dense.append(take(tokens_BNV.cpu(), wanted[start : start + len(tokens_BNV)]))
        start += len(tokens_BNV)
    return torch.cat(pooled).numpy(), torch.cat(dense).numpy()
