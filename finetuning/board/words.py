"""The command line of the leaderboard.

In: words. Out: `Words`. The overrides of the configuration may stand anywhere, after `--checkpoints` too.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass

from utils.cli import parse_words
from utils.errors import UserError

OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)*=")  # section.key=value; no URL begins so
EXTRA_COLUMNS = ("low-shot", "devices", "attentive", "fine-tuned")


@dataclass(frozen=True)
class Words:
    """What the command line asks for."""

    config: str
    overrides: tuple[str, ...]
    checkpoints: tuple[str, ...]
    control: str | None = None
    image_encoder: str | None = None
    supervised: bool = False  # random initialisation is fine-tuned, whatever `columns` says
    columns: tuple[str, ...] = EXTRA_COLUMNS[:2]  # beside the linear one


def parse(description: str, argv: Sequence[str] | None) -> Words:
    """The words of the command line; raises UserError where no checkpoint is named."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--checkpoints", nargs="+", required=True, metavar="RUN_OR_FILE", help="the rows")
        parser.add_argument("--control", metavar="RUN_OR_FILE", help="the two-step control")
        parser.add_argument(
            "--supervised", action="store_true", help="train random initialisation with labels alone"
        )
        parser.add_argument("--image-encoder", metavar="FOLDER", help="a local Hugging Face image encoder")
        parser.add_argument(
            "--columns",
            default=",".join(EXTRA_COLUMNS[:2]),
            metavar="A,B",
            help=f"beside linear, of {', '.join(EXTRA_COLUMNS)}; default: %(default)s",
        )

    args = parse_words("finetuning.compare", description, argv, add_arguments)
    overrides = [word for word in args.checkpoints if OVERRIDE.match(word)]
    checkpoints = [word for word in args.checkpoints if not OVERRIDE.match(word)]
    if not checkpoints:
        raise UserError("--checkpoints: expected one or more, found none")
    columns = tuple(name for name in args.columns.split(",") if name)
    if unknown := sorted(set(columns) - set(EXTRA_COLUMNS)):
        raise UserError(f"--columns: expected some of {', '.join(EXTRA_COLUMNS)}, found {', '.join(unknown)}")
    return Words(
        args.config,
        (*args.overrides, *overrides),
        tuple(checkpoints),
        args.control,
        args.image_encoder,
        args.supervised,
        columns,
    )
