"""Weights spread over the processes of torchrun (FSDP2): each holds its part of every tensor.

In: the modules that are called as wholes, inner ones first, and their optimizer. Out: the same objects, whose
weights, gradients and moments are parts along the first axis. A module's weights are whole while it computes,
and parts again at once: what a process holds beyond its parts is one block. The numbers are those of
processes that hold everything, but for the order of sums.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from utils.errors import UserError
from utils.runtime.shards import Shardable, part

# torch 2.13 has new names for these
GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
Call = Callable[[Callable[[], Any]], None]  # runs a collective; a lost peer becomes LostPeer


class _Allocating:
    """What both collectives of a unit have in common. Without peers no process waits for another: the same
    memory, and numbers that mean nothing.
    """

    def __init__(self, call: Call) -> None:
        self.call, self.has_peers = call, True

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def begin(self, collective: Callable[[], dist.Work | None]) -> dist.Work | None:
        work: list[dist.Work | None] = []
        self.call(lambda: work.append(collective()))
        return work[0]


class _Gather(_Allocating):
    """The weights of a unit, whole. Without peers each part is in the place of all others."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if not self.has_peers:
            for place in output_tensor.split(input_tensor.numel()):
                if place.data_ptr() != input_tensor.data_ptr():  # FSDP2 puts a part into its own place
                    place.copy_(input_tensor)
            return None
        gather = partial(GATHER, output_tensor, input_tensor, group=group, async_op=async_op)
        return self.begin(gather)


class _SumOfParts(_Allocating):
    """The sum of a unit's gradients over the processes, of which each gets its part; `op` says the same."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        if not self.has_peers:
            output_tensor.copy_(input_tensor.view(-1)[: output_tensor.numel()].view_as(output_tensor))
            return None
        total = dist.ReduceOp.SUM
        return self.begin(
            partial(SCATTER, output_tensor, input_tensor, total, group=group, async_op=async_op)
        )


class Shards:
    """A model and its optimizer, spread. All processes have the same weights when it begins."""

    def __init__(
        self, model: Shardable, optimizer: torch.optim.Optimizer, device_type: str, size: int, call: Call
    ) -> None:
        assert isinstance(model, nn.Module)
        self._call = call
        self._comms: tuple[_Gather, _SumOfParts] = _Gather(call), _SumOfParts(call)
        # nothing changes in place what the predictor returns
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        mesh = init_device_mesh(device_type, (size,))
        whole = dict(model.named_parameters())
        self._modules: list[FSDPModule] = []
        for module, method in model.shard_units():
            unit = fully_shard(module, mesh=mesh, reshard_after_forward=True)
            if method != "forward":
                register_fsdp_forward_method(module, method)
            unit.set_gradient_divide_factor(1.0)  # a loss is a share of the global batch's: gradients add up
            unit.set_force_sum_reduction_for_comms(True)  # gloo knows no other
            unit.set_custom_all_gather(cast(Any, self._comms[0]))
            unit.set_custom_reduce_scatter(cast(Any, self._comms[1]))
            self._modules.append(unit)
        spread = dict(model.named_parameters())
        kept = [name for name, value in spread.items() if not isinstance(value, DTensor)]
        assert not kept, f"in no unit: {kept}"
        _move(optimizer, {whole[name]: value for name, value in spread.items()})

    def whole(self, value: Tensor) -> Tensor:
        """The tensor of all parts; every process has to call this."""
        assert isinstance(value, DTensor)
        gathered: list[Tensor] = []
        self._call(lambda: gathered.append(value.full_tensor().detach()))
        return gathered[0]

    @contextmanager
    def without_peers(self) -> Iterator[None]:
        """Compute with what this process has; whatever ends it, the units are as they were. Raises UserError
        where this version of torch cannot take back a pass that ran out of memory.
        """
        for comm in self._comms:
            comm.has_peers = False
        try:
            yield
        except RuntimeError:
            self._take_back()
            raise
        finally:
            for comm in self._comms:
                comm.has_peers = True

    def _take_back(self) -> None:
        for module in self._modules:
            if not module._get_fsdp_state()._is_root:  # None: has not been called yet
                continue
            if not hasattr(module, "reset_iter_state"):
                raise UserError(
                    f"train.per_core_batch_size: out of memory with train.shard_parameters; torch "
                    f"{torch.__version__} cannot try a smaller one by itself: halve it, or update torch"
                )
            module.reset_iter_state()


def _move(optimizer: torch.optim.Optimizer, spread: dict[Tensor, nn.Parameter]) -> None:
    """Give the optimizer the spread parameters for the whole ones, with their parts of the moments."""
    for group in optimizer.param_groups:
        group["params"] = [spread[weight] for weight in group["params"]]
    state: defaultdict[Any, Any] = defaultdict(dict)
    for weight, values in optimizer.state.items():
        parts = {name: _spread_like(value, spread[weight]) for name, value in values.items()}
        state[spread[weight]] = parts
    optimizer.state = state


def _spread_like(value: Tensor, weight: nn.Parameter) -> Tensor:
    """This process's part of a whole moment, in memory of its own; a count of steps stays as it is."""
    if value.ndim == 0:
        return value
    assert isinstance(weight, DTensor)
    cut = distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)
    own = torch.zeros_like(weight, requires_grad=False)
    part(own).copy_(part(cut))
    return own
