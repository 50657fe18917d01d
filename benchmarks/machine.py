"""Which machine a number is from."""

from __future__ import annotations

import platform

import torch


def describe() -> str:
    """Processor, threads and PyTorch in one line."""
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else model}, {torch.get_num_threads()} threads, torch {torch.__version__}"
