"""Index a tree of OCT files: write the two tables that prepare takes, and say what is missing.

In: FOLDER, on a disk or in a bucket, with DICOM, NIfTI, TIFF, Heidelberg XML or folders of images in any
order. Out: manifest.tsv and participants.tsv in FOLDER (or in --out), left_out.tsv with other files and
why, octa.tsv where there are flow cubes or en-face images of OCTA, labels.parquet where exports have
thickness grids, surfaces/ where .vol files have layers, and a summary in words. Headers are read, not
volumes. --set NAME is a public data set in the layout of its owners: then whose eyes they are, splits, labels
and spacing come from there, and labels/, labels.tsv and label_classes.yaml are written too. Nothing is
downloaded. A second run adds what is new, and changes no cell that somebody filled.

examples:
    python -m data_setup.index scans
    python -m data_setup.index gs://bucket/scans --out tables --person '^([^/]+)/'
    python -m data_setup.index OCTA-500 --set octa500 --out tables
    python -m data_setup.index --sets octa500

A person is PatientID of the header as a digest (--keep-ids: as it is, which may identify somebody), else the
nearest name in the path that is more than an eye, a visit or a protocol. --person takes it out of every path
instead: its one group is the person, as in --person '^([^/]+)/'.
"""

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath

from data_setup.index.candidates import find_candidates
from data_setup.index.label_maps import localizers, with_label_maps, with_layers
from data_setup.index.label_table import compare_labels
from data_setup.index.look import HEADED, OCTA, Entry, Rules, look, with_ids_of_folders
from data_setup.index.octa import write_octa
from data_setup.index.people import compile_pattern, is_nobody, people_of_paths, readings
from data_setup.index.sets.facts import Tree
from data_setup.index.sets.preset import describe, entries_of, overview, plug_of
from data_setup.index.summary import summarise
from data_setup.index.write import write_tables
from data_setup.readers.faults import RejectReason
from data_setup.store.format import UNREAD
from data_setup.tables.splits import TREE
from data_setup.tables.text import read_cells
from utils.cli import add_workers, announce, require_folder
from utils.config.schema import StorageOptions
from utils.errors import EXIT_FINISHED, EXIT_TRY_AGAIN, EXIT_USER_ERROR, UserError
from utils.help_pages import Parser
from utils.terminal import say, track
from utils.workers import pool_of

NAME = "bad_name"  # of what is left out
FEW = 200  # candidates that this process reads faster than others start


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m data_setup.index",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root = parser.add_mutually_exclusive_group(required=True)
    root.add_argument("folder", nargs="?", metavar="FOLDER", help="the root of the tree: a folder or a URL")
    root.add_argument(
        "--sets", nargs="?", const="", metavar="NAME", help="list the public sets, or describe one"
    )
    parser.add_argument("--set", metavar="NAME", help="the public set that the tree is")
    parser.add_argument("--out", metavar="DIR", help="where the tables go (default: FOLDER)")
    parser.add_argument("--labels", metavar="TABLE", help="a table: are its ids and classes right?")
    parser.add_argument("--person", metavar="PATTERN", help="a regular expression; its group is the person")
    parser.add_argument("--forget-missing", action="store_true", help="take out the rows whose file is gone")
    parser.add_argument("--keep-ids", action="store_true", help="PatientID as it is, not its digest")
    add_workers(parser)
    parser.add_argument("--endpoint-url", metavar="URL", help="an S3-compatible store, or an emulator")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0, or what files that storage did not give call for; raises UserError."""
    args = _parse(argv)
    if args.sets is not None:
        print("\n".join(describe(plug_of(args.sets)) if args.sets else overview()))
        return 0
    plug = plug_of(args.set) if args.set else None
    if plug and (args.person or args.keep_ids):
        raise UserError("--set: expected neither --person nor --keep-ids with it, found one")
    options = StorageOptions(endpoint_url=args.endpoint_url)
    root = args.folder.rstrip("/") or "/"
    out = (args.out or root).rstrip("/") or "/"
    announce(f"index: files below {root} are listed and their headers read; the tables go into {out}")
    tree = Tree(root, options)
    _check_places(tree, out)
    label_table = read_cells(args.labels, options) if args.labels else None  # before the files are read
    others: Counter[str] = Counter()
    if plug:
        entries = entries_of(plug, tree, out)
    else:
        rules = Rules(compile_pattern(args.person) if args.person else None, args.keep_ids)
        entries, others = read_tree(tree.root, tree.sizes, rules, options, args.workers)
    if not any(entry.is_row for entry in entries):
        reasons = [f"{entry.path}: {entry.status}: {entry.message}" for entry in entries[:3]]
        seen = "; ".join(reasons) or f"{len(tree.sizes)} files of other kinds"
        raise UserError(f"{root}: expected an OCT volume, found none ({seen})")
    _check_tops(tree, [entry.path for entry in entries if entry.is_row])
    octa = [entry for entry in entries if entry.status == OCTA]
    entries = [entry for entry in entries if entry.status != OCTA]
    if not plug:
        entries = [with_layers(root, out, entry, options) for entry in with_ids_of_folders(entries)]
        entries = with_label_maps(root, tree.sizes, entries, options)
        _show_readings([entry for entry in entries if entry.is_row])
    labels = compare_labels(args.labels, label_table, entries) if label_table else []
    has_classes = any(entry.label_volume for entry in entries)
    there = {*tree.sizes, *(str(folder) for path in tree.sizes for folder in PurePosixPath(path).parents)}
    named = (plug.classes_of_voxels(tree) if has_classes else {}) if plug else None
    written = write_tables(out, entries, options, named, there, args.forget_missing)
    octa_lines = write_octa(out, entries, octa, options)
    octa_lines = [*octa_lines, *localizers(root, entries, options)]
    say(*summarise(root, out, entries, others, written, options, octa_lines, plug, labels))
    if any(entry.is_away for entry in entries):
        return EXIT_TRY_AGAIN
    return EXIT_USER_ERROR if any(entry.status == UNREAD for entry in entries) else EXIT_FINISHED


def _show_readings(rows: Sequence[Entry]) -> None:
    """Print the best readings of the paths; raises UserError for a name that is nobody's."""
    of_path = [entry for entry in rows if entry.person_source == "path"]
    if not of_path:
        return
    # of all rows, since --person is of them all
    ways = readings([entry.path for entry in rows], [entry.person_id for entry in rows])
    texts = [f"{n} people" + (f" by --person {shlex.quote(way)}" if way else ", as it is") for way, n in ways]
    if nobody := [entry for entry in of_path if is_nobody(entry.person_id)]:
        better = texts[1] if len(texts) > 1 else "--person PATTERN; or index the folder above"
        raise UserError(
            f"{nobody[0].path!r}: expected the name of a person in the path, found {nobody[0].person_id!r}, "
            f"as in {len(nobody)} of {len(of_path)} paths; put each person's files into a folder of that "
            f"name, or say where it is: {better}"
        )
    if len(texts) > 1 and 2 * len(of_path) >= len(rows):
        number = {2: "two", 3: "three"}[len(texts)]
        others = {entry.person_id for entry in rows} - {entry.person_id for entry in of_path}
        also = f"; --person replaces {len(others)} ids of headers too" * bool(others)
        say(f"people      the paths can be read in {number} ways: {'; or '.join(texts)}{also}")


def _check_places(tree: Tree, out: str) -> None:
    """Raise UserError for a folder that cannot be indexed, or an output that cannot be written."""
    root, sizes = tree.root, tree.sizes
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
    require_folder("--out", out)
    _check_tops(tree)


def _check_tops(tree: Tree, scans: Sequence[str] = ()) -> None:
    """Raise UserError for a folder dataset beside others or `scans`: paths in the manifest leave it out."""
    folders = {path.partition("/")[0] for path in tree.sizes if "/" in path}
    others = {*folders, *(path.partition("/")[0] for path in scans)} - {"dataset"}
    if "dataset" in folders and others:
        raise UserError(
            f"{tree.root}: expected no folder dataset beside others, found {min(others)} beside it: move it "
            f"into dataset, or index {tree.root}/dataset"
        )


def read_tree(
    root: str,
    sizes: Mapping[str, int],
    rules: Rules,
    options: StorageOptions,
    workers: int,
    known: Collection[str] = (),
) -> tuple[list[Entry], Counter[str]]:
    """(what may be a volume, number of the other files by kind) of the files below a root, of any tree;
    `known`: paths that are not looked at again.
    """
    candidates, others = find_candidates(root, sizes, options)
    unnamed = [path for path in sizes if any("\ud800" <= letter <= "\udfff" for letter in path)]
    people = people_of_paths([(one.path, one.kind in HEADED) for one in candidates])
    candidates = [
        replace(one, person=person, place=place)
        for one, (person, place) in zip(candidates, people, strict=True)
        if one.path not in known
    ]
    reader = partial(look, root=root, rules=rules, options=options)
    encoding = sys.getfilesystemencoding()
    text = f"expected a name in {encoding}, found other bytes; rename it"
    text += "" if encoding == "utf-8" else ", or set PYTHONUTF8=1 where names are UTF-8"
    shown = (path.encode(errors="surrogateescape").decode(errors="backslashreplace") for path in unnamed)
    entries = [Entry(path, "name", status=NAME, message=text) for path in shown]
    with pool_of(workers if len(candidates) > FEW else 0) as pool:
        results = pool.map(reader, candidates, chunksize=8)
        progress = track(results, len(candidates), "index", "files")
        for candidate, entry in zip(candidates, progress, strict=True):
            if not candidate.is_sure and entry.status in (RejectReason.NOT_DICOM, RejectReason.NOT_OPT):
                others["files without a known ending"] += 1
            else:
                entries.append(entry)
    return entries, others
