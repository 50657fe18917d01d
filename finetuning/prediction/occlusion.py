"""Occlusion: what a head's output loses when a block of the volume is hidden.

In: an encoder, a head on it, a normalised volume. Out: a number for every token, that of its block. Hidden
voxels take the volume's mean, which is 0 after normalisation (zscore_valid); the tokens stay valid.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import repeat
from torch import Tensor, nn

from finetuning.prediction.evidence import Reads, outputs_of
from utils.config.schema import Config
from utils.runtime.single import Runtime

MAX_BLOCKS = 128  # forward passes of a volume
BATCH = 8  # hidden volumes that go through the encoder together


def block_of(grid: tuple[int, int, int]) -> tuple[int, int, int]:
    """Tokens of a block (d, h, w): where there are more than MAX_BLOCKS, the axis with the most is halved, of
    equals the first.
    """
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
    head: Reads,
    view_1CDHW: Tensor,
    valid_1N: Tensor,
    weights_C: Tensor,
    cfg: Config,
    runtime: Runtime,
) -> Tensor:
    """How much outputs @ weights falls when a token's block is hidden [N]; 0 where a block has no valid
    token.
    """
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
