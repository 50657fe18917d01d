"""Scaled dot-product attention, softmax(q k^T / sqrt(C)) v, without a large T x T matrix in memory, and
rotary positions in three dimensions: a token's place on the grid turns its queries and keys (Assran et al.
2025, arXiv:2506.09985).

In and out: [B, heads, T, C]. PyTorch's own kernel, except on a CPU without AMX: there, in bfloat16, it
computes a fifth of what plain matrix products of the same size do (docs/evidence/benchmarks.md), so the
products are plain ones over blocks that stay in the cache. With AMX the two are as fast, and blocks suffer
from other processes. The backward pass computes the probabilities again, except those of
short sequences, which are small enough to keep.

The price in bfloat16: scores are rounded before the softmax, as in any attention written out under autocast;
PyTorch's kernel keeps them in float32. Scores of a standard deviation of 9 put the output off by about 1.3 %
instead of 0.2 %.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

HAS_AMX = torch.cpu._is_amx_tile_supported()
BLOCK_BYTES = 4 * 2**20  # of probabilities at a time; the fastest of 1, 2, 4, 8 and 16 MiB
KEPT_BYTES = 64 * 2**20  # of probabilities of one call that are kept for its backward pass
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


def attention(q_BHTC: Tensor, k_BHTC: Tensor, v_BHTC: Tensor) -> Tensor:
    """The kernel that suits device and precision."""
    is_self = q_BHTC.shape == k_BHTC.shape == v_BHTC.shape and q_BHTC.dtype == k_BHTC.dtype == v_BHTC.dtype
    if q_BHTC.device.type == "cpu" and q_BHTC.dtype == torch.bfloat16 and is_self and not HAS_AMX:
        return blockwise_attention(q_BHTC, k_BHTC, v_BHTC)
    return F.scaled_dot_product_attention(q_BHTC, k_BHTC, v_BHTC)


def blockwise_attention(q_BHTC: Tensor, k_BHTC: Tensor, v_BHTC: Tensor) -> Tensor:
    """Attention by plain matrix products over blocks of heads or of queries, in the inputs' precision."""
    return _Blockwise.apply(q_BHTC, k_BHTC, v_BHTC)


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = q.shape
        q, k, v = (x.reshape(-1, *shape[-2:]) for x in (q * shape[-1] ** -0.5, k, v))
        heads, queries, room = _blocks(q)
        out = torch.empty_like(q)
        kept: Tensor | None = None
        is_small = q.shape[:-2].numel() * q.shape[-2] ** 2 * q.element_size() <= KEPT_BYTES
        if ctx.needs_input_grad[0] and len(queries) == 1 and is_small:
            kept = q.new_empty(len(q), shape[-2], shape[-2])
        for matrices in heads:
            for rows in queries:
                p = _probabilities(q[matrices, rows], k[matrices], room if kept is None else kept[matrices])
                out[matrices, rows] = torch.bmm(p, v[matrices])
        ctx.save_for_backward(q, k, v, kept)
        ctx.shape = shape
        return out.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, kept = ctx.saved_tensors
        grad = grad.reshape(q.shape)
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        heads, queries, room = _blocks(q)
        other_room = torch.empty_like(room)
        for matrices in heads:
            sum_k: Tensor | None = None
            sum_v: Tensor | None = None
            for rows in queries:
                q_block, grad_block = q[matrices, rows], grad[matrices, rows]
                p = _probabilities(q_block, k[matrices], room) if kept is None else kept[matrices]
                grad_p = torch.bmm(grad_block, v[matrices].transpose(1, 2), out=_view(other_room, p.shape))
                grad_s = torch._softmax_backward_data(grad_p, p, -1, p.dtype)
                grad_q[matrices, rows] = torch.bmm(grad_s, k[matrices])
                sum_v = _add(sum_v, torch.bmm(p.transpose(1, 2), grad_block), len(queries))
                sum_k = _add(sum_k, torch.bmm(grad_s.transpose(1, 2), q_block), len(queries))
            assert sum_k is not None, "there is at least one block of queries"
            assert sum_v is not None
            grad_k[matrices], grad_v[matrices] = sum_k, sum_v
        grad_q.mul_(q.shape[-1] ** -0.5)
        return grad_q.view(ctx.shape), grad_k.view(ctx.shape), grad_v.view(ctx.shape)


def _blocks(q: Tensor) -> tuple[list[slice], list[slice], Tensor]:
    """Slices of the matrices (batch x heads) and of the queries of q [m, T, C], and memory for the
    probabilities of the largest block.
    """
    matrices, tokens, _ = q.shape
    room = BLOCK_BYTES // q.element_size()
    queries = min(tokens, max(1, room // tokens))
    together = min(matrices, max(1, room // tokens**2))
    return (
        [slice(m, m + together) for m in range(0, matrices, together)],
        [slice(t, t + queries) for t in range(0, tokens, queries)],
        q.new_empty(together * queries * tokens),
    )


def _add(total: Tensor | None, part: Tensor, parts: int) -> Tensor:
    """A running sum, in float32 where it has several parts."""
    if parts == 1:
        return part
    return part.float() if total is None else total.add_(part)


def _view(room: Tensor, shape: torch.Size) -> Tensor:
    return room.view(-1)[: shape.numel()].view(shape)


def _probabilities(q: Tensor, k: Tensor, room: Tensor) -> Tensor:
    """softmax(q k^T) of [m, t, C] and [m, T, C], in `room`."""
    p = _view(room, torch.Size((len(q), q.shape[1], k.shape[1])))
    torch.bmm(q, k.transpose(1, 2), out=p)
    return torch.softmax(p, -1, out=p)
