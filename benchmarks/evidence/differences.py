"""The numbers of the page from the scores of benchmarks.evidence; all are read from the runs.

In: the folder of runs. Out: a `Table` of scores with bootstrap intervals and of paired differences. The score
of an arm, random initialisation included, is the mean over its seeds. Every resample draws participants and
seeds, the same for all arms: seed i of two arms starts from the same weights, so seeds are paired, and two
arms that differ only by their seeds give no claim.
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
    ARMS,
    CONTROL,
    CONTROLS,
    RANDOM,
    RANDOM_ARM,
    REFERENCE,
    SUPERVISED,
    SUPERVISED_ARM,
    TRAINED,
    Arm,
    controls_of_claims,
    run_dir,
)
from benchmarks.evidence.queue import BASELINES, Plan
from benchmarks.evidence.scores import TASKS, Scores, load_scores
from models.probes.intervals import doubt, interval95, participant_draws
from utils.config.schema import Config
from utils.errors import UserError
from utils.provenance import provenance
from utils.report.run_files import read_run
from utils.runtime.open import open_runtime

BOOTSTRAP_SAMPLES, BOOTSTRAP_SEED = 2000, 0
FACTS = ("rankme", "skill_position", "steps", "seconds_per_step", "init_weight", "alarms")
BASELINE_LABELS = {
    "voxel_pca": "raw voxels (64 components; the patch's own voxels)",
    "ascan_profile": "mean A-scan profile",
    "device": "device one-hot",
    "position": "place of the token alone",
}
Difference = tuple[float, tuple[float, float], str]  # its interval, and the doubt about it


@dataclass(frozen=True)
class TaskResult:
    """A row's score in one task, and its differences to the arms that have one."""

    score: float
    ci95: tuple[float, float]
    by_seed: list[float]
    against: dict[str, Difference]  # this less another arm: the controls, the reference, Row.compared_with


@dataclass(frozen=True)
class Row:
    """One row of the tables; what the runs logged is the mean over the seeds."""

    name: str
    label: str
    factor: str
    compared_with: str
    failed: int
    facts: dict[str, float | None]  # of FACTS
    tasks: dict[str, TaskResult]

    def difference(self, task: str, against: str) -> Difference | None:
        """This row less the arm `against`; None where one of them has no score."""
        return self.tasks[task].against.get(against) if task in self.tasks else None


@dataclass(frozen=True)
class Table:
    """Everything that table.json holds."""

    budget_s: float | None
    seeds: int
    steps: dict[str, int]
    participants: int
    rows: list[Row]
    commits: list[str]
    packages: dict[str, Any]
    machine: str
    date: str


def training_facts(folder: Path, cfg: Config) -> dict[str, Any]:
    """Numbers that the run logged: steps, seconds per step, skill_position of the last validation (the one
    with one target encoder for all), alarms.
    """
    run = read_run(folder)
    skill = [v for _, v in run.series.get("val/skill_position", [])]
    volumes_per_s = median(v for _, v in run.series["perf/volumes_per_s"])
    return {
        "steps": cfg.train.max_steps,
        "seconds_per_step": cfg.train.global_batch_size / volumes_per_s,
        "skill_position": skill[-1] if skill else None,
        "init_weight": run.series["ema/init_weight"][-1][1],
        "alarms": len(run.alarms),
        "first_alarm": f"step {run.alarms[0][0]}: {run.alarms[0][1]}" if run.alarms else None,
    }


@dataclass(frozen=True)
class Draws:
    """The participants and seeds of every resample, the same for all rows."""

    participants_SP: np.ndarray
    seeds_SN: np.ndarray  # indices of N seeds, with replacement

    @classmethod
    def of(cls, participants: int, seeds: int) -> Draws:
        rng = np.random.default_rng([BOOTSTRAP_SEED, 1])
        people = participant_draws(participants, BOOTSTRAP_SAMPLES, BOOTSTRAP_SEED)
        return cls(people, rng.integers(0, seeds, (BOOTSTRAP_SAMPLES, seeds)))


@dataclass(frozen=True)
class Scored:
    """The scored seeds of an arm, or one baseline."""

    name: str
    label: str
    factor: str
    seeds: list[tuple[Scores, dict[str, Any]]]
    failed: int = 0
    compared_with: str = REFERENCE

    def has(self, task: str) -> bool:
        """Whether there is a score to report."""
        return bool(self.seeds) and self.seeds[0][0].of(task) is not None

    def by_seed(self, task: str) -> list[float]:
        """The score of every seed that has one."""
        return [score for scores, _ in self.seeds if (score := scores.of(task)) is not None]

    def point(self, task: str) -> float:
        """Mean over the seeds."""
        return mean(self.by_seed(task))

    def draws(self, task: str, draws: Draws) -> np.ndarray:
        """The score [S] of every resample of participants and seeds."""
        score_NS = np.array([s.draws(task, draws.participants_SP) for s, _ in self.seeds])
        chosen_SN = draws.seeds_SN % len(score_NS)  # a baseline has one "seed", an arm that failed fewer
        return score_NS[chosen_SN, np.arange(score_NS.shape[1])[:, None]].mean(1)

    def parts(self, task: str) -> np.ndarray:
        """What each participant adds to `point` [P], up to a number that all entries share."""
        return np.mean([scores.parts(task) for scores, _ in self.seeds], axis=0)

    def fact(self, name: str) -> float | None:
        """Mean over the seeds of a number that the runs logged."""
        values = [facts[name] for _, facts in self.seeds if facts.get(name) is not None]
        return mean(values) if values else None


def read_arm(plan: Plan, arm: Arm) -> Scored:
    """The seeds of an arm that are scored."""
    folders = [run_dir(plan.root, arm, seed) for seed in range(plan.seeds)]
    scored = [load_scores(f) for f in folders if (f / "scores.json").exists()]
    failed = sum((f / "failed.json").exists() for f in folders)
    return Scored(arm.name, arm.label, arm.factor, scored, failed, arm.compared_with)


def difference(first: Scored, second: Scored, task: str, draws: Draws) -> Difference:
    """first - second with its interval under shared draws, and the doubt of models.probes.intervals; raises
    ValueError for other participants.
    """
    ids = [getattr(s, task).participants for s, _ in (*first.seeds, *second.seeds)]
    if not all(np.array_equal(ids[0], other) for other in ids):
        raise ValueError(f"{first.name} and {second.name}: expected the same participants")
    apart = first.draws(task, draws) - second.draws(task, draws)
    ci95, people = interval95(apart), first.seeds[0][0].people(task)
    return (
        first.point(task) - second.point(task),
        ci95,
        doubt(ci95, people, first.parts(task) - second.parts(task)),
    )


def commits_of_runs(plan: Plan) -> list[str]:
    """The commits under which the training runs ended, each once."""
    paths = sorted((plan.root / "runs").glob("*/seed_*/provenance.json"))
    return sorted({str(json.loads(path.read_text())["commit"]) for path in paths})


def build_table(plan: Plan) -> Table:
    """Every number of the tables; raises UserError if random initialisation, the reference or the control has
    no scores.
    """
    scored = {arm.name: read_arm(plan, arm) for arm in (*ARMS, RANDOM_ARM, SUPERVISED_ARM)}
    missing = [name for name in (RANDOM, REFERENCE, CONTROL) if not scored[name].seeds]
    if missing:
        raise UserError(
            f"{plan.root}: expected scores of what all is compared with, found none of {', '.join(missing)}"
        )
    for name, label in BASELINE_LABELS.items():
        scored[name] = Scored(name, label, "baseline", [load_scores(plan.root / BASELINES / name)])
    scored |= {arm.name: read_arm(plan, arm) for arm in TRAINED if arm not in ARMS}
    tasks = (getattr(scored[RANDOM].seeds[0][0], task) for task in TASKS)
    participants = next(part for part in tasks if part is not None).participants
    draws = Draws.of(len(np.unique(participants)), plan.seeds)
    return Table(
        budget_s=plan.budget_s,
        seeds=plan.seeds,
        steps=plan.steps,
        participants=len(np.unique(participants)),
        rows=[make_row(entry, scored, draws) for entry in scored.values() if entry.seeds or entry.failed],
        commits=commits_of_runs(plan),
        packages=provenance(open_runtime(False))["packages"],
        machine=f"{platform.processor() or platform.machine()}, {platform.system()}",
        date=datetime.date.today().isoformat(),
    )


def controls_of_entry(entry: Scored) -> tuple[str, ...]:
    """The arms that a claim about it has to be above; a control or baseline claims nothing."""
    is_claim = entry.name not in (*CONTROLS, SUPERVISED) and entry.factor not in ("baseline", "control")
    return controls_of_claims(entry.name) if is_claim else ()


def make_row(entry: Scored, scored: dict[str, Scored], draws: Draws) -> Row:
    """The row of an entry; `scored` holds all entries by name."""

    def against(task: str) -> dict[str, Difference]:
        names = *CONTROLS, REFERENCE, entry.compared_with, *controls_of_entry(entry)
        others = (scored[name] for name in dict.fromkeys(names))
        return {o.name: difference(entry, o, task, draws) for o in others if o is not entry and o.has(task)}

    return Row(
        name=entry.name,
        label=entry.label,
        factor=entry.factor,
        compared_with=entry.compared_with,
        failed=entry.failed,
        facts={name: entry.fact(name) for name in FACTS},
        tasks={
            task: TaskResult(
                score=entry.point(task),
                ci95=interval95(entry.draws(task, draws)),
                by_seed=entry.by_seed(task),
                against=against(task),
            )
            for task in TASKS
            if entry.has(task)
        },
    )
