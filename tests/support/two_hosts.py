"""One of two XLA hosts that share a run, on one machine: `python -m tests.support.two_hosts RANK PORT STOP
--config FILE ...`, with PJRT_DEVICE=CPU and CPU_NUM_DEVICES=4.

torch_xla 2.9 has no world of several CPU processes: each sees its own four devices alone. So torch_xla is
told of eight while the engine opens, and then each host computes the whole global batch on its own four: what
the other host feeds comes over gloo. All else is the project's own: `pretraining.train`, `XlaRuntime.open`,
the host group, and which part of a batch a host feeds. Host 1 gets SIGTERM after update STOP (0: never).

Printed, a JSON object a line: the mesh, the rows that this host feeds at each step, how many programs it has
executed, how many an earlier start had kept and how many not.
"""

import json
import signal
import sys
import warnings
from functools import partial
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import Tensor

import utils.runtime.xla as engine
from models import vit3d
from pretraining import train as loop
from tests.support.xla_counters import count_executed, count_kept_programs
from utils.cli import run_cli
from utils.runtime.processes import join_hosts

HOSTS, DEVICES = 2, 4  # of a host
SMALL = vit3d.Size(2, 48, 2)  # an encoder whose programs compile within seconds


class OneOfTwo(engine.XlaRuntime):
    """A host whose four devices hold what eight would."""

    @property
    def num_devices(self) -> int:
        return HOSTS * DEVICES

    def _shard(self, value: Tensor) -> Tensor:
        return super()._shard(torch.cat(self.group.gather_objects(value)))


def open_as(rank: int, port: int, cls: type[engine.XlaRuntime], *settings: Any) -> engine.XlaRuntime:
    """The runtime as a host of a pod opens it, but for its mesh."""
    names = [f"CPU:{device}" for device in range(HOSTS * DEVICES)]
    listings = {
        "_xla_get_all_runtime_devices": names,
        "_xla_get_runtime_devices": names[rank * DEVICES : (rank + 1) * DEVICES],
    }
    real = {listing: getattr(torch_xla._XLAC, listing) for listing in listings}
    for listing, devices in listings.items():
        setattr(torch_xla._XLAC, listing, partial(list, devices))
    xr.process_count, xr.process_index = lambda: HOSTS, lambda: rank
    engine.discover_master_worker_ip = lambda: "127.0.0.1"
    engine.join_hosts = partial(join_hosts, port=port)
    opened = real_open.__func__(OneOfTwo, *settings)
    say("mesh", opened.mesh.device_ids.tolist())
    for listing, function in real.items():
        setattr(torch_xla._XLAC, listing, function)
    xr.global_runtime_device_count.cache_clear()
    opened.mesh = xs.Mesh(np.arange(DEVICES), (DEVICES,), ("data",))
    return opened


def say(name: str, value: object) -> None:
    print(json.dumps({name: value}), flush=True)


def main(argv: list[str]) -> int:
    rank, port, stop = map(int, argv[:3])
    real_next, steps = loop.next_or_stop, 0

    def next_or_stop(*arguments: Any) -> Any:
        nonlocal steps
        if rank == 1 and steps == stop > 0:
            signal.raise_signal(signal.SIGTERM)
        steps += 1
        batches = real_next(*arguments)
        if batches is not None:
            say("rows", [batch["row"].tolist() for batch in batches])
        return batches

    engine.XlaRuntime.open = classmethod(partial(open_as, rank, port))  # type: ignore[method-assign]
    loop.next_or_stop = next_or_stop
    vit3d.SIZES["ti"] = SMALL
    code = loop.main(argv[3:])
    xm.wait_device_ops()
    say("executed", count_executed())
    say("kept", count_kept_programs())
    return code


real_open = engine.XlaRuntime.open
if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run_cli(partial(main, sys.argv[1:]))
