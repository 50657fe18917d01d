"""Is the device in the features, and what does taking it out cost? On the people of benchmarks.evidence.

In: runs of `evidence run` that are done. Out: device.json and a table in Markdown. Each encoder is scored
twice: its tokens as they are, and less the mean token of the volume's device at the same place of the grid, a
mean over the training volumes of each fold. Beside the three tasks of scores.py stands a probe for the device
itself: mean and std of valid tokens, logistic regression, balanced accuracy over (participant, device).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.evidence.arms import RANDOM, REFERENCE, SUPERVISED, arm_by_name, arm_config, run_dir
from benchmarks.evidence.cohorts import Truth, read_truth
from benchmarks.evidence.queue import Plan
from benchmarks.evidence.scores import BATCH, TASKS, FoldFeatures, score, score_classes
from data_setup.loader import evaluation_batches
from data_setup.normalisation import plain_view
from data_setup.store.reader import PreparedStore
from finetuning.features.pooled import pretrained_encoder, random_encoder
from models.probes.features import pool_tokens
from models.probes.participants import balanced_accuracy
from utils import storage
from utils.checkpoint import load_checkpoint
from utils.config.schema import Config
from utils.errors import UserError
from utils.runtime.open import open_runtime

AS_IS, LESS_DEVICE = "as they are", "less the device's mean of each place"


@torch.no_grad()
def all_tokens(
    encoder: nn.Module, cfg: Config, store: PreparedStore, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Features of every token [n, N, E] and their weights [n, N], float32."""
    runtime = open_runtime(cfg.train.use_bf16)
    encoder = encoder.to(runtime.device).eval()
    tokens, valid = [], []
    for batch in map(runtime.to_device, evaluation_batches(cfg, store, rows, BATCH)):
        with runtime.autocast():
            tokens.append(encoder(plain_view(batch)).float().cpu())
        valid.append(batch["context_valid"].float().cpu())
    return torch.cat(tokens).numpy(), torch.cat(valid).numpy()


def less_device_of_each_place(
    tokens_nNE: np.ndarray, valid_nN: np.ndarray, device_n: np.ndarray, is_training_n: np.ndarray
) -> np.ndarray:
    """Tokens [n, N, E] less the mean of the device's training volumes at the same place, weighted by valid.

    A place that no training volume of the device has loses the device's mean over all places. Raises
    ValueError for a device without a training volume.
    """
    result = np.empty_like(tokens_nNE)
    for name in np.unique(device_n):
        is_device = device_n == name
        fitted = is_device & is_training_n
        if not valid_nN[fitted].any():
            raise ValueError(f"{name}: expected a training volume with a valid token, found none")
        total_NE = np.einsum("nN,nNE->NE", valid_nN[fitted], tokens_nNE[fitted])
        weight_N1 = valid_nN[fitted].sum(axis=0)[:, None]
        everywhere_E = total_NE.sum(axis=0) / weight_N1.sum()
        mean_NE = np.where(weight_N1 > 0, total_NE / np.maximum(weight_N1, 1e-6), everywhere_E)
        result[is_device] = tokens_nNE[is_device] - mean_NE
    return result


def score_device(truth: Truth, device_n: np.ndarray, pooled: FoldFeatures) -> float:
    """Balanced accuracy of a logistic probe for the device, over (participant, device)."""
    names, number = np.unique(device_n, return_inverse=True)
    unit = np.char.add(np.char.add(truth.person.astype(str), " "), device_n.astype(str))
    asked = replace(truth, label=number, classes=tuple(names.tolist()), person=unit)
    return balanced_accuracy(score_classes(asked, pooled)[0])


def score_forms(
    truth: Truth,
    device_n: np.ndarray,
    tokens_nNE: np.ndarray,
    valid_nN: np.ndarray,
    grid: tuple[int, int, int],
) -> dict[str, dict[str, float | None]]:
    """form -> task -> score, "device" among the tasks; tokens [n, N, E] of the reference grid."""
    kept: dict[bytes, np.ndarray] = {}

    def centred(is_training_n: np.ndarray) -> np.ndarray:
        key = is_training_n.tobytes()
        if key not in kept:
            kept.clear()
            kept[key] = less_device_of_each_place(tokens_nNE, valid_nN, device_n, is_training_n)
        return kept[key]

    forms: dict[str, FoldFeatures] = {AS_IS: lambda _: tokens_nNE, LESS_DEVICE: centred}
    place = truth.tokens.clip(min=0)[:, :, None]
    result: dict[str, dict[str, float | None]] = {}
    for name, tokens_of in forms.items():

        def pooled(is_training_n: np.ndarray, tokens_of: FoldFeatures = tokens_of) -> np.ndarray:
            tokens = torch.from_numpy(tokens_of(is_training_n))
            return pool_tokens(tokens, torch.from_numpy(valid_nN)).numpy()

        def dense(is_training_n: np.ndarray, tokens_of: FoldFeatures = tokens_of) -> np.ndarray:
            return np.take_along_axis(tokens_of(is_training_n), place, axis=1)

        scores = score(truth, pooled, dense, grid)
        result[name] = {"device": score_device(truth, device_n, pooled), **{t: scores.of(t) for t in TASKS}}
    return result


def device_report(root: Path, names: Sequence[str], seeds: int, out: Path) -> str:
    """Score the arms' runs of `root` (seeds 0 to seeds - 1), write device.json and return the table.

    Raises UserError for a run that is not there.
    """
    torch.set_num_threads(1)
    plan, truth = Plan.load(root), read_truth(root)
    store = PreparedStore.open(str(root / "evaluation_store"))
    device_n = store.index.loc[truth.rows, "device"].to_numpy(str)
    grid = arm_config(arm_by_name(REFERENCE), 0, 1, root, plan.extra).grid
    rows: list[dict[str, Any]] = []
    for name in names:
        for seed in range(seeds):
            encoder, cfg = _encoder(root, plan, name, seed)
            forms = score_forms(truth, device_n, *all_tokens(encoder, cfg, store, truth.rows), grid)
            rows += [{"arm": name, "seed": seed, "features": form, **part} for form, part in forms.items()]
            out.write_text(json.dumps(rows, indent=1) + "\n")
    return table(rows)


def _encoder(root: Path, plan: Plan, name: str, seed: int) -> tuple[nn.Module, Config]:
    """The encoder of a run, or a random one, and its configuration."""
    arm = arm_by_name(name)
    cfg = arm_config(arm, seed, max(plan.steps.get(name, 1), 1), root, plan.extra)
    if name == RANDOM:
        return random_encoder(cfg, seed), cfg
    if name == SUPERVISED or cfg.grid != arm_config(arm_by_name(REFERENCE), 0, 1, root, plan.extra).grid:
        raise UserError(f"--only: expected arms with a run on the reference's grid, found {name}")
    url = storage.join(str(run_dir(root, arm, seed)), "checkpoints", f"step_{plan.steps[name]:08d}.pt")
    if not storage.exists(url):
        raise UserError(f"{name}, seed {seed}: expected {url}, found none; run `evidence run --only {name}`")
    return pretrained_encoder(cfg, load_checkpoint(url), url), cfg


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: one line for each arm and form, the mean over seeds and their range."""
    tasks = ("device", *TASKS)
    lines = ["| features | | " + " | ".join(tasks) + " |", "|---" * (2 + len(tasks)) + "|"]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        for form in (AS_IS, LESS_DEVICE):
            values = [[r[t] for r in rows if (r["arm"], r["features"]) == (arm, form)] for t in tasks]
            cells = [f"{np.mean(v):.3f} ({min(v):.3f} to {max(v):.3f})" for v in values]
            lines.append(f"| {arm_by_name(arm).label} | {form} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
