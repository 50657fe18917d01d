"""The acquired field on the model's grid: which voxels and tokens lie inside the scan.

In: `matrix` [B,3,4] of data_setup.transforms (output voxel index -> stored voxel index) and `valid_box`
[B,6], half-open, in stored indices. Out: bool masks and shares over voxels [B,D,H,W] or tokens [B,N].
"""

import torch
from torch import Tensor

from data_setup.resample import VALID_SHARE

# Resampled coordinates carry float32 rounding: a voxel this close to the field's edge still counts as inside.
EDGE_TOLERANCE = 1e-3


def valid_planes(matrix: Tensor, valid_box: Tensor, size: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """bool [B,D,1,W] and [B,1,H,W], whose conjunction is `voxel_valid`."""
    d, h, w = (torch.arange(n, dtype=torch.float32, device=matrix.device) for n in size)
    m = matrix[:, :, :, None, None, None]
    low = valid_box[:, 0::2, None, None, None] - EDGE_TOLERANCE
    high = valid_box[:, 1::2, None, None, None] - 1 + EDGE_TOLERANCE
    source_d = m[:, 0, 0] * d[:, None, None] + (m[:, 0, 2] * w + m[:, 0, 3])
    source_h = m[:, 1, 1] * h[:, None] + (m[:, 1, 2] * w + m[:, 1, 3])
    source_w = m[:, 2, 0] * d[:, None, None] + (m[:, 2, 2] * w + m[:, 2, 3])
    in_d = (source_d >= low[:, 0]) & (source_d <= high[:, 0])
    in_h = (source_h >= low[:, 1]) & (source_h <= high[:, 1])
    in_w = (source_w >= low[:, 2]) & (source_w <= high[:, 2])
    return in_d & in_w, in_h


def voxel_valid(matrix: Tensor, valid_box: Tensor, size: tuple[int, int, int]) -> Tensor:
    """bool [B,D,H,W]: every stored voxel that this voxel was interpolated from is in the acquired field.

    matrix [B,3,4] as `geometry_matrix` makes it (H never mixes into D and W, nor D into H): output voxel
    index -> stored voxel index; valid_box [B,6]: half-open, in stored indices.
    """
    in_dw, in_hw = valid_planes(matrix, valid_box, size)
    return in_dw & in_hw


def token_share(
    matrix: Tensor, valid_box: Tensor, grid: tuple[int, int, int], patch: tuple[int, int, int]
) -> Tensor:
    """float32 [B,N]: share of each token that `voxel_valid` calls valid; matrix [B,3,4], valid_box [B,6]."""
    size = (grid[0] * patch[0], grid[1] * patch[1], grid[2] * patch[2])
    in_dw, in_hw = valid_planes(matrix, valid_box, size)
    (d, h, w), patch_w = grid, patch[2]
    share_dw = in_dw.view(-1, d, patch[0], w, patch_w).to(torch.float32).mean(2)
    share_hw = in_hw.view(-1, h, patch[1], w, patch_w).to(torch.float32).mean(2)
    # Within one column of the token the share is a product, since the two planes only have W in common.
    return torch.einsum("bdwp,bhwp->bdhw", share_dw, share_hw).flatten(1) / patch_w


def token_valid(
    matrix: Tensor, valid_box: Tensor, grid: tuple[int, int, int], patch: tuple[int, int, int]
) -> Tensor:
    """bool [B,N]: at least half of the token is inside the acquired field."""
    return token_share(matrix, valid_box, grid, patch) >= VALID_SHARE
