"""Checkpoints side by side under one protocol, with corrected differences of all pairs.

    python -m finetuning.compare --config configs/cls_linear_probe.yaml --checkpoints RUN OTHER

In: checkpoints of pretraining.train or their runs' folders, a task's file of configs/, the prepared store,
labels. Out, in `${run.dir}/leaderboard`: leaderboard.md, .csv and .png, and the answers that they are made
of, so the same command again computes only what is missing.

Every row has the same splits, units, low-shot draws and probe. Rows: each checkpoint; random initialisation
of the same architecture, the seed that is best on validation (in crossfit in each fold its own); a control
(`--control`); a 2D image encoder (`--image-encoder`); baselines without an encoder, of which
finetuning.features.yardsticks makes the strong ones. Each has two readouts, `linear` and `hidden` (one hidden
layer). The order is that of validation (in crossfit by name); the evaluated split is beside it.
Differences of all pairs with an encoder in them are corrected together (Holm). A command that computes an
answer looks at the evaluated split: the ledger of the store gets a line (finetuning.cohort.ledger).

Keys that matter: run.dir, task.label_column, eval.split, eval.protocol
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from finetuning.cohort.labels import check_table
from utils.cli import add_image_arguments, announce, parse_words, require_there, run_cli
from utils.errors import UserError
from utils.log import setup_logging

OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)*=")  # section.key=value; no URL begins so
EXTRA_COLUMNS = ("low-shot", "devices", "attentive", "fine-tuned")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The words of the command line; overrides may stand after --checkpoints. Raises UserError."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.allow_abbrev = False  # --checkpoint would be short for --checkpoints
        parser.add_argument("--checkpoints", nargs="+", required=True, metavar="RUN_OR_FILE", help="the rows")
        parser.add_argument("--control", metavar="RUN_OR_FILE", help="the two-step control")
        parser.add_argument(
            "--supervised", action="store_true", help="train random initialisation with only the labels"
        )
        add_image_arguments(parser)
        parser.add_argument(
            "--columns",
            default=",".join(EXTRA_COLUMNS[:2]),
            metavar="A,B",
            help=f"beside linear, of {', '.join(EXTRA_COLUMNS)}; default: %(default)s",
        )

    args = parse_words("finetuning.compare", __doc__ or "", argv, add_arguments, has_checkpoint=False)
    args.overrides += [word for word in args.checkpoints if OVERRIDE.match(word)]
    args.checkpoints = [word for word in args.checkpoints if not OVERRIDE.match(word)]
    if not args.checkpoints:
        raise UserError("--checkpoints: expected one or more, found none")
    args.columns = [name for name in args.columns.split(",") if name]
    if unknown := sorted(set(args.columns) - set(EXTRA_COLUMNS)):
        raise UserError(f"--columns: expected some of {', '.join(EXTRA_COLUMNS)}, found {', '.join(unknown)}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    require_there("--checkpoints", *args.checkpoints)
    require_there("--control", args.control)
    check_table(args.config, args.overrides)
    announce(f"finetuning.compare: {args.config}; the libraries load, which takes seconds")
    setup_logging()
    # here: torch and scikit-learn take seconds to import, and a wrong command line is refused without them
    from finetuning.answers.leaderboard import Words, leaderboard
    from finetuning.answers.page import write_pages
    from finetuning.features.slices import image_encoder_of

    words = Words(
        args.config,
        tuple(args.overrides),
        tuple(args.checkpoints),
        args.control,
        image_encoder_of(args),
        args.supervised,
        tuple(args.columns),
    )
    print(write_pages(leaderboard(words)))


if __name__ == "__main__":
    run_cli(main)
