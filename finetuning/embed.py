"""Features of every volume of a store, or of files.

    python -m finetuning.embed --checkpoint runs/smoke_test --store runs/phantom_store --out features
    python -m finetuning.embed --checkpoint runs/smoke_test --out features --files scans/

In: a checkpoint of pretraining.train or its run's folder, and a prepared store of the same geometry, or files
and folders of any kind, found as data_setup.index finds them (--dicom: of a folder only the DICOM files) and
read as data_setup.prepare reads them. Out: `--out DIR` with features.parquet, a
row per volume: the columns of the store's index, mean and standard deviation of the features over valid
tokens, and whether pre-training saw the participant; with --patches the features of every patch, float16, in
patches.zarr. The same command after a kill goes on where it was. torchrun shares the volumes out.

A volume that cannot be used is a row with its reason and without features, and the exit code is 1.
Overrides (data.*, train.use_bf16) change the checkpoint's configuration; they stand before --files.

Keys that matter: data.gcs_root, data.workers, train.use_bf16, train.per_core_batch_size
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from utils.cli import announce, require_folder, require_there, run_cli
from utils.config.load import require_changes
from utils.help_pages import PeopleParser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = PeopleParser("finetuning.embed", __doc__ or "")
    parser.add_argument("--checkpoint", required=True, metavar="RUN_OR_FILE")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--store", metavar="STORE", help="a prepared store")
    source.add_argument("--files", nargs="+", metavar="FILE_OR_FOLDER", default=[], help="scans of any kind")
    source.add_argument("--dicom", nargs="+", metavar="FILE_OR_FOLDER", default=[], help="only DICOM files")
    parser.add_argument("--out", required=True, metavar="DIR", help="a new folder, or one of this command")
    parser.add_argument("--patches", action="store_true", help="write the features of every patch too")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Embed what the command line says; returns the exit code."""
    args = parse(argv)
    require_there("--checkpoint", args.checkpoint)
    require_there("--files, --dicom", *args.files, *args.dicom, folder="a folder", of_all=False)
    require_folder("--out", args.out)
    require_changes("embed", args.overrides)
    announce(f"finetuning.embed: {args.checkpoint}; the libraries load, which takes seconds")
    # here: torch takes seconds to import, and a reader process imports this module without it
    from finetuning.embedding.run import embed
    from finetuning.embedding.scans import Places

    places = Places(args.dicom, args.files)
    return embed(args.checkpoint, args.store, places, args.out, args.patches, args.overrides)


if __name__ == "__main__":
    run_cli(main)
