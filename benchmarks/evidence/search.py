"""Sequential halving of arms beside controls of their own; the winner is trained anew, for new people.

In: the folder of `evidence data` and `calibrate`. A round trains every arm that is still in the race, the
same arm with targets of another volume and, where it has a penalty, the same with that alone, for one budget;
one seed in the first round, all in the others. An arm's margin is the smallest of its mean differences to its
controls over the seeds: random initialisation, two steps, and its own two. The better half, or another
share, goes on (Jamieson and Talwalkar 2016, arXiv:1502.07943); a race of one arm has no round. The winner,
its controls and the arms `beside` are then trained for the last budget with new seeds and scored on people
that chose nothing: paired intervals, and p values by Holm's method. Out: a folder for each stage below the
root's `search`, and search.md there; every call goes on where the last one ended.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks.evidence.arms import (
    CONFIG,
    CONTROL,
    RANDOM,
    REFERENCE,
    Arm,
    arm_by_name,
    arm_config,
    own_controls,
    run_dir,
)
from benchmarks.evidence.calibration import calibrated_steps
from benchmarks.evidence.cohorts import PEOPLE, make_people
from benchmarks.evidence.differences import Draws, Scored, difference_draws
from benchmarks.evidence.queue import Job, Plan, Queue
from benchmarks.evidence.scores import TASKS, load_scores
from benchmarks.evidence.words import TASK_LABELS, signed, table_head
from finetuning.board.comparison import bootstrap_p, holm
from models.probes.intervals import interval95
from utils.errors import UserError

DATA = (
    "pretraining",
    "pretraining_store",
    "pretraining_participants.tsv",
    "evaluation",
    "evaluation_store",
    "truth.npz",
)
SHARED_CONTROLS = RANDOM, CONTROL


@dataclass(frozen=True)
class Stage:
    """One round or the confirmation: what is trained for one budget, below `folder`."""

    folder: Path
    budget_s: float
    seeds: tuple[int, ...]
    race: tuple[Arm, ...]
    beside: tuple[Arm, ...]  # trained and reported, in no race

    @property
    def arms(self) -> list[Arm]:
        """Everything that is scored, each once."""
        own = [control for arm in self.race for control in own_controls(arm)]
        shared = [arm_by_name(name) for name in SHARED_CONTROLS]
        return list({arm.name: arm for arm in (*shared, *self.race, *own, *self.beside)}.values())

    def jobs(self, people: Path | None = None) -> list[Job]:
        """Train and score; or, with `people`, score what is trained on them."""
        place = self.folder if people is None else people
        return [Job(a, seed, run_dir(place, a, seed), people) for seed in self.seeds for a in self.arms]

    def score(self, arm: Arm, people: Path | None = None) -> Scored | None:
        """The arm's seeds; None where one of them has no scores."""
        folders = [run_dir(people or self.folder, arm, seed) for seed in self.seeds]
        if not all((folder / "scores.json").exists() for folder in folders):
            return None
        return Scored(arm.name, arm.label, arm.factor, [load_scores(folder) for folder in folders])


def open_stage(root: Path, stage: Stage, extra: Sequence[str]) -> Plan:
    """The stage's folder with links to the data of `root`, and its plan."""
    for name in DATA:
        if not (root / name).exists():
            raise UserError(f"{root / name}: expected the data of a search, found none; run `evidence data`")
    link(DATA, root, stage.folder)
    arms = [arm for arm in stage.arms if arm.is_trained]
    steps = calibrated_steps(root, stage.budget_s, [*arms, arm_by_name(REFERENCE)])
    plan = Plan(stage.folder, stage.budget_s, len(stage.seeds), steps, tuple(extra))
    for arm in arms:  # a configuration that its control cannot have is refused before anything runs
        arm_config(arm, 0, max(2, steps[arm.name]), stage.folder, extra)
    plan.save()
    return plan


def link(names: Sequence[str], source: Path, folder: Path) -> None:
    """Links in `folder` to what lies in `source`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(source / name)


def margins(stage: Stage, task: str) -> dict[str, tuple[float, str]]:
    """Arm -> its smallest mean difference to a control, and that control; an arm that failed is not there.

    Raises UserError where a control that all arms share has no scores.
    """
    result = {}
    shared = {name: stage.score(arm_by_name(name)) for name in SHARED_CONTROLS}
    for name, scored in shared.items():
        if scored is None:
            raise UserError(f"{stage.folder}: expected scores of {name}, found none; see its evidence.log")
    for arm in stage.race:
        scored = stage.score(arm)
        controls = [*shared.values(), *(stage.score(control) for control in own_controls(arm))]
        if scored is None or None in controls:
            continue
        apart = [(scored.point(task) - c.point(task), c.name) for c in controls if c is not None]
        result[arm.name] = min(apart)
    return result


def survivors(stage: Stage, task: str, keep: float) -> tuple[Arm, ...]:
    """The best of the race by margin, the share `keep` of it, rounded up.

    Raises UserError where every arm failed.
    """
    known = margins(stage, task)
    if not known:
        raise UserError(f"{stage.folder}: expected an arm with scores, found failures alone")
    ranked = sorted((arm for arm in stage.race if arm.name in known), key=lambda arm: -known[arm.name][0])
    return tuple(ranked[: math.ceil(round(keep * len(ranked), 9))])


def search(
    root: Path,
    names: Sequence[str],
    beside: Sequence[str],
    budgets_s: Sequence[float],
    seeds: int,
    keep: float,
    jobs: int,
    task: str,
    people: tuple[int, int],
    extra: Sequence[str],
) -> str:
    """Run all stages that are not done; returns search.md. `people`: how many others, which seed; `keep`: the
    share of a round's arms that goes on."""
    place = root / "search"
    race, others = (tuple(arm_by_name(name) for name in part) for part in (names, beside))
    if controls := [arm.name for arm in race if arm.is_control]:
        raise UserError(
            f"--only: expected arms that make claims, found the control {controls[0]}; see --beside"
        )
    pages = ["# Search", ""]
    for number, budget_s in enumerate(budgets_s):
        if len(race) == 1:
            break
        of_round = (0,) if number == 0 and len(budgets_s) > 1 else tuple(range(seeds))
        stage = Stage(place / f"round_{number + 1}", budget_s, of_round, race, others)
        plan = open_stage(root, stage, extra)
        Queue(plan, jobs).run(stage.jobs())
        pages += round_table(stage, number + 1, task, keep)
        race = survivors(stage, task, keep)
        write(place, pages)
    winner = race[0]
    new_seeds = tuple(range(seeds, 2 * seeds))
    stage = Stage(place / "confirmation", budgets_s[-1], new_seeds, (winner,), others)
    plan = open_stage(root, stage, extra)
    Queue(plan, jobs).run(stage.jobs())
    folder = root / f"{PEOPLE}{people[1]}_{people[0]}"
    cfg = arm_config(arm_by_name(REFERENCE), 0, 1, root, extra)
    make_people(folder, cfg, CONFIG, extra, *people)
    others_people = stage.folder / folder.name
    link(DATA[3:], folder, others_people)
    Queue(plan, jobs).run(stage.jobs(others_people))
    pages += confirmation_table(stage, others_people, winner)
    write(place, pages)
    return "\n".join(pages)


def write(place: Path, pages: Sequence[str]) -> None:
    """search.md as far as the search has come."""
    (place / "search.md").write_text("\n".join(pages) + "\n")


def round_table(stage: Stage, number: int, task: str, keep: float) -> list[str]:
    """Scores of every arm of a round, and the margins that decided."""
    known = margins(stage, task)
    kept = {arm.name for arm in survivors(stage, task, keep)}
    head = [
        "features",
        *(TASK_LABELS[t] for t in TASKS),
        "skill_position",
        "smallest margin",
        "over",
        "goes on",
    ]
    lines = [f"## Round {number}: {stage.budget_s:g} s, {len(stage.seeds)} seeds", "", *table_head(head)]
    for arm in stage.arms:
        scored = stage.score(arm)
        if scored is None:
            lines.append(f"| {arm.label} | failed |" + " |" * (len(head) - 2))
            continue
        cells = [arm.label, *(by_seed(scored, t) for t in TASKS)]
        skill = scored.fact("skill_position")
        cells.append("-" if skill is None else f"{skill:+.3f}")
        if arm.name in known:
            margin, control = known[arm.name]
            cells += [f"{margin:+.3f}", arm_by_name(control).label, "yes" if arm.name in kept else "no"]
        else:
            cells += ["", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def by_seed(scored: Scored, task: str) -> str:
    """'0.750 (0.730, 0.770)', or a dash."""
    if not scored.has(task):
        return "-"
    values = scored.by_seed(task)
    return f"{mean(values):.3f} ({', '.join(f'{v:.3f}' for v in values)})"


def confirmation_table(stage: Stage, people: Path, winner: Arm) -> list[str]:
    """The winner less each other arm on the other people: paired intervals and Holm's p over all of them."""
    first = stage.score(winner, people)
    others = {arm: stage.score(arm, people) for arm in stage.arms if arm is not winner}
    if first is None or not any(others.values()):
        raise UserError(f"{people}: expected scores of {winner.name} and of its controls, found none")
    units = [getattr(first.seeds[0][0], task) for task in TASKS]
    count = len(set(next(unit for unit in units if unit is not None).participants.tolist()))
    draws = Draws.of(count, len(stage.seeds))
    cells: dict[tuple[str, str], tuple[float, tuple[float, float], int]] = {}
    p_values: list[float] = []
    for other in others.values():
        for task in TASKS:
            if other is not None and first.has(task) and other.has(task):
                apart = difference_draws(first, other, task, draws)
                value = first.point(task) - other.point(task)
                cells[other.name, task] = value, interval95(apart), len(p_values)
                p_values.append(bootstrap_p(apart))
    adjusted = holm(p_values)
    seeds = f"seeds {stage.seeds[0]} to {stage.seeds[-1]}"
    lines = [
        f"## Confirmation: {winner.label}, {stage.budget_s:g} s, {seeds}, {count} other participants",
        "",
    ]
    lines += table_head([f"{winner.label}, minus", *(f"{TASK_LABELS[t]} | p (Holm)" for t in TASKS)])
    own = [cell for task in TASKS for cell in (by_seed(first, task), "")]
    lines.append(f"| {' | '.join(['itself: its scores', *own])} |")
    for arm, scored in others.items():
        row = [arm.label]
        for task in TASKS:
            if scored is None:
                row += ["failed", ""]
            elif (arm.name, task) in cells:
                value, ci95, number = cells[arm.name, task]
                row += [signed((value, ci95)), f"{adjusted[number]:.3f}"]
            else:
                row += ["-", "-"]
        lines.append(f"| {' | '.join(row)} |")
    known = [first, *(scored for scored in others.values() if scored is not None)]
    facts = {scored.name: scored.fact("skill_position") for scored in known}
    return [
        *lines,
        "",
        f"skill_position: {json.dumps({k: v for k, v in facts.items() if v is not None})}",
        "",
    ]
