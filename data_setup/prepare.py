"""Prepare once: every listed DICOM volume, checked, on one grid, in the store that training reads.

In: the manifest (data.gcs_root), the grid (spatial). Out: the store at data.store, its index and
prepare_report.json, and a table. A file that cannot be used is a row with its reason; the run goes on until
rejects exceed data.max_reject_fraction of the records. A rerun keeps finished rows, also when their source
is out of reach, takes up new records, and tries rejects again; after a kill at any moment it ends with the
same bytes.

    python -m data_setup.prepare --config FILE [--workers N] [--audit] [section.key=value ...]
    python -m data_setup.prepare --config FILE --shard i/n [--workers N]    on each of n machines
    python -m data_setup.prepare --config FILE --finalise [--audit]         once, after all shards
    python -m data_setup.prepare --config FILE --check-only [--json URL] [--pixel-hash all|same-size|none]

`--shard i/n` writes the volumes and row files of the rows with row % n == i; `--finalise` writes the index
and the report. A run without either does both.

There are no locks. Every row is computed from its own file alone and every object is written whole, so the
same shard prepared twice at once, or shards of another n, only write the same bytes twice. Only a run without
--shard may change an existing record list; a shard whose manifest differs from the list is an error. Two runs
at once with two manifests are an error at their end: a record has lost its row.
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
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from data_setup.check import cli as check
from data_setup.check.audit import audit_files, list_tree
from data_setup.manifest import Record, RecordList, read_records
from data_setup.readers.dicom import OCTHeader
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.open_record import check_manifest, open_record, source_stat
from data_setup.resample import Resampled, resample_frames
from data_setup.store.format import KEPT, UNREAD, read_attrs
from data_setup.store.summary import run_line, shorten, summarise, table
from data_setup.store.writer import StoreWriter, measure, record_fields
from utils import storage
from utils.cli import add_workers, parse_cli, run_cli
from utils.config.schema import Config, SpatialConfig, StorageOptions
from utils.errors import EXIT_TRY_AGAIN, EXIT_USER_ERROR, UserError
from utils.workers import in_threads, pool_of

WORKER_DIED = "worker_died"  # the process died twice at this file, most often for lack of memory
INTERNAL_ERROR = "internal_error"  # a fault of this program; its place goes to stderr
DONE, TO_DO = "done", "to_do"  # states of rows before the run
SOURCE_MISSING = "source_missing"  # a kept row whose file is missing now: row and volume stay
_IN_FLIGHT = 3  # jobs per worker that are submitted ahead


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
    is_away: bool = False  # storage did not answer, but may later


def prepare_row(job: Job) -> Outcome:
    """Write one row: its volume and its JSON, or a JSON with the reason why there is no volume.

    Reads the header, checks it against the manifest, decodes and resamples the frames, measures the result.
    Storage that does not answer leaves the row as it was, and so does a missing file whose volume is here.
    """
    fields: dict[str, Any] = _identity(job) | {"message": None}
    voxels = None
    try:
        source = source_stat(job.record, job.options)
        fields |= {"source_size": source.size, "source_version": source.etag_or_mtime}
        header, frames = open_record(job.record, job.options)
        check_manifest(job.record, header)
        volume = _resample(job, header, frames)
        measured = measure(volume)
        if measured["intensity_std"] == 0:
            raise OCTReadError(
                job.record.url, RejectReason.CONSTANT_VOLUME, "an image on the grid", "one grey value"
            )
    except storage.StorageNotFoundError as error:
        fields |= {"status": RejectReason.MISSING_FILE.value, "message": error.problem}
    except storage.StorageError as error:
        return Outcome(job.row, UNREAD, str(error), isinstance(error, storage.StorageAwayError))
    except OCTReadError as error:
        fields |= {"status": error.reason.value, "message": error.detail}
    else:
        voxels = volume.voxels
        fields |= {"status": KEPT} | measured | _acquisition(header)
    if fields["status"] != RejectReason.MISSING_FILE:
        job.writer.write_row(job.row, voxels, fields)
    elif job.was_kept:
        return Outcome(job.row, SOURCE_MISSING)
    else:
        job.writer.write_fields(job.row, fields)
    return Outcome(job.row, fields["status"], fields["message"])


def _resample(job: Job, header: OCTHeader, frames: Iterator[np.ndarray]) -> Resampled:
    """The frames on the grid; a field smaller than a voxel of the grid is a reject."""
    grid = job.spatial
    try:
        return resample_frames(
            frames,
            header.shape,
            header.spacing_mm,
            grid.image_size,
            grid.target_spacing,
            grid.resample,
            header.flip_d,
        )
    except ValueError as error:
        url = job.record.url
        raise OCTReadError(url, RejectReason.IMPLAUSIBLE_SPACING, "a field on the grid", error) from error


def _identity(job: Job) -> dict[str, Any]:
    """The fields of a row's JSON that say where the row comes from."""
    return {"record": record_fields(job.record), "source_url": storage.absolute(job.record.url)}


def _acquisition(header: OCTHeader) -> dict[str, Any]:
    """The fields of a row's JSON that the header gives."""
    return {
        **{f"shape_before_{a}": n for a, n in zip("dhw", header.shape, strict=True)},
        **{f"spacing_before_{a}": s for a, s in zip("dhw", header.spacing_mm, strict=True)},
        "spacing_source": header.spacing_source,
        "orientation_source": header.orientation_source,
        "flipped_d": header.flip_d,
        "bits_stored": header.bits_stored,
        "transfer_syntax": header.transfer_syntax,
        "header_laterality": header.laterality,
    }


def state_of(job: Job, written: dict[str, Any] | None) -> str:
    """DONE, SOURCE_MISSING or TO_DO, by the row's JSON and the source file.

    A row is DONE when its volume was made from the file as it is now; a changed record (a split, an age) is
    then written into the JSON.
    """
    if written is None or written["status"] != KEPT or written["record"]["path"] != job.record.path:
        return TO_DO
    try:
        source = source_stat(job.record, job.options)
    except storage.StorageNotFoundError:
        return SOURCE_MISSING
    except storage.StorageError:
        return TO_DO  # prepare_row meets the same error and counts it, for this row alone
    if (written["source_size"], written["source_version"]) != (source.size, source.etag_or_mtime):
        return TO_DO
    if not _identity(job).items() <= written.items():
        job.writer.write_fields(job.row, written | _identity(job))
    return DONE


def run_jobs(
    jobs: Sequence[Job], workers: int, work: Callable[[Job], Outcome] = prepare_row
) -> Generator[Outcome, None, None]:
    """Yield outcomes as they come from `workers` processes (0: one thread of this process).

    When a process dies, its pool's jobs run again one by one; a job whose process dies again is a reject.
    Closing the generator ends the processes. Raises StorageError when a row cannot be written.
    """
    waiting, suspects = list(reversed(jobs)), list[Job]()
    while waiting or suspects:
        alone = bool(suspects)
        todo, lost = suspects if alone else waiting, list[Job]()
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
    """Reject a row with the error's kind and place, without its text, which may quote the file."""
    if error.__traceback__ is None:  # the error of another process has its traceback as text
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
    verb = parser.add_mutually_exclusive_group()
    verb.add_argument("--shard", metavar="i/n", help="write the rows with row %% n == i, and no index")
    verb.add_argument("--finalise", action="store_true", help="write index and report of rows that are there")
    verb.add_argument(
        "--check-only",
        action="store_true",
        help="the same as python -m data_setup.check",
    )
    check.add_arguments(parser)


@dataclass
class Tally:
    """What a run did with its rows."""

    num_rows: int = 0
    reused: int = 0
    source_missing: int = 0
    prepared: int = 0
    rejected: Counter[str] = field(default_factory=Counter)  # by status; UNREAD is one of them
    first_unread: str | None = None  # the message of the first storage error
    num_away: int = 0  # rows whose storage did not answer

    def fields(self) -> dict[str, Any]:
        """The counts of prepare_report.json."""
        return {
            "prepared": self.prepared,
            "reused": self.reused,
            "source_missing": self.source_missing,
            "rejected": dict(self.rejected),
        }


def select(cfg: Config, writer: StoreWriter, records: Mapping[int, Record], tally: Tally) -> list[Job]:
    """The jobs of the rows in `records` (row -> record) that are not finished; `tally` counts the others."""
    written = writer.read_rows(lambda row: row in records)
    options = cfg.data.storage_options
    jobs = [
        Job(row, record, writer, cfg.spatial, options, written.get(row, {}).get("status") == KEPT)
        for row, record in records.items()
    ]
    states = in_threads(lambda job: state_of(job, written.get(job.row)), jobs)
    tally.num_rows = len(jobs)
    tally.reused, tally.source_missing = states.count(DONE), states.count(SOURCE_MISSING)
    return [job for job, state in zip(jobs, states, strict=True) if state == TO_DO]


def work(jobs: Sequence[Job], workers: int, limit: float, tally: Tally) -> None:
    """Run the jobs and count their outcomes; stop when more than `limit` rows are rejected."""
    outcomes = run_jobs(jobs, workers)
    with tqdm(total=len(jobs), desc="prepare", unit="vol", disable=not sys.stderr.isatty()) as bar:
        for outcome in outcomes:
            bar.update()
            if outcome.status == KEPT:
                tally.prepared += 1
            elif outcome.status == SOURCE_MISSING:
                tally.source_missing += 1
            else:
                tally.rejected[outcome.status] += 1
            if outcome.status == UNREAD:
                tally.first_unread = tally.first_unread or outcome.message
                tally.num_away += outcome.is_away
            if tally.rejected.total() > limit:
                break
    outcomes.close()


def finalise(
    cfg: Config,
    writer: StoreWriter,
    listing: RecordList,
    rows: Sequence[int],
    run: Mapping[str, Any],
    audit: bool,
) -> dict[str, Any]:
    """Write the index and prepare_report.json, whose `run` section is `run`; returns the report."""
    options = cfg.data.storage_options
    index = writer.finalise(rows)
    files = shorten(audit_files(listing, list_tree(listing, options))) if audit else None
    about = dict(run) | {"split_source": listing.split_source, "audit": files}
    report = summarise(index, read_attrs(writer.url, options), listing.skipped, about)
    url = storage.join(writer.url, "prepare_report.json")
    storage.write_text(url, json.dumps(report, indent=1) + "\n", options)
    return report


def _exit_code(cfg: Config, tally: Tally) -> int:
    """0, or what files that could not be read call for; raises UserError for too many other rejects."""
    url, limit, rejected = cfg.data.store, cfg.data.max_reject_fraction, tally.rejected
    if rejected.total() - tally.num_away > limit * tally.num_rows:
        reasons = ", ".join(f"{name} {n}" for name, n in rejected.most_common())
        raise UserError(
            f"{url}: expected at most {limit:.0%} of {tally.num_rows} records rejected "
            f"(data.max_reject_fraction), found {rejected.total()}: {reasons}; finished rows are kept"
            + (f"; first unread: {tally.first_unread}" if tally.first_unread else "")
        )
    if tally.first_unread is None:
        return 0
    problem = f"{rejected[UNREAD]} files could not be read, run again; first: {tally.first_unread}"
    print(f"error: {problem}", file=sys.stderr)
    return EXIT_TRY_AGAIN if tally.num_away else EXIT_USER_ERROR


def _exit_code_of_all(cfg: Config, report: Mapping[str, Any]) -> int:
    """As `_exit_code`, of every shard's rows; EXIT_USER_ERROR also where rows have not been prepared yet."""
    tally = Tally()
    tally.num_rows, tally.rejected = report["records"], Counter(report["rejected"])
    if report["pending"]:
        problem = f"expected all {report['records']} records prepared, found {report['pending']} pending"
        print(f"error: {cfg.data.store}: {problem}; run their shards, then --finalise again", file=sys.stderr)
        return EXIT_USER_ERROR
    return _exit_code(cfg, tally)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stage; 0, or an exit code of utils.errors when some files could not be read."""
    cfg, args = parse_cli("data_setup.prepare", __doc__ or "", argv, _add_arguments)
    shard, num_shards = parse_shard(args.shard or "0/1")
    if args.check_only:
        return check.check_tree(cfg, args.workers, args.pixel_hash or "same-size", args.json)
    if args.json or args.pixel_hash:
        raise UserError("--json, --pixel-hash: expected --check-only with them, found none")
    if args.audit and args.shard:
        raise UserError("--audit: expected with --finalise or alone, found --shard with it")
    start = time.perf_counter()
    options, root = cfg.data.storage_options, cfg.data.gcs_root
    listing = read_records(cfg)
    records = [record_fields(r) for r in listing.records]
    writer = StoreWriter(cfg.data.store, options)
    synthetic = storage.exists(storage.join(root, "synthetic.json"), options)
    writer.create(cfg.spatial, root, synthetic, len(records))
    rows = writer.append_records(records, may_change=args.shard is None)
    tally = Tally()
    if not args.finalise:
        own_records = {r: c for r, c in zip(rows, listing.records, strict=True) if r % num_shards == shard}
        jobs = select(cfg, writer, own_records, tally)
        work(jobs, args.workers, cfg.data.max_reject_fraction * len(own_records), tally)
        writer.check_rows(records, rows)
    seconds = time.perf_counter() - start
    run = tally.fields() | {
        "workers": args.workers,
        "seconds": round(seconds, 3),
        "volumes_per_s": round(tally.prepared / seconds, 3),
        "peak_memory_mb": round(_peak_memory_mb(args.workers), 1),
    }
    if args.shard:
        print(f"shard {args.shard} of {cfg.data.store}: {run_line(run)}; after all shards: --finalise")
    else:
        report = finalise(cfg, writer, listing, rows, run, args.audit or not storage.is_remote(root))
        print(table(report))
        if args.finalise:
            return _exit_code_of_all(cfg, report)
    return _exit_code(cfg, tally)


if __name__ == "__main__":
    run_cli(main)
