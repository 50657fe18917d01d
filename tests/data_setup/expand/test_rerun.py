"""A rerun reads nothing, writes what is gone, and never replaces others' files unasked."""

from __future__ import annotations

import os

import pytest

from tests.data_setup.expand.archives import NOISE, OCT, TREE, Disk, flip, make_zip
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


@pytest.mark.parametrize("bad", [["--workers", "0"], *(["--shard", s] for s in ("2/2", "1", "a/b", "0/0"))])
def test_wrong_arguments_are_named(disk: Disk, bad: list[str]) -> None:
    with pytest.raises(UserError, match=f"{bad[0]}: expected .+, found"):
        disk.run(*bad)
