"""Expanding zip archives: what is refused, what is written, what a rerun does; on disk and in a bucket."""

from __future__ import annotations

import io
import json
import os
import stat
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest

from data_setup.expand import cli as expand
from data_setup.expand.archive import CHUNK_BYTES, ArchiveFault, read_directory, read_member
from data_setup.expand.rules import Limits, Refusal, key_of, make_plan, refuse_name, target_of
from data_setup.expand.state import ranges, state_url
from data_setup.store.locks import shard_lock
from tests.support.cloud_proxy import CORRUPT, CUT, RESET, UNFRAMED, Proxy, fault_proxy
from tests.support.cloud_servers import BUCKET, gcs_server
from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import UserError
from utils.storage import clients as cloud

OCT = "retinal_oct/structural_oct/topcon_triton"
NOISE = np.random.default_rng(0).bytes(200_000)
TREE = {
    "participants.tsv": b"person_id\n9001\n",
    "retinal_oct/manifest.tsv": b"person_id\tfilepath\n",
    f"{OCT}/9001/a.dcm": NOISE,
    f"{OCT}/9002/b.dcm": b"\0" * 300_000,
    f"{OCT}/9002/empty.dcm": b"",
}


def make_zip(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED, prefix: str = "") -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(prefix + name, content)
    return data.getvalue()


def entry(name: str, mode: int = 0) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


def zip_of(*entries: tuple[zipfile.ZipInfo, bytes]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for info, content in entries:
            archive.writestr(info, content)
    return data.getvalue()


def patched(data: bytes, name: str, field: int, fmt: str, value: int) -> bytes:
    """The archive with one field of the directory entry of `name` changed; field: its offset in there."""
    at = data.rindex(b"PK\x01\x02", 0, data.rindex(name.encode()))
    return data[: at + field] + struct.pack(fmt, value) + data[at + field + struct.calcsize(fmt) :]


def tree_of(url: str, options: StorageOptions | None = None) -> dict[str, bytes]:
    names = [n for n in storage.find_names(url, options) if not n.startswith(".expand/")]
    return {n: storage.read_bytes(storage.join(url, n), options) for n in names}


class Disk:
    """Archives in one folder, the tree in another."""

    def __init__(self, folder: Path) -> None:
        self.src, self.dst = folder / "zips", folder / "tree"
        self.src.mkdir(parents=True)

    def put(self, name: str, data: bytes) -> None:
        (self.src / name).write_bytes(data)

    def run(self, *arguments: str) -> int:
        return expand.main(
            ["--src", str(self.src), "--dst", str(self.dst), "--workers", "2", *map(str, arguments)]
        )

    def tree(self) -> dict[str, bytes]:
        return tree_of(str(self.dst))

    def report(self) -> list[dict]:
        return json.loads((self.dst / ".expand/report-0-of-1.json").read_text())["archives"]


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


# ---- what is written


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("prefix", ["", "dataset/", "AI-READI/dataset/", "./"])
def test_the_tree_is_what_the_archive_holds(disk: Disk, method: int, prefix: str) -> None:
    disk.put("a.zip", make_zip(TREE, method, prefix))
    assert disk.run() == 0
    assert disk.tree() == TREE


def test_zip64_and_data_descriptors(disk: Disk) -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(Unseekable(data), "w", zipfile.ZIP_DEFLATED) as archive:  # type: ignore[arg-type]
        for name, content in TREE.items():
            with archive.open(zipfile.ZipInfo(name), "w", force_zip64=True) as member:
                member.write(content)
    whole = data.getvalue()
    assert whole.count(b"PK\x07\x08") >= len(TREE)  # descriptors after the data
    disk.put("a.zip", with_zip64_end(whole))
    assert disk.run() == 0
    assert disk.tree() == TREE


class Unseekable(io.RawIOBase):
    """A stream: zipfile then writes sizes after the data."""

    def __init__(self, file: io.BytesIO) -> None:
        self.file = file

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        return self.file.write(data)


def with_zip64_end(data: bytes) -> bytes:
    """The archive with the end records of ZIP64, as one of more than 4 GiB or 65535 members has them."""
    at = data.rindex(b"PK\x05\x06")
    _, _, _, _, count, size, offset, _ = struct.unpack("<4s4H2LH", data[at : at + 22])
    end = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, offset)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, at, 1)
    old = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return data[:at] + end + locator + old


def test_what_is_no_part_of_the_tree_is_skipped_and_counted(
    disk: Disk, capsys: pytest.CaptureFixture
) -> None:
    junk = {"__MACOSX/._a": b"1", f"{OCT}/.DS_Store": b"2", f"{OCT}/9001/._a.dcm": b"3", f"{OCT}/": b""}
    disk.put("a.zip", make_zip(TREE | junk))
    assert disk.run() == 0
    assert disk.tree() == TREE
    assert disk.report()[0]["skipped"] == {"folder": 1, "not_of_the_tree": 3}
    assert "4 skipped (folder 1, not_of_the_tree 3)" in capsys.readouterr().out


def test_names_are_mapped_to_the_tree() -> None:
    same = f"{OCT}/9001/a.dcm"
    for name in (same, f"dataset/{same}", f"x/dataset/{same}", f"./dataset/{same}", f"retinal_oct/{same}"):
        assert target_of(name) == same
    assert target_of("dataset") == "dataset"  # a file of that name
    assert target_of("clinical_data/dataset/x.csv") == "x.csv"
    assert target_of("clinical_data/omop/dataset/x.csv") == "clinical_data/omop/dataset/x.csv"
    assert key_of("A/\u00c9.dcm") == key_of("a/e\u0301.dcm")


def test_one_archive_a_folder_or_a_pattern(disk: Disk) -> None:
    for device in ("triton", "cirrus"):
        disk.put(f"{device}.zip", make_zip({f"{device}.txt": b"x"}))
    disk.put("notes.txt", b"no archive")
    for src, found in (("triton.zip", ["triton"]), ("*.zip", ["cirrus", "triton"]), ("c*", ["cirrus"])):
        names = expand.find_archives(f"{disk.src}/{src}", StorageOptions())
        assert [Path(n).stem for n in names] == found
    with pytest.raises(UserError, match=r"--src .*none\.zip: expected a zip archive, a folder .+ found none"):
        disk.run("--src", f"{disk.src}/none.zip")
    assert disk.run("--shard", "1/2") == 0
    assert set(disk.tree()) == {"triton.txt"}


# ---- what is refused

BAD_NAMES = {
    "../x": Refusal.TRAVERSAL,
    "a/../../x": Refusal.TRAVERSAL,
    "dataset/..": Refusal.TRAVERSAL,
    "/etc/x": Refusal.ABSOLUTE,
    "//host/x": Refusal.ABSOLUTE,
    "C:/x": Refusal.DRIVE,
    "c:x": Refusal.DRIVE,
    "a\\b": Refusal.BACKSLASH,
    "..\\x": Refusal.BACKSLASH,
    "a//b": Refusal.BAD_NAME,
    "a\x00b": Refusal.BAD_NAME,
    "a\nb": Refusal.BAD_NAME,
    ".": Refusal.BAD_NAME,
    "": Refusal.BAD_NAME,
    "gs://bucket/x": Refusal.BAD_NAME,
    "x" * 250: Refusal.BAD_NAME,
    ".expand/state/x": Refusal.RESERVED,
    "a/.EXPAND/x": Refusal.RESERVED,  # the same folder on a disk without case
    "a.partial": Refusal.RESERVED,
}


@pytest.mark.parametrize(("name", "reason"), BAD_NAMES.items())
def test_dangerous_names(name: str, reason: Refusal) -> None:
    found = refuse_name(name)
    assert found is not None
    assert found[0] == reason


BAD_ENTRIES: dict[Refusal, Callable[[], bytes]] = {
    Refusal.TRAVERSAL: lambda: make_zip({"good": b"1", "../../x": b"2"}),
    Refusal.ABSOLUTE: lambda: make_zip({"good": b"1", "/etc/x": b"2"}),
    Refusal.DRIVE: lambda: make_zip({"good": b"1", "C:/x": b"2"}),
    Refusal.BACKSLASH: lambda: make_zip({"good": b"1", "a\\x": b"2"}),
    Refusal.LINK: lambda: zip_of((entry("good"), b"1"), (entry("x", stat.S_IFLNK | 0o777), b"/etc")),
    Refusal.SPECIAL: lambda: zip_of((entry("good"), b"1"), (entry("x", stat.S_IFIFO | 0o644), b"")),
    Refusal.ENCRYPTED: lambda: patched(make_zip({"good": b"1", "x": b"2"}), "x", 8, "<H", 1),
    Refusal.METHOD: lambda: patched(make_zip({"good": b"1", "x": b"2"}), "x", 10, "<H", 9),
    Refusal.DUPLICATE: lambda: make_zip({"good": b"1", "x": b"2", "./x": b"3"}),
    Refusal.CASE: lambda: make_zip({"good": b"1", "a/x": b"2", "A/x": b"3"}),
    Refusal.FILE_AND_FOLDER: lambda: make_zip({"good": b"1", "a": b"2", "a/x": b"3"}),
    Refusal.RATIO: lambda: make_zip({"good": b"1", "x": b"\0" * 2_000_000}),
    Refusal.MEMBER_SIZE: lambda: patched(make_zip({"good": b"1", "x": b"2"}), "x", 24, "<L", 2**31),
}
WHOLE: dict[Refusal, Callable[[], bytes]] = {
    Refusal.MEMBERS: lambda: make_zip({f"{i}": b"1" for i in range(30)}),
    Refusal.TOTAL_RATIO: lambda: make_zip({f"{i}": b"\0" * 2**20 for i in range(17)}),
    Refusal.OVERLAP: lambda: overlapping(),
}


def overlapping() -> bytes:
    """Two entries of the directory that share one member's bytes."""
    data = make_zip({"good": b"1" * 50, "twin": b"2" * 50}, zipfile.ZIP_STORED)
    return patched(patched(data, "twin", 42, "<L", 0), "twin", 20, "<L", 40)


@pytest.mark.parametrize("reason", [*BAD_ENTRIES, *WHOLE])
def test_a_dangerous_archive_is_refused_before_anything_is_written(
    disk: Disk, reason: Refusal, capsys: pytest.CaptureFixture
) -> None:
    disk.put("bad.zip", (BAD_ENTRIES | WHOLE)[reason]())
    disk.put("other.zip", make_zip({"other": b"4"}))
    limits = ["--max-members", "20", "--max-member-gib", "1"]
    assert disk.run(*limits) == 2
    assert disk.tree() == {"other": b"4"}
    assert list(disk.src.parent.rglob("x")) == []
    said = capsys.readouterr().err
    assert f"{reason}: expected " in said
    assert ", found " in said
    assert "bad.zip" in said
    if reason in WHOLE:
        assert disk.run(*limits, "--skip-refused") == 2  # there is no member to skip
        assert disk.tree() == {"other": b"4"}
    else:
        assert disk.run(*limits, "--skip-refused") == 0
        assert disk.tree() == {"good": b"1", "other": b"4"}
        assert disk.report()[0]["refused"][reason] >= 1


def test_two_archives_with_one_name(disk: Disk) -> None:
    disk.put("a.zip", make_zip({"same": b"1", "manifest.tsv": b"of a"}))
    disk.put("b.zip", make_zip({"same": b"1", "MANIFEST.tsv": b"of b", "b": b"2"}))
    assert disk.run() == 2
    assert disk.tree() == {"same": b"1", "manifest.tsv": b"of a"}
    assert disk.report()[1]["refused"] == {"in_two_archives": 1}
    assert disk.run("--skip-refused") == 0
    assert disk.tree() == {"same": b"1", "manifest.tsv": b"of a", "b": b"2"}
    assert disk.report()[1]["repeated"] == 1


@pytest.mark.parametrize("content", [b"1", b"9"])
def test_a_refused_archive_takes_no_place(disk: Disk, content: bytes) -> None:
    disk.put("a.zip", make_zip({"good": b"1", "../x": b"2"}))
    disk.put("b.zip", make_zip({"good": content, "b": b"2"}))
    assert disk.run() == 2
    assert disk.tree() == {"good": content, "b": b"2"}
    assert (disk.report()[1]["written"], disk.report()[1]["repeated"]) == (2, 0)


@pytest.mark.parametrize("workers", ["1", "4"])
def test_the_copy_of_a_damaged_member_is_written_from_another_archive(disk: Disk, workers: str) -> None:
    sound = make_zip({"x": NOISE}, zipfile.ZIP_STORED)
    for name in ("a.zip", "b.zip"):
        disk.put(name, flip(sound, 500))
    disk.put("c.zip", sound)
    disk.put("d.zip", sound)
    assert disk.run("--workers", workers) == 1  # two archives are damaged
    assert disk.tree() == {"x": NOISE}
    found = disk.report()
    assert [a["failed"] for a in found] == [{"bad_crc": 1}, {"bad_crc": 1}, {}, {}]
    assert [a["written"] for a in found] == [0, 0, 1, 0]
    assert found[3]["repeated"] == 1


@pytest.mark.parametrize(("first", "second"), [("x", "X/y/z"), ("x/y/z", "x"), ("x/y/z", "x/Y")])
def test_a_file_of_one_archive_is_no_folder_of_another(
    disk: Disk, first: str, second: str, capsys: pytest.CaptureFixture
) -> None:
    for name, member in (("a.zip", first), ("b.zip", second), ("c.zip", "c")):
        disk.put(name, make_zip({member: b"1"}))
    assert disk.run() == 2
    assert disk.tree() == {first: b"1", "c": b"1"}
    said = capsys.readouterr().err
    assert f"b.zip: {second!r}: file_and_folder: expected" in said
    assert "a.zip" in said


@pytest.mark.parametrize(("there", "member"), [("x", "x/y"), ("x/y", "x")])
def test_a_file_on_the_disk_is_no_folder(disk: Disk, there: str, member: str) -> None:
    storage.write_bytes(f"{disk.dst}/{there}", b"theirs")
    disk.put("a.zip", make_zip({member: b"1", "a": b"2"}))
    assert disk.run() == 1
    assert disk.tree() == {there: b"theirs", "a": b"2"}
    assert disk.report()[0]["failed"] == {"other_content": 1}


@pytest.mark.parametrize("scheme", ["disk", "memory"])
def test_shards_that_run_together_lose_nothing(
    disk: Disk, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both list the destination before one of them writes: the second one finds the other's object."""
    dst = str(disk.dst) if scheme == "disk" else f"memory://{disk.dst}"
    disk.put("a.zip", make_zip({"same": b"AAA", "twin": NOISE, "a": b"1"}))
    disk.put("b.zip", make_zip({"same": b"BBB", "twin": NOISE, "b": b"2"}))
    listed, find_sizes = Barrier(2), storage.find_sizes

    def together(*arguments: object) -> dict[str, int]:
        found = find_sizes(*arguments)  # type: ignore[arg-type]
        listed.wait(30)
        return found

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(storage, "find_sizes", together)
        codes = list(pool.map(lambda i: disk.run("--dst", dst, "--shard", f"{i}/2"), range(2)))
    assert sorted(codes) == [0, 1]
    winner = b"AAA" if codes[0] == 0 else b"BBB"
    assert tree_of(dst) == {"same": winner, "twin": NOISE, "a": b"1", "b": b"2"}
    assert [disk.run("--dst", dst, "--shard", f"{i}/2") for i in range(2)] == codes
    assert not list(disk.dst.rglob("*.partial"))


def test_what_a_killed_run_left_is_gone_after_the_next_one(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.put("a.zip", make_zip(TREE))
    real_link, folders = os.link, set()

    def killed(partial: Path, path: str) -> None:
        if "locks" in Path(path).parts:
            return real_link(partial, path)
        folders.add(Path(partial).parent)
        real_link(partial, Path(partial).with_name("left.partial"))  # what no code can tidy up after a kill
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", killed)
        with pytest.raises(KeyboardInterrupt):
            disk.run()
    assert list(disk.dst.rglob("left.partial"))
    assert folders == {disk.dst / ".expand" / "unfinished-0-of-1"}
    assert disk.run() == 0
    assert disk.tree() == TREE
    assert not list(disk.dst.rglob("*.partial"))


def test_a_run_with_other_shards_tidies_up_after_killed_ones(disk: Disk) -> None:
    """Folders of another number of shards are nobody's; one of a shard of the same number may be in use."""
    disk.put("a.zip", make_zip(TREE))
    own = disk.dst / ".expand"
    for name in ("unfinished-0-of-2", "unfinished-1-of-3", "unfinished-0-of-4", "unfinished-1-of-4"):
        (own / name).mkdir(parents=True)
        (own / name / "left.partial").write_bytes(b"x")
    assert disk.run("--shard", "0/4") == 0
    assert [p.name for p in own.glob("unfinished-*")] == ["unfinished-1-of-4"]
    assert disk.run() == 0
    assert not list(own.glob("unfinished-*"))


# ---- what is damaged


def flip(data: bytes, at: int, bits: int = 0x40) -> bytes:
    return data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :]


def lying(data: bytes, name: str, size: int, content: bytes) -> bytes:
    """A directory that gives another size, with the CRC of as many bytes."""
    data = patched(data, name, 24, "<L", size)
    return patched(data, name, 16, "<L", zlib.crc32(content[:size]))


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "bad_crc": lambda d: patched(d, "x", 16, "<L", 1),
    "bad_stream": lambda d: flip(d, d.index(b"PK\x03\x04") + 31, 0x06),  # a type of block that there is not
    "damaged_header": lambda d: flip(d, d.index(b"PK\x03\x04") + 30),
    "wrong_size": lambda d: lying(d, "x", 500, NOISE),  # more real bytes than the directory says
    "damaged_archive": lambda d: d[: len(d) // 2],
}


@pytest.mark.parametrize("reason", DAMAGE)
def test_damage_is_named_and_the_others_go_on(disk: Disk, reason: str, capsys: pytest.CaptureFixture) -> None:
    disk.put("a.zip", DAMAGE[reason](make_zip({"x": NOISE})))
    disk.put("b.zip", make_zip(TREE))
    assert disk.run() == 1
    assert disk.tree() == TREE
    assert disk.report()[0]["failed"] == {reason: 1}
    assert f"{reason}: expected" in capsys.readouterr().err
    disk.put("a.zip", make_zip({"x": NOISE}))
    assert disk.run() == 0
    assert disk.tree() == TREE | {"x": NOISE}


def test_a_stream_is_not_inflated_beyond_what_the_directory_says(disk: Disk) -> None:
    """The directory of a bomb may say that it is small; a byte more than that is not kept."""
    bomb = make_zip({"x": b"\0" * 50_000_000})
    disk.put("a.zip", lying(bomb, "x", 1000, b"\0" * 1000))
    tracemalloc.start()
    assert disk.run() == 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * CHUNK_BYTES < 50_000_000
    assert disk.tree() == {}
    assert disk.report()[0]["failed"] == {"wrong_size": 1}


# ---- what a rerun does


def test_a_rerun_reads_nothing_and_repairs_what_is_not_as_it_was_left(disk: Disk) -> None:
    disk.put("a.zip", make_zip(TREE))
    assert disk.run() == 0
    times = {n: os.stat(disk.dst / n).st_mtime_ns for n in TREE}
    assert disk.run() == 0
    assert disk.report()[0]["present"] == len(TREE)
    assert {n: os.stat(disk.dst / n).st_mtime_ns for n in TREE} == times
    (disk.dst / "participants.tsv").write_bytes(b"half")
    (disk.dst / f"{OCT}/9001/a.dcm").unlink()
    assert disk.run() == 0
    assert (disk.report()[0]["repaired"], disk.report()[0]["written"]) == (1, 1)
    assert disk.tree() == TREE


def test_objects_of_others_are_compared_and_never_replaced_unasked(disk: Disk) -> None:
    disk.put("a.zip", make_zip(TREE))
    theirs = TREE["participants.tsv"].replace(b"9001", b"9009")
    storage.write_bytes(f"{disk.dst}/participants.tsv", theirs)  # same size, other bytes
    storage.write_bytes(f"{disk.dst}/retinal_oct/manifest.tsv", b"longer than it was, by some bytes")
    storage.write_bytes(f"{disk.dst}/{OCT}/9001/a.dcm", NOISE)
    assert disk.run() == 1
    found = disk.report()[0]
    assert (found["written"], found["compared"], found["failed"]) == (2, 1, {"other_content": 2})
    assert disk.tree()["participants.tsv"] == theirs
    assert disk.run("--overwrite") == 0
    assert disk.tree() == TREE


def test_verify_reads_what_is_there(disk: Disk) -> None:
    disk.put("a.zip", make_zip(TREE))
    assert disk.run() == 0
    (disk.dst / f"{OCT}/9001/a.dcm").write_bytes(flip(NOISE, 1000))
    assert disk.run() == 0  # the size is right: state and listing cannot tell
    assert disk.run("--verify") == 1
    assert disk.run("--verify", "--overwrite") == 0
    assert disk.tree() == TREE
    found = disk.report()[0]
    assert (found["repaired"], found["compared"]) == (1, len(TREE) - 1)  # what is right stays as it is
    assert found["bytes_written"] == len(NOISE)


def test_another_archive_of_the_same_name_makes_the_state_void(disk: Disk) -> None:
    disk.put("a.zip", make_zip({"x": b"111", "y": b"2"}))
    assert disk.run() == 0
    disk.put("a.zip", make_zip({"x": b"113", "y": b"2"}))
    assert disk.run() == 1
    assert disk.report()[0]["failed"] == {"other_content": 1}
    assert disk.report()[0]["compared"] == 1
    assert disk.run("--overwrite") == 0
    assert disk.tree() == {"x": b"113", "y": b"2"}


def test_a_damaged_state_file_is_no_obstacle(disk: Disk) -> None:
    disk.put("a.zip", make_zip(TREE))
    assert disk.run() == 0
    Path(state_url(str(disk.dst), f"{disk.src}/a.zip")).write_text('{"format"')
    assert disk.run() == 0
    assert disk.report()[0]["compared"] == len(TREE)


def test_two_expands_of_one_destination(disk: Disk) -> None:
    disk.put("a.zip", make_zip(TREE))
    with (
        shard_lock(f"{disk.dst}/.expand", 0, 1),
        pytest.raises(UserError, match=r"tree: another expand is at work there: .+process"),
    ):
        disk.run()
    assert disk.tree() == {}
    assert disk.run() == 0


def test_ranges() -> None:
    assert ranges({5, 1, 2, 3, 9}) == [[1, 3], [5, 5], [9, 9]]
    assert ranges(()) == []


@pytest.mark.parametrize("bad", [["--workers", "0"], ["--max-ratio", "-1"], ["--shard", "2/2"]])
def test_wrong_arguments_are_named(disk: Disk, bad: list[str]) -> None:
    with pytest.raises(UserError, match=f"{bad[0]}: expected .+, found"):
        disk.run(*bad)


# ---- in a bucket


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with pytest.MonkeyPatch.context() as patch, gcs_server() as server, fault_proxy(server) as found:
        for name in list(os.environ):
            if name.startswith(("GOOGLE_", "STORAGE_EMULATOR")):
                patch.delenv(name)
        patch.setattr(cloud, "POLICY", replace(cloud.POLICY, attempts=4, first_wait_s=0.005))
        yield found


class Cloud:
    """Archives and the tree in a bucket behind a proxy."""

    def __init__(self, proxy: Proxy, name: str) -> None:
        self.proxy, self.options = proxy, StorageOptions(endpoint_url=proxy.endpoint)
        self.src, self.dst = f"gs://{BUCKET}/{name}/zips", f"gs://{BUCKET}/{name}/tree"

    def put(self, name: str, data: bytes) -> None:
        storage.write_bytes(f"{self.src}/{name}", data, self.options)

    def run(self, *arguments: str) -> int:
        self.proxy.requests.clear()
        where = ["--src", self.src, "--dst", self.dst, "--endpoint-url", self.proxy.endpoint]
        return expand.main([*where, "--workers", "4", *arguments])

    def media(self) -> list[str]:
        """What was asked for the bytes of an object since the run began."""
        return [t for m, t in self.proxy.requests if m == "GET" and "alt=media" in t]

    def tree(self) -> dict[str, bytes]:
        return tree_of(self.dst, self.options)


@pytest.fixture
def bucket(proxy: Proxy, tmp_path: Path) -> Iterator[Cloud]:
    yield Cloud(proxy, tmp_path.name)
    proxy.schedule = lambda method, target: None


def test_in_a_bucket(bucket: Cloud) -> None:
    bucket.put("a.zip", make_zip(TREE))
    bucket.put("b.zip", make_zip({"x": NOISE})[:-30])
    bucket.put("c.zip", make_zip({"y": b"1", "../z": b"2"}))
    assert bucket.run() == 2
    assert bucket.tree() == TREE
    assert bucket.run() == 2
    assert not [t for t in bucket.media() if "tree" in t and ".expand" not in t]  # no object is read again
    assert not [t for m, t in bucket.proxy.requests if m == "POST" and "topcon" in t]
    assert bucket.tree() == TREE


def test_an_answer_with_a_flipped_bit_does_not_condemn_the_archive(bucket: Cloud) -> None:
    """A part of an object comes without a checksum; the archive's own tells, and the member is read again."""
    bucket.put("a.zip", make_zip({"x": NOISE}, zipfile.ZIP_STORED))
    url = f"{bucket.src}/a.zip"
    found = read_directory(url, bucket.options)
    member = make_plan(found.entries, found.start, found.size, Limits()).members[0]
    faults = iter([CORRUPT])
    bucket.proxy.schedule = lambda method, target: next(faults, None)
    assert read_member(url, member, bucket.options) == NOISE
    bucket.proxy.schedule = lambda method, target: CORRUPT
    with pytest.raises(ArchiveFault, match="damaged_header"):
        read_member(url, member, bucket.options)


@pytest.mark.parametrize("fault", [CUT, UNFRAMED])
def test_a_part_of_an_object_is_whole_or_asked_for_again(bucket: Cloud, fault: str) -> None:
    """Without length and checksum, half of an answer looks like all of it."""
    bucket.put("x", NOISE)
    faults = iter([fault])
    bucket.proxy.schedule = lambda method, target: next(faults, None)
    url = f"{bucket.src}/x"
    assert storage.read_range(url, 100, 5000, bucket.options) == NOISE[100:5000]
    assert bucket.proxy.faults[fault] > 0
    size = len(NOISE)
    assert storage.read_range(url, size - 10, size + 10, bucket.options) == NOISE[-10:]
    assert storage.read_range(url, 10, 10, bucket.options) == b""
    assert storage.find_sizes(bucket.src, bucket.options) == {"x": size}


def test_uploads_that_fail_leave_nothing_and_the_next_run_goes_on(bucket: Cloud) -> None:
    bucket.put("a.zip", make_zip(TREE))
    bucket.proxy.schedule = lambda m, t: RESET if m == "POST" and "b.dcm" in t else None
    with pytest.raises(storage.StorageError, match=r"b\.dcm: gave up after 4 attempts"):
        bucket.run("--workers", "1")
    bucket.proxy.schedule = lambda m, t: None
    assert f"{OCT}/9002/b.dcm" not in bucket.tree()
    there = len(bucket.tree())
    assert there > 0
    bucket.proxy.schedule = lambda m, t: CUT if "b.dcm" in t and not bucket.proxy.faults[CUT] else None
    assert bucket.run() == 0
    assert bucket.tree() == TREE
    uploads = [t for m, t in bucket.proxy.requests if m == "POST" and ".expand" not in t]
    assert len([t for t in uploads if "b.dcm" not in t]) == len(TREE) - there - 1
