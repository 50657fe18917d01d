"""Scores of one frozen encoder, or of a baseline without one, on benchmarks.evidence's people.

In: token features of every evaluated volume. Out: `scores.npz` (predictions and errors per participant, for
paired intervals) and `scores.json` beside it. Five folds by participant: three train, the next one chooses C,
one is evaluated; predictions of all folds are pooled. Tasks, each by two readouts, of which `_hidden` is one
hidden layer:
  classes    study group: mean + std of valid tokens, logistic regression, balanced accuracy over participants
  thickness  layer thickness per volume, less the mean of its protocol over the training fold: ridge, mean R2
  occupancy  layer occupancy per token of the reference grid, with its place: ridge, mean R2 over layers
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.decomposition import PCA
from torch import nn

from benchmarks.evidence.cohorts import FOLDS, Truth, tokens_of_another_grid
from benchmarks.truth_tokens import token_features
from data_setup.phantom.files import save_npz
from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL
from finetuning.features.kept import device_features, raw_features
from finetuning.features.slices import SliceEncoder
from finetuning.features.yardsticks import FoldFeatures, yardsticks
from models.probes.features import rankme
from models.probes.hidden import hidden_probe, hidden_rows
from models.probes.intervals import balanced_accuracy_draws, recall_parts
from models.probes.participants import Fold, Prediction, balanced_accuracy, logistic_probe
from models.probes.tokens import (
    DensePrediction,
    Errors,
    Rows,
    join_errors,
    less_protocol_mean,
    mean_r2,
    mean_r2_draws,
    position_columns,
    r2_parts,
    ridge_rows,
)
from utils.config.schema import Config
from utils.errors import UserError
from utils.runtime.open import open_runtime

HIDDEN = "_hidden"
LINEAR_TASKS = ("classes", "thickness", "occupancy")
TASKS = (*LINEAR_TASKS, *(f"{task}{HIDDEN}" for task in LINEAR_TASKS))
PCA_COMPONENTS = 64
RANKME_TOKENS = 4096
PREDICTION, ERRORS = ("participants", "labels", "scores"), ("participants", "first", "second", "error")
Part = Prediction | Errors
Readout = Callable[[Rows, Rows, Rows], DensePrediction]  # ridge_rows or hidden_rows


@dataclass(frozen=True)
class Scores:
    """Out-of-fold results of one encoder; a task without features has none."""

    parts: dict[str, Part]  # of TASKS
    val: dict[str, float]  # task -> mean over folds of the score that chose C
    chosen_c: dict[str, list[float | None]]  # None: a hidden layer

    def of(self, task: str) -> float | None:
        """The score of a task over all participants."""
        part = self.parts.get(task)
        if part is None:
            return None
        return balanced_accuracy(part) if isinstance(part, Prediction) else mean_r2(part)

    def draws(self, task: str, draws_SP: np.ndarray) -> np.ndarray:
        """The score of every resample of participants [S]."""
        part = self.parts[task]
        if isinstance(part, Prediction):
            return balanced_accuracy_draws(part, draws_SP)
        return mean_r2_draws(part, draws_SP)

    def gains(self, task: str) -> np.ndarray:
        """What each participant adds to the score [P]; of R2 to R2 less 1."""
        part = self.parts[task]
        return recall_parts(part.labels, part.classes) if isinstance(part, Prediction) else r2_parts(part)

    def people(self, task: str) -> list[int]:
        """Participants of each class; of a value all of them."""
        part = self.parts[task]
        if isinstance(part, Prediction):
            return [int(count) for count in np.unique(part.labels, return_counts=True)[1]]
        return [len(part.participants)]


def masks_of_folds(truth: Truth) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(training, validation, evaluated) bool [n] of every fold."""
    if truth.is_split:
        yield truth.fold == TRAIN, truth.fold == VAL, truth.fold == EVALUATED
        return
    for number in range(FOLDS):
        val, test = truth.fold == (number + 1) % FOLDS, truth.fold == number
        train = ~(val | test)
        yield train if truth.labelled is None else train & truth.labelled[number], val, test


def score_classes(
    truth: Truth, features: FoldFeatures, read: Callable[[Fold, Fold, Fold], Prediction] = logistic_probe
) -> tuple[Prediction, list[Prediction]]:
    """Out-of-fold class probabilities of every participant, and the folds' own."""
    parts = []
    for masks in masks_of_folds(truth):
        x = features(masks[0])
        train, val, test = (Fold(x[m], truth.label[m], truth.person[m]) for m in masks)
        parts.append(read(train, val, test))
    return join_predictions(parts), parts


def join_predictions(parts: Sequence[Prediction]) -> Prediction:
    """Those of folds that share no participant, sorted by id."""
    ids = np.concatenate([p.participants for p in parts])
    order = np.argsort(ids)
    labels, scores = (np.concatenate([getattr(p, n) for p in parts])[order] for n in ("labels", "scores"))
    return Prediction(ids[order], labels, scores)


def score_thickness(
    truth: Truth, features: FoldFeatures, read: Readout = ridge_rows
) -> tuple[Errors, list[DensePrediction]]:
    """Errors of layer thickness per volume, relative to what is usual for its protocol."""
    parts = []
    for masks in masks_of_folds(truth):
        x, y = features(masks[0]), less_protocol_mean(truth.thickness_um, truth.protocol, masks[0])
        train, val, test = (Rows(x[m], y[m], truth.person[m]) for m in masks)
        parts.append(read(train, val, test))
    return join_errors([p.errors for p in parts]), parts


def score_occupancy(
    truth: Truth, dense: FoldFeatures, grid: tuple[int, int, int], read: Readout = ridge_rows
) -> tuple[Errors, list[DensePrediction]]:
    """Errors of layer occupancy; `dense` gives features [n, T, F] of truth.tokens of the reference grid."""
    used = truth.tokens >= 0
    place = position_columns(truth.tokens[used], grid)
    y = truth.occupancy[used]
    volume = np.broadcast_to(np.arange(len(used))[:, None], used.shape)[used]
    parts = []
    for masks in masks_of_folds(truth):
        x = np.concatenate([dense(masks[0])[used], place], axis=1)
        folds = [m[volume] for m in masks]
        train, val, test = (Rows(x[m], y[m], truth.person[volume[m]]) for m in folds)
        parts.append(read(train, val, test))
    return join_errors([p.errors for p in parts]), parts


def score(
    truth: Truth, pooled: FoldFeatures | None, dense: FoldFeatures | None, grid: tuple[int, int, int]
) -> Scores:
    """All tasks that there are features and truth for; `grid` is the reference grid, that of truth.tokens."""
    scored: dict[str, Any] = {}
    readouts = ("", logistic_probe, ridge_rows), (HIDDEN, hidden_probe, hidden_rows)
    for name, of_classes, of_values in readouts:
        if pooled is not None and len(truth.classes) > 1:
            scored[f"classes{name}"] = score_classes(truth, pooled, of_classes)
        if pooled is not None and truth.thickness_um.shape[1]:
            scored[f"thickness{name}"] = score_thickness(truth, pooled, of_values)
        if dense is not None:
            scored[f"occupancy{name}"] = score_occupancy(truth, dense, grid, of_values)
    return Scores(
        parts={task: part for task, (part, _) in scored.items()},
        val={task: float(np.mean([p.val_score for p in parts])) for task, (_, parts) in scored.items()},
        chosen_c={task: [p.chosen_c for p in parts] for task, (_, parts) in scored.items()},
    )


def encoder_features(
    encoder: nn.Module, cfg: Config, store: PreparedStore, truth: Truth, grid: tuple[int, int, int]
) -> tuple[np.ndarray, np.ndarray, float]:
    """Pooled features [n, 2E], features [n, T, E] of truth.tokens, and RankMe of valid tokens.

    An encoder with another patch size lends each reference token the features of the token it lies in.
    """
    there = tokens_of_another_grid(truth.tokens.clip(min=0), grid, cfg.grid)
    runtime, sample = open_runtime(cfg.train.use_bf16), -(-RANKME_TOKENS // len(truth.rows))
    pooled, dense, seen = token_features(encoder, cfg, store, truth.rows, there, runtime, sample)
    return pooled, dense, rankme(seen)


Baseline = tuple[str, FoldFeatures | None, FoldFeatures | None]


def baseline_features(
    cfg: Config, store: PreparedStore, truth: Truth, image: SliceEncoder | None = None
) -> dict[str, Baseline]:
    """name -> (label, pooled features by fold, dense ones) of what needs no encoder; `place` is the last."""
    runtime = open_runtime(False)
    voxels, profile = raw_features(cfg, store, truth.rows, runtime)

    def components(is_training: np.ndarray) -> np.ndarray:
        count = min(PCA_COMPONENTS, int(is_training.sum()) - 1, voxels.shape[1])
        pca = PCA(count, svd_solver="randomized", random_state=0)
        return pca.fit(voxels[is_training]).transform(voxels)

    place, *others = yardsticks(cfg, store, truth.rows, runtime, truth.tokens, image)
    return {
        "voxel_pca": ("raw voxels, 64 components", components, None),
        "ascan_profile": ("mean A-scan profile", lambda _: profile, None),
        "device": ("device one-hot", lambda t: device_features(store, truth.rows, truth.rows[t]), None),
    } | {row.name: (row.label, row.volumes, row.tokens) for row in (*others, place)}


def save_scores(folder: Path, scores: Scores, facts: dict[str, Any]) -> None:
    """Write scores.npz, then scores.json, whose presence means that both are there."""
    arrays = {
        f"{task}.{name}": getattr(part, name)
        for task, part in scores.parts.items()
        for name in (PREDICTION if isinstance(part, Prediction) else ERRORS)
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_npz(folder / "scores.npz", arrays)
    content = facts | {
        "scores": {task: scores.of(task) for task in TASKS},
        "val": scores.val,
        "chosen_c": scores.chosen_c,
    }
    part = folder / "scores.json.part"
    part.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    part.replace(folder / "scores.json")


def load_scores(folder: Path) -> tuple[Scores, dict[str, Any]]:
    """What save_scores wrote; raises UserError for scores with only one readout."""
    content = json.loads((folder / "scores.json").read_text())
    parts: dict[str, Part] = {}
    with np.load(folder / "scores.npz") as a:
        if a.files and not any("." in name for name in a):
            raise UserError(f"{folder}: expected two readouts, found older scores; remove scores.json")
        for task in (task for task in TASKS if f"{task}.participants" in a):
            kind, names = (Prediction, PREDICTION) if f"{task}.labels" in a else (Errors, ERRORS)
            parts[task] = kind(*(a[f"{task}.{name}"] for name in names))
    return Scores(parts, content["val"], content["chosen_c"]), content
