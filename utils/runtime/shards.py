"""What a model says of its weights so that an engine may spread them, and what of a tensor is here.

In: a model or a tensor. Out: its units; this process's part. The spreading itself: utils.runtime.fsdp, whose
imports take half a second.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn


class Unit(NamedTuple):
    """A module whose weights are gathered together, whenever this method of it is called."""

    module: nn.Module
    method: str = "forward"


@runtime_checkable
class Shardable(Protocol):
    """A model that knows its units."""

    def shard_units(self) -> list[Unit]:
        """Inner units first; together they hold every parameter."""
        ...


def is_part(value: Tensor) -> bool:
    """Whether this is a tensor of which each process holds a part: a DTensor."""
    return hasattr(value, "to_local")


def part(value: Tensor) -> Tensor:
    """What this process holds of a tensor, in the same memory; the tensor itself where nothing is spread."""
    if not is_part(value):
        return value
    own: Tensor = value.detach().to_local()  # type: ignore[attr-defined]  # DTensor's
    return own
