"""A second run goes on; runs at the same time lose nothing; what a killed one left goes."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from data_setup import expand
from tests.data_setup.expand.archives import NOISE, OCT, TREE, Disk, flip, make_zip, tree_of
from utils import storage
from utils.errors import UserError


def test_a_rerun_reads_nothing_and_writes_what_is_gone(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.put("a.zip", make_zip(TREE))
    assert disk.run() == 0
    times = {n: os.stat(disk.dst / n).st_mtime_ns for n in TREE}
    with monkeypatch.context() as patch:
        patch.setattr(storage, "read_range", None)
        assert disk.run() == 0
    assert disk.line("a.zip") == "5 there already"
    assert {n: os.stat(disk.dst / n).st_mtime_ns for n in TREE} == times
    (disk.dst / "participants.tsv").write_bytes(b"half")
    (disk.dst / f"{OCT}/9001/a.dcm").unlink()
    assert disk.run() == 2
    assert "'participants.tsv': other_content: expected no file, or one of 15 bytes" in disk.errors
    assert disk.line("a.zip") == "1 failed, 3 there already, 1 written"
    assert disk.run("--overwrite") == 0
    assert disk.tree() == TREE


def test_objects_of_others_are_compared_and_never_replaced_unasked(disk: Disk) -> None:
    disk.put("a.zip", make_zip(TREE))
    theirs = TREE["participants.tsv"].replace(b"9001", b"9009")
    storage.write_bytes(f"{disk.dst}/participants.tsv", theirs)  # same size, other bytes
    storage.write_bytes(f"{disk.dst}/retinal_oct/manifest.tsv", b"longer than it was, by some bytes")
    storage.write_bytes(f"{disk.dst}/{OCT}/9001/a.dcm", NOISE)
    assert disk.run() == 2
    assert disk.line("a.zip") == "2 failed, 1 there already, 2 written"
    assert disk.tree()["participants.tsv"] == theirs
    assert disk.run("--overwrite") == 0
    assert disk.line("a.zip") == "2 written, 3 there already"
    assert disk.tree() == TREE


def test_verify_reads_what_is_there(disk: Disk) -> None:
    disk.put("a.zip", make_zip(TREE))
    assert disk.run() == 0
    (disk.dst / f"{OCT}/9001/a.dcm").write_bytes(flip(NOISE, 1000))
    assert disk.run() == 0  # the size is right, and the archive is finished
    assert disk.run("--verify") == 2
    assert disk.run("--verify", "--overwrite") == 0
    assert disk.line("a.zip") == "4 there already, 1 written"
    assert disk.tree() == TREE


def test_another_archive_of_the_same_name_is_compared(disk: Disk) -> None:
    disk.put("a.zip", make_zip({"x": b"111", "y": b"2"}))
    assert disk.run() == 0
    disk.put("a.zip", make_zip({"x": b"113", "y": b"2"}))
    assert disk.run() == 2
    assert disk.line("a.zip") == "1 failed, 1 there already"
    assert disk.run("--overwrite") == 0
    assert disk.tree() == {"x": b"113", "y": b"2"}


def test_no_workers_are_an_error(disk: Disk) -> None:
    with pytest.raises(UserError, match=r"--workers: expected .+, found 0"):
        disk.run("--workers", "0")


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
    runs = [("--dst", dst, "--src", f"{disk.src}/{name}.zip") for name in "ab"]
    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(storage, "find_sizes", listed_by_both())
        codes = list(pool.map(lambda words: disk.run(*words), runs))
    assert sorted(codes) == [0, 2]
    winner = b"AAA" if codes[0] == 0 else b"BBB"
    assert tree_of(dst) == {"same": winner, "twin": NOISE, "a": b"1", "b": b"2"}
    assert [disk.run(*words) for words in runs] == codes
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
        # what no code can tidy up after a kill
        real_link(partial, Path(partial).with_name(f"left{Path(partial).name}"))
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
