"""Choose the engine of this machine.

In: the environment that a launcher made (RANK, WORLD_SIZE, PJRT_DEVICE ...). Out: a `Runtime`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import sys
from glob import glob
from pathlib import Path
from typing import Literal

import torch

from utils.errors import UserError
from utils.runtime.processes import join
from utils.runtime.single import Runtime

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # malloc.h of glibc
# Beyond what the loader of another process may take: the first process alone waits for a bucket, fits probes.
PEER_PATIENCE_S = 600.0
BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")  # of x86 and of ARM
TPU_DEVICES = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")  # the same in utils/tpu_worker.sh


def open_runtime(use_bf16: bool | Literal["auto"], data_timeout_s: float | None = None) -> Runtime:
    """The best device of this machine, or this process's own. With `data_timeout_s`, how long a process may
    wait for its data, together with the other processes of the run. PyTorch/XLA exactly where PJRT_DEVICE is
    set. "auto": bfloat16 where the device has instructions for it.
    """
    if data_timeout_s is not None and "PJRT_DEVICE" in os.environ:
        return _open_xla(bool(use_bf16), data_timeout_s + PEER_PATIENCE_S)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if use_bf16 == "auto":
        use_bf16 = has_bf16(device)
    if device.type == "cpu":
        keep_freed_memory()
    if data_timeout_s is None:
        return Runtime(device, use_bf16)
    if device.type == "cuda":
        device = torch.device("cuda", _local_gpu())
        torch.cuda.set_device(device)
    return Runtime(device, use_bf16, join(device, data_timeout_s + PEER_PATIENCE_S))


def has_bf16(device: torch.device, cpu: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether a device multiplies in bfloat16; False for a CPU of which the system says nothing."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    flags = set(cpu.read_text().split()) if cpu.exists() else set()
    return not flags.isdisjoint(BF16_FLAGS)


def refuse_idle_tpu() -> None:
    """Raise UserError where a training would take the CPU beside a TPU, for lack of PJRT_DEVICE."""
    if "PJRT_DEVICE" in os.environ or torch.cuda.is_available():
        return
    own = os.environ.get("OCT_DEVICE_GLOB")
    if chips := [path for pattern in ([own] if own else TPU_DEVICES) for path in sorted(glob(pattern))]:
        raise UserError(
            f"PJRT_DEVICE: expected a value beside {chips[0]}, the device of a TPU, found none, which would "
            "train on the CPU; start it by run_tpu_xla.sh or with PJRT_DEVICE=TPU; with PJRT_DEVICE=CPU if "
            "you want the CPU; with OCT_DEVICE_GLOB=none if that is no TPU"
        )


def report_opened(runtime: Runtime) -> None:
    """Say on each host that its devices are open: run_tpu_xla.sh sets the variable and waits for the line."""
    if "OCT_EXPECT_HOSTS" in os.environ:
        line = f"opened: {runtime.device_name}, host {runtime.rank + 1} of {runtime.world_size}"
        print(line, file=sys.stderr, flush=True)


def _open_xla(use_bf16: bool, timeout_s: float) -> Runtime:
    if importlib.util.find_spec("torch_xla") is None:
        raise UserError(
            "PJRT_DEVICE is set: expected torch_xla, found none; pip install -r requirements-tpu.txt, "
            "or unset PJRT_DEVICE for plain torch"
        )
    from utils.runtime.xla import XlaRuntime  # only here: elsewhere there is no torch_xla

    return XlaRuntime.open(use_bf16, timeout_s)


def _local_gpu() -> int:
    """The GPU of this process: one each; raises UserError where a machine has fewer than processes."""
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        raise UserError(
            f"torchrun --nproc-per-node: expected at most {count}, the GPUs here, found {local + 1} or more"
        )
    return local


def keep_freed_memory() -> None:
    """Let this process keep what it frees, instead of giving every large tensor of every step back.

    glibc maps blocks of that size one by one and the kernel zeroes their pages each time: a tenth of a
    training step on a CPU and more (docs/evidence/benchmarks.md). Other C libraries are left as they are.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    for parameter, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, 64 * 2**20)):
        if mallopt(parameter, value) != 1:
            raise RuntimeError(f"mallopt: expected parameter {parameter} to take {value}, found a refusal")
