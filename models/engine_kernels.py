"""The kernels that an engine brings for the model.

In: a model on its device, the configuration and the runtime. With PyTorch/XLA: rows of tokens by id, and
activation checkpointing that the compiler does not undo; on a TPU, attention without the tokens x tokens
matrix where `model.tpu_attention` asks for it. On a CPU or a GPU: blocks that torch.compile has fused, where
`train.compile` asks for it.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from models.vit3d import Block, PatchEmbed, Recompute, SelfAttention
from utils.config.schema import Config
from utils.errors import UserError
from utils.runtime.single import Runtime


class Recomputing(Protocol):
    """A model that can keep only the inputs of its blocks for the backward pass."""

    def checkpoint_activations(self, recompute: Recompute) -> None: ...

    def modules(self) -> Iterator[nn.Module]: ...


def choose_kernels(model: Recomputing, cfg: Config, runtime: Runtime, is_for_tpu: bool | None = None) -> None:
    """Put the engine's kernels into the model; `is_for_tpu`: whether the program is for a TPU, if not for
    this machine. Raises UserError for `train.compile` where that cannot be.
    """
    if runtime.device.type != "xla":
        if cfg.train.compile:
            compile_blocks(model, runtime.device)
        return
    if cfg.train.compile:
        raise UserError(
            "train.compile: expected false with PyTorch/XLA, which compiles the whole step, found true"
        )
    if cfg.train.activation_checkpointing:
        recompute = runtime.checkpoint_function()
        assert recompute is not None, "XLA has its own"
        model.checkpoint_activations(recompute)
    gather = runtime.row_gather()
    assert gather is not None, "XLA has its own"
    for module in model.modules():
        if isinstance(module, PatchEmbed):
            module.gather = gather
    if is_for_tpu is None:
        is_for_tpu = os.environ["PJRT_DEVICE"] == "TPU"
    if is_for_tpu and cfg.model.tpu_attention == "flash":
        from models.kernels import pallas_flash  # needs jax, which only this option does

        attention = runtime.flash_attention(pallas_flash)
        assert attention is not None, "XLA has its own"
        for module in model.modules():
            if isinstance(module, SelfAttention):
                module.attention = attention


def compile_blocks(model: Recomputing, device: torch.device) -> None:
    """torch.compile of every transformer block of both encoders and the predictor, in training; names of
    parameters stay. Raises UserError where a CPU has no C++ compiler.
    """
    compiler = shlex.split(os.environ.get("CXX") or "g++")[0]
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise UserError(
            f"train.compile: expected a C++ compiler for this CPU, found no {compiler} (CXX names another)"
        )
    for module in model.modules():
        if isinstance(module, Block):
            module.compiled = _compiled(module.attend), _compiled(module.feed)


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """The same blocks as they are written, for steps that are worth no compilation."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    kept = [block.compiled for block in blocks]
    for block in blocks:
        block.compiled = None
    try:
        yield
    finally:
        for block, compiled in zip(blocks, kept, strict=True):
            block.compiled = compiled


def _compiled(branch: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A branch of a block through torch.compile. The stochastic layers between them stay as they are (each
    draws other numbers), and so does evaluation, whose last batches have other shapes: each would be
    another program. A deep copy of the block would go on with this block's weights.
    """
    compiled: Callable[..., Tensor] = torch.compile(branch, dynamic=False, fullgraph=True)
    return compiled
