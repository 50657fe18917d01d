"""Attention without the T x T matrix, as TPU kernels written in Pallas (JAX).

In: q, k, v [S, T, C], S being samples x heads, T whole blocks. Out: softmax(q k^T / sqrt(C)) v, the
logarithm of the softmax' denominator [S, 1, T], and the gradients. After FlashAttention (Dao et al. 2022,
arXiv:2205.14135; two backward kernels as in its second version, arXiv:2307.08691).

Scores are held transposed, [keys, queries]: what belongs to a query is then a row vector along the lanes. All
keys and values of a head stay in the fast memory (VMEM) while its queries pass, if there is room for them.
Products take the inputs' precision and add up in float32; softmax is in float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCKS = (512, 384, 256, 128)  # tokens at a time; the lanes of a TPU are 128
MAX_PADDING = 0.05  # of the tokens, for the sake of a larger block
RESIDENT_BYTES = 10 * 2**20  # of VMEM (16 MiB on a v4) for the two long operands, twice each, in flight
LANES = 128
NEGATIVE = -1e30

Kernel = Callable[..., Any]


def block_of(tokens: int) -> int:
    """The largest block that pads no more than MAX_PADDING; 128 where none does."""
    fitting = (b for b in BLOCKS if -(-tokens // b) * b <= (1 + MAX_PADDING) * tokens)
    return next(fitting, BLOCKS[-1])


def _resident(tokens: int, block: int, item_bytes: int) -> int:
    """Tokens of the two long operands to hold at once: the most whole blocks that divide them and fit."""
    room = max(1, RESIDENT_BYTES // (2 * 2 * LANES * item_bytes * block))
    blocks = tokens // block
    return block * max(n for n in range(1, min(room, blocks) + 1) if blocks % n == 0)


def _product(a: jax.Array, b: jax.Array, over: tuple[int, int]) -> jax.Array:
    """Matrix product over one axis of each, in float32."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((over[0],), (over[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=exact, preferred_element_type=jnp.float32)


def _scores(k: jax.Array, q: jax.Array, scale: float, is_last: bool, valid: int) -> jax.Array:
    """Transposed scores [keys, queries]; of the last block of keys only the first `valid` count."""
    scores = _product(k, q, (1, 1)) * scale
    if not is_last:
        return scores
    return jnp.where(lax.broadcasted_iota(jnp.int32, scores.shape, 0) < valid, scores, NEGATIVE)


def _over_keys(step: Callable[[int | jax.Array, bool], None], blocks: int, has_padding: bool) -> None:
    """step(block, is_last) for every block of keys that is held; only the very last block has padding."""
    lax.fori_loop(0, blocks - has_padding, lambda i, _: step(i, False), None)
    if has_padding:
        is_end = pl.program_id(2) == pl.num_programs(2) - 1
        pl.when(is_end)(lambda: step(blocks - 1, True))
        pl.when(~is_end)(lambda: step(blocks - 1, False))


def _forward_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, max_ref, sum_ref, acc_ref, *, block, valid, scale):
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        max_ref[...] = jnp.full_like(max_ref, NEGATIVE)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    q = q_ref[0]

    def step(i: int | jax.Array, is_last: bool) -> None:
        rows = pl.ds(pl.multiple_of(i * block, block), block)
        scores = _scores(k_ref[0, rows], q, scale, is_last, valid)
        highest = jnp.maximum(max_ref[...], scores.max(0, keepdims=True))
        p, shrink = jnp.exp(scores - highest), jnp.exp(max_ref[...] - highest)
        max_ref[...] = highest
        sum_ref[...] = sum_ref[...] * shrink + p.sum(0, keepdims=True)
        v = v_ref[0, rows]
        acc_ref[...] = acc_ref[...] * shrink + _product(v, p.astype(v.dtype), (0, 0))

    _over_keys(step, k_ref.shape[1] // block, valid < block)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        o_ref[0] = (acc_ref[...] / sum_ref[...]).T.astype(o_ref.dtype)
        lse_ref[0] = max_ref[...] + jnp.log(sum_ref[...])


def _grad_q_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, di_ref, dq_ref, acc_ref, *, block, valid, scale):
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)

    q, do, lse, di = q_ref[0], do_ref[0], lse_ref[0], di_ref[0]

    def step(i: int | jax.Array, is_last: bool) -> None:
        rows = pl.ds(pl.multiple_of(i * block, block), block)
        k = k_ref[0, rows]
        p = jnp.exp(_scores(k, q, scale, is_last, valid) - lse)
        grad = p * (_product(v_ref[0, rows], do, (1, 1)) - di)
        acc_ref[...] += _product(k, grad.astype(k.dtype), (0, 0))

    _over_keys(step, k_ref.shape[1] // block, valid < block)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        dq_ref[0] = (acc_ref[...] * scale).T.astype(dq_ref.dtype)


def _grad_kv_kernel(
    k_ref, v_ref, q_ref, do_ref, lse_ref, di_ref, dk_ref, dv_ref, ak_ref, av_ref, *, block, scale
):
    """Padded keys get gradients here that nobody reads; padded queries have do = di = 0 and give none."""

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        ak_ref[...], av_ref[...] = jnp.zeros_like(ak_ref), jnp.zeros_like(av_ref)

    k, v = k_ref[0], v_ref[0]

    def step(i: jax.Array, _: None) -> None:
        rows = pl.ds(pl.multiple_of(i * block, block), block)
        q, do = q_ref[0, rows], do_ref[0, rows]
        p = jnp.exp(_scores(k, q, scale, False, block) - lse_ref[0, :, rows])
        grad = p * (_product(v, do, (1, 1)) - di_ref[0, :, rows])
        av_ref[...] += _product(p.astype(do.dtype), do, (1, 0))
        ak_ref[...] += _product(grad.astype(q.dtype), q, (1, 0))

    lax.fori_loop(0, q_ref.shape[1] // block, step, None)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        dk_ref[0], dv_ref[0] = (ak_ref[...] * scale).astype(dk_ref.dtype), av_ref[...].astype(dv_ref.dtype)


def _call(
    kernel: Kernel,
    operands: list[tuple[str, jax.Array]],
    outputs: list[tuple[str, Any]],
    scratch: list[tuple[int, int]],
    products: int,
    block: int,
    interpret: bool,
) -> Any:
    """One kernel over the grid (S, blocks of the `near` side, what is held of the `far` side at once).

    Operands and outputs are [S, T, C] (near, far) or [S, 1, T] (near_row, far_row) and named so.
    """
    like = operands[0][1]
    samples, tokens, width = like.shape
    held = _resident(tokens, block, like.dtype.itemsize)
    specs = {
        "near": pl.BlockSpec((1, block, width), lambda s, i, j: (s, i, 0)),
        "far": pl.BlockSpec((1, held, width), lambda s, i, j: (s, j, 0)),
        "near_row": pl.BlockSpec((1, 1, block), lambda s, i, j: (s, 0, i)),
        "far_row": pl.BlockSpec((1, 1, held), lambda s, i, j: (s, 0, j)),
    }
    shapes = {"near": (samples, tokens, width), "near_row": (samples, 1, tokens)}
    passes = 1 if held == tokens else tokens // block  # over the far side, which is read again each time
    moved = sum(
        x.size * x.dtype.itemsize * (passes if kind.startswith("far") else 1) for kind, x in operands
    ) + sum(math.prod(shapes[kind]) * jnp.dtype(dtype).itemsize for kind, dtype in outputs)
    return pl.pallas_call(
        kernel,
        grid=(samples, tokens // block, tokens // held),
        in_specs=[specs[kind] for kind, _ in operands],
        out_specs=[specs[kind] for kind, _ in outputs],
        out_shape=[jax.ShapeDtypeStruct(shapes[kind], dtype) for kind, dtype in outputs],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * samples * tokens * tokens * width,
            transcendentals=samples * tokens * tokens,
            bytes_accessed=moved,
        ),
        interpret=interpret,
    )(*(x for _, x in operands))


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, *, tokens: int, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """(o [S, T, C], lse float32 [S, 1, T]) of which the first `tokens` are no padding."""
    block, (_, padded, width) = block_of(tokens), q.shape
    valid = block - (padded - tokens)
    kernel = functools.partial(_forward_kernel, block=block, valid=valid, scale=width**-0.5)
    operands = [("near", q), ("far", k), ("far", v)]
    outputs = [("near", q.dtype), ("near_row", jnp.float32)]
    return _call(kernel, operands, outputs, [(1, block), (1, block), (width, block)], 2, block, interpret)


def grad_q(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    lse: jax.Array,
    di: jax.Array,
    *,
    tokens: int,
    interpret: bool = False,
) -> tuple[jax.Array]:
    """Gradient in q; di float32 [S, 1, T] is the sum of o * do over C, do is 0 in the padding."""
    block, (_, padded, width) = block_of(tokens), q.shape
    valid = block - (padded - tokens)
    kernel = functools.partial(_grad_q_kernel, block=block, valid=valid, scale=width**-0.5)
    operands = [("near", q), ("far", k), ("far", v), ("near", do), ("near_row", lse), ("near_row", di)]
    return _call(kernel, operands, [("near", q.dtype)], [(width, block)], 3, block, interpret)


def grad_kv(
    k: jax.Array,
    v: jax.Array,
    q: jax.Array,
    do: jax.Array,
    lse: jax.Array,
    di: jax.Array,
    *,
    tokens: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Gradients in k and v, as `grad_q`; those of the padding mean nothing."""
    block, width = block_of(tokens), k.shape[-1]
    kernel = functools.partial(_grad_kv_kernel, block=block, scale=width**-0.5)
    operands = [("near", k), ("near", v), ("far", q), ("far", do), ("far_row", lse), ("far_row", di)]
    outputs = [("near", k.dtype), ("near", v.dtype)]
    return _call(kernel, operands, outputs, [(block, width), (block, width)], 4, block, interpret)
