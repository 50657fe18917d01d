"""The peak rate of a device, to which `perf/mfu` refers.

In: the device and the precision of its matrix products. Out: dense FLOP/s, two per multiply-add. GPUs and
TPUs have a row with the numbers of their data sheets, without sparsity (NVIDIA: A100, H100 and H200 Tensor
Core GPU; Google Cloud: TPU v4, TPU v5e); a CPU is measured. A device without a row has no peak, rather than
that of a relative.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

# Name as the driver tells it, whole: a MIG slice or an NVL board is another device. Then TFLOP/s in bfloat16,
# and in float32 without TF32 (TPU: no number is published).
DATA_SHEETS: tuple[tuple[str, float, float | None], ...] = (
    (r"TPU v4", 275.0, None),
    (r"TPU (v5 lite|v5e)", 197.0, None),
    (r"(NVIDIA )?A100-(SXM4|PCIE)-[48]0GB|NVIDIA A100 80GB PCIe", 312.0, 19.5),
    (r"NVIDIA H100 80GB HBM3", 989.0, 67.0),
    (r"NVIDIA H100 PCIe", 756.0, 51.0),
    (r"NVIDIA H200", 989.0, 67.0),
)
SIZES = (512, 1024, 2048)  # of the square matrices whose product is timed on a CPU
GPU_SIZES = (8192,)
SECONDS_PER_SIZE = 0.2
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Peak:
    """`flops_per_s` of one device, None where unknown; `source` says where it is from, or why there is
    none.
    """

    flops_per_s: float | None
    source: str


def device_peak(device: torch.device, name: str, use_bf16: bool) -> Peak:
    """The peak of a device called `name` for bfloat16, else for float32; a CPU takes up to a second."""
    precision = "bfloat16" if use_bf16 else "float32"
    if device.type == "cpu":
        rate = measure_matmul(torch.bfloat16 if use_bf16 else torch.float32)
        return Peak(rate, f"{precision}, measured: matrix products on {torch.get_num_threads()} threads")
    if not use_bf16 and torch.get_float32_matmul_precision() != "highest":
        return Peak(None, "float32 products are rounded (torch.set_float32_matmul_precision)")
    for pattern, bf16, float32 in DATA_SHEETS:
        if re.fullmatch(pattern, name):
            tera = bf16 if use_bf16 else float32
            if tera is None:
                return Peak(None, f"no {precision} peak is published for {name}")
            return Peak(tera * 1e12, f"{precision}, data sheet of {name}")
    return Peak(None, f"no row for {name!r} in utils/runtime/device_peak.py")


@cache  # the machine's, so once a process
def measure_matmul(dtype: torch.dtype, device: torch.device = CPU) -> float:
    """FLOP/s of a device's matrix products: the fastest of any size. Global random state is not touched."""
    best = 0.0
    generator = torch.Generator().manual_seed(0)
    for size in SIZES if device.type == "cpu" else GPU_SIZES:
        a, b = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
        _seconds(a, b)  # the first also sets the kernel up
        taken = [_seconds(a, b)]
        while sum(taken) < SECONDS_PER_SIZE and len(taken) < 50:
            taken.append(_seconds(a, b))
        best = max(best, 2 * size**3 / min(taken))
        if 2 * 8 * min(taken) > SECONDS_PER_SIZE:  # eight times the work, twice at least
            break
    return best


def _seconds(a: Tensor, b: Tensor) -> float:
    start = time.perf_counter()
    F.linear(a, b)
    if a.is_cuda:
        torch.cuda.synchronize(a.device)
    return time.perf_counter() - start
