"""Where a run computes: the device, its precision, its place among the processes, and signals.

One object hides the engine from the training loop. Today: plain torch on a CPU or one GPU. The loop asks
for the world size and agrees on decisions through it, so that further engines change this file alone.
"""

from __future__ import annotations

import platform
import signal
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

OUT_OF_MEMORY_TEXTS = ("not enough memory", "can't allocate memory", "out of memory")


@dataclass
class Runtime:
    """One process of a run. `rank` counts processes, `world_size` is how many share a global batch."""

    device: torch.device
    use_bf16: bool
    rank: int = 0
    world_size: int = 1
    stop_requested: bool = field(default=False, init=False)

    @classmethod
    def create(cls, use_bf16: bool) -> Runtime:
        """The best device of this machine."""
        return cls(torch.device("cuda" if torch.cuda.is_available() else "cpu"), use_bf16)

    def autocast(self) -> AbstractContextManager[Any]:
        """bfloat16 autocast where the configuration asks for it; parameters stay float32."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.use_bf16 else nullcontext()

    def to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: v.to(self.device, non_blocking=True) for k, v in batch.items()}

    def synchronise(self) -> None:
        """Wait for the device, so that a clock read afterwards means something."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def catch_sigterm(self) -> None:
        """From now on SIGTERM asks for a checkpoint and a clean end instead of killing the process."""

        def handler(_signum: int, _frame: FrameType | None) -> None:
            self.stop_requested = True

        signal.signal(signal.SIGTERM, handler)

    def attempt(self, work: Callable[[], None]) -> bool:
        """Run work; False when the device or the host ran out of memory, and its cache is emptied."""
        try:
            work()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            failed = True
        else:
            failed = False
        if failed and self.device.type == "cuda":  # out here the traceback no longer holds the graph
            torch.cuda.empty_cache()
        return not failed


def is_out_of_memory(error: RuntimeError) -> bool:
    """The GPU allocator has an error class of its own; the CPU's has only its text."""
    return isinstance(error, torch.OutOfMemoryError) or any(t in str(error) for t in OUT_OF_MEMORY_TEXTS)


def provenance(runtime: Runtime) -> dict[str, Any]:
    """What a reader needs to believe a number: versions, commit, machine."""
    packages = ("torch", "monai", "zarr", "pydicom", "omegaconf", "numpy", "scikit-learn", "wandb")
    device = platform.processor() or platform.machine()
    if runtime.device.type == "cuda":
        device = torch.cuda.get_device_name(runtime.device)
    return {
        "commit": _git_commit(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
        "device": f"{runtime.device.type}: {device}",
        "threads": torch.get_num_threads(),
        "world_size": runtime.world_size,
    }


def _git_commit() -> str | None:
    """The commit of this checkout, with '+changes' when the tree differs; null outside git."""
    root = Path(__file__).resolve().parent.parent
    try:
        commit = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changes = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain", "-uno"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return commit + ("+changes" if changes else "")
