"""What a trained head says of DICOM files, with pictures of where the evidence lies.

    python -m finetuning.predict --checkpoint runs/cls_linear_probe --dicom scans/ --out predictions

In: a head of finetuning.train (head.pt or its run's folder) and files, which are read as data_setup.prepare
reads them. Out: DIR/predictions.jsonl, a line per file: probabilities, or surfaces in the scan's own rows and
in um; digests of head, encoder and voxels, the code's commit, warnings, the distance from the training set.
DIR/pictures has a PNG a file: B-scans, the scan from above, where the evidence lies. The same command after a
kill goes on. Lines of other files stay; another head needs another DIR. A file that cannot be used is a line
with its reason, and the exit code is 1. Overrides (data.*, train.use_bf16, model.checkpoint where the encoder
moved) stand before --dicom.

Probabilities are calibrated where validation allowed it in training; every line says whether. Units of
several volumes are not averaged. The map is that of one forward pass (contributions of tokens, or attention);
with --occlusion what the output loses when a block is hidden. A research model, not a medical device.

Keys that matter: model.checkpoint, data.workers, train.use_bf16
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from utils.cli import run_cli
from utils.help_pages import PeopleParser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The words of the command line."""
    parser = PeopleParser("finetuning.predict", __doc__ or "")
    parser.add_argument("--checkpoint", required=True, metavar="HEAD", help="head.pt, or its run's folder")
    parser.add_argument("--dicom", nargs="+", required=True, metavar="FILE_OR_FOLDER")
    parser.add_argument("--out", required=True, metavar="DIR", help="a new folder, or one of this command")
    parser.add_argument("--occlusion", action="store_true", help="draw the map by hiding blocks (slow)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Predict what the command line says; returns the exit code."""
    args = parse(argv)
    # here: torch takes seconds to import, and a reader process imports this module without it
    from finetuning.prediction.run import predict

    return predict(args.checkpoint, args.dicom, args.out, args.occlusion, args.overrides)


if __name__ == "__main__":
    run_cli(main)
