"""The numbers of docs/results.md from the scores of benchmarks.evidence; all are read from the runs.

In: the folder of runs. Out: scores with bootstrap intervals, paired differences against random
initialisation, the control and the reference arm. An arm's score is the mean over its seeds, random
initialisation's too. Every resample draws participants and seeds, the same for all arms: seed i of two arms
begins with the same weights, so they are paired. Two arms that differ by their seeds alone are no claim then.
"""

from __future__ import annotations

import datetime
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.evidence.arms import (
    ABLATIONS,
    CONTROL,
    MAIN,
    RANDOM_ARM,
    REFERENCE,
    Arm,
    run_dir,
)
from benchmarks.evidence.queue import BASELINES, Plan
from benchmarks.evidence.scores import TASKS, Scores, load_scores
from models.probes.intervals import interval95, participant_draws
from utils.config.schema import Config
from utils.errors import UserError
from utils.provenance import provenance
from utils.report.run_files import read_run
from utils.runtime.open import open_runtime

BOOTSTRAP_SAMPLES, BOOTSTRAP_SEED = 2000, 0
BASELINE_LABELS = {
    "voxel_pca": "raw voxels (64 components; the patch's own voxels)",
    "ascan_profile": "mean A-scan profile",
    "device": "device one-hot",
    "position": "place of the token alone",
}
Difference = tuple[float, tuple[float, float]]


def training_facts(folder: Path, cfg: Config) -> dict[str, Any]:
    """What the run logged: steps, seconds per step, skill_position, alarms."""
    run = read_run(folder)
    skill = [v for _, v in run.series.get("train/skill_position", [])][-3:]
    volumes_per_s = median(v for _, v in run.series["perf/volumes_per_s"])
    return {
        "steps": cfg.train.max_steps,
        "seconds_per_step": cfg.train.global_batch_size / volumes_per_s,
        "skill_position": mean(skill) if skill else None,
        "init_weight": run.series["ema/init_weight"][-1][1],
        "alarms": len(run.alarms),
        "first_alarm": f"step {run.alarms[0][0]}: {run.alarms[0][1]}" if run.alarms else None,
    }


@dataclass(frozen=True)
class Draws:
    """What every resample takes, the same for all rows."""

    participants_SP: np.ndarray
    seeds_SN: np.ndarray  # indices of N seeds, with replacement

    @classmethod
    def of(cls, participants: int, seeds: int) -> Draws:
        rng = np.random.default_rng([BOOTSTRAP_SEED, 1])
        people = participant_draws(participants, BOOTSTRAP_SAMPLES, BOOTSTRAP_SEED)
        return cls(people, rng.integers(0, seeds, (BOOTSTRAP_SAMPLES, seeds)))


@dataclass(frozen=True)
class Row:
    """One line of the tables: an arm's seeds, or one baseline."""

    name: str
    label: str
    factor: str
    seeds: list[tuple[Scores, dict[str, Any]]]
    failed: int = 0
    compared_with: str = REFERENCE

    def has(self, task: str) -> bool:
        """Whether there is anything to report."""
        return bool(self.seeds) and self.seeds[0][0].of(task) is not None

    def point(self, task: str) -> float:
        """Mean over the seeds."""
        return mean(s.of(task) for s, _ in self.seeds if s.of(task) is not None)

    def draws(self, task: str, draws: Draws) -> np.ndarray:
        """The score [S] of every resample of participants and seeds."""
        score_NS = np.array([s.draws(task, draws.participants_SP) for s, _ in self.seeds])
        chosen_SN = draws.seeds_SN % len(score_NS)  # a baseline has one "seed", an arm that failed fewer
        return score_NS[chosen_SN, np.arange(score_NS.shape[1])[:, None]].mean(1)

    def fact(self, name: str) -> float | None:
        """Mean over the seeds of a number that the runs logged."""
        values = [facts[name] for _, facts in self.seeds if facts.get(name) is not None]
        return mean(values) if values else None


def read_arm(plan: Plan, arm: Arm, people: Path) -> Row:
    """The seeds of an arm that are scored on the people of a folder."""
    folders = [run_dir(people, arm, seed) for seed in range(plan.seeds)]
    scored = [load_scores(f) for f in folders if (f / "scores.json").exists()]
    failed = sum((f / "failed.json").exists() for f in folders)
    return Row(arm.name, arm.label, arm.factor, scored, failed, arm.compared_with)


def difference(first: Row, second: Row, task: str, draws: Draws) -> Difference:
    """first - second with its interval under shared draws; raises ValueError for other participants."""
    ids = [getattr(s, task).participants for s, _ in (*first.seeds, *second.seeds)]
    if not all(np.array_equal(ids[0], other) for other in ids):
        raise ValueError(f"{first.name} and {second.name}: expected the same participants")
    apart = first.draws(task, draws) - second.draws(task, draws)
    return first.point(task) - second.point(task), interval95(apart)


def commits_of_runs(plan: Plan) -> list[str]:
    """The commits under which the trained runs ended, each once."""
    paths = sorted((plan.root / "runs").glob("*/seed_*/provenance.json"))
    return sorted({str(json.loads(path.read_text())["commit"]) for path in paths})


def calibrated_seconds(root: Path) -> dict[str, float]:
    """Seconds per step by which the budget was shared out; empty where steps were given instead."""
    path = root / "calibration.json"
    return json.loads(path.read_text())["seconds_per_step"] if path.exists() else {}


def build(plan: Plan, people: Path | None = None) -> dict[str, Any]:
    """Every number of the tables; raises UserError while what all is compared with has not run.

    `people`: folder of a confirmation; without it, the people that the runs were compared on first.
    """
    people = plan.root if people is None else people
    random = read_arm(plan, RANDOM_ARM, people)
    found = [read_arm(plan, arm, people) for arm in MAIN]
    needed = (RANDOM_ARM.name, REFERENCE, CONTROL)
    missing = [r.name for r in (random, *found) if not r.seeds and r.name in needed]
    if missing:
        raise UserError(
            f"{people}: expected scores of what all is compared with, found none of {', '.join(missing)}"
        )
    recipes = [r for r in found if r.seeds or r.failed]
    baselines = [
        Row(name, label, "baseline", [load_scores(people / BASELINES / name)])
        for name, label in BASELINE_LABELS.items()
    ]
    ablations = [r for r in (read_arm(plan, arm, people) for arm in ABLATIONS) if r.seeds or r.failed]
    calibrated = calibrated_seconds(plan.root)
    reference = next(r for r in recipes if r.name == REFERENCE)
    control = next(r for r in recipes if r.name == CONTROL)
    participants = random.seeds[0][0].classes
    assert participants is not None
    draws = Draws.of(len(participants.participants), plan.seeds)
    others = {row.name: row for row in ablations}
    table = []
    for row in (*recipes, random, *baselines, *ablations):
        line: dict[str, Any] = {
            "name": row.name,
            "label": row.label,
            "factor": row.factor,
            "compared_with": row.compared_with,
            "num_seeds": len(row.seeds),
            "failed": row.failed,
            **{k: row.fact(k) for k in ("rankme", "real_rankme", "skill_position", "steps")},
            **{k: row.fact(k) for k in ("init_weight", "alarms")},
            "seconds_per_step_in_run": row.fact("seconds_per_step"),
            "seconds_per_step": calibrated.get(row.name),
            "skill_position_by_seed": [f.get("skill_position") for _, f in row.seeds],
            "tasks": {},
        }
        for task in TASKS:
            if not row.has(task):
                continue
            line["tasks"][task] = {
                "score": row.point(task),
                "ci95": interval95(row.draws(task, draws)),
                "by_seed": [s.of(task) for s, _ in row.seeds],
                "against_random": None if row is random else difference(row, random, task, draws),
                "against_reference": None if row is reference else difference(row, reference, task, draws),
                "against_named": None
                if row.compared_with not in others or not others[row.compared_with].has(task)
                else difference(row, others[row.compared_with], task, draws),
                "against_control": None if row is control else difference(row, control, task, draws),
            }
        table.append(line)
    return {
        "budget_s": plan.budget_s,
        "seeds": plan.seeds,
        "steps": plan.steps,
        "participants": len(participants.participants),
        "rows": table,
        "commits": commits_of_runs(plan),
        "packages": provenance(open_runtime(False))["packages"],
        "machine": f"{platform.processor() or platform.machine()}, {platform.system()}",
        "date": datetime.date.today().isoformat(),
    }
