"""What of a zip archive may be written where: names, kinds and sizes, judged by its directory alone.

In: the entries of a central directory, as zipfile reads them, and `Limits`. Out: a `Plan`: the members with
their places below the destination, what is left out because it is no part of the tree, and what is refused,
each by name with a `Refusal`. Nothing of the archive has been read for that but its directory.
"""

from __future__ import annotations

import re
import stat
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

STATE_FOLDER = ".expand"  # below the destination: state, locks, report; no member may be written there
PARTIAL = ".partial"  # names of unfinished local writes, which listings hide
# The top of an AI-READI tree; a copy may hold each of them twice, one in the other.
MODALITIES = {
    *("cardiac_ecg", "clinical_data", "environment", "retinal_flio", "retinal_oct", "retinal_octa"),
    *("retinal_photography", "wearable_activity_monitor", "wearable_blood_glucose"),
}
JUNK = {".DS_Store", "Thumbs.db", "desktop.ini"}
RATIO_FREE_BYTES = 2**20  # a smaller member is no bomb, whatever its ratio
TOTAL_RATIO_FREE_BYTES = 2**24
_LOCAL_HEADER_BYTES = 30
_LONGEST_NAME = 1000  # bytes of UTF-8; object stores take 1024 with the destination's own path
_LONGEST_PART = 240  # bytes; disks take 255, and a temporary name is longer than the final one


class Refusal(StrEnum):
    """Why a member, or with the last three a whole archive, is not expanded."""

    ABSOLUTE = "absolute_name"
    TRAVERSAL = "path_traversal"
    DRIVE = "drive_letter"
    BACKSLASH = "backslash"
    BAD_NAME = "bad_name"
    RESERVED = "reserved_name"
    LINK = "link"
    SPECIAL = "special_file"
    ENCRYPTED = "encrypted"
    METHOD = "unsupported_method"
    DUPLICATE = "duplicate_name"
    CASE = "case_collision"
    FILE_AND_FOLDER = "file_and_folder"
    TWO_ARCHIVES = "in_two_archives"
    RATIO = "member_ratio"
    MEMBER_SIZE = "member_size"
    MEMBERS = "too_many_members"
    TOTAL_RATIO = "total_ratio"
    OVERLAP = "overlapping_members"


EXPECTED = {
    Refusal.ABSOLUTE: "a name below the destination",
    Refusal.TRAVERSAL: "a name without '..'",
    Refusal.DRIVE: "a name without a drive",
    Refusal.BACKSLASH: "'/' between folders",
    Refusal.BAD_NAME: "a name that every disk and bucket can hold",
    Refusal.RESERVED: f"a name without {STATE_FOLDER} and {PARTIAL}",
    Refusal.LINK: "a file or a folder",
    Refusal.SPECIAL: "a file or a folder",
    Refusal.ENCRYPTED: "a member that is not encrypted",
    Refusal.METHOD: "stored or deflate",
    Refusal.DUPLICATE: "one member for a place",
    Refusal.CASE: "names that differ by more than case",
    Refusal.FILE_AND_FOLDER: "a file or a folder at a place",
    Refusal.TWO_ARCHIVES: "one file for a place",
    Refusal.RATIO: "a member within --max-ratio",
    Refusal.MEMBER_SIZE: "a member within --max-member-gib",
    Refusal.MEMBERS: "an archive within --max-members",
    Refusal.TOTAL_RATIO: "an archive within --max-total-ratio",
    Refusal.OVERLAP: "members that share no bytes",
}


@dataclass(frozen=True)
class Limits:
    """Of one archive. Deflate reaches 1032 : 1 on constant bytes, retinal scans stay under 10 : 1."""

    max_ratio: float = 200.0  # expanded / stored bytes of a member over RATIO_FREE_BYTES
    max_total_ratio: float = 50.0  # expanded bytes / archive, over TOTAL_RATIO_FREE_BYTES
    max_member_bytes: int = 4 * 2**30  # a member is held in memory once
    max_members: int = 1_000_000


@dataclass(frozen=True, slots=True)
class Member:
    """One file of an archive and its place below the destination."""

    index: int  # in the archive's directory
    name: str  # as the archive says
    target: str
    offset: int  # of its local header
    stored: int  # bytes in the archive
    size: int  # bytes expanded
    crc: int
    method: int  # zipfile.ZIP_STORED | ZIP_DEFLATED


@dataclass
class Plan:
    """What is to be done with an archive; `refused` holds (name, reason, what was found)."""

    members: list[Member]
    skipped: Counter[str] = field(default_factory=Counter)
    refused: list[tuple[str, Refusal, str]] = field(default_factory=list)
    whole: tuple[Refusal, str] | None = None  # the archive itself is refused


def make_plan(entries: Sequence[zipfile.ZipInfo], directory_start: int, size: int, limits: Limits) -> Plan:
    """Judge every entry of an archive of `size` bytes whose directory begins at `directory_start`."""
    plan = Plan([])
    if len(entries) > limits.max_members:
        plan.whole = (Refusal.MEMBERS, f"{len(entries)}, at most {limits.max_members}")
        return plan
    if (overlap := _overlap(entries, directory_start)) is not None:
        plan.whole = (Refusal.OVERLAP, overlap)
        return plan
    for index, entry in enumerate(entries):
        name = entry.orig_filename
        found = refuse_name(name) or _refuse_kind(entry) or _refuse_size(entry, limits)
        if found is not None:
            plan.refused.append((name, *found))
        elif name.endswith("/"):
            plan.skipped["folder"] += 1
        elif _is_junk(name):
            plan.skipped["not_of_the_tree"] += 1
        else:
            plan.members.append(
                Member(
                    index=index,
                    name=name,
                    target=target_of(name),
                    offset=entry.header_offset,
                    stored=entry.compress_size,
                    size=entry.file_size,
                    crc=entry.CRC,
                    method=entry.compress_type,
                )
            )
    _refuse_collisions(plan)
    expanded = sum(m.size for m in plan.members)
    if expanded > max(TOTAL_RATIO_FREE_BYTES, limits.max_total_ratio * size):
        said = f"{expanded} bytes out of {size}, at most {limits.max_total_ratio:g} : 1"
        plan.whole = (Refusal.TOTAL_RATIO, said)
    return plan


def refuse_name(name: str) -> tuple[Refusal, str] | None:
    """The reason against a member's name, on any system, or None."""
    parts = name.rstrip("/").split("/")
    reasons = {
        Refusal.BACKSLASH: "\\" in name,
        Refusal.ABSOLUTE: name.startswith("/"),
        Refusal.DRIVE: re.match(r"[A-Za-z]:", name) is not None,
        Refusal.TRAVERSAL: ".." in parts,
        Refusal.BAD_NAME: "" in parts
        or any(unicodedata.category(c) in ("Cc", "Cs") for c in name)
        or "://" in name
        or len(name.encode("utf-8", "replace")) > _LONGEST_NAME
        or any(len(p.encode("utf-8", "replace")) > _LONGEST_PART for p in parts)
        or set(parts) == {"."},
        Refusal.RESERVED: STATE_FOLDER in key_of(name).split("/") or name.endswith(PARTIAL),
    }
    reason = next((r for r, applies in reasons.items() if applies), None)
    return None if reason is None else (reason, repr(name[:200]))


def target_of(name: str) -> str:
    """The place below the destination: without `dataset/` in front, a doubled modality folder made one."""
    parts = [p for p in name.split("/") if p != "."]
    while "dataset" in parts[:2] and parts.index("dataset") < len(parts) - 1:
        parts = parts[parts.index("dataset") + 1 :]
    while len(parts) > 2 and parts[0] in MODALITIES and parts[1] == parts[0]:
        parts = parts[1:]
    return "/".join(parts)


def key_of(target: str) -> str:
    """Equal for names that a disk without case or with other Unicode normalisation takes for one."""
    return unicodedata.normalize("NFC", target).casefold()


def _refuse_kind(entry: zipfile.ZipInfo) -> tuple[Refusal, str] | None:
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind == stat.S_IFLNK:
        return Refusal.LINK, "a symbolic link"
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return Refusal.SPECIAL, f"file type {kind:o}"
    if entry.flag_bits & 0x1:
        return Refusal.ENCRYPTED, "an encrypted member"
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        found = zipfile.compressor_names.get(entry.compress_type, "unknown")
        return Refusal.METHOD, f"method {entry.compress_type} ({found})"
    return None


def _refuse_size(entry: zipfile.ZipInfo, limits: Limits) -> tuple[Refusal, str] | None:
    if entry.file_size > limits.max_member_bytes:
        return Refusal.MEMBER_SIZE, f"{entry.file_size} bytes, at most {limits.max_member_bytes}"
    if entry.file_size > max(RATIO_FREE_BYTES, limits.max_ratio * entry.compress_size):
        said = f"{entry.file_size} bytes out of {entry.compress_size}, at most {limits.max_ratio:g} : 1"
        return Refusal.RATIO, said
    return None


def _is_junk(name: str) -> bool:
    parts = name.split("/")
    return "__MACOSX" in parts or parts[-1] in JUNK or parts[-1].startswith("._")


def _overlap(entries: Sequence[zipfile.ZipInfo], directory_start: int) -> str | None:
    """Members that share bytes multiply without end; so do those that reach into the directory."""
    ordered = sorted(entries, key=lambda e: e.header_offset)
    ends = [e.header_offset + _LOCAL_HEADER_BYTES + e.compress_size for e in ordered]
    starts = [e.header_offset for e in ordered[1:]] + [directory_start]
    for entry, end, start in zip(ordered, ends, starts, strict=True):
        if end > start:
            return f"{entry.orig_filename!r} reaches {end - start} bytes into what follows"
    return None


def _refuse_collisions(plan: Plan) -> None:
    """All members of a collision are refused: none of them is the right one."""
    by_key: dict[str, list[Member]] = {}
    for member in plan.members:
        by_key.setdefault(key_of(member.target), []).append(member)
    bad: dict[int, tuple[str, Refusal, str]] = {}
    for same in by_key.values():
        if len(same) > 1:
            is_one = len({m.target for m in same}) == 1
            reason = Refusal.DUPLICATE if is_one else Refusal.CASE
            for m in same:
                bad[m.index] = (m.name, reason, f"{len(same)} members for {m.target!r}")
    for member in plan.members:
        parts = key_of(member.target).split("/")
        for count in range(1, len(parts)):
            for other in by_key.get("/".join(parts[:count]), ()):
                found = f"{other.name!r} is a file and the folder of {member.name!r}"
                bad |= {m.index: (m.name, Refusal.FILE_AND_FOLDER, found) for m in (other, member)}
    plan.refused += bad.values()
    plan.members = [m for m in plan.members if m.index not in bad]
