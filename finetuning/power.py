"""How small a difference a cohort can show, before anything is trained.

    python -m finetuning.power --participants 352 --classes 4
    python -m finetuning.power --counts 20,30,40 --disagreement 0.3 --effect 0.05 --simulate 500

In: how many evaluated participants each class has, and the disagreement of a pilot: the share of participants
on whom exactly one of two rows is right, averaged over the classes. (The share of participants whose two
predicted classes differ is never below it; in its place it gives a difference that is too large.) Out, before
anything is trained: the smallest true paired difference of balanced accuracy that is shown with 80 % power,
the participants and seeds that an effect needs, and a table.

"Shown" is what the tables of this project mean by it: the 95 % percentile interval of the paired bootstrap
over participants excludes zero, and models.probes.intervals.doubt has no reason against it.

The formula. On a participant the two rows differ by +1, 0 or -1. With disagreement q and difference d in
every class, that has variance q - d^2, and the mean over K classes with n_k participants has variance
(q - d^2) / n, n = K^2 / sum(1 / n_k). A difference is shown with the wanted power from
d = (z_alpha/2 + z_power) * sqrt((q - d^2) / n) on; d cannot exceed q. `--simulate 500` tests it: cohorts are
drawn, each is bootstrapped, and intervals without zero are counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.stats import norm

from models.probes.intervals import ALPHA, MIN_PER_CLASS
from utils.cli import run_cli
from utils.errors import UserError
from utils.help_pages import PeopleParser
from utils.tables import Table, number, terminal

POWER = 0.8
# Of the promised 80 % power 68 to 96 % were seen below this many, 76 to 88 % from it on.
MIN_DISAGREEING = 20  # participants on whom exactly one row is right
MAX_FALSE = 0.07
TABLE_DISAGREEMENTS = (0.1, 0.2, 0.3, 0.4, 0.5)
TABLE_SIZES = (0.5, 1.0, 2.0, 4.0)  # in units of the cohort
ASSUMED_DISAGREEMENT = 0.3
MAX_SEEDS = 100
RESAMPLES = 2000
Draw = Literal["participants", "within classes"]


@dataclass(frozen=True)
class Rates:
    """Shares of simulated cohorts whose interval excludes zero on the side of the first row, or the other."""

    first: float
    second: float


def effective_size(counts_per_class: Sequence[float]) -> float:
    """Participants of a cohort with equal classes that measures balanced accuracy as exactly as this one."""
    counts = np.asarray(counts_per_class, dtype=np.float64)
    if counts.ndim != 1 or len(counts) < 1 or not (counts >= 1).all():
        raise ValueError(
            f"participants per class: expected 1 or more of each, found {list(counts_per_class)}"
        )
    return float(len(counts) ** 2 / (1 / counts).sum())


def smallest_difference(
    counts_per_class: Sequence[float], disagreement: float, power: float = POWER, alpha: float = ALPHA
) -> float:
    """The smallest true paired difference of balanced accuracy shown with this power, in [0, 1].

    counts_per_class: evaluated participants [K]; disagreement: see the module. Where fewer disagree than the
    difference itself needs, everybody who disagrees does so for the better row. Raises ValueError for a class
    without participants or a share outside [0, 1].
    """
    size, factor = effective_size(counts_per_class), _factor(power, alpha) ** 2
    _require_share("disagreement", disagreement)
    return max(math.sqrt(factor * disagreement / (size + factor)), factor / (size + factor))


def participants_needed(
    counts_per_class: Sequence[int],
    disagreement: float,
    effect: float,
    power: float = POWER,
    alpha: float = ALPHA,
) -> int:
    """Participants, with the classes in the proportions of `counts_per_class`, that show `effect`."""
    _require_share("disagreement", disagreement)
    if not 0 < effect < 1:
        raise ValueError(f"effect: expected a number in (0, 1), found {effect}")
    wanted = _factor(power, alpha) ** 2 * (max(disagreement, effect) / effect**2 - 1)
    share = wanted / effective_size(counts_per_class)
    return math.ceil(round(share * sum(counts_per_class), 9))


def disagreement_of_means(disagreement: float, seed_disagreement: float, seeds: int) -> float:
    """Disagreement of two rows that are each the mean over so many seeds: their mean squared difference.

    seed_disagreement: of two seeds of one row; that part of `disagreement` falls with the number of seeds,
    the rest is between the rows. Raises ValueError for more of it than of `disagreement`.
    """
    _require_share("disagreement", disagreement)
    if not 0 <= seed_disagreement <= disagreement:
        raise ValueError(
            f"disagreement of seeds: expected 0 to {disagreement:g}, that of the rows, found "
            f"{seed_disagreement:g}"
        )
    return disagreement - seed_disagreement * (1 - 1 / seeds)


def seeds_needed(
    counts_per_class: Sequence[int], disagreement: float, seed_disagreement: float, effect: float
) -> int | None:
    """Seeds of each row that show `effect` on this cohort; None where MAX_SEEDS do not."""
    for seeds in range(1, MAX_SEEDS + 1):
        of_means = disagreement_of_means(disagreement, seed_disagreement, seeds)
        if smallest_difference(counts_per_class, of_means) <= effect:
            return seeds
    return None


def pilot_disagreement(labels: np.ndarray, first: np.ndarray, second: np.ndarray) -> float:
    """Share of participants on whom exactly one of two rows is right, averaged over classes; of means over
    seeds, which are right in a share of the seeds [P], their mean squared difference.
    """
    squared_P = (np.asarray(first, float) - second) ** 2
    return float(np.mean([squared_P[labels == number].mean() for number in np.unique(labels)]))


def simulate(
    counts_per_class: Sequence[int],
    disagreement: float,
    difference: float,
    cohorts: int,
    seed: int,
    draw: Draw = "participants",
    resamples: int = RESAMPLES,
) -> Rates:
    """How often the 95 % interval excludes zero in cohorts drawn with this true difference.

    Each resample draws participants as models.probes.intervals does, or within each class. What a class adds
    depends on how many of its participants are +1 and -1, so those are drawn, not persons. Raises
    ValueError for a difference above the disagreement.
    """
    effective_size(counts_per_class)
    if not abs(difference) <= disagreement <= 1:
        raise ValueError(f"disagreement: expected {abs(difference):g} to 1, found {disagreement:g}")
    rng, counts_K = np.random.default_rng(seed), np.asarray(counts_per_class)
    better, worse = (disagreement + difference) / 2, (disagreement - difference) / 2
    better_CK, worse_CK = _two_of_three(
        rng, np.broadcast_to(counts_K, (cohorts, len(counts_K))), better, worse
    )
    shape = (cohorts, resamples)
    total_CS, present_CS = np.zeros(shape), np.zeros(shape, int)
    undrawn_CS = np.full(shape, counts_K.sum())
    for place, count in enumerate(counts_K):
        if draw == "within classes":
            drawn_CS = np.full(shape, count)
        else:  # a multinomial over the classes, one class after the other
            drawn_CS = rng.binomial(undrawn_CS, count / counts_K[place:].sum())
            undrawn_CS = undrawn_CS - drawn_CS
        shares = (part[:, place, None] / count for part in (better_CK, worse_CK))
        plus_CS, minus_CS = _two_of_three(rng, drawn_CS, *shares)
        total_CS += (plus_CS - minus_CS) / np.maximum(drawn_CS, 1)
        present_CS += drawn_CS > 0
    low_C, high_C = np.quantile(total_CS / present_CS, [0.025, 0.975], axis=1)
    return Rates(float((low_C > 0).mean()), float((high_C < 0).mean()))


def _two_of_three(
    rng: np.random.Generator, total: np.ndarray, first: float | np.ndarray, second: float | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The first two counts of multinomial draws of three kinds, of shares first, second and the rest."""
    drawn = rng.binomial(total, first)
    rest = 1 - np.asarray(first)
    share = np.divide(second, rest, out=np.zeros(np.shape(rest)), where=rest > 0)
    return drawn, rng.binomial(total - drawn, np.clip(share, 0, 1))


def _factor(power: float, alpha: float) -> float:
    """How many standard errors a difference must be."""
    if not (0 < alpha < 1 and 0.5 <= power < 1):
        raise ValueError(f"expected power in [0.5, 1) and alpha in (0, 1), found {power} and {alpha}")
    return float(norm.ppf(1 - alpha / 2) + norm.ppf(power))


def _require_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: expected a share in [0, 1], found {value}")


def scaled(counts_per_class: Sequence[int], times: float) -> list[int]:
    """The cohort so many times as large, 1 participant a class or more."""
    return [max(1, round(count * times)) for count in counts_per_class]


def answer(
    counts: Sequence[int],
    disagreement: float | None,
    effect: float | None,
    seeds: int,
    seed_disagreement: float | None,
) -> list[str]:
    """The lines that the command prints without a simulation."""
    of_rows = ASSUMED_DISAGREEMENT if disagreement is None else disagreement
    used = of_rows if seed_disagreement is None else disagreement_of_means(of_rows, seed_disagreement, seeds)
    source = "assumed; a pilot's with --disagreement" if disagreement is None else "of a pilot"
    lines = [
        f"{sum(counts)} evaluated participants in {len(counts)} classes ({', '.join(map(str, counts))}); "
        f"disagreement {of_rows:g} ({source})" + (f", {used:.3f} of means of {seeds} seeds" * (seeds > 1)),
        f"could show a difference of {smallest_difference(counts, used):.3f} of balanced accuracy "
        f"({POWER:.0%} power; shown: the 95 % interval excludes zero)",
    ]
    if effect is not None:
        people = participants_needed(counts, used, effect)
        lines.append(f"an effect of {effect:g} needs {people} participants in the same proportions")
        if seed_disagreement is None:
            lines.append("seeds needed: unknown without --seed-disagreement, that of two seeds of one row")
        else:
            enough = seeds_needed(counts, of_rows, seed_disagreement, effect)
            words = "no number of seeds is enough" if enough is None else f"{enough} seeds of each row"
            lines.append(f"with these participants: {words}")
    lines += cautions(counts, used)
    header = ["participants", *(f"disagree {q:g}" for q in TABLE_DISAGREEMENTS)]
    rows = []
    for times in TABLE_SIZES:
        cohort = scaled(counts, times)
        smallest = [smallest_difference(cohort, disagreed) for disagreed in TABLE_DISAGREEMENTS]
        rows.append([str(sum(cohort)), *map(number, smallest)])
    return [*lines, "", terminal(Table("", header, rows))]


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


def simulation_lines(counts: Sequence[int], disagreement: float, cohorts: int) -> list[str]:
    """Power at the planned difference and false positives without one, for both kinds of resamples."""
    planned = smallest_difference(counts, disagreement)
    at_planned = max(disagreement, planned)
    lines = ["", f"{cohorts} simulated cohorts, {RESAMPLES} resamples each:"]
    draws: tuple[Draw, ...] = ("participants", "within classes")
    for seed, draw in enumerate(draws):
        shown = simulate(counts, at_planned, planned, cohorts, 2 * seed, draw).first
        null = simulate(counts, disagreement, 0.0, cohorts, 2 * seed + 1, draw)
        false = null.first + null.second
        lines.append(
            f"  resampled {draw}: a difference of {planned:.3f} is shown in {shown:.1%}, none in {false:.1%}"
        )
        if false > MAX_FALSE:
            lines.append(f"  WARNING: more than {MAX_FALSE:.0%}: intervals of this cohort are too narrow")
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
    """Print what the cohort of the command line can show."""
    parser = PeopleParser("finetuning.power", __doc__ or "")
    parser.add_argument("--participants", type=int, metavar="N", help="evaluated ones, in equal classes")
    parser.add_argument("--classes", type=int, metavar="K")
    parser.add_argument("--counts", metavar="A,B,...", help="evaluated participants of each class")
    parser.add_argument("--disagreement", type=float, metavar="Q", help="of a pilot; without: assumed")
    parser.add_argument("--effect", type=float, metavar="D", help="the difference that you hope to show")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="of each row, averaged")
    parser.add_argument("--seed-disagreement", type=float, metavar="Q", help="of two seeds of one row")
    parser.add_argument("--simulate", type=int, metavar="COHORTS", help="test the formula, 500 say")
    args = parser.parse_args(argv)
    counts = counts_of(args.participants, args.classes, args.counts)
    if args.seeds < 1 or (args.seeds > 1) > (args.seed_disagreement is not None):
        raise UserError(
            f"--seeds: expected 1, or more with --seed-disagreement, found {args.seeds} "
            f"with {args.seed_disagreement}"
        )
    of_rows = ASSUMED_DISAGREEMENT if args.disagreement is None else args.disagreement
    try:
        lines = answer(counts, args.disagreement, args.effect, args.seeds, args.seed_disagreement)
        if args.simulate is not None:
            if args.simulate < 1:
                raise UserError(f"--simulate: expected 1 or more cohorts, found {args.simulate}")
            if args.seed_disagreement is not None:
                of_rows = disagreement_of_means(of_rows, args.seed_disagreement, args.seeds)
            lines += simulation_lines(counts, of_rows, args.simulate)
    except ValueError as error:
        raise UserError(str(error)) from error
    print("\n".join(lines))


if __name__ == "__main__":
    run_cli(main)
