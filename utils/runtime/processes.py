"""The processes that share a global batch: sums, gathers and agreements between them.

In: tensors and plain values of this process. Out: those of all processes. `ALONE`, a single process, gives
everything back as it is, so the training loop has one path. `join` makes a `ProcessGroup` where torchrun (or
what else sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) started more than one: gloo between CPUs and for
what is on the host, NCCL between GPUs. `join_hosts` makes a `HostGroup` of the hosts of a TPU. Every process
calls the same methods in the same order. What they tell each other is JSON and tensors, not pickle: a message
can be wrong, but it is never run as code.

A process that ends leaves closed connections, and the others notice within seconds; one that hangs is given
`timeout_s`. Either way they raise LostPeer, with the last words of the lost process if it had any.
"""

from __future__ import annotations

import json
import logging
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from utils.errors import EXIT_TRY_AGAIN, EXIT_USER_ERROR, TransientError, UserError
from utils.storage.errors import describe

log = logging.getLogger(__name__)
HOSTS_PORT = 29500  # as torchrun's
BUCKET_BYTES = 32 * 2**20  # tensors travel in flat pieces of about this size
FAREWELL_S = 5.0  # longer than the others need to notice that a process has left
DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
}
_T = TypeVar("_T")


class LostPeer(TransientError):
    """Another process of the run ended, hangs or cannot be reached; ends with 2 where that one did."""

    leaves_at_once = True  # what waits for the lost process on a device would never end

    def __init__(self, message: str, exit_code: int = EXIT_TRY_AGAIN) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Group:
    """A group of one process. The docstrings say what a group of several does."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files, the console and Weights & Biases."""
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """The sum over the processes, without gradient; the same on all of them."""
        return value

    def sum_with_gradient(self, value: Tensor) -> Tensor:
        """The sum over the processes of a tensor that all their losses depend on."""
        return value

    def replica(self, model: nn.Module, *, sums: bool) -> nn.Module:
        """The model to call; with `sums`, `backward` makes every gradient its sum over the processes."""
        return model

    def backward(self, objective: Tensor) -> None:
        """The gradients of what a `replica` gave, added to those of the micro-batches before."""
        objective.backward()

    def gather(self, value: Tensor) -> Tensor:
        """The processes' tensors, of one shape, joined along their first axis in the order of the ranks."""
        return value

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on at least one process."""
        return flag

    def broadcast(self, value: _T) -> _T:
        """The first process's value, of plain types and tensors; on the others `value` is ignored."""
        return value

    def gather_objects(self, value: _T) -> list[_T]:
        """The value of every process, of plain types and tensors, in the order of the ranks."""
        return [value]

    def share(self, items: np.ndarray) -> np.ndarray:
        """This process's part: item i belongs to rank i % size; the last item fills up to one length."""
        filled = np.concatenate([items, np.repeat(items[-1:], -len(items) % self.size, axis=0)])
        return filled[self.rank :: self.size]

    def interleave(self, value: Tensor) -> Tensor:
        """Put results of `share`, joined in the order of the ranks, into the order of the items."""
        return value.unflatten(0, (self.size, -1)).transpose(0, 1).flatten(0, 1)

    def leave_message(self, text: str, exit_code: int) -> None:
        """Leave a message for the processes that are still running, and the code that this one ends with."""

    def close(self) -> None:
        """Wait for all processes, then leave the group."""


ALONE = Group()


class ProcessGroup(Group):
    """Several processes, through torch.distributed."""

    def __init__(self, rank: int, size: int, store: dist.Store, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._words = dist.PrefixStore("last words", store)
        self._timeout_s = timeout_s
        self._replica: DistributedDataParallel | None = None
        self._sum_failed = False

    def sum(self, value: Tensor) -> Tensor:
        total = value.detach().clone()
        self._call(lambda: dist.all_reduce(total))
        return total

    def sum_with_gradient(self, value: Tensor) -> Tensor:
        return _SumWithGradient.apply(value, self)

    def replica(self, model: nn.Module, *, sums: bool) -> nn.Module:
        if self._replica is None or self._replica.module is not model:
            with warnings.catch_warnings():  # torch 2.9 has no other name for broadcast_buffers
                warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
                # weights and buffers are equal on all processes, and stay so
                self._replica = DistributedDataParallel(
                    model, init_sync=False, broadcast_buffers=False, gradient_as_bucket_view=True
                )
            self._replica.register_comm_hook(self, ProcessGroup._sum_bucket)
        self._replica.require_backward_grad_sync = sums  # what its no_sync() sets
        return self._replica

    def _sum_bucket(self, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are texts
        """Sum a bucket of gradients while others are computed; DDP's own hook would take the mean."""

        def summed(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            with self._noting_failure():
                return future.value()[0]

        with self._noting_failure():
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(summed)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Remember that a sum failed: `backward` raises a RuntimeError for that and for its faults."""
        try:
            yield
        except RuntimeError:
            self._sum_failed = True
            raise

    def backward(self, objective: Tensor) -> None:
        try:
            objective.backward()
        except RuntimeError as error:
            if not self._sum_failed:
                raise
            raise self._lost(error) from error

    def gather(self, value: Tensor) -> Tensor:
        sent = value.detach().contiguous()
        sent = sent.view(torch.uint8) if sent.dtype == torch.bool else sent  # gloo knows no bool
        received = [torch.empty_like(sent) for _ in range(self.size)]
        self._call(lambda: dist.all_gather(received, sent))
        return torch.cat(received).view(value.dtype)

    def any(self, flag: bool) -> bool:
        votes = torch.tensor(int(flag))
        self._call(lambda: dist.all_reduce(votes))
        return bool(votes)

    def broadcast(self, value: _T) -> _T:
        return self._value_of(0, value)

    def gather_objects(self, value: _T) -> list[_T]:
        return [self._value_of(rank, value) for rank in range(self.size)]

    def _value_of(self, sender: int, value: _T) -> _T:
        """One process's value on all of them, as JSON and tensors: pickle would run what it is sent."""
        text, tensors = encode(value) if self.rank == sender else (b"", [])
        size = torch.tensor(len(text))
        self._call(lambda: dist.broadcast(size, sender))
        data = torch.frombuffer(bytearray(text or int(size)), dtype=torch.uint8)
        self._call(lambda: dist.broadcast(data, sender))
        if self.rank != sender:
            value, tensors = decode(bytes(data.numpy()), f"rank {sender}")
        for bucket in _buckets([t.reshape(-1).view(torch.uint8) for t in tensors if t.numel()]):
            flat = torch.cat(bucket)
            self._call(partial(dist.broadcast, flat, sender))
            torch._foreach_copy_(bucket, list(flat.split([part.numel() for part in bucket])))
        return value

    def leave_message(self, text: str, exit_code: int) -> None:
        with _ignoring_lost_store():
            self._words.set(str(self.rank), f"{exit_code} {text}")
            if self.is_first and dist.get_backend() == "gloo":
                # the messages may be kept by this process: let the others notice, and read them
                dist.destroy_process_group()
                readers = [f"read by {rank}" for rank in range(1, self.size)]
                self._words.wait(readers, timedelta(seconds=FAREWELL_S))

    def close(self) -> None:
        self._call(dist.barrier)
        dist.destroy_process_group()

    def _call(self, collective: Callable[[], Any]) -> None:
        try:
            collective()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # what gloo and NCCL raise has no class of its own
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> LostPeer:
        """What a failed collective means: the last words of the other processes, and this one's own error,
        since a GPU's fault shows in a collective first. The code is a user error's where one ended with that.
        """
        log.error("rank %d: a collective failed", self.rank, exc_info=error)
        traceback.clear_frames(error.__traceback__)  # they would keep the connections open
        words: dict[int, str] = {}
        codes: set[int] = set()
        with _ignoring_lost_store():
            for rank in set(range(self.size)) - {self.rank}:
                if self._words.check([str(rank)]):
                    number, _, words[rank] = self._words.get(str(rank)).decode().partition(" ")
                    codes.add(int(number))
            self._words.set(f"read by {self.rank}", "")
        text = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(words.items())) or (
            f"rank {self.rank} lost another of the {self.size} processes of this run, which left no message: "
            f"killed, its machine gone, or silent for {self._timeout_s:g} s"
        )
        code = EXIT_USER_ERROR if EXIT_USER_ERROR in codes else EXIT_TRY_AGAIN
        return LostPeer(f"{text} (rank {self.rank} met {describe(error)})", code)


class HostGroup(ProcessGroup):
    """The hosts of an engine whose tensors are logically global (utils.runtime.xla): they are summed and
    gathered as they are, and every host takes part in each computation. What is only on the hosts goes over
    gloo.
    """

    sum = Group.sum
    sum_with_gradient = Group.sum_with_gradient
    replica = Group.replica
    backward = Group.backward
    gather = Group.gather


@contextmanager
def _ignoring_lost_store() -> Iterator[None]:
    """Ignore a lost store: the launcher that keeps the messages may be gone itself."""
    try:
        yield
    except RuntimeError:
        return


@contextmanager
def _named_if_lost(place: str, size: int) -> Iterator[None]:
    """Turn what torch raises while the processes look for each other into LostPeer."""
    try:
        yield
    except RuntimeError as error:
        raise LostPeer(f"expected {size} processes to meet at {place}, found {describe(error)}") from error


class _SumWithGradient(torch.autograd.Function):
    """all_reduce with an all_reduce as its backward: every loss depends on every process's tensor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return group.sum(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum(gradient), None


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size >= BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def encode(value: Any) -> tuple[bytes, list[Tensor]]:
    """The value as JSON, and its tensors on the host: plain values (None, bool, int, float, str), tensors,
    and lists, tuples and dictionaries of them; raises TypeError for any other type.
    """
    tensors: list[Tensor] = []
    return json.dumps(_to_form(value, tensors)).encode(), tensors


def decode(data: bytes, sender: str) -> tuple[Any, list[Tensor]]:
    """The value, tuples as lists, tensors still to be filled; raises UserError for what is no message."""
    tensors: list[Tensor] = []
    try:
        return _of_form(json.loads(data), tensors), tensors
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise UserError(
            f"{sender}: expected a message of this program, found {len(data)} other bytes; every process has "
            "to run the same version, and nobody else may reach their ports"
        ) from error


def _to_form(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu().contiguous())
        return {"tensor": [str(value.dtype), list(value.shape)]}
    if isinstance(value, Mapping):  # as pairs, since JSON's own keys are texts alone
        return {"items": [[key, _to_form(part, tensors)] for key, part in value.items()]}
    if isinstance(value, list | tuple):
        return [_to_form(part, tensors) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"expected tensors and plain values, found {type(value).__name__}")


def _of_form(form: Any, tensors: list[Tensor]) -> Any:
    if isinstance(form, list):
        return [_of_form(part, tensors) for part in form]
    if not isinstance(form, dict):
        return form
    if "items" in form:
        return {key: _of_form(part, tensors) for key, part in form["items"]}
    dtype, shape = form["tensor"]
    tensors.append(torch.empty(shape, dtype=DTYPES[dtype]))
    return tensors[-1]


def join(device: torch.device, timeout_s: float) -> Group:
    """The group that this process was started in; ALONE where it was started by itself."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return ALONE
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    with _named_if_lost(f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}", size):
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return ProcessGroup(rank, size, store, timeout_s)


def join_hosts(rank: int, size: int, address: str, timeout_s: float, port: int = HOSTS_PORT) -> HostGroup:
    """The group of `size` hosts, of which number 0 has this address."""
    timeout = timedelta(seconds=timeout_s)
    with _named_if_lost(f"{address}:{port}", size):
        store = dist.TCPStore(address, port, size, is_master=rank == 0, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    return HostGroup(rank, size, store, timeout_s)
