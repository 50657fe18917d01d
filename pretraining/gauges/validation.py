"""What is measured between training steps: validation loss, ranks of the features, probes, and example
pictures.

Validation participants are cut inside the training split; pretraining.gauges.validation_probes has the
probes. Several processes share the volumes, in batches, and all of them get the numbers that one process
would.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data_setup.loader import VALIDATION_SEED, Batch, validation_batches
from data_setup.masks import MaskPlan, draw_mask
from data_setup.normalisation import view
from data_setup.transforms import STREAM_MASK, random_stream
from models.probes.features import lidar, rankme
from pretraining.gauges.validation_probes import probe_scores
from pretraining.run import Run
from pretraining.step import predict
from utils.indices import evenly_spaced
from utils.report.pictures import save_snapshot
from utils.runtime.single import StopRequested

log = logging.getLogger(__name__)
RANKME_TOKENS = 2048
LIDAR_VOLUMES, LIDAR_MASKS = 64, 8  # each mask is a pass of the context encoder


class Validation:
    """Validates a run, and tells which share of the time that took."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.restart()

    def restart(self) -> None:
        """The next share is one of the time from now on."""
        self._ended = time.perf_counter()

    def __call__(self, *, with_share: bool = True) -> dict[str, float | None] | None:
        """What `validate` measures, the same on every process, and perf/validation_fraction, its share of the
        time since the last call. None where SIGTERM came before its end.
        """
        began = time.perf_counter()
        try:
            measured = self.run.runtime.group.broadcast(validate(self.run))
        except StopRequested:
            self.run.model.train()
            return None
        now = time.perf_counter()
        if with_share:
            measured["perf/validation_fraction"] = (now - began) / (now - self._ended)
        self._ended = now
        return measured


@torch.no_grad()
def validate(run: Run) -> dict[str, float | None]:
    """val/loss, val/rankme, val/lidar (null for a single volume) and what probe_scores names."""
    run.model.eval()
    plan = MaskPlan.from_config(run.cfg)
    parts = [
        measure_batch(run, plan, cpu_batch, with_views=first < LIDAR_VOLUMES)
        for first, cpu_batch in run.runtime.until_stopped("validation", shared_batches(run))
    ]
    parts = run.runtime.group.merge_from_ranks(parts)
    tokens = [t for part in parts for t in part.tokens]
    views_NQE = [v for part in parts for v in part.views]
    count = sum(part.count for part in parts)
    finite = [t for t in tokens if bool(torch.isfinite(t).all())]
    if len(finite) < len(tokens):
        log.warning("validation: features of %d volumes are not finite", len(tokens) - len(finite))
    whole = [v for v in views_NQE if bool(torch.isfinite(v).all())][:LIDAR_VOLUMES]
    measured = {
        "val/loss": sum(part.loss_sum for part in parts) / count if count else None,
        "val/rankme": rankme(torch.cat(finite)) if finite else None,
        "val/lidar": lidar(torch.stack(whole)) if len(whole) > 1 else None,
    }
    scores = probe_scores(run)
    run.model.train()
    return measured | scores


@dataclass
class Part:
    """What one batch contributes to a validation."""

    loss_sum: float
    count: int  # volumes with a valid target
    tokens: list[Tensor]  # of each volume, some of its features
    views: list[Tensor]  # of each volume, features [LIDAR_MASKS, E] under several masks


def evaluation_size(run: Run) -> int:
    """The volumes of an evaluation batch."""
    return run.cfg.train.per_core_batch_size * run.runtime.evaluation_devices


def shared_batches(run: Run) -> Iterator[tuple[int, Batch]]:
    """This process's validation batches, each with the place of its first volume among all rows."""
    rows, size = run.rows.val, evaluation_size(run)
    starts = run.runtime.group.split_among_ranks(range(0, len(rows), size))
    own_rows = np.concatenate([rows[:0], *(rows[s : s + size] for s in starts)])
    # only the last of all batches may be short, and it is the last of its process
    return zip(starts, validation_batches(run.cfg, run.store, own_rows, size), strict=True)


def measure_batch(run: Run, plan: MaskPlan, cpu_batch: Batch, *, with_views: bool) -> Part:
    """One batch, with its share of RANKME_TOKENS; `with_views`: also for LiDAR."""
    runtime, count = run.runtime, len(cpu_batch["row"])
    batch = runtime.to_device_padded(cpu_batch, evaluation_size(run))
    output = predict(run.model, batch, runtime, stochastic=False)
    assert output.features_all_BNE is not None, "None in training alone"
    runtime.mark_step()
    per_volume = -(-RANKME_TOKENS // len(run.rows.val))
    tokens = []
    features_BNE = runtime.to_torch(output.features_all_BNE).cpu()[:count]
    for features, valid in zip(features_BNE, cpu_batch["token_valid"], strict=True):
        ids = valid.nonzero().flatten()
        tokens.append(features[ids[evenly_spaced(len(ids), per_volume)]])
    return Part(
        float(runtime.to_torch(output.loss_B)[:count].sum()),
        int((cpu_batch["target_valid"].sum(1) > 0).sum()),
        tokens,
        [v.clone() for v in masked_views(run, plan, cpu_batch)] if with_views else [],
    )


def masked_views(run: Run, plan: MaskPlan, cpu_batch: Batch) -> Iterator[Tensor]:
    """For each volume, context features [LIDAR_MASKS, E] under masks of its own: means over valid tokens.

    The masks depend on the row alone; the first is that of the validation loss.
    """
    runtime, size = run.runtime, evaluation_size(run)
    view_BCDHW = view(runtime.to_device_padded(cpu_batch, size), 0)
    runtime.mark_step()
    means = []
    for number in range(LIDAR_MASKS):
        drawn = [
            draw_mask(random_stream(VALIDATION_SEED, number, int(row), STREAM_MASK), plan, valid.numpy())
            for row, valid in zip(cpu_batch["row"], cpu_batch["token_valid"], strict=True)
        ]
        context_BK, target_BM = (torch.from_numpy(np.stack(ids)) for ids in zip(*drawn, strict=True))
        weight_BK = cpu_batch["token_valid"].gather(1, context_BK).float()
        mask = runtime.to_device_padded(
            {"context": context_BK, "target": target_BM, "weight": weight_BK}, size
        )
        with runtime.autocast():
            encoded = run.model.encode_context(view_BCDHW, mask["context"], mask["target"], None)
            features_BKE = run.model.context_tokens(encoded, mask["context"]).float()
        total_BE = (features_BKE * mask["weight"].unsqueeze(-1)).sum(1)
        means.append(total_BE / mask["weight"].sum(1, keepdim=True).clamp(min=1))
        runtime.mark_step()
    return iter(torch.stack([*map(runtime.to_torch, means)], dim=1).cpu()[: len(cpu_batch["row"])])


@torch.no_grad()
def snapshot(run: Run, step: int) -> list[Path]:
    """Write the arrays of example pictures: up to three validation volumes of different devices. The first
    process writes them; the others take part where the engine computes on all at once.
    """
    cfg, store, runtime = run.cfg, run.store, run.runtime
    by_device = {store.index.loc[int(r), "device"]: int(r) for r in reversed(run.rows.val)}
    chosen = np.array(sorted(by_device.values())[:3])
    run.model.eval()
    paths = []
    for cpu_batch in validation_batches(cfg, store, chosen, 1):
        batch = runtime.to_device_padded(cpu_batch, runtime.evaluation_devices)
        with runtime.autocast():
            features = runtime.to_torch(run.model.target_encoder(view(batch, 1)))
        if not runtime.group.is_first:
            continue
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
    run.model.train()
    return paths
