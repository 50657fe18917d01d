"""A zip archive behind a URL: the list of its members, and the bytes of one member.

In: the URL of an archive; `find_archives` lists them. Out: `read_members` returns the files of an archive;
`read_member` returns one of them, checked against the size and the CRC-32 of the directory. A damaged or
dangerous archive raises ArchiveFault; errors of storage stay StorageError. zipfile reads the directory, ZIP64
included. Members are inflated here, since all readers of one ZipFile wait for one lock.
Standard: PKWARE APPNOTE 6.3, sections 4.3.7 and 4.4.
"""

from __future__ import annotations

import fnmatch
import re
import stat
import struct
import unicodedata
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import UserError
from utils.storage.errors import named_errors

STATE_FOLDER = ".expand"  # below the destination: unfinished files and the names of finished archives
CHUNK_BYTES = 8 * 2**20  # of one range request
MAX_MEMBER_BYTES = 4 * 2**30  # a member is held in memory
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_EXTRA_BYTES = 256  # a guess: the local header's extra field may be longer than the directory's
_UNSAFE = re.compile(r"\\|^[A-Za-z]:|[\x00-\x1f\x7f-\x9f]")  # a backslash, a drive, a control character
_JUNK = re.compile(r"(^|/)(__MACOSX/.*|\._[^/]*|\.DS_Store)$")
# zipfile raises these on bytes that are no archive.
_ZIP_ERRORS = (
    *(zipfile.BadZipFile, NotImplementedError, struct.error),
    *(ValueError, LookupError, OverflowError, EOFError),
)


class ArchiveFault(Exception):
    """An archive or a member that cannot be expanded: `reason: expected ..., found ...`."""

    def __init__(self, reason: str, expected: object, actual: object) -> None:
        super().__init__(f"{reason}: expected {expected}, found {actual}")


@dataclass(frozen=True, slots=True)
class Member:
    """One file of an archive."""

    name: str  # relative to the destination
    offset: int  # of its local header, bytes
    stored: int  # bytes in the archive
    size: int  # bytes when expanded
    crc: int
    is_deflated: bool
    limit: int  # where the directory begins: the member ends before, bytes


def find_archives(src: str, options: StorageOptions) -> list[str]:
    """The URLs of the archives that --src names, sorted; raises UserError when there is none."""
    if re.search(r"[*?\[]", src):
        base = re.split(r"[^/]*[*?\[]", src, maxsplit=1)[0].rstrip("/") or "."
        pattern = src.removeprefix(base).lstrip("/")
        names = fnmatch.filter(storage.find_names(base, options), pattern)
        urls = [storage.join(base, name) for name in names]
    elif src.lower().endswith(".zip"):
        urls = [src] if storage.exists(src, options) else []
    else:
        names = storage.find_names(src, options)
        urls = [storage.join(src, name) for name in names if name.lower().endswith(".zip")]
    if not urls:
        raise UserError(f"--src {src}: expected a zip archive, a folder of them or a pattern, found none")
    return urls


def read_members(url: str, options: StorageOptions) -> list[Member]:
    """The files of an archive, without folders and macOS's own files; raises ArchiveFault, StorageError."""
    with named_errors(url), storage.open_url(url, options=options) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                entries, limit = archive.infolist(), archive.start_dir
        except _ZIP_ERRORS as error:
            problem = f"{type(error).__name__}: {error}"
            raise ArchiveFault("damaged_archive", "a zip archive with its directory", problem) from error
    members = []
    _check_apart(entries)
    for e in entries:
        _check_entry(e)
        name = "/".join(part for part in e.orig_filename.split("/") if part != ".")
        if not name.endswith("/") and not _JUNK.search(name):
            is_deflated = e.compress_type == zipfile.ZIP_DEFLATED
            place = e.header_offset, e.compress_size
            members.append(Member(name, *place, e.file_size, e.CRC, is_deflated, limit))
    return members


def read_member(url: str, member: Member, options: StorageOptions) -> bytes:
    """The bytes of one member, checked; raises ArchiveFault, StorageError."""
    start = member.offset
    guess = start + _LOCAL_HEADER.size + len(member.name.encode()) + _EXTRA_BYTES + member.stored
    stored = b"".join(_parts(url, start, min(guess, member.limit), options))
    if len(stored) < _LOCAL_HEADER.size or not stored.startswith(b"PK\x03\x04"):
        raise ArchiveFault("damaged_header", "a local file header", f"{stored[:4]!r} at byte {start}")
    begin = _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack_from(stored)[-2:])  # the name and the extra field
    end = begin + member.stored
    if start + end > member.limit:
        raise ArchiveFault("damaged_header", f"data before byte {member.limit}", f"up to {start + end}")
    stored += b"".join(_parts(url, start + len(stored), start + end, options))
    data = stored[begin:end]
    if member.is_deflated:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            data = inflater.decompress(data, member.size + 1)  # no more than that, whatever the stream holds
        except zlib.error as error:
            raise ArchiveFault("bad_stream", "a deflate stream", error) from error
        if not inflater.eof or inflater.unused_data:
            raise ArchiveFault("bad_stream", f"a stream that ends at {member.size} bytes", "another end")
    if len(data) != member.size:
        raise ArchiveFault("bad_size", f"{member.size} bytes", len(data))
    if (crc := zlib.crc32(data)) != member.crc:
        raise ArchiveFault("bad_crc", f"CRC-32 {member.crc:08x}", f"{crc:08x}")
    return data


def crc_of(url: str, size: int, options: StorageOptions) -> int:
    """The CRC-32 of an object of `size` bytes."""
    crc = 0
    for part in _parts(url, 0, size, options):
        crc = zlib.crc32(part, crc)
    return crc


def key_of(name: str) -> str:
    """Equal for names that are one file on a disk without case or with another Unicode form."""
    return unicodedata.normalize("NFC", name).casefold()


def _check_apart(entries: Sequence[zipfile.ZipInfo]) -> None:
    """Raise ArchiveFault for two entries of the same bytes: a few of them are a whole disk when expanded."""
    for one, other in pairwise(sorted(entries, key=lambda entry: entry.header_offset)):
        if one.header_offset + _LOCAL_HEADER.size + one.compress_size > other.header_offset:
            expected = "bytes of its own for each member"
            raise ArchiveFault(f"{other.orig_filename[:200]!r}: overlap", expected, "those of another one")


def _check_entry(entry: zipfile.ZipInfo) -> None:
    """Raise ArchiveFault for an entry that must not be expanded."""
    name, kind = entry.orig_filename, stat.S_IFMT(entry.external_attr >> 16)
    parts = name.removesuffix("/").split("/")  # "" is in the parts of an absolute name and of gs://...
    is_unsafe = bool({"", ".."} & set(parts)) or set(parts) == {"."} or bool(_UNSAFE.search(name))
    # Object stores take 1024 bytes with the destination's own path; a disk takes 255 for one part.
    is_long = len(name.encode()) > 1000 or any(len(part.encode()) > 240 for part in parts)
    is_reserved = STATE_FOLDER in key_of(name).split("/") or name.endswith(storage.PARTIAL_SUFFIX)
    methods = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
    rules = (
        ("bad_name", is_unsafe, "a name below the destination, with '/' between folders", "another"),
        ("bad_name", is_long, "at most 1000 bytes, and 240 between two '/'", "more"),
        ("bad_name", is_reserved, f"no {STATE_FOLDER} and no {storage.PARTIAL_SUFFIX}", "one of them"),
        ("bad_kind", kind not in (0, stat.S_IFREG, stat.S_IFDIR), "a file or a folder", f"type {kind:o}"),
        ("encrypted", entry.flag_bits & 1, "a member that is not encrypted", "an encrypted one"),
        ("bad_method", entry.compress_type not in methods, "stored or deflate", entry.compress_type),
        ("bad_size", entry.file_size > MAX_MEMBER_BYTES, f"<= {MAX_MEMBER_BYTES} bytes", entry.file_size),
    )
    for reason, is_refused, expected, actual in rules:
        if is_refused:
            raise ArchiveFault(f"{name[:200]!r}: {reason}", expected, actual)


def _parts(url: str, start: int, end: int, options: StorageOptions) -> Iterator[bytes]:
    for position in range(start, end, CHUNK_BYTES):
        yield storage.read_range(url, position, min(position + CHUNK_BYTES, end), options)
