"""What is measured between training steps: loss, skill, ranks of the features, a check for leaks, probes.

Validation participants are cut inside the training split. Probes are fitted on training participants and
scored on the official validation split, which selects checkpoints. Device and side of the body are shortcut
detectors: features that tell them carry the scanner or the mirror image. All processes of a run have as many
batches, read by the loader's workers, and get the numbers that one process would. What is sampled of the
features is picked on the device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from data_setup.loader import VALIDATION_SEED, Batch, evaluation_batches, validation_batches
from data_setup.masks import MaskPlan, draw_mask
from data_setup.normalisation import view
from data_setup.store.reader import PreparedStore
from data_setup.transforms import STREAM_MASK, random_stream
from models.probes.features import lidar, pool_tokens, rankme
from models.probes.participants import Fold, balanced_accuracy, knn_probe, ridge_classifier_probe
from models.vit3d import gather_tokens
from models.vjepa3d import Output
from pretraining.gauges.monitor import TargetMotion, voxels_of_tokens
from pretraining.gauges.skill import evenly_spaced, select, validation_skill
from pretraining.gauges.throughput import volume_flops
from pretraining.run import Run
from pretraining.step import predict
from utils.config.schema import Config
from utils.runtime.single import StopRequested

log = logging.getLogger(__name__)
RANKME_TOKENS = 2048
LIDAR_VOLUMES, LIDAR_MASKS = 64, 4  # each mask is a pass of the context encoder
SKILL_TOKENS = 2**14  # positions of all volumes together, at most 64 of each
# the validation before step 1 has a quarter of the volumes of the others, at most 64
FIRST_SHARE, FIRST_VOLUMES = 4, 64
SHORTCUTS = ("device", "laterality")
UNKNOWN = "unknown"  # what the store writes where a laterality is not told
Load = Callable[[Config, PreparedStore, np.ndarray, int], Iterator[Batch]]  # of data_setup.loader


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
        hidden = count if run.model.recipe.hidden != "nothing" else 0
        checked = min(hidden, run.cfg.train.at_once * run.runtime.num_devices)
        probed = 0 if step == 0 else sum(map(len, probe_sides(run)))
        self._gauge_flops += min(hidden, LIDAR_VOLUMES) * LIDAR_MASKS * flops.context
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
    volumes), val/rankme, val/leak and val/lidar (null where nothing is hidden; val/lidar also for a single
    volume) and what probe_scores names.
    `is_first`: before step 1, of a few volumes and without probes.
    """
    run.model.eval()
    rows = validation_rows(run, is_first=is_first)
    parts: dict[str, list[Tensor]] = {}
    done, has_hidden = 0, run.model.recipe.hidden != "nothing"
    for cpu_batch, batch in shared_batches(run, rows, validation_batches):
        values = measure_batch(run, cpu_batch, batch, is_leak_checked=has_hidden and done == 0)
        if has_hidden and done < LIDAR_VOLUMES:
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
    views_VQE = parts.get("views", torch.empty(0, LIDAR_MASKS, 1))
    views_VQE = views_VQE[torch.isfinite(views_VQE).all(dim=(1, 2))][:LIDAR_VOLUMES]
    scored = parts["prediction"], parts["target"], parts["counts"]
    valid_VP = parts["valid"] & torch.isfinite(parts["all"]).all(-1)
    mean, position = validation_skill(scored, parts["all"], valid_VP, quarter_V, loss)
    moved, size = (float(parts[name].double().sum()) if name in parts else 0.0 for name in ("moved", "size"))
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


def participants_in_turn(rows: np.ndarray, person_of_row: Mapping[int, str], limit: int) -> np.ndarray:
    """At most `limit` rows: one of every participant, then a second of each, and so on, in an order that is
    drawn once for all runs. A smaller limit gives the beginning of a larger one's.
    """
    rng = np.random.default_rng(VALIDATION_SEED)
    turns: dict[str, int] = {}
    order = []
    for row in rng.permutation(np.sort(rows)).tolist():
        person = person_of_row[row]
        order.append((turns.setdefault(person, 0), row))
        turns[person] += 1
    return np.array([row for _, row in sorted(order, key=lambda entry: entry[0])[:limit]], dtype=int)


def quarters(people: Sequence[str]) -> np.ndarray:
    """0..3 for every volume: the same for all volumes of a participant, as many participants in each."""
    number: dict[str, int] = {}
    return np.array([number.setdefault(person, len(number)) % 4 for person in people], dtype=int)


def choose_rows(side: np.ndarray, label_of_row: Mapping[int, str], limit: int) -> np.ndarray:
    """At most `limit` rows, evenly spread: of those with a label where any has one."""
    labelled = np.array([int(r) for r in side if int(r) in label_of_row], dtype=int)
    pool = labelled if len(labelled) else np.asarray(side, dtype=int)
    if len(pool) == 0:
        return pool
    return pool[evenly_spaced(len(pool), limit).numpy()]


def evaluation_size(run: Run) -> int:
    """The volumes of this process's part of an evaluation batch."""
    return run.cfg.train.at_once * run.runtime.evaluation_devices


def shared_batches(run: Run, rows: np.ndarray, load: Load) -> Iterator[tuple[Batch, Batch]]:
    """This process's part of `rows`: each batch as it was read, and on the device, where it may be filled up.

    `Runtime.collect` of the results, joined and cut to len(rows), is in the order of `rows`.
    """
    size = evaluation_size(run)
    batches = load(run.cfg, run.store, run.runtime.group.share(rows), size)
    for cpu_batch in run.runtime.until_stopped("validation", batches):
        yield cpu_batch, run.runtime.to_device_padded(cpu_batch, size)


def probe_scores(run: Run) -> dict[str, float | None]:
    """Balanced accuracies val/probe (kNN on labels), val/ridge, and val/knn_X, val/ridge_X of each shortcut.

    Null where a side has fewer than two classes, or a participant is on both sides.
    """
    targets, sides = targets_of(run), probe_sides(run)
    names = {key: (f"val/knn{key}" if key else "val/probe", f"val/ridge{key}") for key in targets}
    scores: dict[str, float | None] = {name: None for pair in names.values() for name in pair}
    if not sides:
        return scores
    embedded = [embed_rows(run, side) for side in sides]
    for key, of_row in targets.items():
        folds = make_folds(embedded, of_row, run.rows.person_of_row)
        if folds is not None:
            by_knn, by_ridge = names[key]
            scores[by_knn] = balanced_accuracy(knn_probe(*folds))
            scores[by_ridge] = balanced_accuracy(ridge_classifier_probe(*folds))
    return scores


def targets_of(run: Run) -> dict[str, dict[int, str]]:
    """What each probe looks for, by row: '' the labels, '_X' shortcut X."""
    index = run.store.index
    known = {name: {int(r): v for r, v in index[name].items() if v != UNKNOWN} for name in SHORTCUTS}
    return {"": run.rows.label_of_row} | {f"_{name}": of_row for name, of_row in known.items()}


def probe_sides(run: Run) -> list[np.ndarray]:
    """The rows to fit on and to score on, embedded once for all probes; none where a participant is on both
    sides, or no target has two classes on both.
    """
    rows = run.rows
    most = run.cfg.val.max_volumes
    sides = [choose_rows(side, rows.label_of_row, most) for side in (rows.train, rows.official_val)]
    people = [{rows.person_of_row[int(r)] for r in side} for side in sides]
    is_useful = any(
        all(len(classes_of(side, of_row)) > 1 for side in sides) for of_row in targets_of(run).values()
    )
    return sides if is_useful and not people[0] & people[1] else []


def classes_of(side: np.ndarray, of_row: Mapping[int, str]) -> set[str]:
    return {of_row[int(r)] for r in side if int(r) in of_row}


def embed_rows(run: Run, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pooled target encoder features [n, 2E] of rows [n]; rows whose features are not finite are left out.

    Several processes share the volumes, and all of them get all features.
    """
    runtime, parts = run.runtime, []
    for cpu_batch, batch in shared_batches(run, chosen, evaluation_batches):
        with runtime.autocast():
            tokens_BNE = run.model.target_encoder(view(batch, 1), blocks=run.cfg.model.feature_blocks or ())
        pooled = pool_tokens(tokens_BNE.float(), batch["context_valid"])
        parts.append(runtime.collect(pooled, len(cpu_batch["row"])))
    features = torch.cat(parts)[: len(chosen)].numpy()
    usable = np.isfinite(features).all(axis=1)
    if not usable.all():
        log.warning("probe: features not finite, left out: rows %s", chosen[~usable].tolist())
    return features[usable], chosen[usable]


def make_folds(
    embedded: list[tuple[np.ndarray, np.ndarray]], of_row: Mapping[int, str], person_of_row: Mapping[int, str]
) -> tuple[Fold, Fold] | None:
    """Training and scored fold of one label; None where a side has fewer than two classes left.

    A participant who has several (two eyes, two devices) counts once for each.
    """
    names = sorted(set().union(*(classes_of(chosen, of_row) for _, chosen in embedded)))
    number = {name: i for i, name in enumerate(names)}
    folds = []
    for features, chosen in embedded:
        known = np.array([int(r) in of_row for r in chosen], dtype=bool)
        labels = np.array([number[of_row[int(r)]] for r in chosen[known]], dtype=int)
        if len(set(labels.tolist())) < 2:
            return None
        units = [f"{person_of_row[int(r)]}/{of_row[int(r)]}" for r in chosen[known]]
        folds.append(Fold(features[known], labels, np.array(units)))
    return folds[0], folds[1]
