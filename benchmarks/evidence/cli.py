"""What the commands of benchmarks.evidence do; options.py says which there are."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.evidence.arms import (
    CONFIG,
    RANDOM,
    REFERENCE,
    SCRATCH,
    TRAINED,
    arm_by_name,
    arm_config,
    run_dir,
)
from benchmarks.evidence.calibration import calibrate, steps_of_budget, timed_as
from benchmarks.evidence.cohorts import Truth, make_data, read_truth
from benchmarks.evidence.curves import Scorer, score_curves, write_curves
from benchmarks.evidence.differences import read_rows, training_facts
from benchmarks.evidence.options import parse, refuse_mistakes
from benchmarks.evidence.page import write_results
from benchmarks.evidence.patches import PATCHES
from benchmarks.evidence.queue import BASELINES, Plan, Queue, jobs_of, with_compared
from benchmarks.evidence.real import make_real_data, refuse_real
from benchmarks.evidence.scores import Baseline, baseline_features, encoder_features, save_scores, score
from benchmarks.evidence.scratch import scratch_scores
from data_setup.store.reader import PreparedStore
from finetuning.features.kept import pretrained_encoder, random_encoder
from finetuning.features.slices import SliceEncoder, image_encoder_of
from pretraining import run as run_module
from pretraining.train import train
from utils import storage
from utils.checkpoint import load_checkpoint


def scorer_of(plan: Plan, store: PreparedStore, truth: Truth, name: str, seed: int) -> Scorer:
    """What scores a row, a baseline among them, with the labels of a truth of the same volumes and tokens."""
    reference = plan.config(REFERENCE)
    baselines = baselines_of(plan, store, truth) if (plan.root / BASELINES / name).exists() else {}
    if name in baselines:
        _, pooled_of, dense_of = baselines[name]
        return lambda labels: score(labels, pooled_of, dense_of, reference.grid)
    if name in SCRATCH:
        return lambda labels: scratch_scores(reference, store, labels, name, seed)
    pooled, dense, _ = features_of(plan, store, truth, name, seed)
    return lambda labels: score(labels, lambda _: pooled, lambda _: dense, reference.grid)


def baselines_of(plan: Plan, store: PreparedStore, truth: Truth) -> dict[str, Baseline]:
    """The rows without an encoder, the image model of the plan among them."""
    image = SliceEncoder(*plan.image) if plan.image else None
    return baseline_features(plan.config(REFERENCE), store, truth, image)


def features_of(
    plan: Plan, store: PreparedStore, truth: Truth, name: str, seed: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Pooled and token features of a run, or of a random initialisation, and their RankMe."""
    arm, cfg = arm_by_name(name), plan.config(name, seed)
    if arm.is_trained:
        checkpoint = f"step_{plan.steps[name]:08d}.pt"
        url = storage.join(str(run_dir(plan.root, arm, seed)), "checkpoints", checkpoint)
        encoder = pretrained_encoder(cfg, load_checkpoint(url), url)
    else:
        encoder = random_encoder(cfg, seed)
    return encoder_features(encoder, cfg, store, truth, plan.config(REFERENCE).grid)


def score_one(root: Path, name: str, seed: int) -> None:
    """Score one run, one random initialisation, one network from scratch, or all baselines; writes
    scores.json.
    """
    torch.set_num_threads(1)
    plan = Plan.load(root)
    truth, store = read_truth(root), PreparedStore.open(str(root / "evaluation_store"))
    grid = plan.config(REFERENCE).grid
    if name == BASELINES:
        for number, (baseline, row) in enumerate(baselines_of(plan, store, truth).items()):
            facts = {"name": baseline, "label": row[0], "number": number}
            save_scores(root / BASELINES / baseline, score(truth, row[1], row[2], grid), facts)
        return
    arm, facts = arm_by_name(name), {"name": name, "seed": seed}
    folder = run_dir(root, arm, seed)
    if name in SCRATCH:
        return save_scores(folder, scorer_of(plan, store, truth, name, seed)(truth), facts)
    pooled, dense, rank = features_of(plan, store, truth, name, seed)
    if arm.is_trained:
        facts |= training_facts(folder, plan.config(name, seed))
    scores = score(truth, lambda _: pooled, lambda _: dense, grid)
    save_scores(folder, scores, facts | {"rankme": rank})


def curves(root: Path, only: str | None) -> str:
    """Label curves of the rows that are scored; returns the page."""
    plan = Plan.load(root)
    truth, store = read_truth(root), PreparedStore.open(str(root / "evaluation_store"))
    asked = None if only is None else {REFERENCE, RANDOM, *only.split(",")}
    rows = [
        row
        for row in read_rows(plan).values()
        if row.seeds and (asked is None or row.factor == "baseline" or row.name in asked)
    ]
    score_curves(root, truth, rows, partial(scorer_of, plan, store, truth))
    return write_curves(root, truth, rows)


def train_one(root: Path, name: str, seed: int) -> int:
    """Train one run of the plan, with its arm's patch; returns the exit code of pretraining.train."""
    plan, arm = Plan.load(root), arm_by_name(name)
    run_module.VAL_FRACTION = 0.05  # validation is for the run's log; nothing is chosen by it
    if arm.patch is not None:
        PATCHES[arm.patch]()
    return train(plan.config(name, seed))


def run(root: Path, args: argparse.Namespace) -> None:
    """Train and score all runs that are not done yet."""
    if args.steps is None:
        budget, steps = args.budget, steps_of_budget(root, args.budget, trained_of(args.only))
    else:
        budget, steps = None, {arm.name: arm.steps or args.steps for arm in TRAINED}
    image = image_encoder_of(args)
    words = (str(image.folder.resolve()), args.image_size, image.blocks) if image else ()
    plan = Plan(root, budget, args.seeds, steps, tuple(args.change), words)
    plan.save()
    Queue(plan, args.jobs).run(jobs_of(plan, None if args.only is None else args.only.split(",")))


def trained_of(only: str | None) -> list[str] | None:
    """The arms that a run with `--only` trains: these and what they refer to; None: all."""
    return None if only is None else [a.name for a in TRAINED if a.name in with_compared(only.split(","))]


def real(root: Path, args: argparse.Namespace) -> None:
    """All of it on real eyes: data, calibration, runs, scores and the page."""
    out = root / "real.md" if args.out is None else args.out
    root.mkdir(parents=True, exist_ok=True)
    cfg = arm_config(arm_by_name(REFERENCE), 0, 1, root, args.change)
    make_real_data(root, args.data, cfg, CONFIG, args.change)
    if args.steps is None:
        names = trained_of(args.only)
        timed = None if names is None else list(dict.fromkeys(timed_as(name) for name in names))
        calibrate(root, args.jobs, args.change, timed)
    run(root, args)
    print(write_results(root, out))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: see options.py."""
    args = parse(argv)
    refuse_mistakes(args)
    root = args.root.resolve()
    if args.command == "data":
        refuse_real(root, args.command)
        root.mkdir(parents=True, exist_ok=True)
        cfg = arm_config(arm_by_name(REFERENCE), 0, 1, root, args.change)
        make_data(root, cfg, CONFIG, args.change, (args.pretraining, args.evaluation))
    elif args.command == "calibrate":
        print(json.dumps(calibrate(root, args.jobs, args.change), indent=1))
    elif args.command in ("real", "run"):
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the runs as Ctrl-C does
        try:
            {"real": real, "run": run}[args.command](root, args)
        except KeyboardInterrupt:
            print("stopped; the same command goes on", flush=True)
            return 130
    elif args.command == "train":
        return train_one(root, args.arm, args.seed)
    elif args.command == "score":
        score_one(root, args.arm, args.seed)
    elif args.command == "curves":
        print(curves(root, args.only))
    else:
        print(write_results(root, root / "results.md" if args.out is None else args.out))
    return 0
