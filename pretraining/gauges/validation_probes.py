"""Probes between training steps: what the target encoder's features tell of labels, and of shortcuts.

Fitted on training participants, scored on the official validation split, which is what selects checkpoints.
The volumes are embedded once for all probes. Labels are what we want to find; the device and the side of the
body are shortcut detectors: features that tell them carry the scanner or the mirror image.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import torch

from data_setup.loader import evaluation_batches
from data_setup.normalisation import view
from data_setup.store.reader import PreparedStore
from models.probes.features import pool_tokens
from models.probes.participants import Fold, balanced_accuracy, knn_probe, ridge_classifier_probe
from pretraining.gauges.volumes import choose_rows, shared_batches
from pretraining.run import Run

log = logging.getLogger(__name__)
SHORTCUTS = ("device", "laterality")
UNKNOWN = "unknown"  # what the store writes where a laterality is not told


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
    return {"": run.rows.label_of_row} | {f"_{name}": values_of(run.store, name) for name in SHORTCUTS}


def probe_sides(run: Run) -> list[np.ndarray]:
    """The rows to fit on and to score on, embedded once for all probes; none where a participant is on both
    sides, or no target has two classes on both.
    """
    rows = run.rows
    sides = [
        choose_rows(side, rows.label_of_row, run.cfg.probe.max_volumes)
        for side in (rows.train, rows.official_val)
    ]
    people = [{rows.person_of_row[int(r)] for r in side} for side in sides]
    is_useful = any(
        all(len(classes_of(side, of_row)) > 1 for side in sides) for of_row in targets_of(run).values()
    )
    return sides if is_useful and not people[0] & people[1] else []


def values_of(store: PreparedStore, column: str) -> dict[int, str]:
    """What the index says of every row in a column; rows where it does not know are absent."""
    return {int(row): value for row, value in store.index[column].items() if value != UNKNOWN}


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
