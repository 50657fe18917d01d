"""Pickle as something that must not be reached, and a peer that sends one."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch._dynamo  # noqa: F401 - it makes a class of pickle's as it is imported
import torch.distributed.distributed_c10d as c10d


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path(self.path).touch, ()


def forbid_pickle(*, writing: bool = True) -> Callable[[], None]:
    """Raise where torch.distributed or the library reads or writes a pickle; returns what undoes that."""
    places = [(c10d, "_object_to_tensor"), (c10d, "_tensor_to_object"), (c10d, "_unpickler")]
    places += [(pickle, name) for name in ("load", "loads", "Unpickler")]
    if writing:
        places += [(pickle, name) for name in ("dump", "dumps", "Pickler")]
    before = [(module, name, getattr(module, name)) for module, name in places]

    def forbidden(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a pickle between processes")

    for module, name, _ in before:
        setattr(module, name, forbidden)

    def undo() -> None:
        for module, name, value in before:
            setattr(module, name, value)

    return undo
