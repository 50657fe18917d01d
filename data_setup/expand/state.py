"""What is known about an archive on its way: the members that are done, as a small file at the destination.

In: the destination and an archive. Out: what is told of it; `Places`, which
archive writes what; DST/.expand/state/<name>-<hash of the URL>.json with the digest of
the archive's directory and ranges of member numbers; so a rerun needs the archive's directory, one listing
of the destination and no byte of what is there. Another directory (the archive was replaced) makes the file
void.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from data_setup.expand.archive import Directory
from data_setup.expand.rules import EXPECTED, STATE_FOLDER, Member, Plan, Refusal, key_of
from utils import storage
from utils.config.schema import StorageOptions

FORMAT_VERSION = 1
SAVE_EVERY_S = 2.0  # object stores take about one write a second to one object
NAMED = 20  # failures and refusals that a report names, of each archive


@dataclass
class Archive:
    """One archive: what is to do, what has been done, what went wrong."""

    url: str
    directory: Directory | None = None  # None: it could not be read
    plan: Plan = field(default_factory=lambda: Plan([]))
    done: set[int] = field(default_factory=set)  # member numbers that state says are written
    counts: Counter[str] = field(default_factory=Counter)  # written, present, compared, repaired, repeated
    failures: list[tuple[str, str]] = field(default_factory=list)  # (member or "", reason: what)
    failed: Counter[str] = field(default_factory=Counter)  # reason -> members
    pending: int = 0  # members handed out or still to come
    bytes_written: int = 0
    saved_at: float = 0.0
    is_saved: bool = True

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def fail(self, member: str, reason: str, message: str) -> None:
        self.failed[reason] += 1
        if len(self.failures) < NAMED:
            self.failures.append((member, message))

    def summary(self) -> dict[str, Any]:
        """Plain values for the report."""
        refused = Counter(reason.value for _, reason, _ in self.plan.refused)
        if self.plan.whole:
            refused[self.plan.whole[0].value] += 1
        return {
            "archive": self.url,
            "bytes": self.directory.size if self.directory else None,
            **{k: self.counts[k] for k in ("written", "present", "compared", "repaired", "repeated")},
            "bytes_written": self.bytes_written,
            "skipped": dict(sorted(self.plan.skipped.items())),
            "refused": dict(sorted(refused.items())),
            "refused_names": [f"{r}: {n!r}" for n, r, _ in self.plan.refused[:NAMED]],
            "failed": dict(sorted(self.failed.items())),
            "failures": [f"{n}: {said}" if n else said for n, said in self.failures],
        }


@dataclass(slots=True)
class Place:
    """Of one file below the destination: the accepted archive that writes it, and those that hold it too."""

    archive: str
    target: str
    size: int
    crc: int
    state: str = "open"  # there: written or found; damaged: of no archive so far
    waiting: list[tuple[Archive, Member]] = field(default_factory=list)


class Places:
    """Each file is written once; an equal one of another archive is taken when the first is damaged."""

    def __init__(self) -> None:
        self._files: dict[str, Place] = {}  # by key_of
        self._folders: dict[str, str] = {}  # key -> the first archive with a file below

    def refuse_clashes(self, archive: Archive) -> None:
        """Refuse the members whose place another archive has for something else; nothing is taken yet."""
        mine = []
        for member in archive.plan.members:
            found = self._clash(member)
            if found is None:
                mine.append(member)
            else:
                archive.plan.refused.append((member.name, *found))
        archive.plan.members = mine

    def take(self, archive: Archive) -> list[Member]:
        """The members that the archive is to write; those that wait for another one's count as pending."""
        mine = []
        for member in archive.plan.members:
            key = key_of(member.target)
            place = self._files.get(key)
            if place is None:
                self._files[key] = Place(archive.url, member.target, member.size, member.crc)
                self._folders.update((f, archive.url) for f in _folders(key) if f not in self._folders)
                mine.append(member)
            elif place.state == "damaged":
                place.archive, place.state = archive.url, "open"
                mine.append(member)
            elif place.state == "there":
                archive.counts["repeated"] += 1
            else:
                place.waiting.append((archive, member))
                archive.pending += 1
        return mine

    def settle(self, member: Member) -> list[tuple[Archive, Member]]:
        """The member's place is done with; who has waited for it."""
        place = self._files[key_of(member.target)]
        waiting, place.waiting, place.state = place.waiting, [], "there"
        return waiting

    def pass_on(self, member: Member) -> tuple[Archive, Member] | None:
        """The member is damaged; the next one for its place, or None."""
        place = self._files[key_of(member.target)]
        if not place.waiting:
            place.state = "damaged"
            return None
        found = place.waiting.pop(0)
        place.archive = found[0].url
        return found

    def _clash(self, member: Member) -> tuple[Refusal, str] | None:
        key = key_of(member.target)
        place = self._files.get(key)
        if place is not None:
            said = (member.target, member.size, member.crc)
            if (place.target, place.size, place.crc) != said:
                return Refusal.TWO_ARCHIVES, f"{place.target!r} is another file in {place.archive}"
            return None
        if key in self._folders:
            return Refusal.FILE_AND_FOLDER, f"{member.target!r} is a folder in {self._folders[key]}"
        for folder in _folders(key):
            if (other := self._files.get(folder)) is not None:
                return Refusal.FILE_AND_FOLDER, f"{other.target!r} is a file in {other.archive}"
        return None


def _folders(key: str) -> list[str]:
    parts = key.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def state_url(dst: str, archive_url: str) -> str:
    """Where the state of an archive lies; the same from any folder."""
    whole = storage.absolute(archive_url)
    digest = hashlib.blake2b(whole.encode(), digest_size=6).hexdigest()
    return storage.join(dst, STATE_FOLDER, "state", f"{whole.rpartition('/')[2][:120]}-{digest}.json")


def load_state(dst: str, archive: Archive, options: StorageOptions) -> set[int]:
    """Members that an earlier run has written from the same archive; empty when there is no such state."""
    assert archive.directory is not None
    try:
        found = json.loads(storage.read_text(state_url(dst, archive.url), options))
    except (storage.StorageNotFoundError, json.JSONDecodeError):
        return set()  # what is there is then compared byte by byte
    if not isinstance(found, dict) or found.get("format") != FORMAT_VERSION:
        return set()
    if found.get("directory") != archive.directory.digest:
        return set()
    return {n for first, last in found["done"] for n in range(first, last + 1)}


def save_state(dst: str, archive: Archive, options: StorageOptions, now: bool = False) -> None:
    """Write the state when it has changed and the last time is long enough ago; `now`: in any case."""
    if archive.is_saved or (not now and time.monotonic() - archive.saved_at < SAVE_EVERY_S):
        return
    assert archive.directory is not None
    state = {
        "format": FORMAT_VERSION,
        "archive": archive.url,
        "directory": archive.directory.digest,
        "done": ranges(archive.done),
    }
    storage.write_text(state_url(dst, archive.url), json.dumps(state) + "\n", options)
    archive.is_saved, archive.saved_at = True, time.monotonic()


def ranges(numbers: Iterable[int]) -> list[list[int]]:
    """[[first, last], ...] of a set of numbers, ascending."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def mark_done(archive: Archive, member: Member) -> None:
    """The member's object is at the destination, whole."""
    archive.done.add(member.index)
    archive.is_saved = False


def line(archive: Archive) -> str:
    """One archive in one line."""
    found = archive.summary()
    parts = [f"{archive.counts['written']} written ({archive.bytes_written / 1e6:.1f} MB)"]
    parts += [
        f"{found[key]} {word}"
        for key, word in (
            ("present", "there already"),
            ("compared", "there already, compared"),
            ("repaired", "replaced"),
            ("repeated", "also in another archive"),
        )
        if found[key]
    ]
    for key in ("skipped", "refused", "failed"):
        if found[key]:
            words = ", ".join(f"{k} {n}" for k, n in found[key].items())
            parts.append(f"{sum(found[key].values())} {key} ({words})")
    return f"{archive.name}: {', '.join(parts)}"


def tell(archive: Archive, skip_refused: bool) -> None:
    """Print the line, and on stderr the failures and refusals by name."""
    print(line(archive), flush=True)
    for name, said in archive.failures:
        where = f"{archive.url}: {name!r}" if name else archive.url
        print(f"error: {where}: {said}", file=sys.stderr)
    if archive.plan.whole:
        reason, said = archive.plan.whole
        said = f"expected {EXPECTED[reason]}, found {said}"
        print(f"error: {archive.url}: {reason}: {said}; nothing written", file=sys.stderr)
    word = "skipped" if skip_refused else "nothing of the archive written"
    for name, reason, said in archive.plan.refused[:NAMED]:
        said = f"expected {EXPECTED[reason]}, found {said}"
        print(f"error: {archive.url}: {name[:200]!r}: {reason}: {said}; {word}", file=sys.stderr)
