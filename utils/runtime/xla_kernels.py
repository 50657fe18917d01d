"""Kernels for PyTorch/XLA: activation checkpointing, rows of tokens by id and, on a TPU, attention without
the T x T matrix.

In and out: torch tensors of that engine. The kernels themselves are the caller's, a module of jax functions
(models/kernels/pallas_flash.py); this file pads the tokens to whole blocks, hands each device its own
samples, and puts the compiled kernels into the recorded program. Only flash attention needs jax (the version
that torch_xla names).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.distributed.spmd as xs
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch_xla.utils.checkpoint import checkpoint

Shape = tuple[tuple[int, ...], torch.dtype]
# (name of a kernel, its operands, tokens without padding, its results' shapes)
Caller = Callable[[str, list[Tensor], int, list[Shape]], list[Tensor]]


def recompute_block(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """models.vit3d.recompute_block for XLA, which would otherwise merge both computations into one."""
    return checkpoint(function, *arguments, preserve_rng_state=False)


def split(x: Tensor, mesh: xs.Mesh | None) -> Tensor:
    """What one device holds of x [B, ...], whose samples are spread over `mesh`; None: one device."""
    if mesh is None:
        return x
    return xs.enable_manual_sharding(x, _by_sample(x), mesh=mesh).global_tensor


def join(x: Tensor, samples: int, mesh: xs.Mesh | None) -> Tensor:
    """The whole of what every device holds a part of."""
    if mesh is None:
        return x
    whole = (samples, *x.shape[1:])
    return xs.disable_manual_sharding(x, _by_sample(x), whole, mesh=mesh).global_tensor


class RowGather:
    """The rows ids [B, T] of x [B, N, E], as [B, T, E]; B is spread over the devices of `mesh`.

    torch's `gather` becomes one of single values there, with three int64 of index for each; one of rows by
    sample and id would do, but the partitioner does not see that each device needs only its samples.
    """

    def __init__(self, mesh: xs.Mesh) -> None:
        self.mesh = mesh

    def __call__(self, x_BNE: Tensor, ids_BT: Tensor) -> Tensor:
        if len(x_BNE) % self.mesh.size():  # not spread by sample
            return x_BNE.gather(1, ids_BT.unsqueeze(-1).expand(-1, -1, x_BNE.shape[-1]))
        return _Rows.apply(x_BNE, ids_BT, self.mesh)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BNE: Tensor, ids_BT: Tensor, mesh: xs.Mesh) -> Tensor:
        own, ids = split(x_BNE, mesh), split(ids_BT, mesh)
        starts = torch.arange(len(own), device=own.device).unsqueeze(1) * own.shape[1]
        places = (ids + starts).flatten()
        ctx.save_for_backward(places)
        ctx.mesh, ctx.shape = mesh, x_BNE.shape
        rows = own.flatten(0, 1).index_select(0, places).unflatten(0, ids.shape)
        return join(rows, len(x_BNE), mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTE: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        samples, tokens, width = ctx.shape
        grad = split(grad_BTE, ctx.mesh)
        own = torch.zeros(len(grad) * tokens, width, dtype=grad.dtype, device=grad.device)
        own = own.index_add(0, places, grad.flatten(0, 1)).unflatten(0, (-1, tokens))
        return join(own, samples, ctx.mesh), None, None


class FlashAttention:
    """softmax(q k^T / sqrt(C)) v of [B, heads, T, C]; B is spread over the devices of `mesh`.

    `kernels` has the functions forward, grad_q, grad_kv and block_of; `call` runs one of them, by default as
    a part of a TPU's program.
    """

    def __init__(self, mesh: xs.Mesh | None, kernels: ModuleType, call: Caller | None = None) -> None:
        self.mesh, self.kernels = mesh, kernels
        self.call = partial(call_on_tpu, kernels) if call is None else call

    def __call__(self, q_BHTC: Tensor, k_BHTC: Tensor, v_BHTC: Tensor) -> Tensor:
        return _Flash.apply(q_BHTC, k_BHTC, v_BHTC, self)

    def pad(self, x_BHTC: Tensor) -> Tensor:
        """[B x heads, T up to whole blocks, C], zeros behind the tokens."""
        tokens = x_BHTC.shape[2]
        return F.pad(x_BHTC.flatten(0, 1), (0, 0, 0, -tokens % self.kernels.block_of(tokens)))


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, flash: FlashAttention) -> Tensor:
        samples, heads, tokens, width = q.shape
        q, k, v = (flash.pad(split(x, flash.mesh)) for x in (q, k, v))
        shapes: list[Shape] = [(tuple(q.shape), q.dtype), ((len(q), 1, q.shape[1]), torch.float32)]
        o, lse = flash.call("forward", [q, k, v], tokens, shapes)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.flash, ctx.shape = flash, (samples, heads, tokens, width)
        return join(_unpad(o, heads, tokens), samples, flash.mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        flash, (samples, heads, tokens, _) = ctx.flash, ctx.shape
        do = flash.pad(split(grad, flash.mesh)).to(q.dtype)
        di = (o.float() * do.float()).sum(-1).unsqueeze(1)
        shape: Shape = (tuple(q.shape), q.dtype)
        (dq,) = flash.call("grad_q", [q, k, v, do, lse, di], tokens, [shape])
        dk, dv = flash.call("grad_kv", [k, v, q, do, lse, di], tokens, [shape, shape])
        return *(join(_unpad(x, heads, tokens), samples, flash.mesh) for x in (dq, dk, dv)), None


def _by_sample(x: Tensor) -> tuple[str | None, ...]:
    return ("data", *[None] * (x.ndim - 1))


def _unpad(x: Tensor, heads: int, tokens: int) -> Tensor:
    return x[:, :tokens].unflatten(0, (-1, heads))


def call_on_tpu(
    kernels: ModuleType, name: str, operands: list[Tensor], tokens: int, results: list[Shape]
) -> list[Tensor]:
    """Record one kernel as a custom call of the program."""
    kinds = tuple((tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in operands)
    shapes, types = ([list(part[0]) for part in results], [part[1] for part in results])
    return torch_xla._XLAC._xla_tpu_custom_call(
        operands, _payload(kernels, name, kinds, tokens), shapes, types
    )


@cache
def _payload(
    kernels: ModuleType, name: str, kinds: tuple[tuple[tuple[int, ...], str], ...], tokens: int
) -> str:
    """The compiled kernel as text. jax has to lower for a TPU, whether there is one or not, and in a form
    that the libtpu of torch_xla 2.9 reads: jax 0.7.1's newest is a version too new for it.
    """
    from torch_xla.experimental.custom_kernel import jax_import_guard

    jax_import_guard()  # torch_xla must own the TPU before jax looks for one
    import jax
    from jax.export import export
    from jax.interpreters.mlir import make_ir_context
    from jaxlib.mlir import ir

    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kinds]
    kernel = jax.jit(partial(getattr(kernels, name), tokens=tokens))
    exported = export(kernel, platforms=["tpu"])(*operands)
    calls: list[str] = []
    with make_ir_context():
        for function in ir.Module.parse(exported.mlir_module()).body.operations:
            _custom_calls(function, calls)
    assert len(calls) == 1, f"{name}: expected one custom call, found {len(calls)}"
    return calls[0]


def _custom_calls(operation: Any, calls: list[str]) -> None:
    for region in operation.regions:
        for block in region:
            for inner in block:
                if inner.operation.name == "stablehlo.custom_call":
                    calls.append(inner.backend_config.value)
                _custom_calls(inner, calls)
