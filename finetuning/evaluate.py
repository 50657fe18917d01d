"""The probe table of a checkpoint: `python -m finetuning.evaluate --config FILE [--checkpoint URL]`.

In: a checkpoint of pretraining.train (default: best_probe.pt of the run), the prepared store, a label per
participant. Out: `${run.dir}/probe.json` and a printed table: the pre-trained encoder (EMA target), random
initialisation (the seed that is best on validation) and three baselines without an encoder; then the paired
difference pre-trained - random initialisation, its participant-bootstrap interval, and the sentence that it
allows. All follow the protocol of models.probes.participants: fitted on split train, C chosen on split val,
scored on the participants of `eval.split`.

Participants that pre-training saw are an error, unless eval.allow_overlap=true; the table then says so.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.decomposition import PCA

from data_setup.store.reader import PreparedStore
from finetuning.cohort import Cohort, count_overlap, read_cohort
from finetuning.embed import (
    check_fit,
    device_features,
    embed_rows,
    pretrained_encoder,
    random_encoder,
    raw_features,
)
from models.probes.intervals import (
    balanced_accuracy_draws,
    interval95,
    paired_difference,
    participant_draws,
    verdict,
)
from models.probes.participants import Fold, Prediction, balanced_accuracy, logistic_probe, macro_auroc
from utils import storage
from utils.checkpoint import load_checkpoint
from utils.cli import parse_cli, run_cli
from utils.config.load import flatten
from utils.config.schema import Config, keys_with
from utils.errors import UserError
from utils.log import setup_logging
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime

FORMAT_VERSION = 1
MAX_COMPONENTS = 256  # of the raw-voxel PCA
FEW_PER_CLASS = 5  # evaluated participants; below, the table says that its intervals are too narrow
log = logging.getLogger(__name__)


def probe_folds(cohort: Cohort, features: np.ndarray) -> tuple[Fold, Fold, Fold]:
    """Train, val and evaluated, from features [n, F] in the order of the cohort."""
    label = class_numbers(cohort)
    train, val, evaluated = (
        Fold(features[at], label[at], cohort.person[at]) for at in (cohort.fold == i for i in range(3))
    )
    return train, val, evaluated


def class_numbers(cohort: Cohort) -> np.ndarray:
    """int64 [n]."""
    return cohort.target[:, 0].astype(np.int64)


def find_checkpoint(cfg: Config) -> str:
    """model.checkpoint, else best_probe.pt of this run; UserError names the missing file."""
    if cfg.model.checkpoint is not None:
        return cfg.model.checkpoint
    if cfg.train.ckpt_dir is None:
        raise UserError("model.checkpoint: expected a checkpoint, found null, and train.ckpt_dir is null too")
    url = storage.join(cfg.train.ckpt_dir, "best_probe.pt")
    if not storage.exists(url, cfg.data.storage_options):
        raise UserError(
            f"{url}: expected the checkpoint with the best validation probe, found none; pretraining.train "
            "writes it where val participants have labels; name another one with --checkpoint URL"
        )
    return url


def fingerprint(cfg: Config, store: PreparedStore, cohort: Cohort, checksum: str) -> str:
    """A hash of all that probe.json depends on: checkpoint, keys of the protocol, volumes, labels, folds."""
    sections, keys = ("task.", "probe.", "eval."), {*keys_with("identity"), "seed", "train.use_bf16"}
    used = {key: value for key, value in flatten(cfg) if key.startswith(sections) or key in keys}
    volumes = store.index.loc[cohort.rows, "checksum"].tolist()
    table = [
        volumes,
        cohort.fold.tolist(),
        class_numbers(cohort).tolist(),
        cohort.person.tolist(),
        cohort.names,
    ]
    text = json.dumps([FORMAT_VERSION, checksum, used, table], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def table_row(name: str, label: str, size: int, prediction: Prediction, draws: np.ndarray) -> dict[str, Any]:
    """One line of the table as probe.json holds it."""
    return {
        "name": name,
        "label": label,
        "balanced_accuracy": balanced_accuracy(prediction),
        "ci95": list(interval95(balanced_accuracy_draws(prediction, draws))),
        "macro_auroc": macro_auroc(prediction),
        "chosen_c": prediction.chosen_c,
        "val_balanced_accuracy": prediction.val_score,
        "num_features": size,
    }


def evaluate(cfg: Config, runtime: Runtime) -> dict[str, Any]:
    """The content of probe.json; an existing file of the same checkpoint and configuration is reused."""
    url = find_checkpoint(cfg)
    state = load_checkpoint(url, cfg.data.storage_options)
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    check_fit(cfg, store, state, url)
    cohort = read_cohort(cfg, store)
    overlap = count_overlap(cfg, cohort, state["participants"], url)
    path = storage.join(cfg.run.dir, "probe.json")
    question = fingerprint(cfg, store, cohort, state["checksum"])
    if storage.exists(path):
        known = json.loads(storage.read_text(path))
        if known["fingerprint"] == question:
            log.info("%s already answers for this checkpoint and configuration: reused", path)
            return known

    num_evaluated = len(np.unique(cohort.person[cohort.fold == 2]))
    draws = participant_draws(num_evaluated, cfg.probe.bootstrap_samples, cfg.seed)

    def probe(features: np.ndarray) -> Prediction:
        return logistic_probe(*probe_folds(cohort, features))

    log.info(
        "%d volumes, %d classes, %d evaluated participants",
        len(cohort.rows),
        len(cohort.names),
        num_evaluated,
    )
    features = embed_rows(pretrained_encoder(cfg, state, url), cfg, store, cohort.rows, runtime)
    pretrained = probe(features)
    seeds = range(cfg.seed, cfg.seed + cfg.probe.random_init_seeds)
    arms = []
    for seed in seeds:
        arms.append(probe(embed_rows(random_encoder(cfg, seed), cfg, store, cohort.rows, runtime)))
    best = max(range(len(arms)), key=lambda i: arms[i].val_score or 0.0)
    voxels, profile = raw_features(cfg, store, cohort.rows, runtime)
    is_train = cohort.fold == 0
    pca = PCA(min(MAX_COMPONENTS, int(is_train.sum()) - 1, voxels.shape[1]), random_state=0)
    components = pca.fit(voxels[is_train]).transform(voxels)
    device = device_features(store, cohort.rows, cohort.rows[is_train])

    mean, ci95 = paired_difference(pretrained, arms[best], draws)
    width = features.shape[1]
    table = [
        table_row("pretrained", "pre-trained encoder (EMA target)", width, pretrained, draws),
        table_row("random_init", f"random initialisation (seed {seeds[best]})", width, arms[best], draws),
    ]
    for name, label, raw in (
        ("voxel_pca", "raw-voxel PCA", components),
        ("ascan_profile", "mean A-scan profile", profile),
        ("device", "device one-hot", device),
    ):
        table.append(table_row(name, label, raw.shape[1], probe(raw), draws))
    result = {
        "format_version": FORMAT_VERSION,
        "fingerprint": question,
        "checkpoint": url,
        "checkpoint_sha256": state["checksum"],
        "step": state["step"],
        "label_column": cfg.task.label_column,
        "classes": list(cohort.names),
        "split": cfg.eval.split,
        "n_participants": num_evaluated,
        "n_participants_train": len(np.unique(cohort.person[is_train])),
        "n_participants_val": len(np.unique(cohort.person[cohort.fold == 1])),
        "overlap": overlap,
        "rows": table,
        "paired_difference": {"mean": mean, "ci95": list(ci95)},
        "verdict": verdict(mean, ci95),
        "cautions": cautions(cfg, cohort, overlap),
        "notes": notes(cfg, seeds, arms),
    }
    storage.write_text(path, json.dumps(result, indent=1, allow_nan=False) + "\n")
    return result


def cautions(cfg: Config, cohort: Cohort, overlap: int) -> list[str]:
    """What weakens the verdict; shown wherever the verdict is."""
    lines = []
    if overlap:
        lines.append(
            f"OVERLAP: pre-training saw {overlap} of the evaluated participants (eval.allow_overlap=true)."
        )
    if cfg.eval.split == "val":
        lines.append(
            "C was chosen on the evaluated participants (eval.split=val): the numbers are optimistic."
        )
    evaluated = set(
        zip(cohort.person[cohort.fold == 2], class_numbers(cohort)[cohort.fold == 2], strict=True)
    )
    smallest = min(sum(label == number for _, label in evaluated) for number in range(len(cohort.names)))
    if smallest < FEW_PER_CLASS:
        lines.append(
            f"The smallest class has {smallest} evaluated participants: intervals of so few are too "
            "narrow, and nothing should be concluded from them."
        )
    return lines


def notes(cfg: Config, seeds: Sequence[int], arms: Sequence[Prediction]) -> list[str]:
    """How to read the table."""
    each = ", ".join(
        f"seed {s}: {a.val_score:.3f} on val, {balanced_accuracy(a):.3f} here"
        for s, a in zip(seeds, arms, strict=True)
    )
    return [
        f"Random initialisation is the seed that is best on validation participants ({each}).",
        "Intervals: participant bootstrap, all volumes of a participant pooled; "
        f"{cfg.probe.bootstrap_samples} resamples, the same for both sides of the difference.",
    ]


def format_table(result: dict[str, Any]) -> str:
    """The table for a terminal, the verdict last."""
    lines = [f"{'features':<36} {'bal. acc.':>9}  {'95 % interval':<15} {'AUROC':>6} {'val':>6} {'C':>7}"]
    for row in result["rows"]:
        auroc = "-" if row["macro_auroc"] is None else f"{row['macro_auroc']:.3f}"
        low, high = row["ci95"]
        lines.append(
            f"{row['label']:<36} {row['balanced_accuracy']:>9.3f}  {low:.3f} to {high:.3f}  {auroc:>6} "
            f"{row['val_balanced_accuracy']:>6.3f} {row['chosen_c']:>7g}"
        )
    return "\n".join([*lines, *result["notes"], *result["cautions"], result["verdict"]])


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate the checkpoint of a configuration and print its table."""
    cfg, _ = parse_cli("finetuning.evaluate", __doc__ or "", argv)
    setup_logging()
    print(format_table(evaluate(cfg, open_runtime(cfg.train.use_bf16))))


if __name__ == "__main__":
    run_cli(main)
