"""Expand zip archives of a bucket (or a disk) into the AI-READI tree, without a local copy of any archive.

In: --src, one archive, a folder of them or a pattern; --dst, the root of the tree. Out: every member as an
object of its own, checked against the archive's CRC-32 and size before it is written, and written whole or
not at all; a line for each archive; DST/.expand/report-i-of-n.json. An archive with dangerous names, links or
sizes is refused before anything of it is written. A rerun goes on where the last one ended. Limits, exit
codes and what resumes: docs/expand.md.

    python -m data_setup.expand --src URL --dst URL [--workers N] [--shard i/n] [--overwrite] [--verify]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from data_setup.expand.archive import ArchiveFault, crc_of, find_archives, read_directory, read_member
from data_setup.expand.rules import STATE_FOLDER, Limits, Member, Plan, make_plan
from data_setup.expand.state import Archive, Places, load_state, mark_done, save_state, tell
from data_setup.prepare import parse_shard
from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import EXIT_USER_ERROR, UserError

EXIT_FOUND_BAD = 1  # damaged archives or members, or other content in their place
CONFLICT = "other_content"  # an object is there that this program has not written and that differs
WRITE, COMPARE, REPAIR = "write", "compare", "repair"  # what to do with a member


class Expansion:
    """One run: archives in, objects out; everything but the members themselves happens in one thread."""

    def __init__(self, dst: str, staging: str, options: StorageOptions, args: argparse.Namespace) -> None:
        self.dst, self.staging, self.options, self.args = dst, staging, options, args
        self.limits = Limits(
            args.max_ratio, args.max_total_ratio, int(args.max_member_gib * 2**30), args.max_members
        )
        self.present: dict[str, int] = {}  # object below the destination -> bytes
        self.places = Places()
        self.pool = ThreadPoolExecutor(args.workers)
        self.running: dict[Future[tuple[str, int]], tuple[Archive, Member, str]] = {}
        self.in_flight = 0  # expanded bytes of the running members
        self.archives: list[Archive] = []
        self.bar = tqdm(desc="expand", unit="B", unit_scale=True, disable=not sys.stderr.isatty(), total=0)

    def run(self, urls: Sequence[str]) -> None:
        """Expand the archives; raises StorageError when the storage fails, after saving what is done."""
        self.present = storage.find_sizes(self.dst, self.options)
        with self.pool:
            try:
                for archive, member, action in self._tasks(urls):
                    while self.running and (
                        len(self.running) >= 2 * self.args.workers
                        or self.in_flight + member.size > self.args.memory_gib * 2**30
                    ):
                        self._collect()
                    self._submit(archive, member, action)
                while self.running:
                    self._collect()
            finally:
                self.pool.shutdown(cancel_futures=True)
                for future, (archive, member, _) in self.running.items():
                    if future.done() and not future.cancelled() and future.exception() is None:
                        mark_done(archive, member)
                for archive in self.archives:
                    save_state(self.dst, archive, self.options, now=True)
                self.bar.close()

    def _tasks(self, urls: Sequence[str]) -> Iterator[tuple[Archive, Member, str]]:
        """What is to do, archive by archive; the directories of the next ones are read meanwhile."""
        ahead: deque[Future[Archive]] = deque()
        waiting = deque(urls)
        while waiting or ahead:
            while waiting and len(ahead) < self.args.workers:
                ahead.append(self.pool.submit(self._open, waiting.popleft()))
            archive = ahead.popleft().result()
            self.archives.append(archive)
            self.places.refuse_clashes(archive)
            if self._is_refused(archive):
                archive.plan.members = []
            todo = []
            for member in self.places.take(archive):
                if action := self._action(archive, member):
                    todo.append((member, action))
                else:
                    self.places.settle(member)
            self.bar.total += sum(m.size for m, _ in todo)
            archive.pending += len(todo)
            if archive.pending == 0:
                self._finish(archive)
            for member, action in todo:
                yield archive, member, action

    def _open(self, url: str) -> Archive:
        """Read and judge one archive's directory, and its state."""
        archive = Archive(url)
        try:
            directory = archive.directory = read_directory(url, self.options)
        except ArchiveFault as error:
            archive.fail("", error.reason, str(error))
            return archive
        except storage.StorageNotFoundError as error:
            archive.fail("", "missing_archive", f"missing_archive: {error.problem}")
            return archive
        archive.plan = make_plan(directory.entries, directory.start, directory.size, self.limits)
        directory.entries.clear()  # the plan has what is needed of them
        if archive.plan.members and not self.args.verify:
            archive.done = load_state(self.dst, archive, self.options)
        return archive

    def _is_refused(self, archive: Archive) -> bool:
        plan: Plan = archive.plan
        return plan.whole is not None or bool(plan.refused and not self.args.skip_refused)

    def _action(self, archive: Archive, member: Member) -> str | None:
        """What to do with a member; None: it is there."""
        found = self.present.get(member.target)
        is_ours = member.index in archive.done
        if is_ours and found == member.size:
            archive.counts["present"] += 1
            return None
        archive.done.discard(member.index)
        if found is None:
            return WRITE
        if found == member.size:
            return COMPARE
        if self.args.overwrite or is_ours:
            return REPAIR
        said = f"an object of {found} bytes; --overwrite replaces it"
        archive.fail(member.name, CONFLICT, f"{CONFLICT}: expected {member.size} bytes or none, found {said}")
        return None

    def _expand(self, url: str, member: Member, action: str) -> tuple[str, int]:
        """In a worker: (what was done, bytes written). Raises ArchiveFault, StorageError."""
        target = storage.join(self.dst, member.target)
        if action == COMPARE:
            with _obstacles_named():
                crc = crc_of(target, member.size, self.options)
            if crc == member.crc:
                return COMPARE, 0
            if not self.args.overwrite:
                said = f"{crc:08x}; --overwrite replaces it"
                raise ArchiveFault(CONFLICT, f"CRC-32 {member.crc:08x} or no object", said)
            action = REPAIR
        data = read_member(url, member, self.options)
        with _obstacles_named():
            if action == REPAIR:
                storage.write_bytes(target, data, self.options, self.staging)
                return REPAIR, member.size
            if storage.create(target, data, self.options, self.staging):
                return WRITE, member.size
            size = storage.stat(target, self.options).size  # another shard was first
            if size != member.size or crc_of(target, size, self.options) != member.crc:
                raise ArchiveFault(
                    CONFLICT, "no object", f"another one of {size} bytes, new since the listing"
                )
            return COMPARE, 0

    def _collect(self) -> None:
        """Wait for at least one member, and do what follows from its end."""
        for future in wait(self.running, return_when=FIRST_COMPLETED).done:
            archive, member, action = self.running[future]
            settled = [archive]
            try:
                action, count = future.result()
            except ArchiveFault as error:
                archive.fail(member.name, error.reason, str(error))
                twin = self.places.pass_on(member) if error.reason != CONFLICT else None
                if twin is not None:
                    self.bar.total += twin[1].size
                    self._submit(*twin, action)
                elif error.reason == CONFLICT:
                    settled += self._settle(member)
            else:
                archive.bytes_written += count
                archive.counts[{WRITE: "written", COMPARE: "compared", REPAIR: "repaired"}[action]] += 1
                mark_done(archive, member)
                settled += self._settle(member)
            del self.running[future]
            self.in_flight -= member.size
            self.bar.update(member.size)
            for one in settled:
                one.pending -= 1
                if one.pending == 0:
                    self._finish(one)
            save_state(self.dst, archive, self.options)

    def _settle(self, member: Member) -> list[Archive]:
        """The archives whose equal member is not needed."""
        archives = [archive for archive, _ in self.places.settle(member)]
        for archive in archives:
            archive.counts["repeated"] += 1
        return archives

    def _submit(self, archive: Archive, member: Member, action: str) -> None:
        future = self.pool.submit(self._expand, archive.url, member, action)
        self.running[future] = (archive, member, action)
        self.in_flight += member.size

    def _finish(self, archive: Archive) -> None:
        """Save the state and tell what became of the archive, its failures and refusals by name."""
        save_state(self.dst, archive, self.options, now=True)
        self.bar.clear()
        tell(archive, self.args.skip_refused)
        archive.plan.members = []


@contextmanager
def _obstacles_named() -> Iterator[None]:
    """A file of a disk where a folder has to be, or the other way round, is this one member's fault."""
    try:
        yield
    except storage.StorageError as error:
        if isinstance(error.__cause__, (NotADirectoryError, IsADirectoryError, FileExistsError)):
            expected = "folders above the file and none in its place"
            raise ArchiveFault(CONFLICT, expected, error.problem) from error
        raise


@contextmanager
def _folder_of_its_own(own: str, shard: int, num_shards: int) -> Iterator[str]:
    """A folder for unfinished files, without what killed runs left there; an object store needs none.

    With the shard's lock held: no run with another number of shards is at work then, so their folders go too.
    """
    url = storage.join(own, f"unfinished-{shard}-of-{num_shards}")
    if storage.is_remote(url):
        yield url
        return
    for name in storage.list_names(own):
        match = re.fullmatch(r"unfinished-(\d+)-of-(\d+)", name)
        if match and (int(match[2]) != num_shards or int(match[1]) == shard):
            storage.remove(storage.join(own, name), recursive=True)
    storage.make_dirs(url)
    yield url
    storage.remove(url, recursive=True)


def exit_code(archives: Sequence[Archive], skip_refused: bool) -> int:
    """2 when anything was refused that was not asked to be skipped, 1 for damage, else 0."""
    if any(a.plan.whole or (a.plan.refused and not skip_refused) for a in archives):
        return EXIT_USER_ERROR
    return EXIT_FOUND_BAD if any(a.failed for a in archives) else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    default = Limits()
    parser = argparse.ArgumentParser(
        prog="python -m data_setup.expand",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--src", required=True, metavar="URL", help="a zip, a folder of zips, or a pattern")
    parser.add_argument("--dst", required=True, metavar="URL", help="the root of the tree")
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="members at a time")
    parser.add_argument("--shard", default="0/1", metavar="i/n", help="archives with number %% n == i only")
    parser.add_argument("--overwrite", action="store_true", help="replace objects that are there and differ")
    parser.add_argument("--verify", action="store_true", help="read what is there and compare its CRC-32")
    parser.add_argument(
        "--skip-refused", action="store_true", help="leave refused members out, expand the others"
    )
    limits: list[tuple[str, Any, float, str]] = [
        ("--max-ratio", float, default.max_ratio, "expanded / stored bytes of a member over 1 MiB"),
        ("--max-total-ratio", float, default.max_total_ratio, "expanded bytes / archive, over 16 MiB"),
        ("--max-member-gib", float, default.max_member_bytes / 2**30, "expanded size of a member"),
        ("--max-members", int, default.max_members, "entries of an archive"),
        ("--memory-gib", float, 1.0, "expanded bytes in work at a time (one member may be more)"),
    ]
    for name, kind, value, said in limits:
        parser.add_argument(name, type=kind, default=value, metavar="X", help=f"{said} (default {value:g})")
    parser.add_argument("--endpoint-url", metavar="URL", help="an S3-compatible store, or an emulator")
    parser.add_argument("--profile", metavar="NAME", help="of the AWS credentials file")
    args = parser.parse_args(argv)
    for name, _, _, _ in [*limits, ("--workers", int, 0, "")]:
        value = getattr(args, name.lstrip("-").replace("-", "_"))
        if not value > 0:
            raise UserError(f"{name}: expected a number above 0, found {value}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stage; 0, EXIT_FOUND_BAD, or EXIT_USER_ERROR."""
    args = _arguments(argv)
    shard, num_shards = parse_shard(args.shard)
    options = StorageOptions(endpoint_url=args.endpoint_url, profile=args.profile)
    start = time.perf_counter()
    urls = find_archives(args.src, options)[shard::num_shards]
    own = storage.join(args.dst, STATE_FOLDER)
    with _folder_of_its_own(own, shard, num_shards) as staging:
        expansion = Expansion(args.dst, staging, options, args)
        expansion.run(urls)
    seconds = time.perf_counter() - start
    report = {
        "seconds": round(seconds, 3),
        "archives": [archive.summary() for archive in expansion.archives],
    }
    name = f"report-{shard}-of-{num_shards}.json"
    storage.write_text(storage.join(own, name), json.dumps(report, indent=1) + "\n", options)
    files = sum(a.counts["written"] + a.counts["repaired"] for a in expansion.archives)
    total = sum(a.bytes_written for a in expansion.archives)
    print(f"{len(urls)} archives: {files} files, {total / 1e6:.1f} MB written in {seconds:.1f} s", flush=True)
    return exit_code(expansion.archives, args.skip_refused)
