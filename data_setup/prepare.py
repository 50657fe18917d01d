"""Prepare once: every listed DICOM volume, checked, on one grid, in the store that training reads.

    python -m data_setup.prepare --config configs/smoke_test.yaml
    python -m data_setup.prepare --config configs/pretrain_oct_surroundings.yaml data.gcs_root=TREE
    python -m data_setup.prepare --config configs/smoke_test.yaml --verify

In: the manifest (data.gcs_root), the grid (spatial). Out: the store at data.store, its index and
prepare_report.json, and a table. A file that cannot be used is a row with its reason; the run goes on until
rejects exceed data.max_reject_fraction of the records. A rerun keeps finished rows, also when their source
is out of reach, takes up new records, and tries rejects again; after a kill at any moment it ends with the
same bytes.

    python -m data_setup.prepare --config FILE [--workers N] [--audit] [section.key=value ...]
    python -m data_setup.prepare --config FILE --dask tcp://SCHEDULER:8786  the same by a cluster's workers
    python -m data_setup.prepare --config FILE --heights [--workers N]      afterwards, for task.kind=layers
    python -m data_setup.prepare --config FILE --labels [--workers N]       afterwards, labels of the manifest
    python -m data_setup.prepare --config FILE --flow [--workers N]         afterwards, flow cubes of OCTA
    python -m data_setup.prepare --config FILE --verify [--workers N]
    python -m data_setup.prepare --config FILE --check-only [--json URL]

With `--dask` the workers of a cluster prepare the rows in place of this machine's processes: they need this
repository, data.gcs_root and data.store. `--verify` reads every volume again and compares checksums.
`--check-only` reads only headers, writes no store and ends with 1 where something is wrong
(data_setup/check.py). `--heights` lays the height maps of data.octa_manifest_path on
the volumes of a finalised store (data_setup/attach/heights.py), `--labels` what the manifest's columns
label_volume and label_surfaces name (attach/labels.py), `--flow` the flow cubes and en-face images
of data.octa_manifest_path (attach/flow.py). `--rebase` takes a tree that has moved for
the same one: files of equal size are not read again.

There are no locks. Every row is computed only from its own file and every object is written whole, so two
runs at once only write the same bytes twice. Two runs at once with two manifests are an error at their end: a
record has lost its row.

Keys that matter: data.gcs_root, data.store, data.device_filter, data.max_reject_fraction,
spatial.target_spacing, spatial.image_size, spatial.resample
"""

import argparse
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from data_setup.check import audit_files, check_tree, list_tree
from data_setup.jobs import DONE, SOURCE_MISSING, TO_DO, Job, run_jobs, state_of
from data_setup.manifest import RECOMMENDED, Record, RecordList, read_records
from data_setup.store.format import KEPT, UNREAD, read_attrs
from data_setup.store.reader import verify
from data_setup.store.summary import next_step, repeats, require_apart, shorten, summarise, table
from data_setup.store.writer import StoreWriter, record_fields
from data_setup.tables.splits import shortfalls
from utils import storage
from utils.cli import add_workers, announce, parse_cli, run_cli
from utils.config.schema import Config
from utils.errors import EXIT_FINISHED, EXIT_TRY_AGAIN, EXIT_USER_ERROR, UserError
from utils.terminal import say, track
from utils.workers import in_threads


def _peak_memory_mb(workers: int) -> float:
    import resource  # not on every system; prepare runs on those that have it

    who = resource.RUSAGE_CHILDREN if workers else resource.RUSAGE_SELF
    return resource.getrusage(who).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


_VERBS = {
    "--check-only": "look at the headers of the whole tree, and write no store",
    "--verify": "read every volume of the store and compare its checksum",
    "--heights": "lay the height maps of the data set on the store's volumes",
    "--labels": "lay the labels that the manifest names on the store's volumes",
    "--flow": "lay the flow cubes of the data set on the store's volumes",
}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workers(parser)
    parser.add_argument("--dask", metavar="ADDRESS", help="run on this dask scheduler: tcp://HOST:8786")
    parser.add_argument("--audit", action="store_true", help="list a remote tree too; a local one always is")
    # One at a time, and after a run without them: all but --check-only read the store that it makes.
    verb = parser.add_mutually_exclusive_group()
    for name, text in _VERBS.items():
        verb.add_argument(name, action="store_true", help=text)
    parser.add_argument("--rebase", action="store_true", help="source files are now below data.gcs_root")
    parser.add_argument("--json", metavar="URL", help="where to write the report (default: in data.store)")


LOOKED_AT = 100  # files of a run that are looked at whatever the rejects
EXAMPLES = 3  # rejects that the command names


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
    examples: list[str] = field(default_factory=list)  # the first rejects, with what to do about them

    def fields(self) -> dict[str, Any]:
        """The counts of prepare_report.json."""
        return {
            "prepared": self.prepared,
            "reused": self.reused,
            "source_missing": self.source_missing,
            "rejected": dict(self.rejected),
        }


def select(
    cfg: Config, writer: StoreWriter, records: Mapping[int, Record], tally: Tally, rebase: bool = False
) -> list[Job]:
    """The jobs of the rows in `records` (row -> record) that are not finished; `tally` counts the others."""
    # A row says which bytes it was made from: the source's version decides, not that a volume is there.
    written = writer.rows.read(lambda row: row in records)
    options, planes = cfg.data.storage_options, writer.planes
    jobs = [
        Job(
            *(row, record, writer, cfg.spatial, options, planes),
            was_kept=written.get(row, {}).get("status") == KEPT,
        )
        for row, record in records.items()
    ]
    states = in_threads(lambda job: state_of(job, written.get(job.row), rebase), jobs)
    tally.num_rows = len(jobs)
    tally.reused, tally.source_missing = states.count(DONE), states.count(SOURCE_MISSING)
    return [job for job, state in zip(jobs, states, strict=True) if state == TO_DO]


def work(jobs: Sequence[Job], workers: int, limit: float, tally: Tally, cluster: str | None = None) -> None:
    """Run the jobs and count their outcomes; stop when more than `limit` rows are rejected. Not before
    LOOKED_AT of them: a small set is looked at completely, so that all its rejects are known.
    """
    # Each outcome is written before it arrives here, so a kill between two of them loses none.
    outcomes = run_jobs(jobs, workers, cluster=cluster)
    path_of = {job.row: job.record.path for job in jobs}
    with closing(track(outcomes, len(jobs), "prepare", "volumes")) as progress:
        for count, outcome in enumerate(progress, 1):
            if outcome.status == KEPT:
                tally.prepared += 1
            elif outcome.status == SOURCE_MISSING:
                tally.source_missing += 1
            else:
                tally.rejected[outcome.status] += 1
                if len(tally.examples) < EXAMPLES:
                    text = f"{path_of[outcome.row]}: {outcome.status}: {outcome.message}"
                    tally.examples.append(f"{text}; next: {next_step(outcome.status)}")
            if outcome.status == UNREAD:
                tally.first_unread = tally.first_unread or outcome.message
                tally.num_away += outcome.is_away
            if tally.rejected.total() > limit and count >= LOOKED_AT:
                break
    outcomes.close()
    for example in tally.examples:
        say(f"rejected: {example}", file=sys.stderr)


def finalise(
    cfg: Config,
    writer: StoreWriter,
    listing: RecordList,
    rows: Sequence[int],
    run: Mapping[str, Any],
    audit: bool,
) -> tuple[dict[str, Any], pd.DataFrame]:
    """Write the index and prepare_report.json, whose `run` section is `run`; returns (report, index)."""
    options = cfg.data.storage_options
    # What another filter prepared stays listed: one store may be filled device by device.
    others = writer.find_rows(map(record_fields, listing.filtered)) if listing.filtered else []
    index = writer.finalise([*rows, *others])
    files = shorten(audit_files(listing, list_tree(listing, options))) if audit else None
    about = dict(run) | {"split_source": listing.split_source, "audit": files}
    report = summarise(index, read_attrs(writer.url, options), listing.skipped, about)
    url = storage.join(writer.url, "prepare_report.json")
    storage.write_text(url, json.dumps(report, indent=1) + "\n", options)
    return report, index


def keep_splits(listing: RecordList, writer: StoreWriter) -> RecordList:
    """The listing with the splits that its participants have in the store, where no table recommends one."""
    # Before rows are made: a record that changed sides would be in training and in validation.
    if listing.split_source == RECOMMENDED:
        return listing
    splits = {record["person_id"]: record["split"] for record in writer.read_records()}
    records, filtered = (
        [replace(r, split=splits.get(r.person_id, r.split)) for r in part]
        for part in (listing.records, listing.filtered)
    )
    return replace(listing, records=records, filtered=filtered)


def _exit_code(cfg: Config, tally: Tally) -> int:
    """0, or what files that could not be read call for; raises UserError for too many other rejects."""
    url, limit, rejected = cfg.data.store, cfg.data.max_reject_fraction, tally.rejected
    # Rejects before storage that was away: to run again mends only the latter.
    if rejected.total() - tally.num_away > limit * tally.num_rows:
        reasons = ", ".join(f"{name} {n}" for name, n in rejected.most_common())
        raise UserError(
            f"{url}: expected at most {limit:.0%} of {tally.num_rows} records rejected "
            f"(data.max_reject_fraction), found {rejected.total()}: {reasons}; finished rows are kept; "
            "what to do about each: docs/reference/troubleshooting.md"
            + (f"; first unread: {tally.first_unread}" if tally.first_unread else "")
        )
    if tally.first_unread is None:
        return 0
    problem = f"{rejected[UNREAD]} files could not be read, run again; first: {tally.first_unread}"
    say(f"error: {problem}", file=sys.stderr)
    return EXIT_TRY_AGAIN if tally.num_away else EXIT_USER_ERROR


def _run_verb(verb: str, cfg: Config, args: argparse.Namespace) -> int:
    """Check the tree or the store, or lay files on the store's volumes; returns the exit code."""
    if verb == "--check-only":
        return check_tree(cfg, args.workers, args.json)
    if verb == "--verify":
        return verify(cfg, args.workers, args.dask)
    from data_setup.attach.flow import prepare_flow
    from data_setup.attach.heights import prepare_heights
    from data_setup.attach.labels import prepare_labels

    modes = {"--heights": prepare_heights, "--labels": prepare_labels, "--flow": prepare_flow}
    return modes[verb](cfg, args.workers)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stage; 0, or an exit code of utils.errors when some files could not be read."""
    # ---- the other verbs: each ends here, and none of them makes rows
    cfg, args = parse_cli("data_setup.prepare", __doc__ or "", argv, _add_arguments, has_checkpoint=False)
    verb = next((name for name in _VERBS if getattr(args, name[2:].replace("-", "_"))), None)
    if verb and (args.rebase or args.audit):
        verbs = "--check-only, --verify, --heights, --labels or --flow"
        raise UserError(f"--rebase, --audit: expected none of {verbs} with them, found one")
    if args.dask and verb not in (None, "--verify"):
        raise UserError(f"--dask: expected no {verb} with it, which runs on this machine, found it")
    if args.json and verb != "--check-only":
        raise UserError("--json: expected --check-only with it, found none")
    if verb:
        place = cfg.data.gcs_root if verb == "--check-only" else cfg.data.store
        announce(f"prepare {verb}: {place}: {_VERBS[verb]}")
        return _run_verb(verb, cfg, args)
    announce(f"prepare: {cfg.data.manifest_path} is read; the volumes go into {cfg.data.store}")
    # ---- who is in: the manifest's records; splits of our own stay as they were, so nobody changes sides
    start = time.perf_counter()
    options, root = cfg.data.storage_options, cfg.data.gcs_root
    writer = StoreWriter(cfg.data.store, options)
    listing = keep_splits(read_records(cfg), writer)
    records = [record_fields(r) for r in listing.records]
    # ---- the store: made or checked before records get rows, since a row is a place in its array
    synthetic = storage.exists(storage.join(root, "synthetic.json"), options)
    writer.create(cfg.spatial, root, synthetic, len(records), args.rebase)
    filtered = [record_fields(r) for r in listing.filtered]
    rows = writer.append_records(records, others=filtered)
    # ---- the work: rows that are not finished, by processes or a cluster, until there are too many rejects
    tally = Tally()
    record_of = dict(zip(rows, listing.records, strict=True))
    jobs = select(cfg, writer, record_of, tally, args.rebase)
    work(jobs, args.workers, cfg.data.max_reject_fraction * len(record_of), tally, args.dask)
    writer.check_rows(records, rows)  # before the index: another run may have given them to others
    seconds = time.perf_counter() - start
    run = tally.fields() | {
        "workers": "dask" if args.dask else args.workers,
        "seconds": round(seconds, 3),
        "volumes_per_s": round(tally.prepared / seconds, 3),
        "peak_memory_mb": None if args.dask else round(_peak_memory_mb(args.workers), 1),
    }
    # ---- the end: index and report first, so that what was prepared is kept whatever the verdict
    report, index = finalise(cfg, writer, listing, rows, run, args.audit or not storage.is_remote(root))
    lines = {record.path: record.line for record in listing.records}
    uids = {record.path: record.sop_instance_uid for record in listing.records}
    used = index[(index.status == KEPT) & index.listed]
    short = shortfalls(zip(used.person_id, used.split, strict=True), cfg.seed)
    print(table(report))
    gone = "expected its file, found none, and its SOPInstanceUID in"
    copies = [f"left out, the same scan again: {p}: {gone} {other!r}" for p, other in listing.copies.items()]
    say(*copies, *repeats(index, lines, uids), *short)
    require_apart(cfg.data.store, index, lines)
    code = _exit_code(cfg, tally)
    if code == EXIT_FINISHED:
        say(f"next: python -m pretraining.train --config {shlex.join([args.config, *args.overrides])}")
    return code


if __name__ == "__main__":
    run_cli(main)
