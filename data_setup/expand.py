"""Expand zip archives of a bucket or a disk into a tree of files, without a local copy of an archive.

    python -m data_setup.expand --src gs://BUCKET/zips --dst gs://BUCKET/dataset
    python -m data_setup.expand --src zips --dst dataset --verify

In: --src, one archive, a folder of them or a pattern; --dst, the root of the tree. Out: every member as a
file, written whole or not at all once its size and CRC-32 are right, and a line for each archive. An archive
that is damaged or not safe to expand is named, and the others go on. A second run skips what is there. Rules
and exit codes: docs/guides/prepare.md.
"""

import argparse
import contextlib
import fcntl
import fnmatch
import hashlib
import os
import re
import stat
import struct
import sys
import unicodedata
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

from utils import storage
from utils.cli import require_folder, run_cli
from utils.config.schema import StorageOptions
from utils.errors import EXIT_USER_ERROR, UserError
from utils.help_pages import PeopleParser
from utils.storage.errors import named_errors
from utils.terminal import say, track

# zipfile reads the directory, ZIP64 included (PKWARE APPNOTE 6.3, 4.3.7 and 4.4). Members are inflated here,
# since all readers of one ZipFile wait for one lock.
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
WRITTEN, PRESENT = "written", "there already"


class ArchiveFault(Exception):
    """An archive or a member that cannot be expanded: `reason: expected ..., found ...`."""

    def __init__(self, reason: str, expected: object, actual: object) -> None:
        super().__init__(f"{reason}: expected {expected}, found {actual}")


@dataclass(frozen=True, slots=True)
class Member:
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
            expected = "separate bytes for each member"
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


class Expansion:
    """One run: the files at the destination, and what to do with one archive."""

    def __init__(self, args: argparse.Namespace, options: StorageOptions, staging: str | None) -> None:
        self.args, self.options, self.staging = args, options, staging
        self.sizes = storage.find_sizes(args.dst, options)  # at the start of the run, bytes
        self.places: dict[str, str] = {}  # key of a file or, with a slash, of a folder -> a file's name
        for name in self.sizes:
            self.places |= _places_of(name)
        self.finished: dict[str, tuple[int, int]] = {}  # name -> (size, CRC-32) of a file of this run

    def expand(self, url: str) -> bool:
        """Expand one archive and print what became of it; False when something is wrong with it."""
        try:
            members = read_members(url, self.options)
            self._check_names(members)
            self._check_space(members)
        except ArchiveFault as error:
            say(f"error: {url}: {error}; nothing of the archive written", file=sys.stderr)
            return False
        marker = _marker(members)
        is_trusted = marker in self.sizes and not self.args.verify
        todo = [member for member in members if member.name not in self.finished]
        counts = Counter({"in an earlier archive": len(members) - len(todo)})
        with ThreadPoolExecutor(self.args.workers) as pool:
            results = pool.map(lambda member: self._expand_member(url, member, is_trusted), todo)
            bar = track(results, len(todo), url.rpartition("/")[2], "files")
            for member, result in zip(todo, bar, strict=True):
                if isinstance(result, ArchiveFault):
                    counts["failed"] += 1
                    say(f"error: {url}: {member.name!r}: {result}", file=sys.stderr)
                else:
                    counts[result] += 1
                    self.finished[member.name] = member.size, member.crc
                    self.places |= _places_of(member.name)
        if not counts["failed"] and marker not in self.sizes:
            place = storage.join(self.args.dst, marker)
            storage.create(place, f"{url}\n".encode(), self.options, self.staging)
        words = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        say(f"{url}: {words or 'no files'}", flush=True)
        return not counts["failed"]

    def _expand_member(self, url: str, member: Member, is_trusted: bool) -> str | ArchiveFault:
        """WRITTEN, PRESENT, or what is wrong; raises StorageError."""
        target = storage.join(self.args.dst, member.name)
        size = self.sizes.get(member.name)
        try:
            if size is None:
                data = self._read(url, member)
                if storage.create(target, data, self.options, self.staging):
                    return WRITTEN
                size = storage.stat(target, self.options).size  # another run was first
            if size == member.size and (is_trusted or crc_of(target, size, self.options) == member.crc):
                return PRESENT
            if not self.args.overwrite:
                expected = f"no file, or one of {member.size} bytes with CRC-32 {member.crc:08x}"
                problem = f"another one of {size} bytes; --overwrite replaces it"
                return ArchiveFault("other_content", expected, problem)
            data = self._read(url, member)
        except ArchiveFault as error:
            return error
        storage.write_bytes(target, data, self.options, self.staging)
        return WRITTEN

    def _read(self, url: str, member: Member) -> bytes:
        """The member's bytes; of a bucket, whose answers have no checksum, a faulty one is read once more."""
        try:
            return read_member(url, member, self.options)
        except ArchiveFault:
            if not storage.is_remote(url):
                raise
            return read_member(url, member, self.options)

    def _check_names(self, members: Sequence[Member]) -> None:
        """Raise ArchiveFault when two different files, or a file and a folder, need one place."""
        own: dict[str, str] = {}
        for member in members:
            name, content = member.name, (member.size, member.crc)
            key, *folders = _places_of(name)
            for place in (key, f"{key}/", *(folder.rstrip("/") for folder in folders)):
                other = own.get(place) or self.places.get(place, name)
                if place in own or other != name or self.finished.get(name, content) != content:
                    problem = f"{other!r}, here or in an earlier archive"
                    raise ArchiveFault(f"{name!r}: clash", "no other file for its place", problem)
            own |= _places_of(name)

    def _check_space(self, members: Sequence[Member]) -> None:
        """Raise ArchiveFault where the files that are not there yet take more than the disk has left."""
        free = storage.free_bytes(self.args.dst)
        present = self.sizes.keys() | self.finished.keys()
        size = sum(member.size for member in members if member.name not in present)
        if free is not None and size > free:
            raise ArchiveFault("too_large", f"up to {free} bytes, free at the destination", size)


def _places_of(name: str) -> dict[str, str]:
    """The name under the key of the file and under those of the folders above it, which end in a slash."""
    key = key_of(name)
    return {key: name} | {key[: at + 1]: name for at, letter in enumerate(key) if letter == "/"}


def _marker(members: Sequence[Member]) -> str:
    """The file below the destination that says that these members have all been written."""
    content = sorted((member.name, member.size, member.crc) for member in members)
    digest = hashlib.blake2b(repr(content).encode(), digest_size=16).hexdigest()
    return f"{STATE_FOLDER}/finished/{digest}"


@contextlib.contextmanager
def _staging_folder(dst: str) -> Iterator[str | None]:
    """A folder for unfinished files that runs on a disk share; a single run removes what killed ones left."""
    if storage.is_remote(dst):
        yield None
        return
    own = storage.join(storage.absolute(dst), STATE_FOLDER)
    url = storage.join(own, "unfinished")
    storage.make_dirs(own)
    with named_errors(own):
        descriptor = os.open(own, os.O_RDONLY)
    try:
        with named_errors(own):
            with contextlib.suppress(BlockingIOError):  # another run is at work
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                storage.remove(url, recursive=True)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        storage.make_dirs(url)
        yield url
    finally:
        os.close(descriptor)


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = PeopleParser("data_setup.expand", __doc__ or "")
    parser.add_argument("--src", required=True, metavar="URL", help="a zip, a folder of zips, or a pattern")
    parser.add_argument("--dst", required=True, metavar="URL", help="the root of the tree")
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="members at a time")
    parser.add_argument("--overwrite", action="store_true", help="replace files that are there and differ")
    parser.add_argument("--verify", action="store_true", help="read every file back that is there")
    parser.add_argument("--endpoint-url", metavar="URL", help="an S3-compatible store, or an emulator")
    args = parser.parse_args(argv)
    if args.workers < 1:
        raise UserError(f"--workers: expected a number above 0, found {args.workers}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0, or EXIT_USER_ERROR when something of an archive is not in the tree."""
    args = _parse_arguments(argv)
    options = StorageOptions(endpoint_url=args.endpoint_url)
    require_folder("--dst", args.dst)
    urls = find_archives(args.src, options)
    with _staging_folder(args.dst) as staging:
        expansion = Expansion(args, options, staging)
        is_fine = [expansion.expand(url) for url in urls]
    say(f"{len(urls)} archives, {is_fine.count(False)} with errors", flush=True)
    return 0 if all(is_fine) else EXIT_USER_ERROR


if __name__ == "__main__":
    run_cli(main)
