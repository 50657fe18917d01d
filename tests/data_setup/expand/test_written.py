"""The tree is what the archives hold, in every form of zip, of one archive or many."""

import io
import struct
import zipfile
from pathlib import Path

import pytest

from data_setup.expand import find_archives
from tests.data_setup.expand.archives import NOISE, OCT, TREE, Disk, make_zip
from utils.config.schema import StorageOptions
from utils.errors import UserError


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
