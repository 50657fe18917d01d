"""A zip archive behind a URL: its directory, and single members, through range requests.

In: the URL of an archive; `find_archives` finds them. Out: `read_directory` its entries; `read_member` one
file, whole and checked: every stored byte used, the size and the CRC-32 those of the directory. What is not
as it should be is an `ArchiveFault`; errors of storage stay StorageError. zipfile reads the directory (ZIP64
included); members are inflated here, since a reader of zipfile holds a lock on the one file of all of them.
Standard: PKWARE APPNOTE 6.3, sections 4.3.7 and 4.4.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from data_setup.expand.rules import Member
from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import UserError
from utils.storage.errors import named_errors

CHUNK_BYTES = 8 * 2**20  # of one range request, and of one step of inflating
_HEADER = struct.Struct("<4s5H3L2H")
_ROOM_FOR_EXTRA = 256  # bytes; the local extra field may differ from the directory's
# What zipfile raises on bytes that are no archive.
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    NotImplementedError,
    struct.error,
    ValueError,
    LookupError,
    OverflowError,
    EOFError,
)


class ArchiveFault(Exception):
    """Damage to an archive or a member: `reason: expected ..., found ...`."""

    def __init__(self, reason: str, expected: object, found: object) -> None:
        super().__init__(reason, expected, found)
        self.reason = reason

    def __str__(self) -> str:
        reason, expected, found = self.args
        return f"{reason}: expected {expected}, found {found}"


@dataclass(frozen=True)
class Directory:
    """The central directory of an archive of `size` bytes; `digest` tells its content."""

    entries: list[zipfile.ZipInfo]
    start: int
    size: int
    digest: str


def find_archives(src: str, options: StorageOptions) -> list[str]:
    """The URLs of the archives that --src means, in the order of their names; raises UserError."""
    if re.search(r"[*?\[]", src):
        base = re.split(r"[^/]*[*?\[]", src, maxsplit=1)[0].rstrip("/") or "."
        pattern = src.removeprefix(base).lstrip("/")
        names = [n for n in storage.find_names(base, options) if fnmatch.fnmatchcase(n, pattern)]
        found = [storage.join(base, n) for n in names]
    elif src.lower().endswith(".zip"):
        found = [src] if storage.exists(src, options) else []
    else:
        names = storage.find_names(src, options)
        found = [storage.join(src, n) for n in names if n.lower().endswith(".zip")]
    if not found:
        raise UserError(f"--src {src}: expected a zip archive, a folder of them or a pattern, found none")
    return found


def read_directory(url: str, options: StorageOptions | None = None) -> Directory:
    """Read the directory alone; raises ArchiveFault damaged_archive, StorageError."""
    with named_errors(url), storage.open_url(url, options=options) as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        try:
            with zipfile.ZipFile(file) as archive:
                entries, start = archive.infolist(), archive.start_dir
        except _ZIP_ERRORS as error:
            found = f"{type(error).__name__}: {error}"
            raise ArchiveFault("damaged_archive", "a zip archive with its directory", found) from error
    digest = hashlib.blake2b(digest_size=16)
    for e in entries:
        said = (e.orig_filename, e.header_offset, e.compress_size, e.file_size, e.CRC, e.compress_type)
        digest.update(repr(said).encode("utf-8", "surrogatepass"))
    return Directory(entries, start, size, digest.hexdigest())


def read_member(url: str, member: Member, options: StorageOptions | None = None) -> bytes:
    """The member's bytes; raises ArchiveFault, StorageError. A bucket's bytes get a second chance.

    A part of an object comes without a checksum: what one bad answer broke is whole in the next one.
    """
    try:
        return _read_member(url, member, options)
    except ArchiveFault:
        if not storage.is_remote(url):
            raise
    return _read_member(url, member, options)


def crc_of(url: str, size: int, options: StorageOptions | None = None) -> int:
    """CRC-32 of an object of `size` bytes, read in parts."""
    crc = 0
    for start in range(0, size, CHUNK_BYTES):
        crc = zlib.crc32(storage.read_range(url, start, min(start + CHUNK_BYTES, size), options), crc)
    return crc


def _read_member(url: str, member: Member, options: StorageOptions | None) -> bytes:
    data, crc = io.BytesIO(), 0
    for piece in _inflated(_stored(url, member, options), member):
        if data.tell() + len(piece) > member.size:
            raise ArchiveFault("wrong_size", f"{member.size} bytes", "more")
        crc = zlib.crc32(piece, crc)
        data.write(piece)
    if data.tell() != member.size:
        raise ArchiveFault("wrong_size", f"{member.size} bytes", data.tell())
    if crc != member.crc:
        raise ArchiveFault("bad_crc", f"CRC-32 {member.crc:08x}", f"{crc:08x}")
    return data.getvalue()


def _stored(url: str, member: Member, options: StorageOptions | None) -> Iterator[bytes]:
    """The stored bytes in chunks; the local header comes with the first."""
    room = _HEADER.size + len(member.name.encode("utf-8", "surrogatepass")) + _ROOM_FOR_EXTRA
    stop = member.offset + min(CHUNK_BYTES, room + member.stored)
    head = storage.read_range(url, member.offset, stop, options)
    if len(head) < _HEADER.size or not head.startswith(b"PK\x03\x04"):
        raise ArchiveFault("damaged_header", "a local file header", f"{head[:4]!r} at {member.offset}")
    _, _, flags, method, *_, name_bytes, extra_bytes = _HEADER.unpack_from(head)
    raw = head[_HEADER.size : _HEADER.size + name_bytes]
    name = raw.decode("utf-8" if flags & 0x800 else "cp437", "replace")
    if (name, method) != (member.name, member.method):
        said = f"{member.name!r} by method {member.method}, as in the directory"
        raise ArchiveFault("damaged_header", said, f"{name!r} by method {method}")
    begin = _HEADER.size + name_bytes + extra_bytes
    first = head[begin : begin + member.stored]
    yield first
    position, left = member.offset + begin + len(first), member.stored - len(first)
    while left:
        chunk = storage.read_range(url, position, position + min(CHUNK_BYTES, left), options)
        if not chunk:
            raise ArchiveFault("truncated", f"{member.stored} stored bytes", member.stored - left)
        yield chunk
        position, left = position + len(chunk), left - len(chunk)


def _inflated(chunks: Iterator[bytes], member: Member) -> Iterator[bytes]:
    """Expanded bytes in pieces of CHUNK_BYTES at most, whatever the stream claims."""
    if member.method == zipfile.ZIP_STORED:
        yield from chunks
        return
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        for chunk in chunks:
            while chunk:
                yield inflater.decompress(chunk, CHUNK_BYTES)
                chunk = inflater.unconsumed_tail
                if inflater.eof:
                    break
        yield inflater.flush()
    except zlib.error as error:
        raise ArchiveFault("bad_stream", "a deflate stream", error) from error
    if not inflater.eof or inflater.unused_data or next(chunks, None):
        found = "bytes after its end" if inflater.eof else "no end"
        raise ArchiveFault("bad_stream", f"a deflate stream of {member.stored} bytes", found)
