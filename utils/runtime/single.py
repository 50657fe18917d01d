"""Where a run computes: the device, its precision, its place among the processes, and signals.

One object hides the engine from the training loop: plain torch on a CPU or one GPU, torchrun over several of
either (utils.runtime.processes), or PyTorch/XLA over the devices of a TPU (utils.runtime.xla). Training uses
XLA exactly when PJRT_DEVICE is set; the other commands always use plain torch.
"""

from __future__ import annotations

import logging
import os
import platform
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from utils.errors import EXIT_INTERRUPTED, UserError
from utils.runtime.processes import ALONE, Group
from utils.runtime.watchdog import Watchdog, leave

log = logging.getLogger(__name__)
_T = TypeVar("_T")
CTRL_C = "Ctrl-C"
CTRL_C_WORDS = b"\nCtrl-C: ends after this step, with a checkpoint; once more leaves at once\n"
OUT_OF_MEMORY_TEXTS = ("not enough memory", "can't allocate memory", "out of memory", "RESOURCE_EXHAUSTED")


class StopRequested(Exception):
    """SIGTERM or Ctrl-C reached one of the processes; all of them raise this at the same place."""


@dataclass
class Runtime:
    """One process of a run; `group` are those that share a global batch with it."""

    device: torch.device
    use_bf16: bool
    group: Group = ALONE
    stop_requested: bool = field(default=False, init=False)
    stopped_by: str = field(default="SIGTERM", init=False)  # in words
    watchdog: Watchdog = field(default_factory=Watchdog, init=False)

    def keep_programs(self, folder: Path) -> None:
        """Keep compiled programs in this folder of this machine, so that the next start takes them from there
        (PyTorch/XLA; elsewhere nothing is compiled ahead). Call it before anything is computed.
        """

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world_size(self) -> int:
        """The processes that share a global batch."""
        return self.group.size

    @property
    def num_devices(self) -> int:
        """The devices that share a global batch; as many on every process."""
        return self.world_size

    @property
    def evaluation_devices(self) -> int:
        """The devices of this process that share a batch which `to_device_padded` places."""
        return 1

    @property
    def failure_is_clean(self) -> bool:
        """Whether a step that runs out of memory leaves the tensors that it did not reach unchanged."""
        return True

    @property
    def device_name(self) -> str:
        """For people."""
        return self.device_kind

    @property
    def device_kind(self) -> str:
        """What the driver calls the device: NVIDIA H200, TPU v4; on a CPU the processor's family."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return platform.processor() or platform.machine()

    def peak_memory_bytes(self) -> int | None:
        """The most memory held so far, on the device or resident; None where the device does not tell."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def has_room(self, growth: float) -> bool:
        """Whether every process may hold so many times the most that it has held so far: up to nine tenths of
        a GPU, up to half of a host for all processes of it, since a host kills who takes too much.
        """
        if self.device.type == "cuda":
            limit = 0.9 * torch.cuda.get_device_properties(self.device).total_memory
        else:
            here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            limit = 0.5 * host_memory_bytes() / here
        return not self.group.any((self.peak_memory_bytes() or 0) * growth > limit)

    @contextmanager
    def write_trace(self, path: Path) -> Iterator[None]:
        """Trace what happens inside: to `path`.json.gz (Chrome trace), on XLA to the folder `path`
        (TensorBoard). Raises OSError where the file cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            yield
        file = f"{path}.json.gz"
        profile.export_chrome_trace(file)
        log.info("profile: %s, for ui.perfetto.dev or chrome://tracing", file)

    def autocast(self) -> AbstractContextManager[Any]:
        """bfloat16 autocast where the configuration asks for it; parameters stay float32."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.use_bf16 else nullcontext()

    def to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """This process's micro-batch, on its device or devices."""
        return {k: v.to(self.device, non_blocking=True) for k, v in batch.items()}

    def to_device_padded(self, batch: dict[str, Tensor], size: int) -> dict[str, Tensor]:
        """This process's part of an evaluation batch: at most `size` samples, a multiple of
        `evaluation_devices`. Where shapes are to stay, its last sample is repeated up to `size`.
        """
        return self.to_device(batch)

    def collect(self, value: Tensor, count: int) -> Tensor:
        """The first `count` samples of every process's part of an evaluation result, whole and on the host,
        in the order of the items that `Group.share` gave out.
        """
        return self.group.interleave(self.group.gather(value[:count]).cpu())

    def to_torch(self, value: Tensor) -> Tensor:
        """Return the tensor in a form that plain torch computes with: any operation, any shape."""
        return value

    def to_device_replicated(self, value: Tensor) -> Tensor:
        """Copy a tensor whole to the device or devices of every process."""
        return value.to(self.device)

    def scalar(self, value: float) -> float | Tensor:
        """Pass a host number that changes from step to step to the device."""
        return value

    def mark_step(self) -> None:
        """Run the operations recorded so far as one program (PyTorch/XLA; elsewhere nothing is recorded)."""

    def checkpoint_function(self) -> Callable[..., Any] | None:
        """Activation checkpointing that this engine needs in place of torch's own; None: torch's."""
        return None

    def row_gather(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Rows of [B, N, E] by ids [B, T] as this engine does it best; None: torch's gather."""
        return None

    def flash_attention(self, kernels: ModuleType) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """Attention without the tokens x tokens matrix from these kernels; None where there is none."""
        return None

    def synchronise(self) -> None:
        """Wait for the device, so that a clock read afterwards means something."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def catch_signals(self) -> None:
        """Let SIGTERM and Ctrl-C ask for a checkpoint and a clean end; a second Ctrl-C leaves at once."""

        def stop(signum: int, _frame: FrameType | None) -> None:
            if signum == signal.SIGINT:
                if self.stopped_by == CTRL_C:
                    leave(EXIT_INTERRUPTED)
                self.stopped_by = CTRL_C
                with suppress(OSError):  # not by the log, whose lock the interrupted code may hold
                    os.write(sys.stderr.fileno(), CTRL_C_WORDS)
            self.stop_requested = True

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)

    def stop_agreed(self) -> bool:
        """Whether SIGTERM or Ctrl-C has reached any of the processes, all of which call this."""
        return self.group.any(self.stop_requested)

    def enter(self, phase: str) -> None:
        """Name what begins now; raises StopRequested on all processes, all of which call this."""
        self.watchdog.beat(phase)
        if self.stop_agreed():
            raise StopRequested

    def until_stopped(self, phase: str, items: Iterable[_T]) -> Iterator[_T]:
        """The items, all that this process has; raises StopRequested before any of them."""
        iterator = iter(items)
        while True:
            self.watchdog.beat(phase)
            try:
                item = next(iterator, None)
            except (UserError, EOFError, ConnectionError):
                # a signal to a whole process group ends the loader's workers too, and what starts them
                if not self.stop_requested:
                    raise
                item = None
            if self.stop_agreed():
                raise StopRequested
            if not self.group.any(item is not None):
                return
            if item is not None:
                yield item

    def attempt(self, work: Callable[[], None]) -> bool:
        """Run work, which must not need the other processes; False when the device or the host of one of them
        ran out of memory, and its cache is emptied.
        """
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
        return not self.group.any(failed)


def host_memory_bytes() -> int:
    """The memory of this machine, or what its container may take of it."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no cgroup of version 2, or `max`
        return min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")))
    return whole


def is_out_of_memory(error: RuntimeError) -> bool:
    """The GPU allocator has a separate error class; the CPU's has only its text."""
    return isinstance(error, torch.OutOfMemoryError) or any(t in str(error) for t in OUT_OF_MEMORY_TEXTS)
