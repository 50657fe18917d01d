"""The report of a check: counts, faults by reason and by name, bytes read; as JSON and as a table.

In: the findings of data_setup/check/tree.py. Out: a dictionary of plain values, which the HTML report shows
too, and text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from data_setup.manifest import Record
from data_setup.readers.faults import RejectReason
from data_setup.store.format import UNREAD
from data_setup.store.summary import by_frequency, words
from utils.errors import shown
from utils.tables import Table, terminal

_K = TypeVar("_K")
OK, NOT_OPENED = "ok", "not_opened"  # NOT_OPENED: of another kind than DICOM, so the header is not read
# Only decoding shows these. The length of an uncompressed file shows the first two.
FULL_PASS_ONLY = (
    "truncated_pixel_data and frame_count_mismatch of compressed files",
    "frame_size_mismatch of single frames",
    "corrupt_pixel_data",
    "constant_volume",
    "few_grey_levels, and values that a rescale would clip",
    "a field smaller than a voxel of the grid",
    "files that are no DICOM (counted as not_opened)",
)
SHOWN = 3  # names of each kind of problem in the table; the JSON has all
_UM = 1000


@dataclass(frozen=True)
class Finding:
    """What the first bytes of a file say; `status` is OK, NOT_OPENED, UNREAD or a RejectReason."""

    path: str
    url: str
    record: Record | None = None
    is_orphan: bool = False
    device: str | None = None
    protocol: str | None = None
    manifest_laterality: str | None = None
    is_double: bool = False  # an earlier row has the SOPInstanceUID, so prepare does not use this one
    size: int = 0
    status: str = OK
    message: str | None = None
    kind: str = "DICOM"
    shape: tuple[int, int, int] | None = None
    spacing_mm: tuple[float, float, float] | None = None
    spacing_source: str | None = None
    orientation_source: str | None = None
    laterality: str | None = None  # L | R | unknown; of the header
    transfer_syntax: str | None = None
    sop_instance_uid: str | None = None
    pixel_start: int | None = None  # bytes before the value of the pixel data
    sample: str | None = None  # digest of bytes from the middle of the pixel data
    pixel_hash: str | None = None  # digest of all bytes from pixel_start on
    fetched: dict[str, int] = field(default_factory=dict)  # bytes by purpose: header, sample, pixels
    requests: int = 0

    @property
    def pixel_bytes(self) -> int:
        return self.size - (self.pixel_start or 0)


def grouped(findings: Iterable[Finding], key: Callable[[Finding], _K]) -> dict[_K, list[Finding]]:
    """Key -> the findings that have it."""
    groups: dict[_K, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(key(finding), []).append(finding)
    return groups


def summarise(
    findings: Sequence[Finding], run: Mapping[str, Any], unused_missing: Sequence[str] = ()
) -> dict[str, Any]:
    """The report; `is_fine`: nothing is unreadable, missing, orphaned, double or contradictory.

    `unused_missing` files belong to rows that are not used. They are named and do not count as wrong, since a
    tree of some devices lacks the files of the others.
    """
    listed = [f for f in findings if not f.is_orphan and not f.is_double]
    doubles = [f for f in findings if f.is_double]
    missing = [f.path for f in listed if f.status == RejectReason.MISSING_FILE]
    readable = (OK, NOT_OPENED, UNREAD, RejectReason.MISSING_FILE)
    unreadable = [f for f in listed + doubles if f.status not in readable]
    duplicates = {
        "uid": _duplicates(findings, "sop_instance_uid"),
        "pixels": _duplicates(findings, "pixel_hash"),
    }
    conflicts = [
        f.path
        for f in listed + doubles
        if {f.laterality, f.manifest_laterality} == {"L", "R"}  # unknown is no contradiction
    ]
    orphans = [f.path for f in findings if f.is_orphan]
    fetched: Counter[str] = Counter()
    for finding in findings:
        fetched.update(finding.fetched)
    stored = sum(f.size for f in findings)
    return {
        **run,
        "is_fine": not (missing or unreadable or orphans or doubles or any(duplicates.values()) or conflicts),
        "records": len(listed),
        "ok": sum(f.status == OK for f in listed),
        "unread": sum(f.status == UNREAD for f in findings),
        "not_opened": by_frequency(f.kind for f in listed if f.status == NOT_OPENED),
        "unreadable": by_frequency(f.status for f in unreadable),
        "missing": missing,
        "orphans": orphans,
        "doubles": [f.path for f in doubles],
        "unused_missing": list(unused_missing),
        "duplicates": duplicates,
        "laterality_conflicts": conflicts,
        "bytes": {
            "stored": stored,
            "fetched": fetched.total(),
            **{what: fetched[what] for what in ("header", "sample", "pixels")},
            "share": round(fetched.total() / stored, 6) if stored else None,
        },
        "requests": sum(f.requests for f in findings),
        "by_device": _by(listed, "device"),
        "by_protocol": _by(listed, "protocol"),
        "problems": [
            {"path": f.path, "status": f.status, "message": f.message}
            for f in findings
            if f.status not in (OK, NOT_OPENED)
        ],
        "pixel_hashes": {f.path: f.pixel_hash for f in findings if f.pixel_hash},
        "full_pass_only": list(FULL_PASS_ONLY),
    }


def _by(findings: Iterable[Finding], name: str) -> dict[str, Any]:
    groups = grouped(findings, lambda f: str(getattr(f, name)))
    return {key: _group(groups[key]) for key in sorted(groups)}


def _group(findings: Sequence[Finding]) -> dict[str, Any]:
    seen = [f for f in findings if f.shape is not None]
    return {
        "files": len(findings),
        "status": by_frequency(f.status for f in findings),
        "bytes": sum(f.size for f in findings),
        "shape": by_frequency(" x ".join(map(str, f.shape or ())) for f in seen),
        "spacing_um": by_frequency(" x ".join(f"{_UM * mm:.3g}" for mm in f.spacing_mm or ()) for f in seen),
        **{
            name: by_frequency(getattr(f, name) for f in seen)
            for name in ("spacing_source", "orientation_source", "transfer_syntax", "laterality")
        },
    }


def _duplicates(findings: Iterable[Finding], name: str) -> list[list[str]]:
    """The paths of files that share a value."""
    groups = grouped(findings, lambda f: getattr(f, name))
    return sorted(sorted(f.path for f in group) for v, group in groups.items() if v and len(group) > 1)


def _commonest(numbers: Mapping[str, int]) -> str:
    more = len(numbers) - 1
    return next(iter(numbers), "-") + (f" (+{more})" if more > 0 else "")


def _names(paths: Sequence[str]) -> list[str]:
    more = len(paths) - SHOWN
    return [f"    {path}" for path in paths[:SHOWN]] + ([f"    and {more} more"] if more > 0 else [])


def table(report: Mapping[str, Any]) -> str:
    """The report as text: each protocol with its commonest shape and spacing, then the faults."""
    rows = []
    for name, part in report["by_protocol"].items():
        eyes = [part["laterality"].get(eye, 0) for eye in ("L", "R", "unknown")]
        counts = map(str, [part["files"], part["status"].get(OK, 0), *eyes])
        rows.append([name, *counts, _commonest(part["shape"]), _commonest(part["spacing_um"])])
    header = ("protocol", "files", "ok", "L", "R", "?", "shape, D x H x W", "spacing, um")
    lines = terminal(Table("", header, rows)).split("\n")
    for name, part in report["by_device"].items():
        lines.append(
            f"{name}: {part['files']} files, {words(part['transfer_syntax'])}; "
            f"orientation from: {words(part['orientation_source'])}"
        )
    lines.append(f"manifest rows not used: {words(report['skipped'])}")
    if report["not_opened"]:
        lines.append(f"no DICOM, not opened: {words(report['not_opened'])}")
    lines.append(f"unreadable: {words(report['unreadable'])}")
    bad = [p for p in report["problems"] if p["status"] != RejectReason.MISSING_FILE]
    lines += _names([f"{p['path']}: {p['status']}: {p['message']}" for p in bad])
    for kind, meaning in (
        ("missing", "missing, in the manifest only"),
        ("orphans", "orphaned, in no manifest row"),
        ("doubles", "an earlier row has the SOPInstanceUID; prepare leaves out what has its voxels too"),
        ("unused_missing", "missing, of manifest rows not used"),
        ("laterality_conflicts", "another eye in the header than in the manifest"),
    ):
        lines.append(f"{meaning}: {len(report[kind])}")
        lines += _names(report[kind])
    for kind, meaning in (("uid", "the same SOPInstanceUID"), ("pixels", "the same pixel data")):
        groups = report["duplicates"][kind]
        checked = kind == "uid" or report["pixel_hash"] != "none"
        lines.append(f"{meaning}: {f'{len(groups)} groups' if checked else 'not looked for'}")
        lines += _names([" = ".join(group) for group in groups])
    read = report["bytes"]
    share = "" if read["share"] is None else f" = {read['share']:.2%}"
    lines.append(
        f"bytes fetched / stored: {read['fetched']} / {read['stored']}{share} (headers {read['header']}, "
        f"samples {read['sample']}, whole pixel data {read['pixels']}) in {report['requests']} requests"
    )
    lines.append(f"only prepare can see: {'; '.join(report['full_pass_only'])}")
    lines.append(f"verdict: {verdict(report)}, {report['seconds']:.1f} s")
    return "\n".join(map(shown, lines))


def verdict(report: Mapping[str, Any]) -> str:
    """One phrase on the whole tree."""
    if report["unread"]:
        return f"not finished: {report['unread']} files could not be read"
    if report["is_fine"]:
        return f"nothing wrong in the headers of {report['records']} files"
    return f"something is wrong: {report['ok']} of {report['records']} files are fine by their headers"
