"""Evidence: recipes, controls, baselines and random initialisation under one probe protocol.

    python -m benchmarks.evidence data                    cohorts, stores and truth, once
    python -m benchmarks.evidence calibrate               seconds per step of every arm, on a quiet machine
    python -m benchmarks.evidence run --budget 300        arms x seeds, each trained and scored
    python -m benchmarks.evidence table                   results.md and table.json below --root
    python -m benchmarks.evidence curves                  the same rows with few labelled people: curves.md
    python -m benchmarks.evidence real --data FOLDER      the same on real eyes with layer masks: real.py

Everything lives below --root. Every command resumes, and Ctrl-C is safe.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.evidence.arms import SCRATCH, TRAINED
from utils.cli import add_image_arguments
from utils.errors import UserError
from utils.help_pages import Parser, PeopleParser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The words of the command line."""
    parser = PeopleParser("benchmarks.evidence", __doc__ or "")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    names = "data", "real", "calibrate", "run", "train", "score", "table", "curves"
    verbs = {name: commands.add_parser(name) for name in names}
    for name, command in verbs.items():
        place = Path("runs/evidence_real" if name == "real" else "runs/evidence")
        command.add_argument("--root", type=Path, default=place, help="where all of it lives")
        if name in ("real", "calibrate", "run"):
            command.add_argument("--jobs", type=int, default=2, help="runs at a time, each on its own core")
        if name in ("real", "run"):
            command.add_argument("--seeds", type=int, default=3)
            command.add_argument("--budget", type=float, default=300.0, help="seconds for each arm and seed")
            command.add_argument("--steps", type=int, help="the same steps for every arm instead of a budget")
            only = f"only these arms, beside the controls; {', '.join(SCRATCH)}: no pre-training"
            command.add_argument("--only", metavar="ARM,ARM", help=only)
            add_image_arguments(command)
        if name in ("data", "real", "calibrate", "run"):
            command.add_argument("--change", action="append", default=[], metavar="section.key=value")
        if name == "curves":
            command.add_argument("--only", metavar="ARM,ARM", help="these beside the baselines; default: all")
        if name in ("train", "score"):
            command.add_argument("--arm", required=True)
            command.add_argument("--seed", type=int, required=True)
        if name in ("real", "table"):
            command.add_argument("--out", type=Path, help="the page; by default below --root")
    verbs["data"].add_argument("--pretraining", type=int, default=240, help="participants to train on")
    verbs["data"].add_argument("--evaluation", type=int, default=200, help="other participants to score on")
    verbs["real"].add_argument("--data", type=Path, required=True, help="folder of eyes: see real.py")
    return parser.parse_args(argv)


def refuse_mistakes(args: argparse.Namespace) -> None:
    """Raise UserError for the first argument that makes no sense."""
    given = vars(args)
    least_of = {"jobs": 1, "seeds": 1, "steps": 2, "pretraining": 1, "evaluation": 1}
    for name, least in least_of.items():
        value = given.get(name)
        if value is not None and value < least:
            raise UserError(f"--{name}: expected {least} or more, found {value}")
    if "budget" in given and not 0 < args.budget < math.inf:
        raise UserError(f"--budget: expected a number above 0, found {args.budget:g}")
    names = [arm.name for arm in TRAINED]
    asked = set(filter(None, (given.get("only") or "").split(","))) - {*SCRATCH}
    if unknown := asked - set(names):
        raise UserError(f"--only: expected some of {', '.join(names)}, found {', '.join(sorted(unknown))}")


def add_control(parser: argparse.ArgumentParser) -> None:
    """Those of benchmarks.phantom_truth."""
    words = "a checkpoint of the same configuration after a few steps, or its run's folder"
    parser.add_argument("--control", required=True, metavar="RUN_OR_FILE", help=words)
    add_image_arguments(parser)
