"""Compute against quality: the same arms at several budgets, and whether what is shown grows with them.

In: the folder of `evidence data` and `calibrate`. Random initialisation, two steps of training and the named
arms are trained for each budget, with the same seeds, and scored on the same people. Out: a folder for each
budget below the root's `compute`, and compute.md there: scores by budget, and the first arm less each other
one, paired. Every call goes on where the last one ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.evidence.arms import CONTROL, RANDOM, REFERENCE, Arm, arm_by_name, run_dir
from benchmarks.evidence.calibration import calibrated_steps
from benchmarks.evidence.cohorts import link, link_data
from benchmarks.evidence.differences import Draws, Scored, difference, read_arm
from benchmarks.evidence.queue import Job, Plan, Queue
from benchmarks.evidence.scores import TASKS
from benchmarks.evidence.words import TASK_LABELS, signed, table_head
from models.probes.intervals import interval95
from utils.errors import UserError

SHARED_CONTROLS = RANDOM, CONTROL


def compute(
    root: Path, names: Sequence[str], budgets_s: Sequence[float], seeds: int, jobs: int, extra: Sequence[str]
) -> str:
    """Run what is not done; returns compute.md."""
    arms = [arm_by_name(name) for name in dict.fromkeys((*SHARED_CONTROLS, *names))]
    place = root / "compute"
    plans = [open_budget(root, place / f"{b:g}", b, arms, seeds, extra) for b in budgets_s]
    for plan in plans:
        if plan is not plans[0] and not (plan.root / "runs").exists():
            link(SHARED_CONTROLS, plans[0].root / "runs", plan.root / "runs")  # no budget changes these
        Queue(plan, jobs).run([Job(a, s, run_dir(plan.root, a, s)) for s in range(seeds) for a in arms])
    lines = ["# Compute against quality", "", *table_head(["steps", *(f"{b:g} s" for b in budgets_s)])]
    for arm in arms:
        if arm.is_trained:
            lines.append(f"| {arm.label} | {' | '.join(str(plan.steps[arm.name]) for plan in plans)} |")
    by_budget = [{arm.name: scored_of(plan, arm) for arm in arms} for plan in plans]
    for task in TASKS:
        lines += task_table(by_budget, budgets_s, names[0], task)
    page = "\n".join(lines)
    (place / "compute.md").write_text(page + "\n")
    return page


def open_budget(
    root: Path, folder: Path, budget_s: float, arms: Sequence[Arm], seeds: int, extra: Sequence[str]
) -> Plan:
    """The budget's folder with links to the data of `root`, and its plan."""
    link_data(root, folder)
    trained = [arm for arm in arms if arm.is_trained]
    steps = calibrated_steps(root, budget_s, [*trained, arm_by_name(REFERENCE)])
    plan = Plan(folder, budget_s, seeds, steps, tuple(extra))
    plan.save()
    return plan


def task_table(
    by_budget: Sequence[dict[str, Scored]], budgets_s: Sequence[float], first: str, task: str
) -> list[str]:
    """Score and interval of every arm by budget, then the arm `first` less each other one; no lines where
    nothing has such a score.
    """
    arms = list(by_budget[0].values())
    if not arms[0].has(task):
        return []
    count = len(set(getattr(arms[0].seeds[0][0], task).participants.tolist()))
    draws = Draws.of(count, len(arms[0].seeds))
    budgets = [f"{budget:g} s" for budget in budgets_s]
    lines = ["", f"## {TASK_LABELS[task]}", "", *table_head(["features", *budgets])]
    for arm in arms:
        cells = []
        for scored in (of[arm.name] for of in by_budget):
            low, high = interval95(scored.draws(task, draws))
            cells.append(f"{scored.point(task):.3f} ({low:.3f} to {high:.3f})")
        lines.append(f"| {arm.label} | {' | '.join(cells)} |")
    lines += ["", *table_head([f"{by_budget[0][first].label}, minus", *budgets])]
    for arm in arms:
        if arm.name != first:
            apart = [signed(difference(of[first], of[arm.name], task, draws)) for of in by_budget]
            lines.append(f"| {arm.label} | {' | '.join(apart)} |")
    return lines


def scored_of(plan: Plan, arm: Arm) -> Scored:
    """The arm's seeds at this budget; raises UserError where one of them failed."""
    scored = read_arm(plan, arm)
    if len(scored.seeds) < plan.seeds:
        raise UserError(
            f"{plan.root}: expected scores of {arm.name}, all seeds, found failures; see its evidence.log"
        )
    return scored
