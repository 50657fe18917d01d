"""Damage is named, nothing of it is written, and the other archives go on."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Callable

import pytest

from data_setup.expand.archive import CHUNK_BYTES
from tests.data_setup.expand.archives import NOISE, TREE, Disk, flip, make_zip, patched


def lying(data: bytes, name: str, size: int, content: bytes) -> bytes:
    """A directory that gives another size, with the CRC of as many bytes."""
    data = patched(data, name, 24, "<L", size)
    return patched(data, name, 16, "<L", zlib.crc32(content[:size]))


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "bad_crc": lambda d: patched(d, "x", 16, "<L", 1),
    "bad_stream": lambda d: flip(d, d.index(b"PK\x03\x04") + 31, 0x06),  # a type of block that there is not
    "bad_stream: expected": lambda d: lying(d, "x", 500, NOISE),  # more real bytes than the directory says
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
