"""Zip archives, sound and changed; a folder of them and the tree that the command makes of it."""

import io
import re
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from data_setup import expand
from utils import storage
from utils.config.schema import StorageOptions

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
