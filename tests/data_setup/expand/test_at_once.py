"""Runs at the same time lose nothing, and what a killed one left is gone after the next."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from data_setup.expand import cli as expand
from tests.data_setup.expand.archives import NOISE, TREE, Disk, make_zip, tree_of
from utils import storage


def listed_by_both() -> Callable[..., dict[str, int]]:
    """storage.find_sizes that returns when two runs have called it."""
    listed, find_sizes = Barrier(2), storage.find_sizes

    def find(*arguments: object) -> dict[str, int]:
        sizes = find_sizes(*arguments)
        listed.wait(30)
        return sizes

    return find


@pytest.mark.parametrize("scheme", ["disk", "memory"])
def test_runs_at_the_same_time_lose_nothing(disk: Disk, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both list the destination before one of them writes: the second one finds the other's object."""
    dst = str(disk.dst) if scheme == "disk" else f"memory://{disk.dst}"
    disk.put("a.zip", make_zip({"same": b"AAA", "twin": NOISE, "a": b"1"}))
    disk.put("b.zip", make_zip({"same": b"BBB", "twin": NOISE, "b": b"2"}))
    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(storage, "find_sizes", listed_by_both())
        codes = list(pool.map(lambda i: disk.run("--dst", dst, "--shard", f"{i}/2"), range(2)))
    assert sorted(codes) == [0, 2]
    winner = b"AAA" if codes[0] == 0 else b"BBB"
    assert tree_of(dst) == {"same": winner, "twin": NOISE, "a": b"1", "b": b"2"}
    assert [disk.run("--dst", dst, "--shard", f"{i}/2") for i in range(2)] == codes
    assert not list(disk.dst.rglob("*.partial"))


def test_the_same_command_twice_at_the_same_time(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.put("a.zip", make_zip(TREE))
    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(storage, "find_sizes", listed_by_both())
        assert list(pool.map(lambda _: disk.run(), range(2))) == [0, 0]
    assert disk.tree() == TREE


def test_what_a_killed_run_left_is_gone_after_the_next_one(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.put("a.zip", make_zip(TREE))
    real_link, folders = os.link, set()

    def killed(partial: Path, path: str) -> None:
        folders.add(Path(partial).parent)
        real_link(
            partial, Path(partial).with_name(f"left{Path(partial).name}")
        )  # what no code can tidy up after a kill
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", killed)
        with pytest.raises(KeyboardInterrupt):
            disk.run()
    assert list(disk.dst.rglob("left*.partial"))
    assert folders == {disk.dst / ".expand" / "unfinished"}
    assert disk.tree() == {}
    with expand._staging_folder(str(disk.dst)):  # another run is at work: its unfinished files stay
        (disk.dst / ".expand/unfinished/theirs.partial").write_bytes(b"x")
        assert disk.run() == 0
        assert list(disk.dst.rglob("theirs.partial"))
    assert disk.run() == 0
    assert disk.tree() == TREE
    assert not list(disk.dst.rglob("*.partial"))
