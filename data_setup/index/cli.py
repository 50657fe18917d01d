"""Index a tree of OCT files: write the two tables that prepare takes, and say what is missing.

In: FOLDER, on a disk or in a bucket, with DICOM, NIfTI, TIFF, Heidelberg XML or folders of images in any
order. Out: manifest.tsv and participants.tsv in FOLDER (or in --out), left_out.tsv with what is no volume and
why, octa.tsv where there are flow cubes or en-face images of OCTA, labels.parquet where exports have
thickness grids, surfaces/ where .vol files have layers, and a summary in words. Headers are read, not
volumes.
A second run adds what is new, and changes no cell that somebody filled.

examples:
    python -m data_setup.index scans
    python -m data_setup.index gs://bucket/scans --out tables --person '^([^/]+)/'

A person is PatientID of the header as a digest (--keep-ids: as it is, which may identify somebody), else the
nearest name in the path that is more than an eye, a visit or a protocol. --person takes it out of every path
instead: its one group is the person, as in --person '^([^/]+)/'.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from data_setup.index.candidates import find_candidates
from data_setup.index.layers import with_layers
from data_setup.index.look import OCTA, Entry, Rules, look, with_ids_of_folders
from data_setup.index.octa import write_octa
from data_setup.index.people import compile_pattern
from data_setup.index.summary import summarise
from data_setup.index.write import write_tables
from data_setup.readers.faults import RejectReason
from data_setup.store.format import UNREAD
from data_setup.tables.participants import TREE
from utils import storage
from utils.cli import add_workers
from utils.config.schema import StorageOptions
from utils.errors import EXIT_TRY_AGAIN, UserError
from utils.help_pages import Parser
from utils.terminal import track
from utils.workers import pool_of

FEW = 200  # candidates that this process reads faster than others start


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m data_setup.index",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="FOLDER", help="the root of the tree: a folder or a URL")
    parser.add_argument("--out", metavar="DIR", help="where the tables go (default: FOLDER)")
    parser.add_argument("--person", metavar="PATTERN", help="a regular expression; its group is the person")
    parser.add_argument("--keep-ids", action="store_true", help="PatientID as it is, not its digest")
    add_workers(parser)
    parser.add_argument("--endpoint-url", metavar="URL", help="an S3-compatible store, or an emulator")
    parser.add_argument("--profile", metavar="NAME", help="of the AWS credentials file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0, or EXIT_TRY_AGAIN when storage did not give some files; raises UserError."""
    args = _parse(argv)
    options = StorageOptions(endpoint_url=args.endpoint_url, profile=args.profile)
    root = args.folder.rstrip("/") or "/"
    out = (args.out or root).rstrip("/") or "/"
    rules = Rules(compile_pattern(args.person) if args.person else None, args.keep_ids)
    sizes = storage.find_sizes(root, options)
    if not sizes:
        raise UserError(
            f"{root}: expected a folder with files in it, found none; name the one that holds your scans "
            "(docs/start/folder.md)"
        )
    if f"{TREE[0]}/manifest.tsv" in sizes and out == root:
        raise UserError(
            f"{root}: expected a tree without tables, found {TREE[0]}/manifest.tsv, so AI-READI's layout: "
            "see docs/start/dicoms.md, or give --out DIR"
        )
    if Path(out).is_dir() and not os.access(out, os.W_OK):
        raise UserError(f"{out}: expected a folder that can be written, found none; give --out DIR")
    tops = {path.partition("/")[0] for path in sizes if "/" in path}
    if "dataset" in tops and len(tops) > 1:  # the manifest's paths leave this name out
        raise UserError(f"{root}: expected no folder dataset beside others, found it: index {root}/dataset")
    candidates, others = find_candidates(root, sizes, options)
    reader = partial(look, root=root, rules=rules, options=options)
    entries: list[Entry] = []
    with pool_of(args.workers if len(candidates) > FEW else 0) as pool:
        results = pool.map(reader, candidates, chunksize=8)
        progress = track(results, len(candidates), "index", "files")
        for candidate, entry in zip(candidates, progress, strict=True):
            if not candidate.is_sure and entry.status in (RejectReason.NOT_DICOM, RejectReason.NOT_OPT):
                others["files without a known ending"] += 1
            else:
                entries.append(entry)
    if not any(entry.is_row for entry in entries):
        reasons = [f"{entry.path}: {entry.status}: {entry.message}" for entry in entries[:3]]
        seen = "; ".join(reasons) or f"{len(sizes)} files of other kinds"
        raise UserError(f"{root}: expected an OCT volume, found none ({seen})")
    octa = [entry for entry in entries if entry.status == OCTA]
    entries = with_ids_of_folders([entry for entry in entries if entry.status != OCTA])
    entries = with_layers(root, out, entries, options)
    written = write_tables(out, entries, options)
    lines = summarise(root, out, entries, others, written, options)
    lines[-1:-1] = write_octa(out, entries, octa, options)
    print("\n".join(lines))
    return EXIT_TRY_AGAIN if any(entry.status == UNREAD for entry in entries) else 0
