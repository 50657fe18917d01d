"""Compute against quality: the same arms at several budgets, and whether what is shown grows with them.

In: the folder of `evidence data` and `calibrate`. Random initialisation, two steps of training and the named
arms are trained for each budget, with the same seeds, and scored on the same people. Out: a folder for each
budget below the root's `compute`, and compute.md there: scores by budget, and the first arm less each other
one, paired. Every call goes on where the last one ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.evidence.arms import arm_by_name
from benchmarks.evidence.differences import Draws, Scored, difference
from benchmarks.evidence.queue import Queue
from benchmarks.evidence.scores import TASKS
from benchmarks.evidence.search import SHARED_CONTROLS, Stage, link, open_stage
from benchmarks.evidence.words import TASK_LABELS, signed, table_head
from models.probes.intervals import interval95
from utils.errors import UserError


def compute(
    root: Path, names: Sequence[str], budgets_s: Sequence[float], seeds: int, jobs: int, extra: Sequence[str]
) -> str:
    """Run what is not done; returns compute.md."""
    arms = tuple(arm_by_name(name) for name in names)
    place = root / "compute"
    stages = [Stage(place / f"{b:g}", b, tuple(range(seeds)), (), arms) for b in budgets_s]
    steps = []
    for stage in stages:
        plan = open_stage(root, stage, extra)
        if stage is not stages[0] and not (stage.folder / "runs").exists():
            link(SHARED_CONTROLS, stages[0].folder / "runs", stage.folder / "runs")  # no budget changes these
        Queue(plan, jobs).run(stage.jobs())
        steps.append(plan.steps)
    lines = ["# Compute against quality", "", *table_head(["steps", *(f"{b:g} s" for b in budgets_s)])]
    for arm in stages[0].arms:
        if arm.is_trained:
            lines.append(f"| {arm.label} | {' | '.join(str(of[arm.name]) for of in steps)} |")
    for task in TASKS:
        lines += task_table(stages, task)
    page = "\n".join(lines)
    (place / "compute.md").write_text(page + "\n")
    return page


def task_table(stages: Sequence[Stage], task: str) -> list[str]:
    """Score and interval of every arm by budget, then the first named arm less each other one; no lines where
    nothing has such a score.
    """
    by_stage = [{arm.name: scored_of(stage, arm.name) for arm in stage.arms} for stage in stages]
    some = next(iter(by_stage[0].values()))
    if not some.has(task):
        return []
    first = stages[0].beside[0]
    count = len(set(getattr(some.seeds[0][0], task).participants.tolist()))
    draws = Draws.of(count, len(stages[0].seeds))
    budgets = [f"{stage.budget_s:g} s" for stage in stages]
    lines = ["", f"## {TASK_LABELS[task]}", "", *table_head(["features", *budgets])]
    for arm in stages[0].arms:
        cells = []
        for scored in (of[arm.name] for of in by_stage):
            low, high = interval95(scored.draws(task, draws))
            cells.append(f"{scored.point(task):.3f} ({low:.3f} to {high:.3f})")
        lines.append(f"| {arm.label} | {' | '.join(cells)} |")
    lines += ["", *table_head([f"{first.label}, minus", *budgets])]
    for arm in stages[0].arms:
        if arm is not first:
            apart = [signed(difference(of[first.name], of[arm.name], task, draws)) for of in by_stage]
            lines.append(f"| {arm.label} | {' | '.join(apart)} |")
    return lines


def scored_of(stage: Stage, name: str) -> Scored:
    """The arm's seeds at this budget; raises UserError where one of them failed."""
    scored = stage.score(arm_by_name(name))
    if scored is None:
        raise UserError(
            f"{stage.folder}: expected scores of {name}, all seeds, found failures; see its evidence.log"
        )
    return scored
