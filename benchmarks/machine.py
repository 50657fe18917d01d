"""What this machine can do: the rate of its matrix products."""

from __future__ import annotations

import platform
import time
from statistics import median

import torch
import torch.nn.functional as F

from utils.runtime.single import Runtime


def describe() -> str:
    """Processor, threads and PyTorch in one line."""
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else model}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def matmul_peak(runtime: Runtime, dtype: torch.dtype, size: int) -> float:
    """Rate in FLOP/s of matrix products of size^3 on this device: the median of half a second of them."""
    a, b = (torch.randn(size, size, device=runtime.device).to(dtype) for _ in range(2))
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < 5 or time.perf_counter() - began < 0.5:
        runtime.synchronise()
        start = time.perf_counter()
        F.linear(a, b)
        runtime.synchronise()
        taken.append(time.perf_counter() - start)
    return 2 * size**3 / median(taken[2:])
