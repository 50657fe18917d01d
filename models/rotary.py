"""Rotary positions in three dimensions: a token's place on the grid turns its queries and keys.

In: raster ids of tokens and queries or keys [B, heads, T, C]. Out: the same, each pair of channels turned by
the token's position along one axis. Follows V-JEPA 2 (Assran et al. 2025, arXiv:2506.09985).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

ROPE_BASE = 10_000.0
RopeForm = Literal["interleaved", "tiled", "interpolated"]
INTERPOLATED_ROWS = (16, 16)  # H and W of the grid over which `interpolated` spreads its positions
Rotary = tuple[Tensor, Tensor]


def rotary_tables(
    ids_BT: Tensor, grid: tuple[int, int, int], head_dim: int, form: RopeForm, num_axes: int = 3
) -> Rotary:
    """Cosines and signed sines [B, 1, T, head_dim] of the 3D rotary embedding at raster token ids.

    Each axis owns 2 * ((head_dim // 3) // 2) dimensions in the order D, H, W; the rest stay unrotated.
    `interleaved` gives both members of a pair one frequency; `tiled` repeats the published 2.0 checkpoints'
    layout; `interpolated` is interleaved with positions 0..n-1 of H and W spread over 0..15, as in the 2.1
    checkpoints. Of the axes only the first `num_axes` turn anything. In the precision of autocast.
    """
    _, grid_h, grid_w = grid
    pairs = (head_dim // 3) // 2
    omega = ROPE_BASE ** (-torch.arange(pairs, device=ids_BT.device, dtype=torch.float32) / pairs)
    plane = grid_h * grid_w
    spread = (grid[0], *INTERPOLATED_ROWS) if form == "interpolated" else grid
    coordinates = (
        ids_BT.div(plane, rounding_mode="floor"),
        ids_BT.remainder(plane).div(grid_w, rounding_mode="floor"),
        ids_BT.remainder(grid_w),
    )
    angles = []
    for axis, position_BT in enumerate(coordinates[:num_axes]):
        stretch = (spread[axis] - 1) / (grid[axis] - 1) if grid[axis] > 1 else 1.0
        angle = (position_BT.float() * stretch).unsqueeze(-1) * omega
        angles.append(angle.repeat(1, 1, 2) if form == "tiled" else angle.repeat_interleave(2, dim=-1))
    angle_BTR = F.pad(torch.cat(angles, dim=-1), (0, head_dim - 2 * num_axes * pairs))
    sign = torch.tensor((-1.0, 1.0), device=ids_BT.device).repeat(head_dim // 2)
    cos, signed_sin = angle_BTR.cos().unsqueeze(1), (angle_BTR.sin() * sign).unsqueeze(1)
    if torch.is_autocast_enabled(ids_BT.device.type):  # here, or each block would cast them four times
        dtype = torch.get_autocast_dtype(ids_BT.device.type)
        return cos.to(dtype), signed_sin.to(dtype)
    return cos, signed_sin


def apply_rotary(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the pairs (0, 1), (2, 3) ... of x [B, heads, T, head_dim]."""
    cos, signed_sin = (table.to(x.dtype) for table in rotary)
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x * cos, swapped, signed_sin)
