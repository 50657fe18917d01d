"""How small a difference a cohort can show, before anything is trained.

    python -m finetuning.power --participants 352 --classes 4
    python -m finetuning.power --counts 20,30,40 --disagreement 0.3 --effect 0.05

In: how many evaluated participants each class has, and the disagreement of a pilot: the share of participants
on whom exactly one of two rows is right, averaged over the classes. (The share of participants whose two
predicted classes differ is never below it; in its place it gives a difference that is too large.) Out, before
anything is trained: the smallest true paired difference of balanced accuracy that is shown with 80 % power,
the participants that an effect needs, and a table.

"Shown" is what the tables of this project mean by it: the 95 % percentile interval of the paired bootstrap
over participants excludes zero, and models.probes.intervals.doubt has no reason against it.

The formula. On a participant the two rows differ by +1, 0 or -1. With disagreement q and difference d in
every class, that has variance q - d^2, and the mean over K classes with n_k participants has variance
(q - d^2) / n, n = K^2 / sum(1 / n_k). A difference is shown with the wanted power from
d = (z_alpha/2 + z_power) * sqrt((q - d^2) / n) on; d cannot exceed q. tests/finetuning/test_power.py draws
cohorts, bootstraps each and counts intervals without zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import norm

from models.probes.intervals import ALPHA, MIN_PER_CLASS
from utils.cli import run_cli
from utils.errors import UserError
from utils.help_pages import PeopleParser
from utils.tables import Table, number, terminal

POWER = 0.8
NUM_ERRORS = float(norm.ppf(1 - ALPHA / 2) + norm.ppf(POWER))  # standard errors that this power takes
# Of the promised 80 % power 68 to 96 % were seen below this many, 76 to 88 % from it on.
MIN_DISAGREEING = 20  # participants on whom exactly one row is right
MAX_FALSE = 0.07
TABLE_DISAGREEMENTS = (0.1, 0.2, 0.3, 0.4, 0.5)
TABLE_SIZES = (0.5, 1.0, 2.0, 4.0)  # in units of the cohort
ASSUMED_DISAGREEMENT = 0.3


def effective_size(counts_per_class: Sequence[float]) -> float:
    """Participants of a cohort with equal classes that measures balanced accuracy as exactly as this one."""
    counts = np.asarray(counts_per_class, dtype=np.float64)
    if counts.ndim != 1 or len(counts) < 1 or not (counts >= 1).all():
        raise ValueError(
            f"participants per class: expected 1 or more of each, found {list(counts_per_class)}"
        )
    return float(len(counts) ** 2 / (1 / counts).sum())


def smallest_difference(counts_per_class: Sequence[float], disagreement: float) -> float:
    """The smallest true paired difference of balanced accuracy shown with POWER, in [0, 1].

    counts_per_class: evaluated participants [K]; disagreement: see the module. Where fewer disagree than the
    difference itself needs, everybody who disagrees does so for the better row. Raises ValueError for a class
    without participants or a share outside [0, 1].
    """
    size, factor = effective_size(counts_per_class), NUM_ERRORS**2
    _require_share("disagreement", disagreement)
    return max(math.sqrt(factor * disagreement / (size + factor)), factor / (size + factor))


def participants_needed(counts_per_class: Sequence[int], disagreement: float, effect: float) -> int:
    """Participants, with the classes in the proportions of `counts_per_class`, that show `effect`."""
    _require_share("disagreement", disagreement)
    if not 0 < effect < 1:
        raise ValueError(f"effect: expected a number in (0, 1), found {effect}")
    wanted = NUM_ERRORS**2 * (max(disagreement, effect) / effect**2 - 1)
    share = wanted / effective_size(counts_per_class)
    return math.ceil(round(share * sum(counts_per_class), 9))


def pilot_disagreement(labels: np.ndarray, first: np.ndarray, second: np.ndarray) -> float:
    """Share of participants on whom exactly one of two rows is right, averaged over classes; of means over
    seeds, which are right in a share of the seeds [P], their mean squared difference.
    """
    squared_P = (np.asarray(first, float) - second) ** 2
    return float(np.mean([squared_P[labels == number].mean() for number in np.unique(labels)]))


def _require_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: expected a share in [0, 1], found {value}")


def answer(counts: Sequence[int], pilot: float | None, effect: float | None) -> list[str]:
    """The lines that the command prints; `pilot`: its disagreement."""
    disagreement = ASSUMED_DISAGREEMENT if pilot is None else pilot
    source = "assumed; a pilot's with --disagreement" if pilot is None else "of a pilot"
    lines = [
        f"{sum(counts)} evaluated participants in {len(counts)} classes ({', '.join(map(str, counts))}); "
        f"disagreement {disagreement:g} ({source})",
        f"could show a difference of {smallest_difference(counts, disagreement):.3f} of balanced accuracy "
        f"({POWER:.0%} power; shown: the 95 % interval excludes zero)",
    ]
    if effect is not None:
        people = participants_needed(counts, disagreement, effect)
        lines.append(f"an effect of {effect:g} needs {people} participants in the same proportions")
    rows = []
    for times in TABLE_SIZES:
        cohort = [max(1, round(count * times)) for count in counts]
        smallest = [smallest_difference(cohort, disagreed) for disagreed in TABLE_DISAGREEMENTS]
        rows.append([str(sum(cohort)), *map(number, smallest)])
    header = ["participants", *(f"disagree {q:g}" for q in TABLE_DISAGREEMENTS)]
    return [*lines, *cautions(counts, disagreement), "", terminal(Table("", header, rows))]


def cautions(counts: Sequence[int], disagreement: float) -> list[str]:
    """Where the interval or the formula is not to be relied on."""
    lines = []
    if min(counts) < MIN_PER_CLASS:
        lines.append(
            f"WARNING: the smallest class has {min(counts)} participants: below {MIN_PER_CLASS} intervals "
            f"are too narrow, and exclude zero in over {MAX_FALSE:.0%} of some cohorts without a difference."
        )
    if (disagreeing := disagreement * sum(counts)) < MIN_DISAGREEING:
        lines.append(
            f"WARNING: {disagreeing:.1f} participants are expected to disagree: below {MIN_DISAGREEING} the "
            "formula's power may be off by more than 5 points."
        )
    return lines


def counts_of(participants: int | None, classes: int | None, counts: str | None) -> list[int]:
    """Participants per class from the command line; raises UserError where the words contradict."""
    if counts is None:
        if participants is None or classes is None:
            raise UserError("expected --participants N and --classes K, or --counts A,B,..., found neither")
        if not 1 <= classes <= participants:
            raise UserError(f"--classes: expected 1 to {participants} (--participants), found {classes}")
        return [participants // classes + (number < participants % classes) for number in range(classes)]
    parts = [part.strip() for part in counts.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise UserError(f"--counts: expected numbers above 0 with commas between, found {counts}")
    numbers = [int(part) for part in parts]
    for flag, value, expected in (
        ("--participants", participants, sum(numbers)),
        ("--classes", classes, len(numbers)),
    ):
        if value not in (None, expected):
            raise UserError(f"{flag}: expected {expected} as in --counts {counts}, found {value}")
    return numbers


def main(argv: Sequence[str] | None = None) -> None:
    parser = PeopleParser("finetuning.power", __doc__ or "")
    parser.add_argument("--participants", type=int, metavar="N", help="evaluated ones, in equal classes")
    parser.add_argument("--classes", type=int, metavar="K")
    parser.add_argument("--counts", metavar="A,B,...", help="evaluated participants of each class")
    parser.add_argument("--disagreement", type=float, metavar="Q", help="of a pilot; without: assumed")
    parser.add_argument("--effect", type=float, metavar="D", help="the difference that you hope to show")
    args = parser.parse_args(argv)
    counts = counts_of(args.participants, args.classes, args.counts)
    try:
        lines = answer(counts, args.disagreement, args.effect)
    except ValueError as error:
        raise UserError(str(error)) from error
    print("\n".join(lines))


if __name__ == "__main__":
    run_cli(main)
