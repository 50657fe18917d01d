"""What the check of a tree tells: counts, what is wrong by reason and name, bytes read; JSON and a table.

In: the findings of data_setup/check/cli.py. Out: a dictionary of plain values, which utils/report/cli.py
shows too, and text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from data_setup.check.finding import NOT_OPENED, OK, Finding
from data_setup.readers.faults import RejectReason
from data_setup.store.format import UNREAD

# What no header tells and decoding does. Of uncompressed files the length tells the first two.
FULL_PASS_ONLY = (
    "truncated_pixel_data and frame_count_mismatch of compressed files",
    "frame_size_mismatch of single frames",
    "corrupt_pixel_data",
    "constant_volume",
    "a field smaller than a voxel of the grid",
    "files that are no DICOM (counted as not_opened)",
)
SHOWN = 3  # values of a column, and names of a kind of problem, in the table; the JSON has all
_UM = 1000


def summarise(
    findings: Sequence[Finding], run: Mapping[str, Any], unused_missing: Sequence[str] = ()
) -> dict[str, Any]:
    """The report; `is_fine`: nothing is unreadable, missing, orphaned, double or contradictory.

    `unused_missing`: files of rows that are not used; a tree of some devices has none of the others' files,
    so they are told and do not count.
    """
    listed = [f for f in findings if not f.is_orphan and not f.is_double]
    doubles = [f for f in findings if f.is_double]
    missing = [f.path for f in listed if f.status == RejectReason.MISSING_FILE]
    readable = (OK, NOT_OPENED, UNREAD, RejectReason.MISSING_FILE)
    unreadable = [f for f in listed + doubles if f.status not in readable]
    duplicates = {
        "uid": _groups(findings, lambda f: f.sop_instance_uid),
        "pixels": _groups(findings, lambda f: f.pixel_hash),
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
        "not_opened": _counts(f.kind for f in listed if f.status == NOT_OPENED),
        "unreadable": _counts(f.status for f in unreadable),
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
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(str(getattr(finding, name)), []).append(finding)
    return {key: _group(groups[key]) for key in sorted(groups)}


def _group(findings: Sequence[Finding]) -> dict[str, Any]:
    seen = [f for f in findings if f.shape is not None]
    return {
        "files": len(findings),
        "status": _counts(f.status for f in findings),
        "bytes": sum(f.size for f in findings),
        "shape": _counts(" x ".join(map(str, f.shape or ())) for f in seen),
        "spacing_um": _counts(" x ".join(f"{_UM * mm:.3g}" for mm in f.spacing_mm or ()) for f in seen),
        "spacing_source": _counts(str(f.spacing_source) for f in seen),
        "orientation_source": _counts(str(f.orientation_source) for f in seen),
        "transfer_syntax": _counts(str(f.transfer_syntax) for f in seen),
        "laterality": _counts(str(f.laterality) for f in seen),
    }


def _counts(values: Iterable[str]) -> dict[str, int]:
    """Value -> how often, most frequent first, ties by name."""
    return dict(sorted(Counter(map(str, values)).items(), key=lambda item: (-item[1], item[0])))


def _groups(findings: Iterable[Finding], key: Any) -> list[list[str]]:
    """Paths of the files that agree in a value, where there is more than one."""
    groups: dict[str, list[str]] = {}
    for finding in findings:
        if key(finding):
            groups.setdefault(key(finding), []).append(finding.path)
    return sorted(sorted(paths) for paths in groups.values() if len(paths) > 1)


def _words(numbers: Mapping[str, int], shown: int = 10**6) -> str:
    words = [f"{name} {n}" for name, n in list(numbers.items())[:shown]]
    more = len(numbers) - shown
    return ", ".join(words + ([f"{more} more"] if more > 0 else [])) or "none"


def _commonest(numbers: Mapping[str, int]) -> str:
    more = len(numbers) - 1
    return next(iter(numbers), "-") + (f" (+{more})" if more > 0 else "")


def _names(paths: Sequence[str]) -> list[str]:
    more = len(paths) - SHOWN
    return [f"    {path}" for path in paths[:SHOWN]] + ([f"    and {more} more"] if more > 0 else [])


def table(report: Mapping[str, Any]) -> str:
    """The report as text: each protocol with its commonest shape and spacing, then what is wrong."""
    lines = [
        f"{'protocol':32s} {'files':>6s} {'ok':>6s} {'L':>5s} {'R':>5s} {'?':>4s}  "
        f"{'shape, D x H x W':24s} spacing, um"
    ]
    for name, part in report["by_protocol"].items():
        eyes = part["laterality"]
        lines.append(
            f"{name:32s} {part['files']:6d} {part['status'].get(OK, 0):6d} {eyes.get('L', 0):5d} "
            f"{eyes.get('R', 0):5d} {eyes.get('unknown', 0):4d}  {_commonest(part['shape']):24s} "
            f"{_commonest(part['spacing_um'])}"
        )
    for name, part in report["by_device"].items():
        lines.append(f"{name}: {part['files']} files, {_words(part['transfer_syntax'])}")
    lines.append(f"manifest rows not used: {_words(report['skipped'])}")
    if report["not_opened"]:
        lines.append(f"no DICOM, not opened: {_words(report['not_opened'])}")
    lines.append(f"unreadable: {_words(report['unreadable'])}")
    bad = [p for p in report["problems"] if p["status"] != RejectReason.MISSING_FILE]
    lines += _names([f"{p['path']}: {p['status']}: {p['message']}" for p in bad])
    for kind, said in (
        ("missing", "missing, in the manifest only"),
        ("orphans", "orphaned, in no manifest row"),
        ("doubles", "left out by prepare, an earlier row has the SOPInstanceUID"),
        ("unused_missing", "missing, of manifest rows not used"),
        ("laterality_conflicts", "another eye in the header than in the manifest"),
    ):
        lines.append(f"{said}: {len(report[kind])}")
        lines += _names(report[kind])
    for kind, said in (("uid", "the same SOPInstanceUID"), ("pixels", "the same pixel data")):
        groups = report["duplicates"][kind]
        checked = kind == "uid" or report["pixel_hash"] != "none"
        lines.append(f"{said}: {f'{len(groups)} groups' if checked else 'not looked for'}")
        lines += _names([" = ".join(group) for group in groups])
    read = report["bytes"]
    share = "" if read["share"] is None else f" = {read['share']:.2%}"
    lines.append(
        f"bytes fetched / stored: {read['fetched']} / {read['stored']}{share} (headers {read['header']}, "
        f"samples {read['sample']}, whole pixel data {read['pixels']}) in {report['requests']} requests"
    )
    lines.append(f"only prepare can see: {'; '.join(report['full_pass_only'])}")
    lines.append(f"verdict: {verdict(report)}, {report['seconds']:.1f} s")
    return "\n".join(lines)


def verdict(report: Mapping[str, Any]) -> str:
    """One phrase."""
    if report["unread"]:
        return f"not finished: {report['unread']} files could not be read"
    if report["is_fine"]:
        return f"nothing wrong in the headers of {report['records']} files"
    return f"something is wrong: {report['ok']} of {report['records']} files are fine by their headers"
