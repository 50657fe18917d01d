"""Draw what a head sees into files: classes of voxels, or surfaces, in the geometry of the scan itself.

    python -m finetuning.segment --head runs/segmentation --rows 0,5 --format nifti --out masks
    python -m finetuning.segment --head runs/segmentation --files scans/eye.dcm --format seg --out masks
    python -m finetuning.segment --head runs/layers --rows all --format heightmap --out surfaces

In: a head of finetuning.train with task.kind=segmentation or layers, and scans: rows of its store, whose
files are read again, or files of their own, which are read as data_setup.prepare reads them. Out, below DIR
at the scan's path: nifti (.nii.gz), png (a folder, an image a B-scan, grey value = class) or seg (DICOM
Segmentation; of DICOM scans, needs pip install highdicom); of a layers head heightmap (DICOM Height Map
Segmentation). DIR/segments.jsonl has a line per scan: file, voxels and mm3 of each class, digests. The same
command after a kill goes on; another head needs another DIR.
DIR/label_classes.yaml names the classes. A scan larger than the grid is read in windows that overlap. A file
that cannot be used is a line with its reason, and the exit code is 1. Overrides (data.*, model.checkpoint
where the encoder moved) stand before --files. A research model, not a medical device.

Keys that matter: data.store, model.checkpoint
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from utils.cli import run_cli
from utils.help_pages import PeopleParser

FORMATS = ("nifti", "png", "seg", "heightmap")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The words of the command line."""
    parser = PeopleParser("finetuning.segment", __doc__ or "")
    parser.add_argument("--head", required=True, metavar="HEAD", help="head.pt, or its run's folder")
    scans = parser.add_mutually_exclusive_group(required=True)
    scans.add_argument("--rows", metavar="all|N,N", help="rows of the head's store (data.store)")
    scans.add_argument("--files", nargs="+", metavar="FILE", help="scans of any kind that prepare opens")
    parser.add_argument("--format", required=True, choices=FORMATS)
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what the command line says; returns the exit code."""
    args = parse(argv)
    # here: torch takes seconds to import
    from finetuning.dense.draw import draw

    return draw(args.head, args.rows, args.files, args.format, args.out, args.overrides)


if __name__ == "__main__":
    run_cli(main)
