"""Attention on this machine: PyTorch's kernel against blocks of plain matrix products, in bfloat16.

    python -m benchmarks.attention [--repeats 5]

Shapes [batch, heads, tokens, head width] of the step benchmark: context encoder, target encoder, predictor,
and the context encoder at [64, 384, 384]. Forward, and forward with backward, shortest of the repeats.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.machine import describe, seconds
from models import attention
from utils.cli import number_from, run_cli
from utils.help_pages import Parser
from utils.runtime.open import keep_freed_memory

SHAPES = ((2, 12, 461, 64), (2, 12, 1152, 64), (2, 12, 1152, 32), (1, 12, 3686, 64))
BLOCKS_MIB = (1, 2, 4, 8, 16)
Kernel = Callable[..., Tensor]  # of queries, keys and values


def forward_and_backward(kernel: Kernel, leaves: Sequence[Tensor], grad: Tensor) -> None:
    torch.autograd.grad(kernel(*leaves), leaves, grad)


def main() -> None:
    """Print the table."""
    parser = Parser(
        prog="python -m benchmarks.attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repeats", type=number_from(1), default=5)
    repeats = parser.parse_args().repeats
    keep_freed_memory()
    print(describe())
    print(f"{'shape':22}{'kernel':18}{'forward ms':>11}{'GFLOP/s':>9}{'with backward ms':>18}{'GFLOP/s':>9}")
    for shape in SHAPES:
        batch, heads, tokens, width = shape
        flops = 4 * tokens * tokens * batch * heads * width
        made = [torch.randn(batch, tokens, heads, width, dtype=torch.bfloat16) for _ in range(4)]
        q, k, v, grad = (x.transpose(1, 2) for x in made)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        kernels: dict[str, tuple[Kernel, int]] = {
            "PyTorch": (F.scaled_dot_product_attention, attention.BLOCK_BYTES)
        }
        for mib in BLOCKS_MIB:
            kernels[f"blocks of {mib} MiB"] = (attention.blockwise_attention, mib * 2**20)
        for name, (kernel, attention.BLOCK_BYTES) in kernels.items():
            with torch.no_grad():
                forward = seconds(partial(kernel, *leaves), repeats)
            both = seconds(partial(forward_and_backward, kernel, leaves, grad), repeats)
            rates = flops / forward / 1e9, 3 * flops / both / 1e9
            print(
                f"{shape!s:22}{name:18}{forward * 1e3:11.1f}{rates[0]:9.0f}{both * 1e3:18.1f}{rates[1]:9.0f}",
                flush=True,
            )


if __name__ == "__main__":
    run_cli(main)
