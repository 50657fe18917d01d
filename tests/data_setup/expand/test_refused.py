"""What is refused before anything is written; damage is named, and the other archives go on."""

import io
import stat
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable

import pytest

from data_setup.expand import CHUNK_BYTES, key_of
from tests.data_setup.expand.archives import NOISE, TREE, Disk, flip, make_zip, patched
from utils import storage


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
