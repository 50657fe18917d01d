"""What is measured between training steps: validation loss, rank of the features, a probe, and example
pictures.

Validation participants are cut inside the training split. The probe is fitted on the training participants
and scored on the official validation split, which is what selects checkpoints.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch

from data_setup.loader import evaluation_batches, validation_batches
from data_setup.store import PreparedStore
from models.embed import embed
from models.probes import Fold, balanced_accuracy, knn_probe, rankme
from models.vjepa3d import VJEPA3D
from pretraining.data import Rows
from pretraining.step import predict, views
from utils.config import Config
from utils.runtime import Runtime
from utils.visualize import save_snapshot

log = logging.getLogger(__name__)
RANKME_TOKENS = 2048


@torch.no_grad()
def validate(
    model: VJEPA3D, cfg: Config, store: PreparedStore, rows: Rows, runtime: Runtime
) -> dict[str, float | None]:
    """val/loss, val/rankme and val/probe (null without labels of two classes on both sides)."""
    model.eval()
    loss_sum, count = 0.0, 0
    tokens: list[torch.Tensor] = []
    per_volume = -(-RANKME_TOKENS // len(rows.val))
    for cpu_batch in validation_batches(cfg, store, rows.val, cfg.train.per_core_batch_size):
        batch = runtime.to_device(cpu_batch)
        output = predict(model, batch, runtime, stochastic=False)
        loss_sum += float(output.loss_B.sum())
        count += int((batch["target_valid"].sum(1) > 0).sum())
        for features, valid in zip(output.target_all_BNE.cpu(), cpu_batch["token_valid"], strict=True):
            ids = valid.nonzero().flatten()
            spread = torch.linspace(0, len(ids) - 1, min(per_volume, len(ids))).round().long()
            tokens.append(features[ids[spread]])
    finite = [t for t in tokens if bool(torch.isfinite(t).all())]
    if len(finite) < len(tokens):
        log.warning("validation: features of %d volumes are not finite", len(tokens) - len(finite))
    rank = rankme(torch.cat(finite)) if finite else None
    probe = probe_score(model, cfg, store, rows, runtime)
    model.train()
    return {"val/loss": loss_sum / count if count else None, "val/rankme": rank, "val/probe": probe}


def probe_score(
    model: VJEPA3D, cfg: Config, store: PreparedStore, rows: Rows, runtime: Runtime
) -> float | None:
    """Balanced accuracy of kNN on pooled target features: training participants -> official validation."""
    limit = cfg.probe.max_volumes
    sides = [[r for r in side if int(r) in rows.label_of_row] for side in (rows.train, rows.official_val)]
    classes = [{rows.label_of_row[int(r)] for r in side} for side in sides]
    if min(map(len, classes)) < 2 or set(sides[0]) & set(sides[1]):
        return None
    number = {label: i for i, label in enumerate(sorted(classes[0] | classes[1]))}
    folds = []
    for side in sides:
        chosen = np.asarray(side)[np.linspace(0, len(side) - 1, min(limit, len(side))).round().astype(int)]
        batches = evaluation_batches(cfg, store, chosen, cfg.train.per_core_batch_size)
        on_device = map(runtime.to_device, batches)
        features = embed(
            model.target_encoder, ((views(b)[1], b["context_valid"]) for b in on_device), runtime
        )
        usable = np.isfinite(features).all(axis=1)
        if not usable.all():
            log.warning("probe: features not finite, left out: rows %s", chosen[~usable].tolist())
            features, chosen = features[usable], chosen[usable]
        labels = np.array([number[rows.label_of_row[int(r)]] for r in chosen])
        if len(set(labels)) < 2:
            return None
        folds.append(Fold(features, labels, np.array([rows.person_of_row[int(r)] for r in chosen])))
    return balanced_accuracy(knn_probe(*folds))


@torch.no_grad()
def snapshot(
    model: VJEPA3D, cfg: Config, store: PreparedStore, rows: Rows, runtime: Runtime, step: int
) -> list[Path]:
    """Write the arrays of example pictures: up to three validation volumes of different devices."""
    by_device = {store.index.loc[int(r), "device"]: int(r) for r in reversed(rows.val)}
    chosen = np.array(sorted(by_device.values())[:3])
    model.eval()
    paths = []
    for cpu_batch in validation_batches(cfg, store, chosen, 1):
        batch = runtime.to_device(cpu_batch)
        with runtime.autocast():
            features = model.target_encoder(views(batch)[1])
        row = int(cpu_batch["row"][0])
        if not bool(torch.isfinite(features).all()):
            log.warning("no picture of row %d: its features are not finite", row)
            continue
        record = store.index.loc[row]
        path = Path(cfg.run.dir) / "snapshots" / f"step_{step:08d}_row_{row:06d}.npz"
        save_snapshot(
            path,
            volume=cpu_batch["volume"][0].numpy(),
            context=cpu_batch["context"][0].numpy(),
            target=cpu_batch["target"][0].numpy(),
            grid=np.array(cfg.grid),
            patch=np.array(cfg.spatial.patch_size),
            spacing=np.array(cfg.spatial.target_spacing),
            features=features[0].float().cpu().numpy().astype(np.float16),
            valid=cpu_batch["token_valid"][0].numpy(),
            title=f"{record['device']} {record['protocol']} {record['laterality']}, step {step}",
        )
        paths.append(path)
    model.train()
    return paths
