"""What the training gauges cost: `python -m benchmarks.gauges [--config FILE] [--json FILE] [overrides]`.

In: a configuration (by default the recommended one) and random volumes of its size. Out: medians over
steps without gauges, steps that remember targets and steps that measure, alternating in one process: the
time of the whole step, the time inside the gauges, and the gauges' share at train.log_every_steps.
`--batch` volumes stand for the whole global batch: more would cost the gauges less per volume, since the
rank and the baselines are paid once per batch.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.train_step.batches import synthetic_batch
from data_setup.loader import Batch
from data_setup.masks import MaskPlan, draw_mask
from data_setup.transforms import random_stream
from models.vjepa3d import VJEPA3D
from pretraining.gauges.monitor import Gauges, target_drift, update_ratio
from pretraining.gauges.skill import SkillGauge
from pretraining.step import UNWATCHED, Balance, Update, Watch, build_optimizer, train_step
from utils import storage
from utils.cli import number_from, run_cli
from utils.config.load import load_config
from utils.config.schema import Config
from utils.help_pages import Parser
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime

BUDGET = 0.02
KINDS = ("without", "remembered", "measured")


def masked_batch(cfg: Config, size: int, runtime: Runtime) -> Batch:
    """Volumes of noise, fully valid, with masks of the configuration."""
    batch, plan = synthetic_batch(cfg, 0), MaskPlan.from_config(cfg)
    valid = batch["token_valid"].numpy()
    drawn = [draw_mask(random_stream(0, 0, b, 0), plan, valid[b]) for b in range(size)]
    context, target = (torch.stack([torch.from_numpy(d[side]) for d in drawn]) for side in (0, 1))
    weights = {"context_valid": torch.ones(context.shape), "target_valid": torch.ones(target.shape)}
    return runtime.to_device(batch | {"context": context, "target": target} | weights)


def measure(cfg: Config, size: int, rounds: int) -> dict[str, float]:
    """Median seconds of the three kinds of step, and the gauges' share of the wall time."""
    cfg = replace(cfg, train=replace(cfg.train, global_batch_size=size, per_core_batch_size=size))
    runtime = open_runtime(cfg.train.use_bf16)
    torch.manual_seed(0)
    model = VJEPA3D(cfg).to(runtime.device).train()
    optimizer = build_optimizer(model, cfg)
    gauges = Gauges(SkillGauge.of_model(model, runtime.device), size, has_fixed_targets=False)
    batch = masked_batch(cfg, size, runtime)
    ring = gauges.skill
    ring.row_R.copy_(torch.arange(len(ring.row_R)) + size)  # full, and of other volumes
    ring.ring_RPE.normal_()
    ring.valid_RP.fill_(True)

    spent = 0.0

    def timed(work: Callable[..., object], *args: object) -> None:
        nonlocal spent
        runtime.synchronise()
        began = time.perf_counter()
        work(*args)
        runtime.synchronise()
        spent += time.perf_counter() - began

    watch_balance = Balance.watch  # a pass backwards through the penalty, inside the step

    def timed_balance(*args: Any) -> None:
        timed(watch_balance, *args)

    def step(kind: str) -> tuple[float, float]:
        nonlocal spent
        spent = 0.0
        runtime.synchronise()
        began = time.perf_counter()
        gauges.begin(measure=kind == "measured")
        watch = UNWATCHED
        if kind != "without":
            watch = Watch(partial(timed, gauges.observe), measures=lambda: gauges.measure)
        update = Update(0, cfg.optim.base_lr, 0.99)
        with patch.object(Balance, "watch", timed_balance):
            train_step(model, optimizer, [batch], cfg, runtime, update, watch)
        if kind != "without":
            timed(gauges.finish)
        if kind == "measured":
            timed(lambda: float(target_drift(model)))
            timed(lambda: float(update_ratio(optimizer)))
        runtime.synchronise()
        return time.perf_counter() - began, spent

    for kind in KINDS:
        step(kind)  # warm-up
    taken: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind in KINDS:
            taken[kind].append(step(kind))
    whole = {kind: median(seconds for seconds, _ in pairs) for kind, pairs in taken.items()}
    inside = {kind: median(seconds for _, seconds in pairs) for kind, pairs in taken.items()}
    every = cfg.train.log_every_steps
    cost = (every - 1) * inside["remembered"] + inside["measured"]
    result = {f"step_{kind}_s": seconds for kind, seconds in whole.items()}
    result |= {f"gauges_{kind}_s": inside[kind] for kind in KINDS[1:]}
    return result | {"log_every_steps": every, "share": cost / (every * whole["without"])}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(
        prog="python -m benchmarks.gauges",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", default="configs/pretrain_oct_vjepa2.yaml")
    parser.add_argument("--batch", type=number_from(1), default=2, help="volumes per step")
    parser.add_argument("--rounds", type=number_from(1), default=5)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args(argv)
    result = measure(load_config(args.config, args.overrides), args.batch, args.rounds)
    for key, value in result.items():
        print(f"{key:<20} {value:.4f}" + (f" (budget {BUDGET})" if key == "share" else ""))
    if args.json:
        storage.write_text(args.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_cli(main)
