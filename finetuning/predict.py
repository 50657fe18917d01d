"""What a trained head says of scans: labels, surfaces, classes of voxels, or slabs of flow.

    python -m finetuning.predict --checkpoint runs/cls_linear_probe --files scans/ --out predictions
    python -m finetuning.predict --checkpoint runs/segmentation --files scans/ --out masks
    python -m finetuning.predict --checkpoint runs/segmentation --files scans/eye.dcm --format seg --out masks
    python -m finetuning.predict --checkpoint runs/layers --files scans/ --format heightmap --out surfaces

In: a head of finetuning.train (head.pt or its run's folder) and scans: files and folders of any kind, found
as data_setup.index finds them and read as data_setup.prepare reads them, with the manifest and the YAML
beside them (--dicom: of a folder only the DICOM files). Out, below DIR:

Without a format predictions.jsonl, a line per scan: probabilities and the predicted class, or surfaces or
slabs in the scan's own B-scans and A-scans; digests of head, encoder and voxels, the code's commit, warnings,
the distance from the training set. docs/guides/embedding.md has a table of all fields.
DIR/pictures has a PNG a scan: B-scans, the scan from above, where the evidence lies.
Probabilities are calibrated where validation allowed it in training; every line says whether. Units of
several volumes are not averaged. The map is that of one forward pass (contributions of tokens, or attention);
with --occlusion what the output loses when a block is hidden.

study.csv is one table of all scans: person, eye, and of surfaces um by layer and ETDRS sector, of classes nl
and lesions, of labels scores. Where the manifest names drawn surfaces (label_surfaces), or a maker's file
holds them, agreement.md, agreement.csv and agreement.png say how well the thickness agrees with theirs.

With --format a file at the scan's path, in its own geometry: nifti (.nii.gz; what a head of classes writes
without a format), npz, png (a folder, an image a B-scan, grey value = class) or seg (DICOM Segmentation; of
DICOM scans, needs pip install highdicom); of a head of surfaces these hold the layers between them (npz: the
surfaces), or heightmap (DICOM Height Map Segmentation) the surfaces. seg and heightmap name no patient,
unless --no-anonymous says so.
segments.jsonl has a line per scan: file, voxels, mm3, nl and lesions of each class, or thickness of layers,
digests; label_classes.yaml names the classes. A scan larger than the grid is read in windows that overlap.

The same command after a kill goes on. Lines of other scans stay; another head needs another DIR. A file that
cannot be used is a line with its reason, and the exit code is 1. Overrides (data.*, train.use_bf16,
model.checkpoint where the encoder moved) stand before --dicom and --files. A research model, not a medical
device.

Keys that matter: model.checkpoint, data.workers, train.use_bf16
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from utils.cli import announce, require_folder, require_there, run_cli
from utils.config.load import require_changes
from utils.help_pages import PeopleParser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = PeopleParser("finetuning.predict", __doc__ or "")
    parser.add_argument("--checkpoint", required=True, metavar="HEAD", help="head.pt, or its run's folder")
    scans = parser.add_mutually_exclusive_group(required=True)
    scans.add_argument("--files", nargs="+", metavar="FILE_OR_FOLDER", default=[], help="scans of any kind")
    scans.add_argument("--dicom", nargs="+", metavar="FILE_OR_FOLDER", default=[], help="only DICOM files")
    parser.add_argument(
        "--format", choices=("nifti", "npz", "png", "seg", "heightmap"), help="files in place of pictures"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="a new folder, or one of this command")
    parser.add_argument("--occlusion", action="store_true", help="draw the map by hiding blocks (slow)")
    parser.add_argument(
        "--anonymous",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="seg and heightmap name no patient (default); --no-anonymous: whom the scan names",
    )
    parser.add_argument(
        "--fovea",
        metavar="centre|B,A|TABLE",
        help="where foveas are, B-scan and A-scan from 0; TABLE: columns scan, b_scan, a_scan",
    )
    parser.add_argument("--visit-date", action="store_true", help="study.csv says when a scan was taken")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Predict what the command line says; returns the exit code."""
    args = parse(argv)
    require_there("--checkpoint", args.checkpoint)
    require_there("--files, --dicom", *args.files, *args.dicom, folder="a folder", of_all=False)
    require_folder("--out", args.out)
    options = require_changes("predict", args.overrides)
    if args.fovea is not None:
        from finetuning.dense.surfaces import read_foveas

        read_foveas(args.fovea, len({*args.dicom, *args.files}), options)
    announce(f"finetuning.predict: {args.checkpoint}; the libraries load, which takes seconds")
    # here: torch takes seconds to import, and a reader process imports this module without it
    from finetuning.prediction.run import Asked, Places, predict

    asked = Asked(
        Places(args.dicom, args.files),
        args.format,
        args.occlusion,
        args.anonymous,
        args.fovea,
        args.visit_date,
    )
    return predict(args.checkpoint, asked, args.out, args.overrides)


if __name__ == "__main__":
    run_cli(main)
