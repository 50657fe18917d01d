"""The processes of a run, as far as one process can tell; tests/whole_runs/test_torchrun.py has real ones."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from data_setup.loader import LoaderError
from pretraining.trial import next_or_stop
from utils.runtime.processes import ALONE, Group, join
from utils.runtime.single import Runtime


class OneOf(Group):
    """A rank of several."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_what_is_shared_comes_together_again(size: int, count: int) -> None:
    """All parts have one length, and the last item fills them up."""
    items = np.arange(10, 10 + count)
    parts = [OneOf(rank, size).share(items) for rank in range(size)]
    assert {len(part) for part in parts} == {math.ceil(count / size)}
    joined = torch.cat([torch.from_numpy(part) for part in parts])
    together = OneOf(0, size).interleave(joined).tolist()
    assert together[:count] == items.tolist()
    assert set(together[count:]) <= set(items[-1:].tolist())


def test_one_process_is_its_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join(torch.device("cpu"), 1.0) is ALONE
    weight = torch.ones(3, requires_grad=True)
    total = ALONE.sum_with_gradient(weight * 2).sum()
    total.backward()
    ALONE.sum_gradients([weight])
    assert torch.equal(weight.grad, torch.full((3,), 2.0))
    assert ALONE.any(True)
    assert not ALONE.any(False)


def failing(error: Exception) -> Iterator[list[dict]]:
    raise error
    yield


def test_a_loader_that_a_signal_ended_is_a_stop_and_no_error() -> None:
    runtime = Runtime(torch.device("cpu"), use_bf16=False)
    assert next_or_stop(iter([[{}]]), runtime, 60.0) == [{}]
    with pytest.raises(LoaderError, match="dead worker"):
        next_or_stop(failing(LoaderError("dead worker")), runtime, 60.0)

    def dies_of_the_signal() -> Iterator[list[dict]]:
        runtime.stop_requested = True
        raise LoaderError("dead worker")
        yield

    assert next_or_stop(dies_of_the_signal(), runtime, 60.0) is None
    assert next_or_stop(iter([[{}]]), runtime, 60.0) is None
