"""The queue of benchmarks.evidence: the runs to train and to score, one core each.

A run is `evidence train` for the steps of its plan, then `evidence score` on the same core. A
run with scores is not run again; an interrupted one resumes from its checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.evidence.arms import (
    ARMS,
    CONFIG,
    CONTROLS,
    RANDOM_ARM,
    REFERENCE,
    SCRATCH_ARMS,
    TRAINED,
    Arm,
    arm_by_name,
    arm_config,
    run_dir,
)
from utils.config.load import changed_keys, config_of_yaml
from utils.config.schema import Config
from utils.errors import UserError

POLL_SECONDS = 0.2
RECIPE_KEYS = (
    "method.",
    "optim.",
    "spatial.",
    "model.",
    "augment.",
    "data.sampling",
    "train.global_batch_size",
)
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
BASELINES, LAST_BASELINE = "baselines", "place"  # of what baseline_features gives


@dataclass(frozen=True)
class Plan:
    """What every command of one evidence folder shares; kept in plan.json."""

    root: Path
    budget_s: float | None  # None: a number of steps was asked for
    seeds: int
    steps: dict[str, int]  # arm -> steps
    extra: tuple[str, ...] = ()  # configuration changes for all arms
    image: tuple[Any, ...] = ()  # of SliceEncoder: the image model among the baselines, if one is asked for

    def save(self) -> None:
        """Write plan.json, keeping its arms; raises UserError if runs were made under another plan."""
        content: dict[str, Any] = {
            "budget_s": self.budget_s,
            "seeds": self.seeds,
            "steps": self.steps,
            "extra": list(self.extra),
            "image": json.loads(json.dumps(self.image)),  # as it is read again: no tuple of blocks
        }
        path = self.root / "plan.json"
        if path.exists() and (self.root / "runs").exists():
            earlier = json.loads(path.read_text())
            # arms that are new since then have no runs yet, those that are not asked for now keep their steps
            content["steps"] = {**earlier["steps"], **self.steps}
            known = {"steps": {arm: content["steps"][arm] for arm in earlier["steps"]}}
            for key in ("budget_s", "extra", "steps", "image"):
                value = {**content, **known}[key]
                if earlier.get(key, []) not in ([], value):
                    raise UserError(
                        f"{path}: {key}: expected {earlier[key]} as the runs here began, found {value}; "
                        "use another --root, or the same values"
                    )
        part = path.with_name(f"{path.name}.part")  # another command of this folder may be reading
        part.write_text(json.dumps(content, indent=1) + "\n")
        part.replace(path)

    @classmethod
    def load(cls, root: Path) -> Plan:
        """Read plan.json; raises UserError if `run` has not written it."""
        path = root / "plan.json"
        if not path.exists():
            raise UserError(f"{path}: expected the plan of a run, found none; run `evidence run` first")
        content = json.loads(path.read_text())
        extra, image = tuple(content["extra"]), tuple(content.get("image", ()))
        return cls(root, content["budget_s"], content["seeds"], content["steps"], extra, image)

    def config(self, name: str, seed: int = 0) -> Config:
        """The configuration of a run of an arm; of an arm without training, with one step."""
        arm = arm_by_name(name)
        return arm_config(arm, seed, self.steps[name] if arm.is_trained else 1, self.root, self.extra)


def pin(core: int) -> None:
    """Keep this process and its children on one core, where the system can do that."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})


def cores(jobs: int) -> list[int]:
    """A core for each of the simultaneous runs; raises UserError if there are fewer."""
    count = os.cpu_count() or 1
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(count))
    if jobs > len(usable):
        raise UserError(f"--jobs: expected at most {len(usable)}, the cores here, found {jobs}")
    return usable[:jobs]


@dataclass(frozen=True)
class Job:
    """One run to train and score; arm None: the baselines without an encoder."""

    arm: Arm | None
    seed: int
    folder: Path  # of its scores
    verbs: tuple[str, ...] = ("train", "score")
    needs: tuple[str, ...] = (LAST_BASELINE,)  # baselines without which their job is not done

    @property
    def name(self) -> str:
        """For messages."""
        return BASELINES if self.arm is None else f"{self.arm.name}, seed {self.seed}"

    @property
    def is_done(self) -> bool:
        """Whether it is scored; the next call tries failed jobs again."""
        folders = [self.folder / name for name in self.needs] if self.arm is None else [self.folder]
        return all((folder / "scores.json").exists() for folder in folders)

    def commands(self, plan: Plan) -> list[list[str]]:
        """Train, where there is something to train, then score."""
        arm = BASELINES if self.arm is None else self.arm.name
        module = [sys.executable, "-m"]
        words = ["--root", str(plan.root), "--arm", arm, "--seed", str(self.seed)]
        is_trained = self.arm is not None and self.arm.is_trained
        verbs = [verb for verb in self.verbs if is_trained or verb != "train"]
        return [[*module, "benchmarks.evidence", verb, *words] for verb in verbs]


def jobs_of(plan: Plan, only: Collection[str] | None = None) -> list[Job]:
    """Baselines, random initialisation and what is trained only on labels first, then one seed of every arm
    after another.

    `only`: these arms and own controls, and those that every claim refers to.
    """
    needs = (*(["slices"] if plan.image else []), LAST_BASELINE)
    jobs = [Job(None, 0, plan.root / BASELINES, needs=needs)]
    first = [RANDOM_ARM, *(arm for arm in SCRATCH_ARMS if only is None or arm.name in only)]
    jobs += [Job(arm, s, run_dir(plan.root, arm, s)) for arm in first for s in range(plan.seeds)]
    arms = ARMS if only is None else [a for a in TRAINED if a.name in with_compared(only)]
    return jobs + [Job(a, s, run_dir(plan.root, a, s)) for s in range(plan.seeds) for a in arms]


def with_compared(only: Collection[str]) -> set[str]:
    """These arms and what their claims refer to."""
    return {*only, *(arm_by_name(name).compared_with for name in only), REFERENCE, *CONTROLS}


class Queue:
    """Runs jobs on pinned cores, one each; ends its children when it ends."""

    def __init__(self, plan: Plan, jobs: int) -> None:
        self.plan, self.free = plan, cores(jobs)
        self.running: dict[subprocess.Popen[bytes], tuple[Job, int, list[list[str]], float]] = {}

    def run(self, jobs: Iterable[Job]) -> None:
        """Run all jobs that are not done; KeyboardInterrupt stops the children (training checkpoints). Raises
        UserError for a run that is done and was trained by another recipe than its arm's current one.
        """
        waiting = self._waiting(jobs)
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

    def _waiting(self, jobs: Iterable[Job]) -> Iterator[Job]:
        for job in jobs:
            if job.is_done:
                refuse_another_recipe(job, self.plan)
            else:
                yield job

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
            failure = {"returncode": process.returncode, "log": log[-5:], "seconds": used_s}
            (job.folder / "failed.json").write_text(json.dumps(failure, indent=1) + "\n")
            print(f"FAILED  {job.name}: {log[-1] if log else 'no output'}", flush=True)
        elif commands:
            (job.folder / "training_seconds.txt").write_text(f"{used_s:.2f}\n")
            self._start(job, core, commands, used_s)
            return
        else:
            (job.folder / "seconds.txt").write_text(f"{used_s:.2f}\n")
            print(f"done    {job.name}: {used_s:.0f} s", flush=True)
        self.free.append(core)


def refuse_another_recipe(job: Job, plan: Plan) -> None:
    """Raise UserError if the job's run was trained with other keys of a recipe than its arm has today."""
    path = job.folder / "config.yaml"
    if job.arm is None or not job.arm.is_trained or not path.exists():
        return
    trained = config_of_yaml(path.read_text(), str(path))
    for key, had, expected in changed_keys(trained, plan.config(job.arm.name, job.seed)):
        if key.startswith(RECIPE_KEYS):
            raise UserError(
                f"{path}: {key}: expected {expected} of the arm {job.arm.name}, found {had}; "
                "use another --root, or remove the run"
            )
