"""The processes of a run, as far as one process can tell; tests/whole_runs/test_torchrun.py has real ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from data_setup.loader import LoaderError
from pretraining.trial import next_or_stop
from utils.runtime.processes import ALONE, Group, join
from utils.runtime.single import Runtime


class OneOf(Group):
    """A rank of several whose `gather_objects` answers with what the others were given."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.parts: list[list[str]] = []

    def gather_objects(self, value: list[str]) -> list[list[str]]:
        assert value == self.parts[self.rank]
        return self.parts


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_what_is_shared_comes_together_again(size: int, count: int) -> None:
    items = [f"item {i}" for i in range(count)]
    ranks = [OneOf(r, size) for r in range(size)]
    parts = [[f"done {item}" for item in rank.split_among_ranks(items)] for rank in ranks]
    assert sum(map(len, parts)) == count
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for rank, part in zip(ranks, parts, strict=True):
        rank.parts = parts
        assert rank.merge_from_ranks(part) == [f"done {item}" for item in items]


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


class HearsAnother(Group):
    """A rank of several, of which another one has the flag set."""

    def any(self, flag: bool) -> bool:
        return True


def test_another_processs_sigterm_is_a_stop() -> None:
    runtime = Runtime(torch.device("cpu"), use_bf16=False, group=HearsAnother())
    assert next_or_stop(iter([[{}]]), runtime, 60.0) is None


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
