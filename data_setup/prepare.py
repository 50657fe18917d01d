"""Prepare once: every listed DICOM volume, checked, on one grid, in the store that training reads.

In: the manifest (data.gcs_root), the grid (spatial). Out: the store at data.store, its index and
prepare_report.json, and a table. A file that cannot be used is a row with its reason; the run goes on until
rejects exceed data.max_reject_fraction of the records. A rerun keeps finished rows, also when their source
is out of reach, takes up new records, and tries rejects again; after a kill at any moment it ends with the
same bytes.

    python -m data_setup.prepare --config FILE [--workers N] [--shard i/n] [--audit] [section.key=value ...]
    python -m data_setup.prepare --config FILE --check-only [--json URL] [--pixel-hash all|same-size|none]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from data_setup.check import cli as check
from data_setup.check.audit import audit_files, list_tree
from data_setup.manifest import Record, read_records
from data_setup.readers.dicom import OCTReadError, RejectReason
from data_setup.readers.open_record import check_manifest, open_record, source_stat
from data_setup.resample import resample_frames
from data_setup.store.locks import setup_lock, shard_lock
from data_setup.store.reader import KEPT, UNREAD, read_attrs
from data_setup.store.summary import shorten, summarise, table
from data_setup.store.writer import StoreWriter, measure, record_fields
from utils import storage
from utils.cli import add_workers, parse_cli, run_cli
from utils.config.schema import SpatialConfig, StorageOptions
from utils.errors import EXIT_USER_ERROR, UserError
from utils.workers import in_threads, pool_of

WORKER_DIED = "worker_died"  # the process was lost twice at this file; killed for memory, most often
INTERNAL_ERROR = "internal_error"  # a fault of this program; where it happened goes to stderr
DONE, TO_DO = "done", "to_do"  # rows before the run
SOURCE_MISSING = "source_missing"  # a kept row whose file is not there now: row and volume stay
_IN_FLIGHT = 3  # files per worker that are handed out ahead


@dataclass(frozen=True)
class Job:
    """One row to prepare."""

    row: int
    record: Record
    writer: StoreWriter
    spatial: SpatialConfig
    options: StorageOptions
    was_kept: bool = False  # the row holds a volume of an earlier run


@dataclass(frozen=True)
class Outcome:
    """What became of a row; the measurements are in its JSON."""

    row: int
    status: str
    message: str | None = None


def prepare_row(job: Job) -> Outcome:
    """Read, check, resample and write one row; a bad file is a reject with its reason.

    A file that is gone says nothing about the volume that the row already holds: that row is left alone.
    """
    url = job.record.url
    fields: dict[str, Any] = _identity(job) | {"message": None}
    voxels = None
    try:
        source = source_stat(job.record, job.options)
        fields |= {"source_size": source.size, "source_version": source.etag_or_mtime}
        header, frames = open_record(job.record, job.options)
        try:
            volume = resample_frames(
                frames,
                header.shape,
                header.spacing_mm,
                job.spatial.image_size,
                job.spatial.target_spacing,
                job.spatial.resample,
                header.flip_d,
            )
        except ValueError as error:  # a field smaller than a voxel of the grid
            raise OCTReadError(url, RejectReason.IMPLAUSIBLE_SPACING, "a field on the grid", error) from error
        measured = measure(volume)
        check_manifest(job.record, header)
        if measured["intensity_std"] == 0:
            raise OCTReadError(url, RejectReason.CONSTANT_VOLUME, "an image on the grid", "one grey value")
    except storage.StorageNotFoundError as error:
        fields |= {"status": RejectReason.MISSING_FILE.value, "message": error.problem}
    except storage.StorageError as error:
        return Outcome(job.row, UNREAD, str(error))
    except OCTReadError as error:
        fields |= {"status": error.reason.value, "message": error.detail}
    else:
        voxels = volume.voxels
        fields |= measured | {
            "status": KEPT,
            **{f"shape_before_{a}": n for a, n in zip("dhw", header.shape, strict=True)},
            **{f"spacing_before_{a}": s for a, s in zip("dhw", header.spacing_mm, strict=True)},
            "spacing_source": header.spacing_source,
            "orientation_source": header.orientation_source,
            "flipped_d": header.flip_d,
            "bits_stored": header.bits_stored,
            "transfer_syntax": header.transfer_syntax,
            "header_laterality": header.laterality,
        }
    if fields["status"] != RejectReason.MISSING_FILE:
        job.writer.write_row(job.row, voxels, fields)
    elif job.was_kept:
        return Outcome(job.row, SOURCE_MISSING)
    else:
        job.writer.write_fields(job.row, fields)  # whatever volume there may be stays
    return Outcome(job.row, fields["status"], fields["message"])


def _identity(job: Job) -> dict[str, Any]:
    """What a row's JSON says of where it comes from."""
    return {"record": record_fields(job.record), "source_url": storage.absolute(job.record.url)}


def state_of(job: Job, found: dict[str, Any] | None) -> str:
    """DONE: kept from the same source file (its copy of the record is brought up to date); SOURCE_MISSING:
    kept, but the file is not there now; otherwise TO_DO."""
    if found is None or found["status"] != KEPT:
        return TO_DO
    try:
        source = source_stat(job.record, job.options)
    except storage.StorageNotFoundError:
        return SOURCE_MISSING
    except storage.StorageError:
        return TO_DO  # prepare_row meets the same error and counts it, for this row alone
    if (found["source_size"], found["source_version"]) != (source.size, source.etag_or_mtime):
        return TO_DO
    if not _identity(job).items() <= found.items():
        job.writer.write_fields(job.row, found | _identity(job))
    return DONE


def run_jobs(
    jobs: Sequence[Job], workers: int, work: Callable[[Job], Outcome] = prepare_row
) -> Iterator[Outcome]:
    """Outcomes as they come, from `workers` processes (0: a thread of this one); closing the generator ends
    them.

    When a process is lost, the files that were in the pool run again one by one: the one that takes its
    process with it a second time is a reject. A row that cannot be written ends the run: StorageError.
    """
    waiting, suspects = list(reversed(jobs)), []
    while waiting or suspects:
        alone = bool(suspects)
        todo, lost = (suspects, []) if alone else (waiting, [])
        size = 1 if alone else workers
        ahead = 1 if alone else _IN_FLIGHT * size or 1
        with pool_of(size) as pool:
            running: dict[Future[Outcome], Job] = {}
            while (todo or running) and not lost:
                while todo and len(running) < ahead:
                    job = todo.pop()
                    try:
                        running[pool.submit(work, job)] = job
                    except BrokenProcessPool:
                        lost.append(job)
                        break
                done, _ = wait(running, return_when=FIRST_COMPLETED) if running else (set(), None)
                for future in done:
                    job, error = running.pop(future), future.exception()
                    if isinstance(error, BrokenProcessPool):
                        lost.append(job)
                    elif isinstance(error, storage.StorageError):
                        raise error
                    elif error is not None:
                        yield _internal_error(job, error)
                    else:
                        yield future.result()
            lost += running.values()
        if alone and lost:
            job = lost.pop()
            yield _reject(job, WORKER_DIED, "its worker process was lost twice, for lack of memory perhaps")
        suspects = suspects + lost if alone else lost


def _internal_error(job: Job, error: BaseException) -> Outcome:
    """A reject with the error's kind and place; not its text, which may quote the file."""
    if error.__traceback__ is None:  # of another process: the way to the error is text
        places = re.findall(r'^  File "(.*)", line (\d+), in (.*)$', str(error.__cause__), re.MULTILINE)
    else:
        frames = traceback.extract_tb(error.__traceback__)
        places = [(frame.filename, str(frame.lineno), frame.name) for frame in frames]
    trace = [f"  {path}:{line} {function}" for path, line, function in places]
    print(f"{job.record.path}: {type(error).__name__}", *trace, sep="\n", file=sys.stderr)
    where = f" at {os.path.basename(places[-1][0])}:{places[-1][1]}" if places else ""
    return _reject(job, INTERNAL_ERROR, f"{type(error).__name__}{where}")


def _reject(job: Job, status: str, message: str) -> Outcome:
    fields = _identity(job) | {"status": status, "message": message}
    job.writer.write_row(job.row, None, fields)
    return Outcome(job.row, status, message)


def parse_shard(text: str) -> tuple[int, int]:
    """'i/n' -> (i, n) with 0 <= i < n; raises UserError."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not int(match[1]) < int(match[2]):
        raise UserError(f"--shard: expected i/n with 0 <= i < n, found {text!r}")
    return int(match[1]), int(match[2])


def _peak_memory_mb(workers: int) -> float:
    import resource  # not on every system; prepare runs on those that have it

    who = resource.RUSAGE_CHILDREN if workers else resource.RUSAGE_SELF
    return resource.getrusage(who).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workers(parser)
    parser.add_argument(
        "--audit", action="store_true", help="list the files of a remote tree too; a local one always is"
    )
    parser.add_argument("--shard", default="0/1", metavar="i/n", help="rows with row %% n == i only")
    parser.add_argument(
        "--check-only",
        action="store_true",
        help="the same as python -m data_setup.check",
    )
    check.add_arguments(parser)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stage; 0, or EXIT_USER_ERROR when too many files were rejected or some could not be read."""
    cfg, args = parse_cli("data_setup.prepare", __doc__ or "", argv, _add_arguments)
    shard, num_shards = parse_shard(args.shard)
    if args.check_only:
        return check.check_tree(cfg, args.workers, args.pixel_hash or "same-size", args.json)
    if args.json or args.pixel_hash:
        raise UserError("--json, --pixel-hash: expected --check-only with them, found none")
    start = time.perf_counter()
    options, url = cfg.data.storage_options, cfg.data.store
    listing = read_records(cfg)
    writer = StoreWriter(url, options)
    wants_audit = args.audit or not storage.is_remote(cfg.data.gcs_root)
    audit = shorten(audit_files(listing, list_tree(listing, options))) if wants_audit else None
    synthetic = storage.exists(storage.join(cfg.data.gcs_root, "synthetic.json"), options)
    with shard_lock(url, shard, num_shards, options):
        with setup_lock(url, options):
            writer.create(cfg.spatial, cfg.data.gcs_root, synthetic)
            rows = writer.append_records([record_fields(r) for r in listing.records])
        found = writer.read_rows(lambda row: row % num_shards == shard)
        mine = [
            Job(row, record, writer, cfg.spatial, options, found.get(row, {}).get("status") == KEPT)
            for row, record in zip(rows, listing.records, strict=True)
            if row % num_shards == shard
        ]
        states = in_threads(lambda job: state_of(job, found.get(job.row)), mine)
        jobs = [job for job, state in zip(mine, states, strict=True) if state == TO_DO]
        source_missing = states.count(SOURCE_MISSING)
        bad: Counter[str] = Counter()
        first_unread = None
        limit = cfg.data.max_reject_fraction * len(mine)
        outcomes = run_jobs(jobs, args.workers)
        prepared = 0
        with tqdm(total=len(jobs), desc="prepare", unit="vol", disable=not sys.stderr.isatty()) as bar:
            for outcome in outcomes:
                bar.update()
                if outcome.status == KEPT:
                    prepared += 1
                    continue
                if outcome.status == SOURCE_MISSING:
                    source_missing += 1
                    continue
                bad[outcome.status] += 1
                if outcome.status == UNREAD:
                    first_unread = first_unread or outcome.message
                if bad.total() > limit:
                    break
        outcomes.close()

        def is_own(row: int) -> bool:
            return row % num_shards == shard

        measured = writer.read_unindexed(is_own)  # minutes for many rows in a bucket: before the lock
        with setup_lock(url, options):
            index = writer.finalise(rows, measured, is_own)
            seconds = time.perf_counter() - start
            report = summarise(
                index,
                read_attrs(url, options),
                listing.skipped,
                {
                    "shard": args.shard,
                    "workers": args.workers,
                    "prepared": prepared,
                    "reused": states.count(DONE),
                    "source_missing": source_missing,
                    "rejected": dict(bad),
                    "seconds": round(seconds, 3),
                    "volumes_per_s": round(prepared / seconds, 3),
                    "peak_memory_mb": round(_peak_memory_mb(args.workers), 1),
                    "split_source": listing.split_source,
                    "audit": audit,
                },
            )
            storage.write_text(
                storage.join(url, "prepare_report.json"), json.dumps(report, indent=1) + "\n", options
            )
    print(table(report))
    if bad.total() > limit:
        reasons = ", ".join(f"{name} {n}" for name, n in bad.most_common())
        raise UserError(
            f"{url}: expected at most {cfg.data.max_reject_fraction:.0%} of {len(mine)} records rejected "
            f"(data.max_reject_fraction), found {bad.total()}: {reasons}; finished rows are kept"
            + (f"; first unread: {first_unread}" if first_unread else "")
        )
    if first_unread:
        print(
            f"error: {bad[UNREAD]} files could not be read, run again; first: {first_unread}", file=sys.stderr
        )
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    run_cli(main)
