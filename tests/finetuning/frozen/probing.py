"""A quick probe: the command's words; made-up cohorts, their features and a small grid for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL, Cohort
from finetuning.heads.frozen import PooledInputs
from tests.support.finetune_factory import config
from tests.support.pipeline_factory import ROOT
from utils.checkpoint import load_checkpoint
from utils.config.schema import Config

TASK = str(ROOT / "configs" / "cls_linear_probe.yaml")
CPU = torch.device("cpu")
QUICK = ["train.epochs=3", "head.learning_rates=[1e-3,1e-2]", "head.weight_decays=[0.01]", "data.workers=0"]
QUICK += ["train.log_every_steps=2", "wandb.mode=disabled"]
WIDTH = 6


def made_up(kind: str, target: np.ndarray, people: int = 90, seed: int = 0) -> tuple[Cohort, np.ndarray]:
    """Two volumes of each participant, half of them in TRAIN; features that target [people, T] decides."""
    rng = np.random.default_rng(seed)
    number = np.repeat(np.arange(people), 2)
    features = rng.normal(size=(2 * people, 2 * WIDTH)).astype(np.float32)
    features[:, : target.shape[1]] += 6 * (target - target.mean(axis=0))[number] / target.std(axis=0)
    person = np.array([f"p{n:03d}" for n in number])
    names = tuple(f"n{i}" for i in range(target.shape[1] if kind == "multilabel" else int(target.max()) + 1))
    names = ("value",) if kind == "regression" else names
    return Cohort(
        kind,
        names,
        np.arange(2 * people),
        np.array([TRAIN, VAL, EVALUATED, TRAIN])[number % 4],
        target[number],
        person,
        person,
    ), features


def learning(world: Path, *overrides: str) -> Config:
    """A small grid and many small steps; nothing is read from disk."""
    grid = ["head.learning_rates=[1e-3,3e-2]", "head.weight_decays=[0,0.3]", "finetune.patience=null"]
    steps = ["train.global_batch_size=16", "train.per_core_batch_size=16"]
    steps += ["train.max_steps=null", "train.epochs=8"]
    return config(world, world / "unused", *grid, *steps, "head.hidden=8", *overrides)


def pooled(cohort: Cohort, features: np.ndarray) -> PooledInputs:
    places = np.flatnonzero(cohort.fold != EVALUATED)
    return PooledInputs(features[places], cohort, places, CPU)


def classes(count: int, people: int = 90) -> np.ndarray:
    return (np.arange(people) // 4 % count).astype(np.float64)[:, None]


def load_checkpoint_config(url: str) -> Config:
    from utils.config.load import config_of_yaml

    return config_of_yaml(load_checkpoint(url)["config"], url)
