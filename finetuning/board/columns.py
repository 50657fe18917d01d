"""The columns of the leaderboard: what is computed of a row, each on the same cohorts.

In: an `Entry`, cohorts, seeds. Out: cells by name. `linear` is the probe of finetuning.features.probing
(logistic, ridge for a value; C chosen on validation), the same for encoders and baselines; `hidden` is one
hidden layer. `attentive` trains a head on the tokens of an encoder, `fine-tuned` the encoder too, once a
seed; a row without one has no such cell.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from finetuning.board.answers import Cell
from finetuning.board.entries import Encoder, Entry, Volumes, kept_features
from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL, Cohort, low_shot
from finetuning.cohort.predictions import Predictions, Scored
from finetuning.cohort.source import Source
from finetuning.features.probing import probe
from finetuning.heads.finetune import finetune
from finetuning.heads.frozen import scores_of_fold
from finetuning.heads.head_file import NAME as HEAD_NAME
from finetuning.heads.head_file import open_head, predict_rows
from utils import storage
from utils.config.schema import Config
from utils.errors import EXIT_FINISHED, EXIT_STOPPED, UserError

FRACTIONS = (0.01, 0.05, 0.1, 0.25)  # of the training participants; all of them are the linear column
LINEAR, HIDDEN, LOW_SHOT, DEVICES = "linear", "hidden", "low-shot", "devices"
BY_FOLD = "by-fold"  # what the random seed of each fold is chosen by
ATTENTIVE, TUNED = "attentive", "fine-tuned"


@dataclass(frozen=True)
class Question:
    """What is asked of every row."""

    volumes: Volumes
    cohorts: Sequence[Cohort]
    seeds: Sequence[int]
    folder: str  # of its runs of fine-tuning


def linear(entry: Entry, question: Question) -> dict[str, Cell]:
    """The probe on all training participants: the cell `linear`."""
    probed = probe(question.cohorts, entry.features())
    return {LINEAR: _cell([probed.scored.evaluated()], [probed.val_score], [question.cohorts])}


def hidden(entry: Entry, question: Question) -> dict[str, Cell]:
    """One hidden layer in place of the linear probe: the cell `hidden`."""
    probed = probe(question.cohorts, entry.features(), is_hidden=True)
    return {HIDDEN: _cell([probed.scored.evaluated()], [probed.val_score], [question.cohorts])}


def by_fold(entry: Entry, question: Question) -> dict[str, Cell]:
    """The linear probe of each fold: a cell a fold, in their order. No column of the table."""
    cells = {}
    for number, cohort in enumerate(question.cohorts):
        probed = probe([cohort], entry.features())
        cells[f"fold {number}"] = _cell([probed.scored.evaluated()], [probed.val_score], [[cohort]])
    return cells


def low_shots(entry: Entry, question: Question) -> dict[str, Cell]:
    """A cell for each share of the training participants; every seed draws its own, the same for all rows."""
    cells = {}
    for fraction in FRACTIONS:
        drawn = [[low_shot(c, fraction, seed) for c in question.cohorts] for seed in question.seeds]
        probed = [probe(cohorts, entry.features()) for cohorts in drawn]
        cells[share_name(fraction)] = _cell(
            [p.scored.evaluated() for p in probed], [p.val_score for p in probed], drawn
        )
    return cells


def share_name(fraction: float) -> str:
    """`5 %`, of 0.05."""
    return f"{100 * fraction:g} %"


def device_tables(entry: Entry, question: Question) -> dict[str, Cell]:
    """`without A`: trained on all other devices, evaluated on A; `A on B`: trained on A, evaluated on B.

    A cell is missing where a fold has no volume of the device, or training fewer than two classes.
    """
    cells = {}
    device = [device_of(question.volumes, cohort) for cohort in question.cohorts]
    for name in sorted({d for of in device for d in of.tolist()}):
        without = [
            keep(c, np.where(c.fold == EVALUATED, of == name, of != name))
            for c, of in zip(question.cohorts, device, strict=True)
        ]
        if all(_can_be_learnt(cohort) for cohort in without):
            probed = probe(without, entry.features())
            predictions = [probed.scored.evaluated()]
            cells[f"without {name}"] = _cell(predictions, [probed.val_score], [without])
        alone = [
            keep(c, (c.fold == EVALUATED) | (of == name))
            for c, of in zip(question.cohorts, device, strict=True)
        ]
        if not all(_can_be_learnt(cohort) for cohort in alone):
            continue
        probed = probe(alone, entry.features())
        of_alone = [device_of(question.volumes, cohort) for cohort in alone]
        for other in sorted({d for of in device for d in of.tolist()}):
            masks = tuple(of == other for of in of_alone)
            if all(((c.fold == EVALUATED) & m).any() for c, m in zip(alone, masks, strict=True)):
                predictions = [probed.scored.evaluated(masks)]
                cells[f"{name} on {other}"] = _cell(predictions, [probed.val_score], [alone])
    return cells


def attentive(entry: Entry, question: Question) -> dict[str, Cell]:
    """An attentive head on the frozen tokens, by the grid of head.*: a training a seed."""
    assert entry.encoder is not None
    encoders = [entry.encoder(cohort) for cohort in question.cohorts]
    kept = [kept_features(question.volumes, encoder) for encoder in encoders]
    predictions, vals = [], []
    for seed in question.seeds:
        parts = [
            scores_of_fold(replace(features, cfg=_attentive(encoder.cfg, seed)), cohort)
            for cohort, features, encoder in zip(question.cohorts, kept, encoders, strict=True)
        ]
        scores, of_val = zip(*parts, strict=True)
        predictions.append(Scored(tuple(question.cohorts), tuple(scores)).evaluated())
        vals.append(float(np.mean(of_val)))
    return {ATTENTIVE: _cell(predictions, vals, [question.cohorts] * len(vals))}


def _attentive(cfg: Config, seed: int) -> Config:
    return replace(cfg, seed=seed, head=replace(cfg.head, kind="attentive"))


def fine_tuned(entry: Entry, question: Question) -> dict[str, Cell]:
    """The whole model, trained by finetune.*: a run a seed, which goes on where it was stopped.

    From random initialisation this is supervised training from scratch. Raises `Stopped` after SIGTERM.
    """
    assert entry.encoder is not None
    volumes = question.volumes
    predictions, vals = [], []
    for seed in question.seeds:
        scores, of_val = [], []
        for number, cohort in enumerate(question.cohorts):
            source = _tuning_source(entry.encoder(cohort), entry, question, seed, number)
            if finetune(source, volumes.store, cohort, volumes.runtime) != EXIT_FINISHED:
                by = volumes.runtime.stopped_by
                raise Stopped(f"{source.cfg.run.dir}: stopped by {by}; the same command again goes on")
            head = open_head(storage.join(str(source.cfg.train.ckpt_dir), f"{HEAD_NAME}.pt"))
            scores.append(predict_rows(head, volumes.store, cohort.rows, volumes.runtime))
            of_val.append(float(head.state["validation"]["score"]))
        predictions.append(Scored(tuple(question.cohorts), tuple(scores)).evaluated())
        vals.append(float(np.mean(of_val)))
    return {TUNED: _cell(predictions, vals, [question.cohorts] * len(vals))}


class Stopped(UserError):
    """The command was stopped; the same command again goes on."""

    exit_code = EXIT_STOPPED


def _tuning_source(encoder: Encoder, entry: Entry, question: Question, seed: int, number: int) -> Source:
    """What a run of fine-tuning starts from: the encoder's weights, and a separate folder."""
    name = hashlib.sha256(entry.identity.encode()).hexdigest()[:12]
    folder = storage.join(question.folder, f"{name}_seed_{seed}_fold_{number}")
    cfg = replace(
        encoder.cfg,
        seed=seed,
        run=replace(encoder.cfg.run, dir=folder),
        train=replace(encoder.cfg.train, ckpt_dir=storage.join(folder, "checkpoints")),
        finetune=replace(encoder.cfg.finetune, encoder="trained"),
        wandb=replace(encoder.cfg.wandb, mode="disabled"),
    )
    if not encoder.is_random:
        return replace(encoder.source, cfg=cfg)
    weights = {f"target_encoder.{key}": value for key, value in encoder.module.state_dict().items()}
    state = encoder.source.state | {"model": weights, "participants": [], "checksum": entry.identity}
    return Source(cfg, f"random initialisation {entry.name}", state)


Column = Callable[[Entry, Question], dict[str, Cell]]
COLUMNS: dict[str, Column] = {
    LINEAR: linear,
    HIDDEN: hidden,
    BY_FOLD: by_fold,
    LOW_SHOT: low_shots,
    DEVICES: device_tables,
    ATTENTIVE: attentive,
    TUNED: fine_tuned,
}
NEEDS_ENCODER = {ATTENTIVE, TUNED}


def device_of(volumes: Volumes, cohort: Cohort) -> np.ndarray:
    """The device folder of every volume of a cohort, str [n]."""
    return volumes.store.index.loc[cohort.rows, "device"].fillna("unknown").to_numpy(str)


def keep(cohort: Cohort, chosen: np.ndarray) -> Cohort:
    """The cohort with some of its volumes, bool [n]."""
    columns = {name: getattr(cohort, name)[chosen] for name in ("rows", "fold", "target", "unit", "person")}
    return replace(cohort, **columns)


def _can_be_learnt(cohort: Cohort) -> bool:
    """Whether a probe can be fitted, chosen and judged."""
    train = cohort.fold == TRAIN
    varies = all(len(np.unique(column)) > 1 for column in cohort.target[train].T) and train.any()
    return bool(varies and (cohort.fold == VAL).any() and (cohort.fold == EVALUATED).any())


def _cell(
    predictions: Sequence[Predictions], vals: Sequence[float], cohorts_of_seeds: Sequence[Sequence[Cohort]]
) -> Cell:
    counts = [
        len(np.unique(cohort.person[cohort.fold == TRAIN]))
        for cohorts in cohorts_of_seeds
        for cohort in cohorts
    ]
    return Cell(tuple(predictions), tuple(float(v) for v in vals), max(counts))
