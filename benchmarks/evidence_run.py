"""Calibration and the queue of benchmarks.evidence: the same wall-clock for every arm, one core per run.

`calibrate` times a step of every arm, interleaved, on as many pinned cores as runs will share the machine.
Steps per arm = budget / seconds per step: fixed in advance, because schedules need the total, so that results
do not depend on what else the machine does. A run is `python -m pretraining.train`; `evidence score` follows
it on the same core. A run with scores is not run again; an interrupted one goes on from its checkpoint.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.evidence_arms import (
    ABLATIONS,
    CONFIG,
    CONTROL,
    MAIN,
    RANDOM_ARM,
    REFERENCE,
    Arm,
    arm_by_name,
    arm_config,
    cost_key,
    overrides,
    run_dir,
)
from data_setup.loader import Loader
from data_setup.store import PreparedStore
from models.vjepa3d import VJEPA3D
from pretraining.data import open_rows
from pretraining.schedules import ema_momentum, learning_rate
from pretraining.step import build_optimizer, train_step
from utils.config import UserError
from utils.runtime import Runtime

ROUNDS, WARM_UP_ROUNDS = 9, 2
POLL_SECONDS = 0.2
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
BASELINES, LAST_BASELINE = "baselines", "position"  # written in the order of baseline_features


@dataclass(frozen=True)
class Plan:
    """What every command of one evidence folder shares; kept in plan.json."""

    root: Path
    budget_s: float | None  # None: a number of steps was asked for
    seeds: int
    steps: dict[str, int]  # arm -> steps
    extra: tuple[str, ...] = ()  # configuration changes for all arms

    def save(self) -> None:
        """Write plan.json; raises UserError when runs were made under another."""
        told = {
            "budget_s": self.budget_s,
            "seeds": self.seeds,
            "steps": self.steps,
            "extra": list(self.extra),
        }
        path = self.root / "plan.json"
        if path.exists() and (self.root / "runs").exists():
            found = json.loads(path.read_text())
            # arms that are new since then have no runs yet
            again = {"steps": {arm: self.steps[arm] for arm in found["steps"] if arm in self.steps}}
            for key in ("budget_s", "extra", "steps"):
                value = {**told, **again}[key]
                if found[key] != value:
                    raise UserError(
                        f"{path}: {key}: expected {found[key]} as the runs here began, found {value}; "
                        "use another --root, or the same values"
                    )
        path.write_text(json.dumps(told, indent=1) + "\n")

    @classmethod
    def load(cls, root: Path) -> Plan:
        """What `run` wrote; raises UserError where it has not run."""
        path = root / "plan.json"
        if not path.exists():
            raise UserError(f"{path}: expected the plan of a run, found none; run `evidence run` first")
        told = json.loads(path.read_text())
        return cls(root, told["budget_s"], told["seeds"], told["steps"], tuple(told["extra"]))


def pin(core: int) -> None:
    """This process, and those it starts, on one core with one thread, where the system can do that."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})


def cores(jobs: int) -> list[int]:
    """A core for each of the runs that go at a time; raises UserError when there are fewer."""
    count = os.cpu_count() or 1
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(count))
    if jobs > len(usable):
        raise UserError(f"--jobs: expected at most {len(usable)}, the cores here, found {jobs}")
    return usable[:jobs]


def calibrate(root: Path, jobs: int, extra: Sequence[str]) -> dict[str, Any]:
    """Seconds per step of every arm, written to calibration.json.

    Arms that the file already has keep their time. Those that are new are timed beside the reference, and
    their times scaled to the file's reference, so that all rest on one speed of the machine. Raises UserError
    for a file of another machine, number of jobs or configuration.
    """
    path = root / "calibration.json"
    conditions = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "jobs": jobs,
        "rounds": ROUNDS - WARM_UP_ROUNDS,
        "extra": list(extra),
    }
    found = json.loads(path.read_text()) if path.exists() else {**conditions, "seconds_per_step": {}}
    for key, value in conditions.items():
        if found.get(key) != value:
            raise UserError(
                f"{path}: {key}: expected {value} as now, found {found.get(key)}; "
                "remove the file to time all again"
            )
    known = found["seconds_per_step"]
    new = [arm.name for arm in (*MAIN, *ABLATIONS) if arm.name not in known]
    if known and new:
        new.insert(0, REFERENCE)
    times = _time_on_cores(root, jobs, extra, new) if new else []
    medians = {name: median(s for one in times for s in one[name]) for name in new}
    scale = known[REFERENCE] / medians[REFERENCE] if known and new else 1.0
    told = {
        **conditions,
        "seconds_per_step": {name: round(scale * s, 5) for name, s in medians.items()} | known,
    }
    path.write_text(json.dumps(told, indent=1) + "\n")
    return told


def _time_on_cores(
    root: Path, jobs: int, extra: Sequence[str], names: Sequence[str]
) -> list[dict[str, list[float]]]:
    """`time_steps` on as many cores at a time."""
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context) as pool:
        work = [pool.submit(time_steps, root, core, tuple(extra), tuple(names)) for core in cores(jobs)]
        return [w.result() for w in work]


def time_steps(
    root: Path, core: int, extra: tuple[str, ...], names: tuple[str, ...]
) -> dict[str, list[float]]:
    """Seconds of single steps, loading included: one step of each named arm in turn; arms of one cost
    share.
    """
    pin(core)
    torch.set_num_threads(1)
    runtime = Runtime(torch.device("cpu"), use_bf16=False)
    configs = {name: arm_config(arm_by_name(name), 0, ROUNDS, root, extra) for name in names}
    first_of = {cost_key(cfg): name for name, cfg in reversed(configs.items())}
    timed: dict[str, list[float]] = {name: [] for name in sorted(first_of.values())}
    parts = {}
    for name in timed:
        cfg = configs[name]
        store = PreparedStore.open(cfg.data.store)
        model = VJEPA3D(cfg).train()
        loader = Loader(cfg, store, open_rows(cfg, store).train, num_steps=ROUNDS)
        parts[name] = cfg, model, build_optimizer(model, cfg), iter(loader)
    for step in range(ROUNDS):
        for name, (cfg, model, optimizer, batches) in parts.items():
            lr, momentum = learning_rate(cfg, step, ROUNDS), ema_momentum(cfg, step, ROUNDS)
            start = time.perf_counter()
            train_step(model, optimizer, next(batches), cfg, runtime, step, lr, momentum)
            if step >= WARM_UP_ROUNDS:
                timed[name].append(time.perf_counter() - start)
    return {name: timed[first_of[cost_key(cfg)]] for name, cfg in configs.items()}


def steps_of_budget(root: Path, budget_s: float) -> dict[str, int]:
    """Steps of every arm that fit the budget, from calibration.json; raises UserError without it."""
    path = root / "calibration.json"
    if not path.exists():
        raise UserError(f"{path}: expected seconds per step, found none; run `evidence calibrate` first")
    seconds = json.loads(path.read_text())["seconds_per_step"]
    return {a.name: a.steps or max(2, int(budget_s / seconds[a.name])) for a in (*MAIN, *ABLATIONS)}


@dataclass(frozen=True)
class Job:
    """One run to train and score; arm None: the baselines without an encoder."""

    arm: Arm | None
    seed: int
    folder: Path  # of its scores
    people: Path | None = None  # whom a run that is trained is scored on again

    @property
    def name(self) -> str:
        """For messages."""
        return BASELINES if self.arm is None else f"{self.arm.name}, seed {self.seed}"

    @property
    def is_done(self) -> bool:
        """Scored; what failed is tried again by the next call."""
        folder = self.folder / LAST_BASELINE if self.arm is None else self.folder
        return (folder / "scores.json").exists()

    def commands(self, plan: Plan) -> list[list[str]]:
        """Train, then score."""
        arm = BASELINES if self.arm is None else self.arm.name
        module = [sys.executable, "-m"]
        result = [[*module, "benchmarks.evidence", "score", "--root", str(plan.root), "--arm", arm]]
        result[0] += ["--seed", str(self.seed)]
        if self.people is not None:
            result[0] += ["--people", str(self.people)]
        elif self.arm is not None and self.arm.is_trained:
            changes = overrides(self.arm, self.seed, plan.steps[self.arm.name], plan.root, plan.extra)
            result.insert(0, [*module, "pretraining.train", "--config", str(CONFIG), *changes])
        return result


def main_jobs(plan: Plan, only: Collection[str] | None = None) -> list[Job]:
    """Baselines and random initialisation first, then one seed of every recipe before the next seed.

    `only`: without the other recipes, but for what every difference of the table is to.
    """
    jobs = [Job(None, 0, plan.root / BASELINES)]
    jobs += [Job(RANDOM_ARM, s, run_dir(plan.root, RANDOM_ARM, s)) for s in range(plan.seeds)]
    arms = [a for a in MAIN if only is None or a.name in {*only, REFERENCE, CONTROL}]
    return jobs + [Job(a, s, run_dir(plan.root, a, s)) for s in range(plan.seeds) for a in arms]


def ablation_jobs(plan: Plan, only: Collection[str] | None = None) -> list[list[Job]]:
    """The jobs of each ablation, in order; an ablation is started only when all its seeds fit the time."""
    arms = [a for a in ABLATIONS if only is None or a.name in only]
    return [[Job(a, s, run_dir(plan.root, a, s)) for s in range(plan.seeds)] for a in arms]


def confirmation_jobs(plan: Plan, people: Path) -> list[Job]:
    """Every run that is scored, to be scored on other people too; raises UserError where there is none."""
    found = [Job(None, 0, people / BASELINES, people)]
    for arm in (RANDOM_ARM, *MAIN, *ABLATIONS):
        for seed in range(plan.seeds):
            if (run_dir(plan.root, arm, seed) / "scores.json").exists():
                found.append(Job(arm, seed, run_dir(people, arm, seed), people))
    if len(found) == 1:
        raise UserError(f"{plan.root}: expected scored runs, found none; run `evidence run` first")
    return found


class Queue:
    """Runs jobs on pinned cores, one each; ends its children when it ends."""

    def __init__(self, plan: Plan, jobs: int) -> None:
        self.plan, self.free = plan, cores(jobs)
        self.running: dict[subprocess.Popen[bytes], tuple[Job, int, list[list[str]], float]] = {}

    def run(self, jobs: Iterable[Job]) -> None:
        """All jobs that are not done; KeyboardInterrupt stops the children first (training checkpoints)."""
        waiting: Iterator[Job] = (job for job in jobs if not job.is_done)
        job = next(waiting, None)
        try:
            while job is not None or self.running:
                while job is not None and self.free:
                    self._start(job, self.free.pop(0), job.commands(self.plan), 0.0)
                    job = next(waiting, None)
                time.sleep(POLL_SECONDS)
                for process in [p for p in self.running if p.poll() is not None]:
                    self._advance(process)
        finally:
            for process in self.running:
                process.send_signal(signal.SIGTERM)
            for process in self.running:
                process.wait()

    def _start(self, job: Job, core: int, commands: list[list[str]], used_s: float) -> None:
        job.folder.mkdir(parents=True, exist_ok=True)
        (job.folder / "failed.json").unlink(missing_ok=True)
        with (job.folder / "evidence.log").open("ab") as output:
            process = subprocess.Popen(
                commands[0],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | dict.fromkeys(THREAD_VARIABLES, "1"),
                cwd=CONFIG.parents[1],
                start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the others
                preexec_fn=lambda: pin(core),
            )
        self.running[process] = job, core, commands[1:], used_s - time.monotonic()

    def _advance(self, process: subprocess.Popen[bytes]) -> None:
        """Next command of the job, or its end."""
        job, core, commands, used_s = self.running.pop(process)
        used_s += time.monotonic()
        if process.returncode != 0:
            log = (job.folder / "evidence.log").read_text(errors="replace").splitlines()
            told = {"returncode": process.returncode, "log": log[-5:], "seconds": used_s}
            (job.folder / "failed.json").write_text(json.dumps(told, indent=1) + "\n")
            print(f"FAILED  {job.name}: {log[-1] if log else 'no output'}", flush=True)
        elif commands:
            (job.folder / "training_seconds.txt").write_text(f"{used_s:.2f}\n")
            self._start(job, core, commands, used_s)
            return
        else:
            (job.folder / "seconds.txt").write_text(f"{used_s:.2f}\n")
            print(f"done    {job.name}: {used_s:.0f} s", flush=True)
        self.free.append(core)


def used_seconds(folder: Path) -> float:
    """Core seconds that a finished job took; 0 where it has not finished."""
    path, failed = folder / "seconds.txt", folder / "failed.json"
    if failed.exists():
        return float(json.loads(failed.read_text())["seconds"])
    return float(path.read_text()) if path.exists() else 0.0


def run_all(plan: Plan, jobs: int, minutes: float, only: Collection[str] | None = None) -> None:
    """The recipes, then ablations until `minutes` of wall-clock are used, those of earlier calls included."""
    plan.save()
    Queue(plan, jobs).run(main_jobs(plan, only))
    Queue(plan, jobs).run(fitting_ablations(plan, jobs, minutes * 60, only))


def fitting_ablations(
    plan: Plan, jobs: int, allowed_s: float, only: Collection[str] | None = None
) -> Iterator[Job]:
    """Jobs of one ablation after the other, while another is expected to fit the time."""
    ablations = ablation_jobs(plan, only)
    spent_s = sum(used_seconds(job.folder) for ablation in ablations for job in ablation) / jobs
    expected_s = (
        max(used_seconds(job.folder) for job in main_jobs(plan) if job.arm in MAIN) * plan.seeds / jobs
    )
    start = time.monotonic()
    for ablation in ablations:
        if all(job.is_done for job in ablation):
            continue
        used_s = spent_s + time.monotonic() - start
        if used_s + expected_s > allowed_s:
            arm = ablation[0].arm
            assert arm is not None
            print(f"stopped before {arm.name}: {used_s / 60:.0f} min used of {allowed_s / 60:g}", flush=True)
            return
        yield from ablation
