"""The engine for TPUs: PyTorch/XLA, one plain process per host, one program over all devices (SPMD).

In: PJRT_DEVICE (TPU, or CPU for tests; there CPU_NUM_DEVICES makes several) and what a Runtime is asked for.
Out: the same, on tensors that are logically global: the first axis of a batch lies spread over the devices of
all hosts, everything else is on each of them, and the compiler writes the sums between them.
Only utils.runtime.open imports this file; torch_xla 2.9 is the last of its line, and what follows it
replaces this file.

Operations are recorded, and run at `mark_step` as one compiled program. A Python number that changes from
step to step would be another program: `scalar` makes it an input.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.profiler as profiler
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import Tensor
from torch_xla._internal.tpu import discover_master_worker_ip, get_tpu_type

from utils.errors import UserError
from utils.runtime import xla_kernels
from utils.runtime.processes import ALONE, Group, join_hosts
from utils.runtime.single import Runtime

log = logging.getLogger(__name__)
DEVICES = ("TPU", "CPU")
KINDS = {"v5litepod": "v5e"}  # the machines' name of a generation, and that of utils.runtime.device_peak


@dataclass
class XlaRuntime(Runtime):
    """This host's process; `mesh` holds the devices of all hosts, in the order of the hosts."""

    mesh: xs.Mesh = field(kw_only=True)

    @classmethod
    def open(cls, use_bf16: bool, timeout_s: float) -> XlaRuntime:
        """Take this host's devices, and find the other hosts."""
        name = os.environ["PJRT_DEVICE"]
        if name not in DEVICES:
            raise UserError(f"PJRT_DEVICE: expected {' or '.join(DEVICES)}, found {name}")
        if not xr.is_spmd():
            with warnings.catch_warnings():  # a second run in one process finds tensors of the first
                warnings.filterwarnings("ignore", "Replicating tensors already initialized", UserWarning)
                xr.use_spmd()
        group: Group = ALONE
        hosts = xr.process_count()
        expected = os.environ.get("OCT_EXPECT_HOSTS", str(hosts))
        if expected != str(hosts):
            raise UserError(
                f"OCT_EXPECT_HOSTS: expected a TPU of {expected} hosts, found {hosts}; look at the TPU_* "
                "variables of this worker, which say of which TPU it is a part"
            )
        if hosts > 1:
            group = join_hosts(xr.process_index(), hosts, discover_master_worker_ip(), timeout_s)
        everywhere = torch_xla._XLAC._xla_get_all_runtime_devices()
        own = [everywhere.index(device) for device in torch_xla._XLAC._xla_get_runtime_devices()]
        # the i-th part of what a host feeds goes to its i-th device, wherever that is in the mesh
        assert own == sorted(own), f"expected this host's devices in ascending order, found {own}"
        order = np.array(list(chain.from_iterable(group.gather_objects(own))))
        return cls(torch_xla.device(), use_bf16, group, mesh=xs.Mesh(order, (len(order),), ("data",)))

    def keep_programs(self, folder: Path) -> None:
        if torch_xla._XLAC._xla_computation_cache_is_initialized():
            return  # a process has one place, chosen before its first program
        own = folder / f"host_{self.rank}"
        try:
            own.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("%s: compiled programs are not kept, training goes on: %s", own, error)
        else:
            xr.initialize_cache(str(own))

    @property
    def num_devices(self) -> int:
        return int(self.mesh.device_ids.size)

    @property
    def evaluation_devices(self) -> int:
        return self.num_devices // self.world_size

    @property
    def failure_is_clean(self) -> bool:
        return False  # what a program was to compute is lost with it

    @property
    def device_name(self) -> str:
        return f"{self.num_devices} x {os.environ['PJRT_DEVICE']}"

    @property
    def device_kind(self) -> str:
        # not torch_xla's xla_device_kind, which raises RuntimeError for the one device that SPMD shows
        if os.environ["PJRT_DEVICE"] != "TPU":
            return os.environ["PJRT_DEVICE"]
        try:
            generation = get_tpu_type()
        except OSError:  # the machine's metadata cannot be read
            return "TPU of unknown generation"
        return f"TPU {KINDS.get(generation, generation)}"

    def peak_memory_bytes(self) -> int | None:
        return None  # torch_xla 2.9: "MemoryInfo not supported for SPMD virtual device"

    @contextmanager
    def write_trace(self, path: Path) -> Iterator[None]:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.start_trace(path)
        try:
            yield
        finally:
            profiler.stop_trace()
        log.info("profile: %s, for TensorBoard", path)

    def to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: self._shard(value) for key, value in batch.items()}

    def to_device_padded(self, batch: dict[str, Tensor], size: int) -> dict[str, Tensor]:
        return self.to_device({key: _fill(value, size) for key, value in batch.items()})

    def collect(self, value: Tensor, count: int) -> Tensor:
        return self.group.interleave(self.to_torch(value))[: count * self.world_size]

    def _shard(self, value: Tensor) -> Tensor:
        """This host's part of a tensor becomes the global one, split along its first axis."""
        split = ("data", *[None] * (value.ndim - 1))
        sharding = xs.ShardingSpec(self.mesh, split, minibatch=True)
        return xm.send_cpu_data_to_device([value.contiguous()], self.device, sharding)[0]

    def to_torch(self, value: Tensor) -> Tensor:
        if value.device.type != self.device.type:
            return value
        # a program of its own that gathers it, compiled once a shape; what `cpu` itself does is compiled anew
        # at each call
        whole = value.detach().unsqueeze(0)
        xs.mark_sharding(whole, self.mesh, (None,) * whole.ndim)
        return whole.cpu()[0]

    def to_device_replicated(self, value: Tensor) -> Tensor:
        # `to` writes a single 0 or 1 into the program as a constant
        return xm.send_cpu_data_to_device([value], self.device)[0]

    def scalar(self, value: float) -> Tensor:
        return self.to_device_replicated(torch.tensor(value, dtype=torch.float64))

    def mark_step(self) -> None:
        torch_xla.sync()

    def checkpoint_function(self) -> Callable[..., Any]:
        return xla_kernels.recompute_block

    def row_gather(self) -> Callable[[Tensor, Tensor], Tensor]:
        return xla_kernels.RowGather(self.mesh)

    def flash_attention(self, kernels: ModuleType) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return xla_kernels.FlashAttention(self.mesh, kernels)

    def synchronise(self) -> None:
        torch_xla.sync(wait=True)
        xm.wait_device_ops()


def _fill(value: Tensor, size: int) -> Tensor:
    """Repeat the last sample up to `size`: one shape is one program."""
    missing = size - len(value)
    return torch.cat([value, value[-1:].expand(missing, *value.shape[1:])]) if missing else value
