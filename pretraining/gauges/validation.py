"""What is measured between training steps: validation loss, skill, ranks of the features, a check for leaks,
probes.

Validation participants are cut inside the training split; pretraining.gauges.validation_probes has the
probes. Several processes share the volumes (pretraining.gauges.volumes), and all of them get the numbers that
one process would. What is sampled of the features is picked on the device.
"""

from __future__ import annotations

import logging
import time

import numpy as np
import torch
from torch import Tensor

from data_setup.loader import VALIDATION_SEED, Batch, validation_batches
from data_setup.masks import MaskPlan, draw_mask
from data_setup.normalisation import view
from data_setup.transforms import STREAM_MASK, random_stream
from models.probes.features import lidar, rankme
from models.vit3d import gather_tokens
from models.vjepa3d import Output
from pretraining.gauges.monitor import TargetMotion, voxels_of_tokens
from pretraining.gauges.skill import select, validation_skill
from pretraining.gauges.throughput import volume_flops
from pretraining.gauges.validation_probes import probe_scores, probe_sides
from pretraining.gauges.volumes import (
    evaluation_size,
    participants_in_turn,
    quarters,
    shared_batches,
)
from pretraining.run import Run
from pretraining.step import predict
from utils.indices import evenly_spaced
from utils.runtime.single import StopRequested

log = logging.getLogger(__name__)
RANKME_TOKENS = 2048
LIDAR_VOLUMES, LIDAR_MASKS = 64, 4  # each mask is a pass of the context encoder
SKILL_TOKENS = 2**14  # positions of all volumes together, at most 64 of each
# the validation before step 1 has a quarter of the volumes of the others, at most 64
FIRST_SHARE, FIRST_VOLUMES = 4, 64


class Validation:
    """Validates a run that begins at step `start`, and tells which share of its time and work that took."""

    def __init__(self, run: Run, start: int) -> None:
        self.run, self.start = run, start
        self.motion = TargetMotion(run.model, run.runtime.to_torch)
        self._began, self._seconds = time.perf_counter(), 0.0
        self._gauge_flops = self._loss_flops = 0

    def __call__(self, step: int) -> dict[str, float | None]:
        """What `validate` measures after `step` updates, the same on every process, and, after the first
        update, the shares of all that this process of the run did since its start: perf/validation_fraction
        of the time, perf/gauges_fraction of the counted operations (LiDAR, the check for leaks, probes).
        Raises StopRequested where SIGTERM came before its end.
        """
        run = self.run
        run.runtime.synchronise()  # what the steps have left to compute is theirs
        began = time.perf_counter()
        try:
            measured = run.runtime.group.broadcast(validate(run, is_first=step == 0))
        except StopRequested:
            run.model.train()
            raise
        now = time.perf_counter()
        self._seconds += now - began
        flops, count = volume_flops(run.cfg, run.model), len(validation_rows(run, is_first=step == 0))
        self._loss_flops += count * flops.prediction
        # of the check a batch, of which a volume costs at most a prediction
        checked = min(count, run.cfg.train.at_once * run.runtime.num_devices)
        probed = 0 if step == 0 else sum(map(len, probe_sides(run)))
        self._gauge_flops += min(count, LIDAR_VOLUMES) * LIDAR_MASKS * flops.context
        self._gauge_flops += checked * flops.prediction + probed * flops.target
        if step > self.start:
            trained = (step - self.start) * run.cfg.train.global_batch_size * flops.training
            whole = self._gauge_flops + self._loss_flops + trained
            measured["perf/validation_fraction"] = self._seconds / (now - self._began)
            measured["perf/gauges_fraction"] = self._gauge_flops / whole
        return measured


def validation_rows(run: Run, *, is_first: bool = False) -> np.ndarray:
    """The rows of a validation, the same at each; before step 1 the first few of them."""
    limit = run.cfg.val.max_volumes
    limit = min(-(-limit // FIRST_SHARE), FIRST_VOLUMES) if is_first else limit
    return participants_in_turn(run.rows.val, run.rows.person_of_row, limit)


def volumes_read(run: Run) -> int:
    """The volumes that all processes together read for one validation."""
    return len(validation_rows(run)) + sum(map(len, probe_sides(run)))


@torch.no_grad()
def validate(run: Run, *, is_first: bool = False) -> dict[str, float | None]:
    """val/volumes, on which the numbers rest, val/loss, val/skill_mean, val/skill_position (null for few
    volumes), val/leak, val/rankme, val/lidar (null for a single volume) and what probe_scores names.
    `is_first`: before step 1, of a few volumes and without probes.
    """
    run.model.eval()
    rows = validation_rows(run, is_first=is_first)
    parts: dict[str, list[Tensor]] = {}
    done = 0
    for cpu_batch, batch in shared_batches(run, rows, validation_batches):
        values = measure_batch(run, cpu_batch, batch, is_leak_checked=done == 0)
        if done < LIDAR_VOLUMES:
            values["views"] = masked_views(run, cpu_batch, batch)
        count = len(cpu_batch["row"])
        for name, value in values.items():
            parts.setdefault(name, []).append(run.runtime.collect(value, count))
        done += count * run.runtime.world_size
    whole = {name: torch.cat(values)[: len(rows)] for name, values in parts.items()}
    people = [run.rows.person_of_row[int(row)] for row in rows]
    measured: dict[str, float | None] = {"val/volumes": float(len(rows))}
    measured |= summarise(whole, torch.from_numpy(quarters(people)), run.model.recipe.loss)
    scores = {} if is_first else probe_scores(run)
    run.model.train()
    return measured | scores


def summarise(parts: dict[str, Tensor], quarter_V: Tensor, loss: str) -> dict[str, float | None]:
    """The numbers of a validation from what `measure_batch` and `masked_views` found in all volumes."""
    count = int(parts["has_target"].sum())
    is_finite = torch.isfinite(parts["tokens"]).all(dim=(1, 2))
    if not bool(is_finite.all()):
        log.warning("validation: features of %d volumes are not finite", int((~is_finite).sum()))
    tokens = parts["tokens"][is_finite][parts["is_token"][is_finite]]
    views_VQE = parts["views"][torch.isfinite(parts["views"]).all(dim=(1, 2))][:LIDAR_VOLUMES]
    scored = parts["prediction"], parts["target"], parts["counts"]
    valid_VP = parts["valid"] & torch.isfinite(parts["all"]).all(-1)
    mean, position = validation_skill(scored, parts["all"], valid_VP, quarter_V, loss)
    moved, size = (float(parts[name].double().sum()) for name in ("moved", "size"))
    return {
        "val/loss": float(parts["loss"].sum()) / count if count else None,
        "val/skill_mean": mean,
        "val/skill_position": position,
        "val/leak": (moved / size) ** 0.5 if size > 0 else None,
        "val/rankme": rankme(tokens) if len(tokens) else None,
        "val/lidar": lidar(views_VQE) if len(views_VQE) > 1 else None,
    }


def measure_batch(run: Run, cpu_batch: Batch, batch: Batch, *, is_leak_checked: bool) -> dict[str, Tensor]:
    """What one batch contributes, on the device: losses [B], some features of each volume [B, T, E] with
    those that count, and predictions and targets at some positions [B, P, ...].
    """
    runtime, num_volumes = run.runtime, min(len(run.rows.val), run.cfg.val.max_volumes)
    picked = pick_tokens(cpu_batch["token_valid"], -(-RANKME_TOKENS // num_volumes))
    picked = runtime.to_device_padded(picked, evaluation_size(run))
    num_tokens = run.model.encoder.num_tokens
    positions_P = evenly_spaced(num_tokens, min(64, -(-SKILL_TOKENS // num_volumes)))
    positions_P = runtime.to_device_replicated(positions_P)
    output = predict(run.model, batch, runtime, stochastic=False)
    assert output.features_all_BNE is not None, "None only in training"
    scored = select(
        positions_P, num_tokens, output.prediction_BME, output.target_BME,
        batch["target"], batch["target_valid"],
    )  # fmt: skip
    values = dict(zip(("prediction", "target", "counts"), scored, strict=True)) | {
        "loss": output.loss_B,
        "has_target": batch["target_valid"].sum(1) > 0,
        "tokens": gather_tokens(output.features_all_BNE, picked["ids"]),
        "is_token": picked["is_token"],
        "all": output.target_all_BNE[:, positions_P],
        "valid": batch["token_valid"][:, positions_P],
    }
    runtime.mark_step()
    return values | (leaked(run, batch, output) if is_leak_checked else {})


def pick_tokens(valid_BN: Tensor, number: int) -> dict[str, Tensor]:
    """`ids` [B, number] of valid tokens of each volume, evenly spread, and `is_token` [B, number], which is
    false where a volume has fewer.
    """
    ids = torch.zeros(len(valid_BN), number, dtype=torch.long)
    is_token = torch.zeros(len(valid_BN), number, dtype=torch.bool)
    for b, valid in enumerate(valid_BN):
        own = valid.nonzero().flatten()
        own = own[evenly_spaced(len(own), number)]
        ids[b, : len(own)], is_token[b, : len(own)] = own, True
    return {"ids": ids, "is_token": is_token}


def leaked(run: Run, batch: Batch, output: Output) -> dict[str, Tensor]:
    """How far the predictions `moved` [B], squared, when nothing but the voxels of the target tokens changes,
    in both views, and their `size` [B]. A prediction that cannot see its targets stays where it is.
    """
    model, runtime = run.model, run.runtime
    is_target_BN = torch.zeros_like(batch["token_valid"]).scatter(1, batch["target"], True)
    hidden = voxels_of_tokens(is_target_BN, model.encoder.grid, model.encoder.patch_embed.patch)
    views = (view(batch, number) for number in (0, 1))
    changed = [torch.where(hidden, seen + 1 + seen.square(), seen) for seen in views]
    with runtime.autocast():
        again = model(*changed, batch["context"], batch["target"], batch["token_valid"])
    before, weight = output.prediction_BME, batch["target_valid"].unsqueeze(-1)
    moved_B = ((again.prediction_BME - before).square() * weight).sum((1, 2))
    size_B = (before.square() * weight).sum((1, 2))
    runtime.mark_step()
    return {"moved": moved_B, "size": size_B}


def masked_views(run: Run, cpu_batch: Batch, batch: Batch) -> Tensor:
    """For each volume, context features [LIDAR_MASKS, E] under masks drawn for it: means over valid tokens.

    The masks depend only on the row; the first is that of the validation loss.
    """
    runtime, plan = run.runtime, MaskPlan.from_config(run.cfg)
    view_BCDHW = view(batch, 0)
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
            {"context": context_BK, "target": target_BM, "weight": weight_BK}, evaluation_size(run)
        )
        with runtime.autocast():
            features_BKE = run.model.encode_context(view_BCDHW, mask["context"], mask["target"], None).float()
        total_BE = (features_BKE * mask["weight"].unsqueeze(-1)).sum(1)
        means.append(total_BE / mask["weight"].sum(1, keepdim=True).clamp(min=1))
        runtime.mark_step()
    return torch.stack(means, dim=1)
