"""The processes of a run, as far as one process can tell; tests/whole_runs/test_torchrun.py has real ones."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from data_setup.loader import LoaderError, next_or_stop
from tests.support.process_factory import run_two
from tests.support.two_processes import CASES, losses_and_weights, settled_batch
from utils.errors import EXIT_TRY_AGAIN, UserError
from utils.runtime.processes import ALONE, Group, decode, join
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
    ALONE.backward(total)
    assert torch.equal(weight.grad, torch.full((3,), 2.0))
    assert ALONE.any(True)
    assert not ALONE.any(False)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two real processes have settled and learned, and how one of them ended the other."""
    out = tmp_path_factory.mktemp("two") / "two.pt"
    run_two([sys.executable, "-m", "tests.support.two_processes", str(out)], out.parent / "process")
    return torch.load(out, weights_only=True)


@pytest.fixture(scope="module")
def two(both: dict[str, Any]) -> list[list[Any]]:
    return both["each"]


def test_a_process_lost_half_way_through_an_update_is_named(both: dict[str, Any]) -> None:
    passed, text, code = both["lost"]
    assert passed == ["forward"]
    assert "rank 0 lost another of the 2 processes of this run" in text
    assert code == EXIT_TRY_AGAIN


def test_out_of_memory_on_one_process_halves_the_batch_of_both(two: list[list[Any]]) -> None:
    """Its pass is cut short half-way; then training goes on."""
    _, loss = settled_batch(Runtime(torch.device("cpu"), use_bf16=False))
    for settled, _ in two:
        assert settled[0] == 1
        assert settled[1] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_learn_what_one_does(two: list[list[Any]], name: str) -> None:
    """The same losses and norms, and one set of weights; what is not finite on one is skipped on both."""
    losses, weights = losses_and_weights(Runtime(torch.device("cpu"), use_bf16=False), name)
    of_first, of_second = (saved[name] for _, saved in two)
    assert math.isnan(losses[2])
    assert of_first[0] == pytest.approx(losses, rel=1e-4, nan_ok=True)
    assert of_second[0] == pytest.approx(of_first[0], rel=1e-12, nan_ok=True)
    assert weights.keys() == of_first[1].keys()
    for key, value in of_first[1].items():
        assert torch.equal(value, of_second[1][key]), key


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


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04cposix\nsystem\n",
        b'{"tensor": ["torch.float32", [-1]]}',
        b'{"tensor": ["os.system", [1]]}',
        b'{"code": 1}',
        b'{"items": [[[1], 2]]}',
        b"[" * 100_000,
    ],
    ids=range(6),
)
def test_what_is_no_message_is_one_line(data: bytes) -> None:
    with pytest.raises(UserError, match=rf"^rank 1: expected a message .+, found {len(data)} other bytes"):
        decode(data, "rank 1")
