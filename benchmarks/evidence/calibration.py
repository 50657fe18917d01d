"""Calibration of benchmarks.evidence: seconds per step of every arm, for the same wall-clock in all.

In: the stores of `evidence data`. Out: calibration.json. Steps of all arms are timed in turn, on as many
pinned cores as runs will share the machine. Steps per arm = budget / seconds per step. They are fixed in
advance because schedules need the total; so results do not depend on what else the machine does.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.evidence.arms import (
    ABLATIONS,
    MAIN,
    REFERENCE,
    TRAINED,
    Arm,
    arm_by_name,
    arm_config,
    cost_key,
)
from benchmarks.evidence.queue import THREAD_VARIABLES, cores, pin
from data_setup.loader import Loader
from data_setup.store.reader import PreparedStore
from models.vjepa3d import VJEPA3D
from pretraining.rows import open_rows
from pretraining.schedules import ema_momentum, learning_rate
from pretraining.step import Update, build_optimizer, train_step
from utils.errors import UserError
from utils.runtime.single import Runtime

ROUNDS, WARM_UP_ROUNDS = 9, 2


def calibrate(
    root: Path, jobs: int, extra: Sequence[str], names: Sequence[str] | None = None
) -> dict[str, Any]:
    """Seconds per step of every arm, or of those in `names`, written to calibration.json.

    Arms that the file already has keep their time. New arms are timed beside the reference and scaled to the
    file's time of the reference, so that all times mean one speed of the machine. Raises UserError for a file
    of another machine, number of jobs or configuration.
    """
    path = root / "calibration.json"
    conditions = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "jobs": jobs,
        "rounds": ROUNDS - WARM_UP_ROUNDS,
        "extra": list(extra),
    }
    earlier: dict[str, Any] = {**conditions, "seconds_per_step": {}}
    if path.exists():
        earlier = json.loads(path.read_text())
    for key, value in conditions.items():
        if earlier.get(key) != value:
            raise UserError(
                f"{path}: {key}: expected {value} as now, found {earlier.get(key)}; "
                "remove the file to time all again"
            )
    known = earlier["seconds_per_step"]
    asked = [arm.name for arm in (*MAIN, *ABLATIONS)] if names is None else names
    new = [name for name in asked if name not in known]
    if known and new:
        new.insert(0, REFERENCE)
    times = _time_on_cores(root, jobs, extra, new) if new else []
    medians = {name: median(s for one in times for s in one[name]) for name in new}
    scale = known[REFERENCE] / medians[REFERENCE] if known and new else 1.0
    calibration = {
        **conditions,
        "seconds_per_step": {name: round(scale * s, 5) for name, s in medians.items()} | known,
    }
    path.write_text(json.dumps(calibration, indent=1) + "\n")
    return calibration


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
    """Seconds of single steps with loading: one step of each named arm in turn; arms of equal cost share."""
    pin(core)
    torch.set_num_threads(1)
    configs = {name: arm_config(arm_by_name(name), 0, ROUNDS, root, extra) for name in names}
    runtime = Runtime(torch.device("cpu"), use_bf16=next(iter(configs.values())).train.use_bf16)
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
            train_step(model, optimizer, next(batches), cfg, runtime, Update(step, lr, momentum))
            if step >= WARM_UP_ROUNDS:
                timed[name].append(time.perf_counter() - start)
    return {name: timed[first_of[cost_key(cfg)]] for name, cfg in configs.items()}


def timed_as(name: str) -> str:
    """The arm whose time of a step this one has: an own control has its arm's."""
    return name.partition("+")[0]


def steps_of_budget(root: Path, budget_s: float, names: Sequence[str] | None = None) -> dict[str, int]:
    """Steps of every arm that fit the budget, from calibration.json; raises UserError where a time is missing
    of any arm, or, with `names`, of these.
    """
    if names is None:
        return calibrated_steps(root, budget_s, TRAINED)
    calibrated_steps(root, budget_s, [arm_by_name(name) for name in names])
    known = json.loads((root / "calibration.json").read_text())["seconds_per_step"]
    return calibrated_steps(root, budget_s, [arm for arm in TRAINED if timed_as(arm.name) in known])


def calibrated_steps(root: Path, budget_s: float, arms: Sequence[Arm]) -> dict[str, int]:
    """Steps of these arms that fit the budget; an own control has its arm's time of a step."""
    path = root / "calibration.json"
    if not path.exists():
        raise UserError(f"{path}: expected seconds per step, found none; run `evidence calibrate` first")
    seconds = json.loads(path.read_text())["seconds_per_step"]
    timed = {arm.name: timed_as(arm.name) for arm in arms}
    if missing := sorted(set(timed.values()) - seconds.keys()):
        raise UserError(f"{path}: expected seconds per step of {missing[0]}; run `evidence calibrate` again")
    return {a.name: a.steps or max(2, int(budget_s / seconds[timed[a.name]])) for a in arms}
