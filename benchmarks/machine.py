"""What this machine can do: the rate of its matrix products, and what a process needs of memory."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F


def describe() -> str:
    """Processor, threads and PyTorch in one line."""
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else model}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def matmul_peak(dtype: torch.dtype, shapes: Sequence[tuple[int, int, int]] = ()) -> float:
    """Rate in FLOP/s that this machine keeps up over half a second of matrix products [m, k] x [k, n]: the
    median of the best of 2048^3 and `shapes`.
    """
    best = 0.0
    for m, k, n in ((2048, 2048, 2048), *shapes):
        a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        product = partial(F.linear, a, b)
        taken = _times(product, max(5, round(0.5 / min(_times(product, 1)))))
        best = max(best, 2 * m * k * n / median(taken))
    return best


def _times(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of `repeats` runs, after two to warm up."""
    taken = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return taken[2:]


def memory(kind: str) -> int:
    """Bytes resident: `VmRSS` now, `VmHWM` at most so far (Linux)."""
    with open(f"/proc/{os.getpid()}/status", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(f"{kind}:"):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status: expected {kind}, found no such line")
