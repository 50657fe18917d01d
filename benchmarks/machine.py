"""What this machine can do: the rate of its matrix products, and what a process needs of memory."""

from __future__ import annotations

import os
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


def memory(kind: str) -> int:
    """Bytes resident: `VmRSS` now, `VmHWM` at most so far (Linux)."""
    with open(f"/proc/{os.getpid()}/status", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(f"{kind}:"):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status: expected {kind}, found no such line")
