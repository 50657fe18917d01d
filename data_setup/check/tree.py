"""The verdict on a whole tree from the first bytes of its files: `prepare --check-only`.

In: the manifest's records (`Config`). Out: check_report.json, a table and a verdict. HEAD_BYTES of each DICOM
file are fetched, and more only when the header is longer. `--pixel-hash` says which files are read to the
end: `same-size` those that have the length of another one's pixel data and the same bytes in its middle;
`all`; `none`. Only decoding shows the faults in report.FULL_PASS_ONLY. Exit codes: docs/guides/prepare.md.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pydicom.uid import UID

from data_setup.check import report as check_report
from data_setup.check.report import NOT_OPENED, OK, Finding, grouped
from data_setup.manifest import TREE, RecordList, read_records
from data_setup.readers.dicom import OCTHeader, read_header
from data_setup.readers.faults import OCTReadError, RejectReason, named_faults
from data_setup.readers.open_record import check_manifest, identify, kind_by_name
from data_setup.readers.pixels import BoundedFile
from data_setup.store.format import UNREAD
from utils import storage
from utils.config.schema import Config, StorageOptions
from utils.errors import EXIT_TRY_AGAIN, UserError
from utils.storage.ranges import RangeFile
from utils.terminal import say, track
from utils.workers import pool_of

EXIT_FOUND_BAD = 1
HEAD_BYTES = 2**16  # of one request; the header of some hundred frames
PIXEL_HASH_MODES = ("same-size", "all", "none")
_SAMPLE_BYTES = 2**14  # from the middle of the pixel data
_READ_BYTES = 2**23


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
    """Sorted paths: "missing" of records, "unused_missing" of other rows, "orphans" of no row at all.

    An orphan is a .dcm file anywhere in the listing.
    """
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
            header, pixel_start = read_header(bounded, finding.url, finding.record)
            finding = _described(finding, header, pixel_start)
            if finding.record is not None:
                check_manifest(finding.record, header)
    except OCTReadError as error:
        finding = replace(finding, status=error.reason.value, message=error.detail)
    except storage.StorageNotFoundError as error:
        finding = replace(finding, status=RejectReason.MISSING_FILE.value, message=error.problem)
    except storage.StorageError as error:
        finding = replace(finding, status=UNREAD, message=error.problem)
    return replace(finding, fetched={"header": file.fetched}, requests=file.requests)


def _described(finding: Finding, header: OCTHeader, pixel_start: int) -> Finding:
    return replace(
        finding,
        device=finding.device or header.device,
        protocol=finding.protocol or header.protocol,
        shape=header.shape,
        spacing_mm=header.spacing_mm,
        spacing_source=header.spacing_source,
        orientation_source=header.orientation_source,
        laterality=header.laterality or "unknown",
        transfer_syntax=UID(header.transfer_syntax).name,
        sop_instance_uid=header.sop_instance_uid,
        pixel_start=pixel_start,
    )


def add_digest(finding: Finding, purpose: str, options: StorageOptions) -> Finding:
    """Add the digest of the stored bytes from the pixel data's value to the end of the file ("pixels"), or
    of bytes from the middle of it ("sample"): equal pixels have equal middles.
    """
    assert finding.pixel_start is not None
    start, end = finding.pixel_start, finding.size
    if purpose == "sample":
        start += finding.pixel_bytes // 2
        end = min(start + _SAMPLE_BYTES, end)
    digest, count, requests = hashlib.blake2b(digest_size=16), 0, 0
    try:
        for position in range(start, end, _READ_BYTES):
            data = storage.read_range(finding.url, position, min(position + _READ_BYTES, end), options)
            digest.update(data)
            count, requests = count + len(data), requests + 1
    except storage.StorageError as error:
        return replace(finding, status=UNREAD, message=error.problem)
    fetched, requests = finding.fetched | {purpose: count}, finding.requests + requests
    finding = replace(finding, fetched=fetched, requests=requests)
    value = digest.hexdigest()
    return replace(finding, sample=value) if purpose == "sample" else replace(finding, pixel_hash=value)


def hash_pixels(
    findings: Sequence[Finding],
    mode: str,
    apply: Callable[[Callable[..., Finding], list[Finding]], list[Finding]],
) -> list[Finding]:
    """The findings, with pixel hashes where `mode` asks for them."""
    by_path = {f.path: f for f in findings}

    def update(function: Callable[..., Finding], some: Iterable[Finding]) -> None:
        by_path.update((f.path, f) for f in apply(function, list(some)))

    add_hash = partial(add_digest, purpose="pixels")
    readable = [f for f in findings if f.pixel_start is not None]
    if mode == "same-size":
        update(partial(add_digest, purpose="sample"), _shared(readable, lambda f: f.pixel_bytes))
        sampled = [f for f in by_path.values() if f.sample is not None]
        update(add_hash, _shared(sampled, lambda f: (f.pixel_bytes, f.sample)))
    elif mode == "all":
        update(add_hash, readable)
    return list(by_path.values())


def _shared(findings: Iterable[Finding], key: Callable[[Finding], object]) -> list[Finding]:
    """The findings that have the key of another one."""
    return [f for group in grouped(findings, key).values() if len(group) > 1 for f in group]


def list_findings(listing: RecordList, orphans: Sequence[str], tree: Tree) -> list[Finding]:
    """The files of the records, and the orphans; sizes come from the listing."""
    findings = []
    doubles = {record.path for record in listing.doubles}
    for record in listing.records:
        finding = Finding(
            path=record.path,
            url=record.url,
            record=record,
            device=record.device,
            protocol=record.protocol,
            manifest_laterality=record.laterality,
            is_double=record.path in doubles,
            size=tree.sizes.get(record.path, 0),
        )
        if record.path in tree.folders and kind_by_name(record.url) is None:
            finding = replace(finding, status=NOT_OPENED, kind="folder")
        elif record.path not in tree:
            missing, message = RejectReason.MISSING_FILE.value, "expected a file, found none"
            finding = replace(finding, status=missing, message=message)
        findings.append(finding)
    urls = {path: storage.join(listing.root, path) for path in orphans}
    return findings + [Finding(p, url, is_orphan=True, size=tree.sizes[p]) for p, url in urls.items()]


def check_tree(cfg: Config, workers: int, pixel_hash: str, json_url: str | None) -> int:
    """Look at the tree, print the table, write the report; 0, EXIT_FOUND_BAD or EXIT_TRY_AGAIN."""
    start = time.perf_counter()
    options = cfg.data.storage_options
    listing = read_records(cfg)
    tree = list_tree(listing, options)
    audit = audit_files(listing, tree)
    files = list_findings(listing, audit["orphans"], tree)
    with pool_of(workers) as pool:  # threads would not help: parsing a header keeps the interpreter's lock

        def run(title: str, function: Callable[..., Finding], some: Sequence[Any]) -> list[Finding]:
            results = pool.map(partial(function, options=options), some, chunksize=8)
            try:
                return list(track(results, len(some), title, "files"))
            except BrokenProcessPool as error:
                raise UserError(
                    f"{title}: a worker process was lost, for lack of memory perhaps; run again with fewer "
                    "--workers"
                ) from error

        findings = hash_pixels(run("check", read_finding, files), pixel_hash, partial(run, "compare"))
    report = check_report.summarise(
        findings,
        {
            "tree": cfg.data.gcs_root,
            "pixel_hash": pixel_hash,
            "skipped": listing.skipped,
            "split_source": listing.split_source,
            "seconds": round(time.perf_counter() - start, 3),
            "workers": workers,
        },
        audit["unused_missing"],
    )
    url = json_url or storage.join(cfg.data.store, "check_report.json")
    print(check_report.table(report), flush=True)  # first: the report may have no place to be written to
    storage.write_text(url, json.dumps(report, indent=1) + "\n", options)
    say(f"report: {url}")
    if report["unread"]:
        first = next(f for f in findings if f.status == UNREAD)
        message = (
            f"{report['unread']} files could not be read, run again; first: {first.url}: {first.message}"
        )
        say(f"error: {message}", file=sys.stderr)
        return EXIT_TRY_AGAIN
    return 0 if report["is_fine"] else EXIT_FOUND_BAD
