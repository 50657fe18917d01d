"""What a computation costs: seconds, and the highest memory while it ran.

In: a function. Out: its result, seconds, bytes: of the GPU where there is one, else of this process (Linux).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from utils.runtime.single import Runtime

T = TypeVar("T")
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def measured(compute: Callable[[], T], runtime: Runtime) -> tuple[T, float, int | None]:
    """The result, its seconds, and the peak in bytes; None where the system does not tell."""
    is_gpu = runtime.device.type == "cuda"
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(runtime.device)
    begins_anew = not is_gpu and _forget_peak()
    start = time.perf_counter()
    result = compute()
    seconds = time.perf_counter() - start
    if is_gpu:
        return result, seconds, int(torch.cuda.max_memory_allocated(runtime.device))
    match = re.search(r"VmHWM:\s*(\d+) kB", STATUS.read_text()) if begins_anew else None
    return result, seconds, 1024 * int(match[1]) if match else None


def _forget_peak() -> bool:
    """Let the process's peak begin at what is in use now; False where the system does not do that."""
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return STATUS.is_file()
