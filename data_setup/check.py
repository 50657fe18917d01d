"""The verdict on a whole tree from the first bytes of its files: `prepare --check-only`.

In: the manifest's records (`Config`). Out: check_report.json, a table and a verdict. HEAD_BYTES of each DICOM
file are fetched, and more only when the header is longer. Only decoding shows the faults in FULL_PASS_ONLY.
Exit codes: docs/guides/prepare.md.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pydicom.uid import UID

from data_setup.manifest import TREE, Record, RecordList, read_records
from data_setup.readers.dicom import OCTHeader, read_header
from data_setup.readers.faults import OCTReadError, RejectReason, named_faults
from data_setup.readers.open_record import check_manifest, identify, kind_by_name
from data_setup.readers.pixels import BoundedFile
from data_setup.store.format import UNREAD
from data_setup.store.summary import by_frequency, words
from utils import storage
from utils.cli import require_file
from utils.config.schema import Config, StorageOptions
from utils.errors import EXIT_TRY_AGAIN, EXIT_USER_ERROR, UserError, shown
from utils.storage.ranges import RangeFile
from utils.tables import Table, terminal
from utils.terminal import say, track
from utils.workers import pool_of

EXIT_FOUND_BAD = 1
HEAD_BYTES = 2**16  # of one request; the header of some hundred frames
OK, NOT_OPENED = "ok", "not_opened"  # NOT_OPENED: of another kind than DICOM, so the header is not read
# Only decoding shows these. The length of an uncompressed file shows the first two.
FULL_PASS_ONLY = (
    "truncated_pixel_data and frame_count_mismatch of compressed files",
    "frame_size_mismatch of single frames",
    "corrupt_pixel_data",
    "constant_volume",
    "few_grey_levels, and values that a rescale would clip",
    "a field smaller than a voxel of the grid",
    "pixels that two files share, and files that are no DICOM (counted as not_opened)",
)
SHOWN = 3  # names of each kind of problem in the table; the JSON has all
_UM = 1000


@dataclass(frozen=True)
class Finding:
    """What the first bytes of a file say; `status` is OK, NOT_OPENED, UNREAD or a RejectReason."""

    path: str
    url: str
    record: Record | None = None  # None: an orphan
    is_double: bool = False  # an earlier row has the SOPInstanceUID, so prepare does not use this one
    size: int = 0
    status: str = OK
    message: str | None = None
    is_away: bool = False  # storage did not answer, but may later
    kind: str = "DICOM"
    header: OCTHeader | None = None
    fetched: int = 0  # bytes
    requests: int = 0


@dataclass(frozen=True)
class Tree:
    """Files and folders by their path relative to the root."""

    sizes: dict[str, int]  # of files, bytes
    folders: frozenset[str]

    def __contains__(self, path: str) -> bool:
        return path in self.sizes or path in self.folders


def list_tree(listing: RecordList, options: StorageOptions) -> Tree:
    """All files and folders, from one listing; raises StorageError."""
    top = f"{TREE[0]}/"
    if not all(row.path.startswith(top) for row in [*listing.records, *listing.unused]):
        top = ""
    below = storage.find_sizes(storage.join(listing.root, top), options)
    sizes = {top + name: size for name, size in below.items()}
    folders: set[str] = set()
    for path in sizes:
        while (path := path.rpartition("/")[0]) and path not in folders:
            folders.add(path)
    return Tree(sizes, frozenset(folders))


def audit_files(listing: RecordList, tree: Tree) -> dict[str, list[str]]:
    """Sorted paths: missing of records, unused_missing of other rows, orphans: .dcm files of no row."""
    used = {record.path for record in listing.records}
    unused = {row.path for row in listing.unused} - used
    dicoms = {path for path in tree.sizes if path.lower().endswith(".dcm")}
    return {
        "missing": sorted(path for path in used if path not in tree),
        "orphans": sorted(dicoms - used - unused),
        "unused_missing": sorted(path for path in unused if path not in tree),
    }


def read_finding(finding: Finding, options: StorageOptions) -> Finding:
    """Look at one file's header; a fault of the file or of storage becomes the status."""
    if finding.status != OK:  # by the listing
        return finding
    file = RangeFile(finding.url, finding.size, options, HEAD_BYTES)
    try:
        if (named := kind_by_name(finding.url) or "DICOM") != "DICOM":
            kind, _ = identify(file.read(1024))
            finding = replace(finding, status=NOT_OPENED, kind=kind or named)
        else:
            with named_faults(finding.url, RejectReason.NOT_DICOM, "a DICOM file"):
                bounded = BoundedFile(file)
            header = read_header(bounded, finding.url, finding.record)
            finding = replace(finding, header=header)
            if finding.record is not None:
                check_manifest(finding.record, header)
    except OCTReadError as error:
        finding = replace(finding, status=error.reason.value, message=error.detail)
    except storage.StorageNotFoundError as error:
        finding = replace(finding, status=RejectReason.MISSING_FILE.value, message=error.problem)
    except storage.StorageError as error:
        is_away = isinstance(error, storage.StorageAwayError)
        finding = replace(finding, status=UNREAD, message=error.problem, is_away=is_away)
    return replace(finding, fetched=file.fetched, requests=file.requests)


def list_findings(listing: RecordList, orphans: Sequence[str], tree: Tree) -> list[Finding]:
    """The files of the records, and the orphans; sizes come from the listing."""
    findings = []
    doubles = {record.path for record in listing.doubles}
    for record in listing.records:
        size = tree.sizes.get(record.path, 0)
        finding = Finding(record.path, record.url, record, record.path in doubles, size)
        if record.path in tree.folders and kind_by_name(record.url) is None:
            finding = replace(finding, status=NOT_OPENED, kind="folder")
        elif record.path not in tree:
            missing, message = RejectReason.MISSING_FILE.value, "expected a file, found none"
            finding = replace(finding, status=missing, message=message)
        findings.append(finding)
    urls = {path: storage.join(listing.root, path) for path in orphans}
    return findings + [Finding(p, url, size=tree.sizes[p]) for p, url in urls.items()]


def check_tree(cfg: Config, workers: int, json_url: str | None) -> int:
    """Look at the tree, print and write what is found; 0, EXIT_FOUND_BAD, or what unread files call for."""
    start = time.perf_counter()
    options, url = cfg.data.storage_options, json_url or storage.join(cfg.data.store, "check_report.json")
    require_file("--json" if json_url else "data.store", url)
    listing = read_records(cfg)
    tree = list_tree(listing, options)
    audit = audit_files(listing, tree)
    files = list_findings(listing, audit["orphans"], tree)
    with pool_of(workers) as pool:  # threads would not help: parsing a header keeps the interpreter's lock
        results = pool.map(partial(read_finding, options=options), files, chunksize=8)
        try:
            findings = list(track(results, len(files), "check", "files"))
        except BrokenProcessPool as error:
            raise UserError(
                "check: a worker process was lost, for lack of memory perhaps; run again with fewer --workers"
            ) from error
    seconds = round(time.perf_counter() - start, 3)
    about: dict[str, Any] = {"tree": cfg.data.gcs_root, "skipped": listing.skipped}
    about |= {"split_source": listing.split_source, "seconds": seconds, "workers": workers}
    report = summarise(findings, about, audit["unused_missing"])
    print(table(report), flush=True)  # first: the report may have no place to be written to
    storage.write_text(url, json.dumps(report, indent=1) + "\n", options)
    say(f"report: {url}")
    if report["unread"]:
        first = next(f for f in findings if f.status == UNREAD)
        message = f"{report['unread']} files could not be read, run again"
        say(f"error: {message}; first: {first.url}: {first.message}", file=sys.stderr)
        return EXIT_TRY_AGAIN if any(f.is_away for f in findings) else EXIT_USER_ERROR
    return 0 if report["is_fine"] else EXIT_FOUND_BAD


def summarise(
    findings: Sequence[Finding], run: Mapping[str, Any], unused_missing: Sequence[str] = ()
) -> dict[str, Any]:
    """The report; `is_fine`: nothing is unreadable, missing, orphaned, double or contradictory.

    `unused_missing` files belong to rows that are not used. They are named and do not count as wrong, since a
    tree of some devices lacks the files of the others.
    """
    listed = [f for f in findings if f.record is not None and not f.is_double]
    doubles = [f for f in findings if f.is_double]
    missing = [f.path for f in listed if f.status == RejectReason.MISSING_FILE]
    readable = (OK, NOT_OPENED, UNREAD, RejectReason.MISSING_FILE)
    unreadable = [f for f in listed + doubles if f.status not in readable]
    groups = _grouped(findings, lambda f: f.header.sop_instance_uid if f.header else "")
    duplicates = sorted(sorted(f.path for f in g) for uid, g in groups.items() if uid and len(g) > 1)
    known = [(f.path, f.record, f.header) for f in listed + doubles]  # an unknown eye is no contradiction
    conflicts = [
        p for p, row, seen in known if row and seen and {row.laterality, seen.laterality} == {"L", "R"}
    ]
    orphans = [f.path for f in findings if f.record is None]
    fetched = sum(f.fetched for f in findings)
    stored = sum(f.size for f in findings)

    def by(name: str) -> dict[str, Any]:
        parts = _grouped(listed, lambda f: str(getattr(f.record, name)))
        return {value: _group(part) for value, part in parts.items()}

    return {
        **run,
        "is_fine": not (missing or unreadable or orphans or doubles or duplicates or conflicts),
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
            "fetched": fetched,
            "share": round(fetched / stored, 6) if stored else None,
        },
        "requests": sum(f.requests for f in findings),
        "by_device": by("device"),
        "by_protocol": by("protocol"),
        "problems": [
            {"path": f.path, "status": f.status, "message": f.message}
            for f in findings
            if f.status not in (OK, NOT_OPENED)
        ],
        "full_pass_only": list(FULL_PASS_ONLY),
    }


def _grouped(findings: Iterable[Finding], key: Callable[[Finding], str]) -> dict[str, list[Finding]]:
    """Key, sorted -> the findings that have it."""
    groups = defaultdict(list)
    for finding in findings:
        groups[key(finding)].append(finding)
    return dict(sorted(groups.items()))


def _group(findings: Sequence[Finding]) -> dict[str, Any]:
    seen = [f.header for f in findings if f.header is not None]
    return {
        "files": len(findings),
        "status": by_frequency(f.status for f in findings),
        "bytes": sum(f.size for f in findings),
        "shape": by_frequency(" x ".join(map(str, h.shape)) for h in seen),
        "spacing_um": by_frequency(" x ".join(f"{_UM * mm:.3g}" for mm in h.spacing_mm) for h in seen),
        "spacing_source": by_frequency(h.spacing_source for h in seen),
        "orientation_source": by_frequency(h.orientation_source for h in seen),
        "transfer_syntax": by_frequency(UID(h.transfer_syntax).name for h in seen),
        "laterality": by_frequency(h.laterality or "unknown" for h in seen),
    }


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
    lines.append(f"the same SOPInstanceUID: {len(report['duplicates'])} groups")
    lines += _names([" = ".join(group) for group in report["duplicates"]])
    read = report["bytes"]
    share = "" if read["share"] is None else f" = {read['share']:.2%}"
    fetched = f"{read['fetched']} / {read['stored']}{share}"
    lines.append(f"bytes fetched / stored: {fetched} in {report['requests']} requests")
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
