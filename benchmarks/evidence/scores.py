"""Scores of one frozen encoder, or of a baseline without one, on benchmarks.evidence's people.

In: token features of every evaluated volume. Out: `scores.npz` (predictions and errors per participant, for
paired intervals) and `scores.json` beside it. Five folds by participant: three train, the next one chooses C,
one is evaluated; predictions of all folds are pooled. Tasks:
  classes    study group: mean + std of valid tokens, logistic regression, balanced accuracy over participants
  thickness  layer thickness per volume, less the mean of its protocol over the training fold: ridge, mean R2
  occupancy  layer occupancy per token of the reference grid, with its place: ridge, mean R2 over layers
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from sklearn.decomposition import PCA
from torch import nn

from benchmarks.evidence.cohorts import FOLDS, Truth, tokens_of_another_grid
from data_setup.loader import evaluation_batches
from data_setup.normalisation import plain_view
from data_setup.phantom.files import save_npz
from data_setup.store.reader import PreparedStore
from finetuning.features.pooled import device_features, raw_features
from models.probes.features import pool_tokens, rankme
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
from utils.indices import evenly_spaced
from utils.runtime.open import open_runtime

TASKS = ("classes", "thickness", "occupancy")
PCA_COMPONENTS = 64
RANKME_TOKENS = 4096
BATCH = 16
FoldFeatures = Callable[
    [np.ndarray], np.ndarray
]  # is-training [n] -> features [n, F], or [n, T, F] of tokens


@dataclass(frozen=True)
class Scores:
    """Out-of-fold results of one encoder; a task without features is None."""

    classes: Prediction | None
    thickness: Errors | None
    occupancy: Errors | None
    val: dict[str, float]  # task -> mean over folds of the score that chose C
    chosen_c: dict[str, list[float]]

    def of(self, task: str) -> float | None:
        """The score of a task over all participants."""
        part = getattr(self, task)
        if part is None:
            return None
        return balanced_accuracy(part) if isinstance(part, Prediction) else mean_r2(part)

    def draws(self, task: str, draws_SP: np.ndarray) -> np.ndarray:
        """The score of every resample of participants [S]."""
        part = getattr(self, task)
        if isinstance(part, Prediction):
            return balanced_accuracy_draws(part, draws_SP)
        return mean_r2_draws(part, draws_SP)

    def parts(self, task: str) -> np.ndarray:
        """What each participant adds to the score [P]; of R2 to R2 less 1."""
        part = getattr(self, task)
        return recall_parts(part.labels, part.classes) if isinstance(part, Prediction) else r2_parts(part)

    def people(self, task: str) -> list[int]:
        """Participants of each class; of a value all of them."""
        part = getattr(self, task)
        if isinstance(part, Prediction):
            return [int(count) for count in np.unique(part.labels, return_counts=True)[1]]
        return [len(part.participants)]


def masks_of_folds(fold: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(training, validation, evaluated) bool [n] of every fold."""
    for number in range(FOLDS):
        val, test = fold == (number + 1) % FOLDS, fold == number
        yield ~(val | test), val, test


def score_classes(truth: Truth, features: FoldFeatures) -> tuple[Prediction, list[Prediction]]:
    """Out-of-fold class probabilities of every participant, and the folds' own."""
    parts = []
    for masks in masks_of_folds(truth.fold):
        x = features(masks[0])
        train, val, test = (Fold(x[m], truth.label[m], truth.person[m]) for m in masks)
        parts.append(logistic_probe(train, val, test))
    ids = np.concatenate([p.participants for p in parts])
    order = np.argsort(ids)
    labels, scores = (np.concatenate([getattr(p, n) for p in parts])[order] for n in ("labels", "scores"))
    return Prediction(ids[order], labels, scores), parts


def score_thickness(truth: Truth, features: FoldFeatures) -> tuple[Errors, list[DensePrediction]]:
    """Errors of layer thickness per volume, relative to what is usual for its protocol."""
    parts = []
    for masks in masks_of_folds(truth.fold):
        x, y = features(masks[0]), less_protocol_mean(truth.thickness_um, truth.protocol, masks[0])
        train, val, test = (Rows(x[m], y[m], truth.person[m]) for m in masks)
        parts.append(ridge_rows(train, val, test))
    return join_errors([p.errors for p in parts]), parts


def score_occupancy(
    truth: Truth, dense: FoldFeatures, grid: tuple[int, int, int]
) -> tuple[Errors, list[DensePrediction]]:
    """Errors of layer occupancy; `dense` gives features [n, T, F] of truth.tokens of the reference grid."""
    used = truth.tokens >= 0
    place = position_columns(truth.tokens[used], grid)
    y = truth.occupancy[used]
    volume = np.broadcast_to(np.arange(len(used))[:, None], used.shape)[used]
    parts = []
    for masks in masks_of_folds(truth.fold):
        x = np.concatenate([dense(masks[0])[used], place], axis=1)
        folds = [m[volume] for m in masks]
        train, val, test = (Rows(x[m], y[m], truth.person[volume[m]]) for m in folds)
        parts.append(ridge_rows(train, val, test))
    return join_errors([p.errors for p in parts]), parts


def score(
    truth: Truth, pooled: FoldFeatures | None, dense: FoldFeatures | None, grid: tuple[int, int, int]
) -> Scores:
    """All tasks that there are features and truth for; `grid` is the reference grid, that of truth.tokens."""
    scored: dict[str, Any] = {}
    if pooled is not None and len(truth.classes) > 1:
        scored["classes"] = score_classes(truth, pooled)
    if pooled is not None and truth.thickness_um.shape[1]:
        scored["thickness"] = score_thickness(truth, pooled)
    if dense is not None:
        scored["occupancy"] = score_occupancy(truth, dense, grid)
    return Scores(
        **{task: scored[task][0] if task in scored else None for task in TASKS},
        val={task: float(np.mean([p.val_score for p in parts])) for task, (_, parts) in scored.items()},
        chosen_c={task: [p.chosen_c for p in parts] for task, (_, parts) in scored.items()},
    )


@torch.no_grad()
def encoder_features(
    encoder: nn.Module, cfg: Config, store: PreparedStore, truth: Truth, grid: tuple[int, int, int]
) -> tuple[np.ndarray, np.ndarray, float]:
    """Pooled features [n, 2E], features [n, T, E] of truth.tokens, and RankMe of valid tokens.

    An encoder with another patch size lends each reference token the features of the token it lies in.
    """
    runtime = open_runtime(cfg.train.use_bf16)
    encoder = encoder.to(runtime.device).eval()
    there = tokens_of_another_grid(truth.tokens.clip(min=0), grid, cfg.grid)
    pooled, dense, sample, start = [], [], [], 0
    per_volume = -(-RANKME_TOKENS // len(truth.rows))
    for batch in map(runtime.to_device, evaluation_batches(cfg, store, truth.rows, BATCH)):
        with runtime.autocast():
            tokens_BNE = encoder(plain_view(batch)).float()
        pooled.append(pool_tokens(tokens_BNE, batch["context_valid"]).cpu())
        tokens_BNE = tokens_BNE.cpu()
        ids_BT = torch.from_numpy(there[start : start + len(tokens_BNE)])
        dense.append(tokens_BNE.gather(1, ids_BT.unsqueeze(-1).expand(-1, -1, tokens_BNE.shape[-1])))
        for features, valid in zip(tokens_BNE, batch["context_valid"].cpu(), strict=True):
            inside = features[valid > 0]
            sample.append(inside[evenly_spaced(len(inside), per_volume)])
        start += len(tokens_BNE)
    return torch.cat(pooled).numpy(), torch.cat(dense).numpy(), rankme(torch.cat(sample))


def baseline_features(
    cfg: Config, store: PreparedStore, truth: Truth
) -> dict[str, tuple[FoldFeatures | None, FoldFeatures | None]]:
    """name -> (pooled features by fold, dense features) of the baselines without an encoder."""
    runtime = open_runtime(False)
    voxels, profile = raw_features(cfg, store, truth.rows, runtime)

    def components(is_training: np.ndarray) -> np.ndarray:
        count = min(PCA_COMPONENTS, int(is_training.sum()) - 1, voxels.shape[1])
        pca = PCA(count, svd_solver="randomized", random_state=0)
        return pca.fit(voxels[is_training]).transform(voxels)

    d, h, w = cfg.spatial.patch_size
    patches, start = [], 0
    for batch in evaluation_batches(cfg, store, truth.rows, BATCH):
        tokens_BNV = rearrange(
            plain_view(batch)[:, 0], "b (gd d) (gh h) (gw w) -> b (gd gh gw) (d h w)", d=d, h=h, w=w
        )
        ids_BT = torch.from_numpy(truth.tokens[start : start + len(tokens_BNV)].clip(min=0))
        patches.append(tokens_BNV.gather(1, ids_BT.unsqueeze(-1).expand(-1, -1, d * h * w)))
        start += len(tokens_BNV)
    dense, nothing = torch.cat(patches).numpy(), np.zeros((*truth.tokens.shape, 0), np.float32)
    return {
        "voxel_pca": (components, lambda _: dense),
        "ascan_profile": (lambda _: profile, None),
        "device": (lambda t: device_features(store, truth.rows, truth.rows[t]), None),
        "position": (None, lambda _: nothing),
    }


def save_scores(folder: Path, scores: Scores, facts: dict[str, Any]) -> None:
    """Write scores.npz, then scores.json, whose presence means that both are there."""
    arrays: dict[str, np.ndarray] = {}
    if scores.classes is not None:
        p = scores.classes
        arrays |= {"participants": p.participants, "labels": p.labels, "class_scores": p.scores}
    for task in ("thickness", "occupancy"):
        errors = getattr(scores, task)
        if errors is not None:
            arrays |= {f"{task}_participants": errors.participants}
            arrays |= {f"{task}_{n}": getattr(errors, n) for n in ("first", "second", "error")}
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
    """What save_scores wrote."""
    content = json.loads((folder / "scores.json").read_text())
    with np.load(folder / "scores.npz") as a:
        classes = None
        if "labels" in a:
            classes = Prediction(a["participants"], a["labels"], a["class_scores"])
        errors = {
            task: Errors(a[f"{task}_participants"], *(a[f"{task}_{n}"] for n in ("first", "second", "error")))
            if f"{task}_error" in a
            else None
            for task in ("thickness", "occupancy")
        }
    return Scores(
        classes, errors["thickness"], errors["occupancy"], content["val"], content["chosen_c"]
    ), content
