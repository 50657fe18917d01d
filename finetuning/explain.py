"""Score the maps of a head where the truth is known, and choose the one that predictions show.

    python -m finetuning.explain --head runs/thin_linear

In: a head of finetuning.train (head.pt or its run's folder) that tells thinned eyes of a phantom from others,
the phantom's tree and store (docs/guides/explanations.md makes them). Evaluated are one volume of each
planted eye of people that nobody trained on.
Out: explanations.json beside the head, explanations.md and explanations.png in run.dir.

Maps: token contributions of a linear head or an mlp, attention of an attentive head, occlusion of all. Each
is scored by AUPRC against the tokens whose tissue the thinning changed; with a deletion curve; beside a head
of random weights, a head on an encoder of random weights, the grey value, and where changes usually are. The
winner must be above chance and both random controls, with 95 % intervals over participants; else the verdict
is that no map beats chance. finetuning.predict shows the winner and prints its score. Overrides (data.*,
eval.*, probe.*, run.*, model.checkpoint where the encoder moved) stand after. A score of phantom eyes says
nothing about real ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from utils.cli import run_cli
from utils.help_pages import PeopleParser

NUM_EYES = 60


def eye_count(text: str) -> int:
    """For argparse: 1 or more."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, found {text}")
    return int(text)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The words of the command line."""
    parser = PeopleParser("finetuning.explain", __doc__ or "")
    parser.add_argument("--head", required=True, metavar="HEAD", help="head.pt, or its run's folder")
    parser.add_argument(
        "--eyes", type=eye_count, default=NUM_EYES, metavar="N", help=f"at most so many planted ({NUM_EYES})"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one forward pass an eye: neither occlusion nor deletion"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Score what the command line says; returns the exit code."""
    args = parse(argv)
    # here: torch takes seconds to import
    from finetuning.explanations.run import explain

    return explain(args.head, args.eyes, args.quick, args.overrides)


if __name__ == "__main__":
    run_cli(main)
