"""Probes between training steps: what the target encoder's features tell of labels, and of shortcuts.

Fitted on training participants, scored on the official validation split, which is what selects checkpoints.
The volumes are embedded once for all probes. Labels are what we want to find; the device and the side of the
body are shortcut detectors: features that tell them carry the scanner or the mirror image.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from data_setup.loader import evaluation_batches
from data_setup.normalisation import view
from data_setup.store.reader import PreparedStore
from models.probes.features import embed
from models.probes.participants import Fold, balanced_accuracy, knn_probe, ridge_classifier_probe
from pretraining.run import Run
from utils.indices import evenly_spaced

log = logging.getLogger(__name__)
SHORTCUTS = ("device", "laterality")
UNKNOWN = "unknown"  # what the store writes where a laterality is not told


def probe_scores(run: Run) -> dict[str, float | None]:
    """Balanced accuracies val/probe (kNN on labels), val/ridge, and val/knn_X, val/ridge_X of each shortcut.

    Null where a side has fewer than two classes, or a participant is on both sides.
    """
    rows = run.rows
    targets = {"": rows.label_of_row} | {f"_{name}": values_of(run.store, name) for name in SHORTCUTS}
    names = {key: (f"val/knn{key}" if key else "val/probe", f"val/ridge{key}") for key in targets}
    scores: dict[str, float | None] = {name: None for pair in names.values() for name in pair}
    sides = [
        choose_rows(side, rows.label_of_row, run.cfg.probe.max_volumes)
        for side in (rows.train, rows.official_val)
    ]
    people = [{rows.person_of_row[int(r)] for r in side} for side in sides]
    wanted = {
        key: of_row
        for key, of_row in targets.items()
        if all(len(classes_of(side, of_row)) > 1 for side in sides)
    }
    if people[0] & people[1] or not wanted:
        return scores
    embedded = [embed_rows(run, side) for side in sides]
    for key, of_row in wanted.items():
        folds = make_folds(embedded, of_row, rows.person_of_row)
        if folds is not None:
            by_knn, by_ridge = names[key]
            scores[by_knn] = balanced_accuracy(knn_probe(*folds))
            scores[by_ridge] = balanced_accuracy(ridge_classifier_probe(*folds))
    return scores


def values_of(store: PreparedStore, column: str) -> dict[int, str]:
    """What the index says of every row in a column; rows where it does not know are absent."""
    return {int(row): value for row, value in store.index[column].items() if value != UNKNOWN}


def choose_rows(side: np.ndarray, label_of_row: Mapping[int, str], limit: int) -> np.ndarray:
    """At most `limit` rows, evenly spread: of those with a label where any has one."""
    labelled = np.array([int(r) for r in side if int(r) in label_of_row], dtype=int)
    pool = labelled if len(labelled) else np.asarray(side, dtype=int)
    if len(pool) == 0:
        return pool
    return pool[evenly_spaced(len(pool), limit).numpy()]


def classes_of(side: np.ndarray, of_row: Mapping[int, str]) -> set[str]:
    return {of_row[int(r)] for r in side if int(r) in of_row}


def embed_rows(run: Run, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pooled target encoder features [n, 2E] of rows [n]; rows whose features are not finite are left out.

    Several processes share the volumes, and all of them get all features.
    """
    runtime = run.runtime
    own = np.array(runtime.group.split_among_ranks(chosen.tolist()), dtype=int)
    size = run.cfg.train.per_core_batch_size * runtime.evaluation_devices
    batches = runtime.until_stopped("probe", evaluation_batches(run.cfg, run.store, own, size))
    on_device = (runtime.to_device_padded(b, size) for b in batches)
    loaded = ((view(b, 1), b["context_valid"]) for b in on_device)
    if not len(own):
        list(batches)  # none, but agreed with the processes that have some
    part = [*embed(run.model.target_encoder, loaded, runtime)[: len(own)]] if len(own) else []
    features = np.stack(runtime.group.merge_from_ranks(part))
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
