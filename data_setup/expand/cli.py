"""Expand zip archives of a bucket or a disk into a tree of files, without a local copy of an archive.

    python -m data_setup.expand --src gs://BUCKET/zips --dst gs://BUCKET/dataset
    python -m data_setup.expand --src zips --dst dataset --verify

In: --src, one archive, a folder of them or a pattern; --dst, the root of the tree. Out: every member as a
file, written whole or not at all once its size and CRC-32 are right, and a line for each archive. An archive
that is damaged or not safe to expand is named, and the others go on. A second run skips what is there. Rules
and exit codes: docs/guides/prepare.md.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from data_setup.expand.archive import (
    STATE_FOLDER,
    ArchiveFault,
    Member,
    crc_of,
    find_archives,
    key_of,
    read_member,
    read_members,
)
from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import EXIT_USER_ERROR, UserError
from utils.help_pages import PeopleParser
from utils.storage.errors import named_errors
from utils.terminal import say, track

WRITTEN, PRESENT = "written", "there already"


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
        """The member's bytes. An answer for a part of an object has no checksum, so one flipped bit on the
        way does not condemn an archive in a bucket: it is read once more.
        """
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
    """A folder for unfinished files on the destination's disk; a bucket needs none.

    Runs share it. The only run removes what killed runs left there: the system frees their locks.
    """
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


def parse_shard(text: str) -> tuple[int, int]:
    """'i/n' -> (i, n) with 0 <= i < n; raises UserError."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not int(match[1]) < int(match[2]):
        raise UserError(f"--shard: expected i/n with 0 <= i < n, found {text!r}")
    return int(match[1]), int(match[2])


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = PeopleParser("data_setup.expand", __doc__ or "")
    parser.add_argument("--src", required=True, metavar="URL", help="a zip, a folder of zips, or a pattern")
    parser.add_argument("--dst", required=True, metavar="URL", help="the root of the tree")
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="members at a time")
    parser.add_argument("--shard", default="0/1", metavar="i/n", help="archives with number %% n == i only")
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
    shard, num_shards = parse_shard(args.shard)
    options = StorageOptions(endpoint_url=args.endpoint_url)
    urls = find_archives(args.src, options)[shard::num_shards]
    with _staging_folder(args.dst) as staging:
        expansion = Expansion(args, options, staging)
        is_fine = [expansion.expand(url) for url in urls]
    say(f"{len(urls)} archives, {is_fine.count(False)} with errors", flush=True)
    return 0 if all(is_fine) else EXIT_USER_ERROR
