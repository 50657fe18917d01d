"""Label curves: every scored row again, its readouts trained on few labelled people; the label multiplier.

In: the folder of `evidence run`. Out: curves/ below it, with the scores of every row for each number of
labelled people and each draw of them, curves.md and curves.json. In a fold the labelled people are drawn from
its training people, class after class, the same for all rows; 10 are among 30. The fold's validation people
choose penalty and step as ever, and its evaluated people are scored.

The endpoint, fixed before: how many labelled people the best row without pre-training needs for the score
that an encoder has with ENDPOINT, over ENDPOINT. Its curve is followed linearly in log(people), never
falling, and ends where the labels end: a multiplier there is "at least". The best row, by either readout, is
the one that needs fewest people.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.evidence.arms import RANDOM
from benchmarks.evidence.cohorts import FOLDS, Truth
from benchmarks.evidence.differences import Scored, people_draws
from benchmarks.evidence.scores import HIDDEN, TASKS, Scores, load_scores, save_scores
from benchmarks.evidence.words import TASK_LABELS
from models.probes.intervals import doubt, seeds_and_people
from utils.tables import Table, markdown, with_interval

COUNTS, DRAWS, ENDPOINT = (3, 10, 30, 100), 3, 10
FEWER = 1, *COUNTS  # where a fold has no more than ENDPOINT people to train on, and nobody asks for classes
Scorer = Callable[[Truth], Scores]


@dataclass(frozen=True)
class Curve:
    """A row's scores of one task: [seeds, counts], means over draws, and of every resample of people."""

    label: str
    is_pretrained: bool  # and no control
    is_free: bool  # without any pre-training
    score_NC: np.ndarray
    draws_NCS: np.ndarray
    gains_P: np.ndarray  # what each of the people adds to the mean at ENDPOINT
    people: list[int]  # of each class; of a value all of them


def counts_of(truth: Truth) -> list[int]:
    """The numbers of labelled people that every fold's training people allow; the last is all of them."""
    most = min(len(np.unique(truth.person[mask])) for mask in training_masks(truth))
    counts = FEWER if most <= ENDPOINT and len(truth.classes) < 2 else COUNTS
    return [count for count in counts if count < most] + [most]


def draws_of(count: int, counts: Sequence[int]) -> range:
    """DRAWS, of all people one."""
    return range(1 if count == counts[-1] else DRAWS)


def training_masks(truth: Truth) -> Iterator[np.ndarray]:
    """Rows of the three training folds, bool [n], of each fold."""
    for number in range(FOLDS):
        yield (truth.fold != number) & (truth.fold != (number + 1) % FOLDS)


def with_labels(truth: Truth, count: int, draw: int) -> Truth:
    """The truth with `count` labelled people in each fold: classes in turn, their people in a drawn order."""
    masks = []
    for number, mask in enumerate(training_masks(truth)):
        people, first = np.unique(truth.person[mask], return_index=True)
        label = truth.label[mask][first]
        order = np.random.default_rng([draw, number]).permutation(len(people))
        turn = np.empty(len(people), int)  # how many of its class come before
        for one in np.unique(label):
            turn[order[label[order] == one]] = np.arange((label == one).sum())
        chosen = people[order[np.argsort(turn[order], kind="stable")][:count]]
        masks.append(mask & np.isin(truth.person, chosen))
    return replace(truth, labelled=np.array(masks))


def score_curves(
    root: Path, truth: Truth, rows: Sequence[Scored], scorer: Callable[[str, int], Scorer]
) -> None:
    """Score what is missing: each seed of each row at each number of people and each draw."""
    counts = counts_of(truth)
    for row in rows:
        for seed in range(len(row.seeds)):
            missing = [
                (count, draw)
                for count in counts
                for draw in draws_of(count, counts)
                if not (place(root, row.name, seed, count, draw) / "scores.json").exists()
            ]
            if not missing:
                continue
            score = scorer(row.name, seed)
            for count, draw in missing:
                scores = score(with_labels(truth, count, draw))
                save_scores(place(root, row.name, seed, count, draw), scores, {"name": row.name})
            print(f"done    {row.name}, seed {seed}", flush=True)


def place(root: Path, name: str, seed: int, count: int, draw: int) -> Path:
    """Where the scores of one point lie."""
    return root / "curves" / name / f"seed_{seed}" / f"people_{count}_draw_{draw}"


def read_curve(root: Path, row: Scored, task: str, counts: Sequence[int], draws_SP: np.ndarray) -> Curve:
    """A row's curve from the files of `score_curves`."""
    scores, draws, gains, at = [], [], [], counts.index(ENDPOINT) if ENDPOINT in counts else -1
    for seed in range(len(row.seeds)):
        parts = [
            [load_scores(place(root, row.name, seed, count, draw))[0] for draw in draws_of(count, counts)]
            for count in counts
        ]
        scores.append([np.mean([one.of(task) for one in of]) for of in parts])
        draws.append([np.mean([one.draws(task, draws_SP) for one in of], axis=0) for of in parts])
        gains += [one.gains(task) for one in parts[at]]
    return Curve(
        row.label,
        row.is_pretrained,
        row.factor in ("baseline", "labels") or row.name == RANDOM,
        np.array(scores),
        np.array(draws),
        np.mean(gains, axis=0),
        row.seeds[0][0].people(task),
    )


def people_needed(curve_CS: np.ndarray, counts: Sequence[int], wanted_S: np.ndarray) -> np.ndarray:
    """People [S] at which each curve [C, S], never falling, has what is wanted; between ends of `counts`."""
    rising_CS, logs = np.maximum.accumulate(curve_CS, axis=0), np.log(counts)
    needed = np.full(wanted_S.shape, float(logs[-1]))
    for k in reversed(range(len(counts) - 1)):
        low, high = rising_CS[k], rising_CS[k + 1]
        share = np.divide(wanted_S - low, high - low, out=np.ones_like(low), where=high > low)
        needed = np.where(wanted_S <= high, logs[k] + share.clip(0, 1) * (logs[k + 1] - logs[k]), needed)
    return np.exp(np.where(wanted_S <= rising_CS[0], logs[0], needed))


@dataclass(frozen=True)
class Multiplier:
    """Labelled people of `against` for one of the encoder's."""

    task: str
    row: str
    against: str
    value: float
    ci95: tuple[float, float]
    bound: str  # "at least" or "at most" where the curve of `against` ends
    doubt: str  # of models.probes.intervals, about the difference of the two at ENDPOINT

    @property
    def text(self) -> str:
        words = f"{self.bound} " if self.bound else ""
        unclear = f"; cannot say, because {self.doubt}" if self.doubt else ""
        return f"{words}{with_interval(self.value, self.ci95, '.2f')} of {self.against}{unclear}"


def multiplier(task: str, row: Curve, others: Sequence[Curve], counts: Sequence[int]) -> Multiplier:
    """The label multiplier of a pre-trained row against the one of `others` that needs fewest people."""
    at = counts.index(ENDPOINT)
    wanted = float(row.score_NC[:, at].mean())

    def needed(other: Curve) -> float:
        return float(people_needed(other.score_NC.mean(0)[:, None], counts, np.array([wanted]))[0])

    best = min(others, key=lambda other: (needed(other), -other.score_NC[:, at].mean()))
    seeds = np.arange(len(row.score_NC))
    paired = seeds % len(best.score_NC)
    log_N, log_NS = (
        np.log([people_needed(of[paired[seed]], counts, own[seed, at]) / ENDPOINT for seed in seeds])
        for of, own in (
            (best.score_NC[..., None], row.score_NC[..., None]),
            (best.draws_NCS, row.draws_NCS),
        )
    )
    low, high = seeds_and_people(log_N[:, 0], log_NS)
    curve = np.maximum.accumulate(best.score_NC.mean(0))
    bound = "at least" if wanted > curve[-1] else "at most" if wanted < curve[0] else ""
    value, ci95 = math.exp(float(log_N.mean())), (math.exp(low), math.exp(high))
    apart = seeds_and_people(  # a multiplier that is not 1 is a difference there; it ends with the labels
        row.score_NC[:, at] - best.score_NC[paired, at], row.draws_NCS[:, at] - best.draws_NCS[paired, at]
    )
    unclear = doubt(apart, row.people, row.gains_P - best.gains_P)
    if apart[0] <= 0 <= apart[1] and not ci95[0] <= 1 <= ci95[1]:  # the cap has no variance of seeds
        unclear = f"the difference at {ENDPOINT} people includes zero"
    return Multiplier(task, row.label, best.label, value, ci95, bound, unclear)


def write_curves(root: Path, truth: Truth, rows: Sequence[Scored]) -> str:
    """curves.md and curves.json; returns the page, without multipliers if a fold has fewer than ENDPOINT."""
    counts = counts_of(truth)
    means = f"Means over {DRAWS} draws of labelled people (all of them: one), the same for all rows."
    lines = ["# Label curves", "", means, ""]
    content, curves_of = [], {}
    for task in TASKS:
        having = [row for row in rows if row.has(task)]
        if having:
            draws_SP = people_draws(len(having[0].seeds[0][0].parts[task].participants))
            curves_of[task] = [read_curve(root, row, task, counts, draws_SP) for row in having]
    for task, curves in curves_of.items():
        cells = []
        for curve in curves:
            points = zip(curve.score_NC.T, curve.draws_NCS.swapaxes(0, 1), strict=True)
            cells.append([curve.label, *(with_interval(s.mean(), seeds_and_people(s, d)) for s, d in points)])
        header = ["labelled people", *map(str, counts)]
        lines.append(markdown(Table(TASK_LABELS[task], header, cells, is_text=True)))
        readouts = [name for name in curves_of if name.removesuffix(HIDDEN) == task.removesuffix(HIDDEN)]
        free = [
            replace(curve, label=curve.label + ", hidden layer" * name.endswith(HIDDEN))
            for name in (readouts if ENDPOINT in counts else [])
            for curve in curves_of[name]
            if curve.is_free
        ]
        multipliers = [multiplier(task, c, free, counts) for c in curves if c.is_pretrained] if free else []
        lines += [
            "",
            *(f"* {one.row}: label multiplier at {ENDPOINT} people {one.text}." for one in multipliers),
            "",
        ]
        content.append(
            {
                "task": task,
                "people": counts,
                "rows": {curve.label: curve.score_NC.mean(0).tolist() for curve in curves},
                "multipliers": [asdict(one) for one in multipliers],
            }
        )
    (root / "curves.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    text = "\n".join(lines)
    (root / "curves.md").write_text(text + "\n")
    return text
