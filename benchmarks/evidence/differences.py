"""The numbers of the page from the scores of benchmarks.evidence; all are read from the runs.

In: the folder of runs. Out: `Results`: scores with intervals, and paired differences. The score of an
arm, random initialisation included, is the mean over its seeds. Resamples draw participants, the same for all
arms; few seeds are no bootstrap, so their variance is added by Student's t (models.probes.intervals). Seed i
of two arms starts from the same weights, so seeds are paired, and two arms that differ only by their seeds
give no claim.
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
    SCRATCH,
    SCRATCH_ARMS,
    TRAINED,
    Arm,
    controls_of_claims,
    run_dir,
)
from benchmarks.evidence.queue import BASELINES, Plan
from benchmarks.evidence.scores import TASKS, Scores, load_scores
from models.probes.intervals import doubt, participant_draws, seeds_and_people
from utils.config.schema import Config
from utils.errors import UserError
from utils.provenance import provenance
from utils.report.run_files import read_run
from utils.runtime.open import open_runtime

BOOTSTRAP_SAMPLES, BOOTSTRAP_SEED = 2000, 0
FACTS = ("rankme", "skill_position", "steps", "seconds_per_step", "init_weight", "alarms")
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
class Results:
    """Everything that table.json holds."""

    budget_s: float | None
    seeds: int
    steps: dict[str, int]
    participants: int
    rows: list[Row]
    best_free: dict[str, str]  # task -> the baseline with the highest score: a claim is above it, too
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


def people_draws(count: int) -> np.ndarray:
    """The participants of every resample [S, P], the same for all rows."""
    return participant_draws(count, BOOTSTRAP_SAMPLES, BOOTSTRAP_SEED)


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

    @property
    def is_pretrained(self) -> bool:
        """Whether it makes claims: no baseline, no network from labels, no control."""
        return self.name not in (*CONTROLS, *SCRATCH) and self.factor not in ("baseline", "control")

    def by_seed(self, task: str) -> list[float]:
        """The score of every seed that has one."""
        return [score for scores, _ in self.seeds if (score := scores.of(task)) is not None]

    def point(self, task: str) -> float:
        """Mean over the seeds."""
        return mean(self.by_seed(task))

    def draws(self, task: str, draws_SP: np.ndarray) -> np.ndarray:
        """The score [N, S] of every seed and resample of participants."""
        return np.array([scores.draws(task, draws_SP) for scores, _ in self.seeds])

    def interval(self, task: str, draws_SP: np.ndarray) -> tuple[float, float]:
        """Of the mean, over seeds and people."""
        return seeds_and_people(np.array(self.by_seed(task)), self.draws(task, draws_SP))

    def gains(self, task: str) -> np.ndarray:
        """What each participant adds to `point` [P], up to a number that all entries share."""
        return np.mean([scores.gains(task) for scores, _ in self.seeds], axis=0)

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


def difference(first: Scored, second: Scored, task: str, draws_SP: np.ndarray) -> Difference:
    """first - second with its interval, seeds and people paired, and the doubt of models.probes.intervals;
    raises ValueError for other participants.
    """
    ids = [s.parts[task].participants for s, _ in (*first.seeds, *second.seeds)]
    if not all(np.array_equal(ids[0], other) for other in ids):
        raise ValueError(f"{first.name} and {second.name}: expected the same participants")
    count = np.arange(max(len(first.seeds), len(second.seeds)))  # a baseline has one "seed"
    score_N, draws_NS = (
        one[count % len(one)] - other[count % len(other)]
        for one, other in (
            (np.array(first.by_seed(task)), np.array(second.by_seed(task))),
            (first.draws(task, draws_SP), second.draws(task, draws_SP)),
        )
    )
    ci95, gains_P = seeds_and_people(score_N, draws_NS), first.gains(task) - second.gains(task)
    unclear = doubt(ci95, first.seeds[0][0].people(task), gains_P)
    return first.point(task) - second.point(task), ci95, unclear


def best_free(scored: dict[str, Scored]) -> dict[str, str]:
    """Task -> the row without pre-training whose score is highest on the evaluated people: a baseline, or a
    network trained from scratch on the same labels.
    """
    free = [entry for entry in scored.values() if entry.factor in ("baseline", "labels")]
    return {
        task: max(having, key=lambda entry: entry.point(task)).name
        for task in TASKS
        if (having := [entry for entry in free if entry.has(task)])
    }


def commits_of_runs(plan: Plan) -> list[str]:
    """The commits under which the training runs ended, each once."""
    paths = sorted((plan.root / "runs").glob("*/seed_*/provenance.json"))
    return sorted({str(json.loads(path.read_text())["commit"]) for path in paths})


def read_rows(plan: Plan) -> dict[str, Scored]:
    """All rows by name, in their order; UserError if random initialisation, the reference or the control has
    no scores.
    """
    scored = {arm.name: read_arm(plan, arm) for arm in (*ARMS, RANDOM_ARM, *SCRATCH_ARMS)}
    missing = [name for name in (RANDOM, REFERENCE, CONTROL) if not scored[name].seeds]
    if missing:
        raise UserError(
            f"{plan.root}: expected scores of what all is compared with, found none of {', '.join(missing)}"
        )
    loaded = [load_scores(path.parent) for path in (plan.root / BASELINES).glob("*/scores.json")]
    for scores, facts in sorted(loaded, key=lambda one: int(one[1]["number"])):
        scored[facts["name"]] = Scored(facts["name"], facts["label"], "baseline", [(scores, facts)])
    scored |= {arm.name: read_arm(plan, arm) for arm in TRAINED if arm not in ARMS}
    return scored


def build_table(plan: Plan) -> Results:
    """Every number of the tables; UserError as read_rows."""
    scored = read_rows(plan)
    participants = next(iter(scored[RANDOM].seeds[0][0].parts.values())).participants
    draws_SP, best = people_draws(len(participants)), best_free(scored)
    return Results(
        budget_s=plan.budget_s,
        seeds=plan.seeds,
        steps=plan.steps,
        participants=len(participants),
        rows=[
            make_row(entry, scored, best, draws_SP)
            for entry in scored.values()
            if entry.seeds or entry.failed
        ],
        best_free=best,
        commits=commits_of_runs(plan),
        packages=provenance(open_runtime(False))["packages"],
        machine=f"{platform.processor() or platform.machine()}, {platform.system()}",
        date=datetime.date.today().isoformat(),
    )


def make_row(entry: Scored, scored: dict[str, Scored], best: dict[str, str], draws_SP: np.ndarray) -> Row:
    """The row of an entry; `scored` holds all entries by name, `best` what `best_free` says of them."""

    def against(task: str) -> dict[str, Difference]:
        own = controls_of_claims(entry.name) if entry.is_pretrained else ()  # what claims nothing has none
        names = *CONTROLS, REFERENCE, entry.compared_with, *own, best.get(task)
        others = (scored[name] for name in dict.fromkeys(names) if name is not None)
        return {
            o.name: difference(entry, o, task, draws_SP) for o in others if o is not entry and o.has(task)
        }

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
                ci95=entry.interval(task, draws_SP),
                by_seed=entry.by_seed(task),
                against=against(task),
            )
            for task in TASKS
            if entry.has(task)
        },
    )
