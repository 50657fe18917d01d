"""`data_setup.expand`: zip archives, sound and changed, and the tree that the command makes of them."""

import argparse
import io
import os
import re
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

from data_setup import expand
from data_setup.expand import CHUNK_BYTES, ArchiveFault, find_archives, key_of, read_members
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


def make_zip(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return data.getvalue()


def patched(data: bytes, name: str, field: int, fmt: str, value: int) -> bytes:
    """The archive with one field of the directory entry of `name` changed; field: its offset in there."""
    # the name follows 46 bytes of an entry; sought alone, one letter may be a byte of today's date
    entry = re.compile(rb"PK\x01\x02.{42}" + re.escape(name.encode()), re.DOTALL)
    at = [match.start() for match in entry.finditer(data)][-1]
    return data[: at + field] + struct.pack(fmt, value) + data[at + field + struct.calcsize(fmt) :]


def flip(data: bytes, at: int, bits: int = 0x40) -> bytes:
    return data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :]


def tree_of(url: str, options: StorageOptions | None = None) -> dict[str, bytes]:
    names = [n for n in storage.find_names(url, options) if not n.startswith(".expand/")]
    return {n: storage.read_bytes(storage.join(url, n), options) for n in names}


class Disk:
    """Archives in one folder, the tree in another."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture) -> None:
        self.src, self.dst, self.capsys = folder / "zips", folder / "tree", capsys
        self.src.mkdir(parents=True)
        self.output = self.errors = ""  # of the last run

    def put(self, name: str, data: bytes) -> None:
        (self.src / name).write_bytes(data)

    def run(self, *arguments: str) -> int:
        where = ["--src", str(self.src), "--dst", str(self.dst), "--workers", "2"]
        code = expand.main([*where, *arguments])
        self.output, self.errors = self.capsys.readouterr()
        return code

    def line(self, name: str) -> str:
        """What the last run printed of one archive."""
        return next(x for x in self.output.splitlines() if f"/{name}: " in x).rpartition(": ")[2]

    def tree(self) -> dict[str, bytes]:
        return tree_of(str(self.dst))


@pytest.fixture
def disk(tmp_path: Path, capsys: pytest.CaptureFixture) -> Disk:
    return Disk(tmp_path, capsys)


# ---- the tree is what the archives hold, in every form of zip, of one archive or many


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_the_tree_is_what_the_archive_holds(disk: Disk, method: int) -> None:
    disk.put("a.zip", make_zip({f"./{name}": data for name, data in TREE.items()}, method))
    assert disk.run() == 0
    assert disk.tree() == TREE
    assert disk.line("a.zip") == "5 written"


def test_a_member_of_many_parts(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_setup.expand.CHUNK_BYTES", 1000)
    disk.put("a.zip", make_zip(TREE, zipfile.ZIP_STORED))
    assert disk.run() == 0
    assert disk.run("--verify") == 0
    assert disk.tree() == TREE


def test_an_extra_field_longer_than_expected(disk: Disk) -> None:
    """zipfile writes the same extra field into the directory and into the local header."""
    data, info = io.BytesIO(), zipfile.ZipInfo("x")
    info.extra = struct.pack("<HH", 0x7075, 3000) + b"\0" * 3000
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(info, NOISE)
    disk.put("a.zip", data.getvalue())
    assert disk.run() == 0
    assert disk.tree() == {"x": NOISE}


def test_zip64_and_data_descriptors(disk: Disk) -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(Unseekable(data), "w", zipfile.ZIP_DEFLATED) as archive:
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

    def write(self, data: bytes) -> int:
        return self.file.write(data)


def with_zip64_end(data: bytes) -> bytes:
    """The archive with the end records of ZIP64, as one of more than 4 GiB or 65535 members has them."""
    at = data.rindex(b"PK\x05\x06")
    _, _, _, _, count, size, offset, _ = struct.unpack("<4s4H2LH", data[at : at + 22])
    end = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, offset)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, at, 1)
    old = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return data[:at] + end + locator + old


def test_folders_and_files_of_macos_are_left_out(disk: Disk) -> None:
    junk = {"__MACOSX/._a": b"1", f"{OCT}/.DS_Store": b"2", f"{OCT}/9001/._a.dcm": b"3", f"{OCT}/": b""}
    disk.put("a.zip", make_zip(TREE | junk))
    assert disk.run() == 0
    assert disk.tree() == TREE


def test_one_archive_a_folder_or_a_pattern(disk: Disk) -> None:
    for device in ("triton", "cirrus"):
        disk.put(f"{device}.zip", make_zip({f"{device}.txt": b"x"}))
    disk.put("notes.txt", b"no archive")
    for src, stems in (("triton.zip", ["triton"]), ("*.zip", ["cirrus", "triton"]), ("c*", ["cirrus"])):
        urls = find_archives(f"{disk.src}/{src}", StorageOptions())
        assert [Path(url).stem for url in urls] == stems
    with pytest.raises(UserError, match=r"--src .*none\.zip: expected a zip archive, a folder .+ found none"):
        disk.run("--src", f"{disk.src}/none.zip")
    assert disk.run("--src", f"{disk.src}/t*") == 0
    assert set(disk.tree()) == {"triton.txt"}


# ---- a second run goes on; runs at the same time lose nothing; what a killed one left goes


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


# ---- what is refused before anything is written; damage is named, and the other archives go on


def zip_of_kind(mode: int) -> bytes:
    """A good member, and one that is a file of this mode."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("good", b"1")
        info = zipfile.ZipInfo("x")
        info.external_attr = mode << 16
        archive.writestr(info, b"/etc")
    return data.getvalue()


BAD_NAMES = (
    *("../x", "a/../../x", "a/..", "/etc/x", "//host/x", "C:/x", "c:x", "a\\b", "..\\x", "a//b", "a\nb"),
    *(".", "./.", "gs://bucket/x", "x" * 250, "a/" * 600 + "x"),
    *(".expand/finished/x", "a/.EXPAND/x", "a.partial"),
)


def overlapping() -> bytes:
    """Two names in the directory, one member."""
    data = make_zip({"good": b"1" * 99, "x": b"2" * 99})
    return patched(data, "x", 42, "<L", 0)


BAD_ARCHIVES: dict[str, Callable[[], bytes]] = {
    "bad_kind": lambda: zip_of_kind(stat.S_IFLNK | 0o777),
    "bad_kind: expected a file": lambda: zip_of_kind(stat.S_IFIFO | 0o644),
    "encrypted": lambda: patched(make_zip({"good": b"1", "x": b"2"}), "x", 8, "<H", 1),
    "bad_method": lambda: patched(make_zip({"good": b"1", "x": b"2"}), "x", 10, "<H", 9),
    "bad_size": lambda: patched(make_zip({"good": b"1", "x": b"2"}), "x", 24, "<L", 2**32 - 2),
    "overlap": overlapping,
    "clash": lambda: make_zip({"good": b"1", "x": b"2", "./x": b"3"}),
    "clash: expected": lambda: make_zip({"good": b"1", "a/x": b"2", "A/x": b"3"}),
    "clash: expected no": lambda: make_zip({"good": b"1", "a": b"2", "a/x": b"3"}),
    "clash: expected no other": lambda: make_zip({"good": b"1", "a/b/x": b"2", "A/B": b"3"}),
    "clash: expected no other file": lambda: make_zip({"good": b"1", "\u00c9": b"2", "e\u0301": b"3"}),
}


def check_refused(disk: Disk, data: bytes, reason: str) -> None:
    """Nothing of the archive is written, the next one is, and one line names both."""
    disk.put("bad.zip", data)
    disk.put("other.zip", make_zip({"other": b"4"}))
    assert disk.run() == 2
    assert disk.tree() == {"other": b"4"}
    assert {p.name for p in disk.src.parent.iterdir()} == {"zips", "tree"}
    assert disk.errors.count("\n") == 1
    assert disk.errors.startswith(f"error: {disk.src}/bad.zip: ")
    assert reason in disk.errors
    assert disk.errors.endswith("; nothing of the archive written\n")


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_leaves_the_destination_is_refused(disk: Disk, name: str) -> None:
    check_refused(disk, make_zip({"good": b"1", name: b"2"}), f"{name[:200]!r}: bad_name: expected ")


@pytest.mark.parametrize("raw", [b"a\0b", b""])
def test_a_name_that_zipfile_would_not_write_is_refused(disk: Disk, raw: bytes) -> None:
    data = make_zip({"good": b"1", "abc": b"2"}).replace(b"abc", raw.ljust(3, b"\0"))
    check_refused(disk, data, "bad_name: expected ")


@pytest.mark.parametrize("reason", BAD_ARCHIVES)
def test_a_dangerous_archive_is_refused_before_anything_is_written(
    disk: Disk, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_setup.expand.MAX_MEMBER_BYTES", 2**31)
    check_refused(disk, BAD_ARCHIVES[reason](), f": {reason}")


def test_what_does_not_fit_on_the_disk_is_refused(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The free space is counted against files that are not there yet."""
    monkeypatch.setattr(storage, "free_bytes", lambda url: 10)
    check_refused(disk, make_zip({"a": b"1" * 6, "b": b"2" * 6}), "too_large: expected up to 10 bytes, free")
    disk.put("bad.zip", make_zip({"other": b"4", "a": b"1" * 10}))
    assert disk.run() == 0


def test_names_that_are_one_file_on_some_disk() -> None:
    assert key_of("A/\u00c9.dcm") == key_of("a/e\u0301.dcm")


def test_two_archives_with_one_name(disk: Disk) -> None:
    disk.put("a.zip", make_zip({"same": b"1", "manifest.tsv": b"of a"}))
    disk.put("b.zip", make_zip({"same": b"1", "b": b"2"}))
    disk.put("c.zip", make_zip({"manifest.tsv": b"of c", "c": b"3"}))
    disk.put("d.zip", make_zip({"MANIFEST.tsv": b"of a", "d": b"4"}))
    assert disk.run() == 2
    assert disk.tree() == {"same": b"1", "manifest.tsv": b"of a", "b": b"2"}
    assert disk.line("b.zip") == "1 in an earlier archive, 1 written"
    for archive, name in (("c.zip", "manifest.tsv"), ("d.zip", "MANIFEST.tsv")):
        clash = f"{archive}: {name!r}: clash: expected no other file for its place, found 'manifest"
        assert clash in disk.errors


@pytest.mark.parametrize("content", [b"1", b"9"])
def test_a_refused_archive_takes_no_place(disk: Disk, content: bytes) -> None:
    disk.put("a.zip", make_zip({"good": b"1", "../x": b"2"}))
    disk.put("b.zip", make_zip({"good": content, "b": b"2"}))
    assert disk.run() == 2
    assert disk.tree() == {"good": content, "b": b"2"}


def test_the_copy_of_a_damaged_member_is_written_from_another_archive(disk: Disk) -> None:
    sound = make_zip({"x": NOISE}, zipfile.ZIP_STORED)
    disk.put("a.zip", flip(sound, 500))
    disk.put("b.zip", sound)
    disk.put("c.zip", sound)
    assert disk.run() == 2
    assert disk.tree() == {"x": NOISE}
    lines = [disk.line(name) for name in ("a.zip", "b.zip", "c.zip")]
    assert lines == ["1 failed", "1 written", "1 in an earlier archive"]


@pytest.mark.parametrize(("first", "second"), [("x", "X/y/z"), ("x/y/z", "x"), ("x/y/z", "x/Y")])
def test_a_file_of_one_archive_is_no_folder_of_another(disk: Disk, first: str, second: str) -> None:
    for name, member in (("a.zip", first), ("b.zip", second), ("c.zip", "c")):
        disk.put(name, make_zip({member: b"1"}))
    assert disk.run() == 2
    assert disk.tree() == {first: b"1", "c": b"1"}
    assert f"b.zip: {second!r}: clash: expected no other file for its place, found {first!r}" in disk.errors


@pytest.mark.parametrize(("there", "member"), [("x", "x/y"), ("x/y", "x")])
def test_a_file_on_the_disk_is_no_folder(disk: Disk, there: str, member: str) -> None:
    storage.write_bytes(f"{disk.dst}/{there}", b"theirs")
    disk.put("a.zip", make_zip({member: b"1"}))
    disk.put("b.zip", make_zip({"b": b"2"}))
    assert disk.run() == 2
    assert disk.tree() == {there: b"theirs", "b": b"2"}
    assert f"{member!r}: clash: expected" in disk.errors


def lying(data: bytes, name: str, size: int, content: bytes) -> bytes:
    """A directory that gives another size, with the CRC of as many bytes."""
    data = patched(data, name, 24, "<L", size)
    return patched(data, name, 16, "<L", zlib.crc32(content[:size]))


def with_more_behind_the_stream() -> bytes:
    """A deflated member whose stream ends before its bytes do; its size and CRC-32 are right."""
    packer, content = zlib.compressobj(wbits=-zlib.MAX_WBITS), b"2" * 99
    data = make_zip({"x": packer.compress(content) + packer.flush() + b"more"}, zipfile.ZIP_STORED)
    return patched(lying(data, "x", len(content), content), "x", 10, "<H", zipfile.ZIP_DEFLATED)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "bad_crc": lambda d: patched(d, "x", 16, "<L", 1),
    "bad_stream": lambda d: flip(d, d.index(b"PK\x03\x04") + 31, 0x06),  # a type of block that there is not
    "bad_stream: expected": lambda d: lying(d, "x", 500, NOISE),  # more real bytes than the directory says
    "bad_stream: expected a stream": lambda d: with_more_behind_the_stream(),
    "bad_size": lambda d: lying(d, "x", len(NOISE) + 1, NOISE),
    "damaged_header": lambda d: flip(d, d.index(b"PK\x03\x04")),
    "damaged_header: expected data": lambda d: flip(
        d, d.index(b"PK\x03\x04") + 29
    ),  # of a longer extra field
    "damaged_archive": lambda d: d[: len(d) // 2],
}


@pytest.mark.parametrize("reason", DAMAGE)
def test_damage_is_named_and_the_others_go_on(disk: Disk, reason: str) -> None:
    disk.put("a.zip", DAMAGE[reason](make_zip({"x": NOISE})))
    disk.put("b.zip", make_zip(TREE))
    assert disk.run() == 2
    assert disk.tree() == TREE
    assert disk.errors.count("\n") == 1
    assert disk.errors.startswith(f"error: {disk.src}/a.zip: ")
    assert f"{reason}" in disk.errors
    assert ": expected " in disk.errors
    disk.put("a.zip", make_zip({"x": NOISE}))
    assert disk.run() == 0
    assert disk.tree() == TREE | {"x": NOISE}


def test_a_sound_member_of_an_archive_with_a_damaged_one_is_written(disk: Disk) -> None:
    disk.put("a.zip", patched(make_zip({"x": NOISE, "y": b"1"}), "x", 16, "<L", 1))
    assert disk.run() == 2
    assert disk.tree() == {"y": b"1"}
    assert "a.zip: 'x': bad_crc: expected CRC-32 00000001, found " in disk.errors
    assert not list((disk.dst / ".expand").rglob("finished"))


def test_a_stream_is_not_inflated_beyond_what_the_directory_says(disk: Disk) -> None:
    """The directory of a bomb may say that it is small; a byte more than that is not kept."""
    bomb = make_zip({"x": b"\0" * 50_000_000})
    disk.put("a.zip", lying(bomb, "x", 1000, b"\0" * 1000))
    tracemalloc.start()
    assert disk.run() == 2
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * CHUNK_BYTES < 50_000_000
    assert disk.tree() == {}
    assert "bad_stream" in disk.errors


# ---- archives and tree in a bucket, with faults in the requests


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with pytest.MonkeyPatch.context() as patch, gcs_server() as server, fault_proxy(server) as server_proxy:
        for name in list(os.environ):
            if name.startswith(("GOOGLE_", "STORAGE_EMULATOR")):
                patch.delenv(name)
        patch.setattr(cloud, "POLICY", replace(cloud.POLICY, attempts=4, first_wait_s=0.005))
        yield server_proxy


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


def test_an_answer_with_a_flipped_bit_does_not_condemn_the_archive(bucket: Cloud) -> None:
    """A part of an object comes without a checksum; the archive's own tells, and the member is read again."""
    bucket.put("a.zip", make_zip({"x": NOISE}, zipfile.ZIP_STORED))
    url = f"{bucket.src}/a.zip"
    (member,) = read_members(url, bucket.options)
    expansion = expand.Expansion(argparse.Namespace(dst=bucket.dst), bucket.options, None)
    faults = iter([CORRUPT])
    bucket.proxy.schedule = lambda method, target: next(faults, None)
    assert expansion._read(url, member) == NOISE
    bucket.proxy.schedule = lambda method, target: CORRUPT
    with pytest.raises(ArchiveFault, match="damaged_header"):
        expansion._read(url, member)
