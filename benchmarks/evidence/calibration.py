"""Calibration of benchmarks.evidence: seconds per step of every arm, for the same wall-clock in all.

In: the stores of `evidence data`. Out: calibration.json. Every arm is trained for a few steps, as many at a
time as runs will share the machine. Steps per arm = budget / seconds per step. They are fixed in advance
because schedules need the total; so results do not depend on what else the machine does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.evidence.arms import ARMS, TRAINED, arm_by_name, arm_config, run_dir
from benchmarks.evidence.cohorts import link_data
from benchmarks.evidence.differences import training_facts
from benchmarks.evidence.queue import Job, Plan, Queue
from utils.errors import UserError

STEPS = 50  # five lines of the log, of which the first is of the warm-up; the median counts


@dataclass(frozen=True)
class Timing(Job):
    """A short run for its times; it has no scores."""

    verbs: tuple[str, ...] = ("train",)

    @property
    def is_done(self) -> bool:
        """Whether it is finished."""
        return (self.folder / "checkpoints" / f"step_{STEPS:08d}.pt").exists()


def calibrate(
    root: Path, jobs: int, extra: Sequence[str], names: Sequence[str] | None = None
) -> dict[str, float]:
    """Seconds per step of every arm, or of those in `names`, added to calibration.json; arms that the file
    has keep their time. Raises UserError for an arm that failed, or a file of another configuration.
    """
    path, folder = root / "calibration.json", root / "calibration"
    known: dict[str, float] = json.loads(path.read_text())["seconds_per_step"] if path.exists() else {}
    arms = [arm for arm in (ARMS if names is None else map(arm_by_name, names)) if arm.steps is None]
    new = [arm for arm in arms if arm.name not in known]
    link_data(root, folder)
    plan = Plan(folder, None, 1, dict.fromkeys((arm.name for arm in new), STEPS), tuple(extra))
    plan.save()
    timings = {arm.name: Timing(arm, 0, run_dir(folder, arm, 0)) for arm in new}
    Queue(plan, jobs).run(timings.values())
    for arm in new:
        run = timings[arm.name]
        if not run.is_done:
            raise UserError(f"{run.folder}: expected a run of {STEPS} steps; see its evidence.log")
        facts = training_facts(run.folder, arm_config(arm, 0, STEPS, folder, extra))
        known[arm.name] = round(facts["seconds_per_step"], 5)
    path.write_text(json.dumps({"seconds_per_step": known}, indent=1) + "\n")
    return known


def timed_as(name: str) -> str:
    """The arm whose time of a step this one has: an own control has its arm's."""
    return name.partition("+")[0]


def steps_of_budget(root: Path, budget_s: float, names: Sequence[str] | None = None) -> dict[str, int]:
    """Steps of every arm whose time calibration.json has, so that they fit the budget; an own control has its
    arm's time of a step. Raises UserError where that of an arm is missing, or, with `names`, of one of these.
    """
    path = root / "calibration.json"
    if not path.exists():
        raise UserError(f"{path}: expected seconds per step, found none; run `evidence calibrate` first")
    seconds = json.loads(path.read_text())["seconds_per_step"]
    asked = TRAINED if names is None else map(arm_by_name, names)
    if missing := sorted({timed_as(arm.name) for arm in asked if arm.steps is None} - seconds.keys()):
        raise UserError(f"{path}: expected seconds per step of {missing[0]}; run `evidence calibrate` again")
    return {
        arm.name: arm.steps or max(2, int(budget_s / seconds[timed_as(arm.name)]))
        for arm in TRAINED
        if arm.steps or timed_as(arm.name) in seconds
    }
