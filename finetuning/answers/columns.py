"""The columns of the leaderboard: what is computed of a row, each on the same cohorts, and what is kept of
it.

In: an `Entry`, cohorts, seeds. Out: cells by name. `linear` is the probe of finetuning.features.entries
(logistic, ridge for a value; C chosen on validation), the same for encoders and baselines; `hidden` is one
hidden layer. `attentive` trains a head on the tokens of an encoder, `fine-tuned` the encoder too, once a
seed; a row without one has no such cell.

What is in the folder is not computed again: one file an answer, written whole, `answers/NAME.json` with a
digest of its content, by the entry's identity, the column and the digest of the question (data and protocol).
A damaged one is computed again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL, Cohort, low_shot
from finetuning.cohort.ledger import digest
from finetuning.cohort.metrics import Predictions, Scored
from finetuning.cohort.source import Source
from finetuning.features.entries import Encoder, Entry, Probed, Volumes, kept_features, probe
from finetuning.heads.finetune import finetune
from finetuning.heads.frozen import scores_of_fold
from finetuning.heads.head_file import NAME as HEAD_NAME
from finetuning.heads.head_file import open_head, predict_rows
from utils import storage
from utils.errors import EXIT_FINISHED, EXIT_STOPPED, UserError

log = logging.getLogger(__name__)
FORMAT_VERSION = 3
PARTS = ("unit", "person", "truth", "scores")
FRACTIONS = (0.01, 0.05, 0.1, 0.25)  # of the training participants; all of them are the linear column
LINEAR, HIDDEN, LOW_SHOT, DEVICES = "linear", "hidden", "low-shot", "devices"
BY_FOLD = "by-fold"  # what the random seed of each fold is chosen by
ATTENTIVE, TUNED = "attentive", "fine-tuned"


@dataclass(frozen=True)
class Cell:
    """Predictions of the evaluated units, one for each seed, and the scores on validation [seeds]."""

    predictions: tuple[Predictions, ...]
    val_scores: tuple[float, ...]
    participants: int  # of the training fold, largest over seeds

    @property
    def val(self) -> float:
        return float(np.mean(self.val_scores))


Cells = Mapping[str, Cell]  # of a column of one row


@dataclass(frozen=True)
class Answers:
    """The kept answers to one question; `question` is a digest of data and protocol."""

    folder: str
    question: str

    def url(self, identity: str, column: str) -> str:
        name = digest([FORMAT_VERSION, self.question, identity, column])[:32]
        return storage.join(self.folder, "answers", f"{name}.json")

    def read(self, identity: str, column: str) -> Cells | None:
        """The kept answer; None where there is none, or a damaged file."""
        url = self.url(identity, column)
        if not storage.exists(url):
            return None
        try:
            kept = json.loads(storage.read_bytes(url))
            cells = kept["cells"]
            if kept["digest"] != digest([identity, column, cells]):
                raise ValueError("expected the content that its digest names, found another")
        except (ValueError, KeyError, TypeError) as error:
            log.warning("%s: damaged (%s); it is computed again", url, error)
            return None
        return {
            name: Cell(tuple(map(_predictions, one["seeds"])), tuple(one["val"]), one["participants"])
            for name, one in cells.items()
        }

    def write(self, identity: str, column: str, answer: Cells) -> None:
        cells = {
            name: {
                "participants": cell.participants,
                "val": cell.val_scores,
                "seeds": [
                    {"kind": p.kind, "names": p.names} | {part: getattr(p, part).tolist() for part in PARTS}
                    for p in cell.predictions
                ],
            }
            for name, cell in answer.items()
        }
        content = {"column": column, "identity": identity, "cells": cells}
        text = json.dumps(content | {"digest": digest([identity, column, cells])})
        storage.write_text(self.url(identity, column), text)


def _predictions(one: Mapping[str, Any]) -> Predictions:
    unit, person = (np.array(one[part], str) for part in PARTS[:2])
    truth, scores = (np.array(one[part], float) for part in PARTS[2:])
    return Predictions(str(one["kind"]), tuple(one["names"]), unit, person, truth, scores)


@dataclass(frozen=True)
class Question:
    """What is asked of every row."""

    volumes: Volumes
    cohorts: Sequence[Cohort]
    seeds: Sequence[int]
    folder: str  # of its runs of fine-tuning


def linear(entry: Entry, question: Question) -> dict[str, Cell]:
    """The probe on all training participants: the cell `linear`."""
    return {LINEAR: _probed_cell([probe(question.cohorts, entry.features())])}


def hidden(entry: Entry, question: Question) -> dict[str, Cell]:
    """One hidden layer in place of the linear probe: the cell `hidden`."""
    return {HIDDEN: _probed_cell([probe(question.cohorts, entry.features(), is_hidden=True)])}


def by_fold(entry: Entry, question: Question) -> dict[str, Cell]:
    """The linear probe of each fold: a cell a fold, in their order. No column of the table."""
    return {
        f"fold {number}": _probed_cell([probe([cohort], entry.features())])
        for number, cohort in enumerate(question.cohorts)
    }


def low_shots(entry: Entry, question: Question) -> dict[str, Cell]:
    """A cell for each share of the training participants; every seed draws its own, the same for all rows."""
    cells = {}
    for fraction in FRACTIONS:
        drawn = [[low_shot(c, fraction, seed) for c in question.cohorts] for seed in question.seeds]
        probed = [probe(cohorts, entry.features()) for cohorts in drawn]
        cells[f"{100 * fraction:g} %"] = _probed_cell(probed)
    return cells


def device_tables(entry: Entry, question: Question) -> dict[str, Cell]:
    """`without A`: trained on all other devices, evaluated on A; `A on B`: trained on A, evaluated on B.

    A cell is missing where a fold has no volume of the device, or training fewer than two classes.
    """
    cells = {}
    devices = [(c, device_of(question.volumes, c)) for c in question.cohorts]
    names = sorted({name for _, of in devices for name in of.tolist()})
    for name in names:
        without = [c.where(np.where(c.fold == EVALUATED, of == name, of != name)) for c, of in devices]
        if all(map(_can_be_learnt, without)):
            cells[f"without {name}"] = _probed_cell([probe(without, entry.features())])
        alone = [c.where((c.fold == EVALUATED) | (of == name)) for c, of in devices]
        if not all(map(_can_be_learnt, alone)):
            continue
        probed = probe(alone, entry.features())
        of_alone = [device_of(question.volumes, cohort) for cohort in alone]
        for other in names:
            masks = tuple(of == other for of in of_alone)
            if all(((c.fold == EVALUATED) & m).any() for c, m in zip(alone, masks, strict=True)):
                cells[f"{name} on {other}"] = _probed_cell([probed], masks)
    return cells


def attentive(entry: Entry, question: Question) -> dict[str, Cell]:
    """An attentive head on the frozen tokens, by the grid of head.*: a training a seed."""
    assert entry.encoder is not None
    kept = [kept_features(question.volumes, entry.encoder(cohort)) for cohort in question.cohorts]

    def of_fold(seed: int, number: int) -> tuple[np.ndarray, float]:
        cfg = kept[number].cfg
        cfg = replace(cfg, seed=seed, head=replace(cfg.head, kind="attentive"))
        return scores_of_fold(replace(kept[number], cfg=cfg), question.cohorts[number])

    return {ATTENTIVE: _trained_cell(question, of_fold)}


def fine_tuned(entry: Entry, question: Question) -> dict[str, Cell]:
    """The whole model, a run a seed, which goes on where it was stopped; raises `Stopped` after SIGTERM."""
    assert entry.encoder is not None
    of, volumes = entry.encoder, question.volumes

    def of_fold(seed: int, number: int) -> tuple[np.ndarray, float]:
        cohort = question.cohorts[number]
        source = _tuning_source(of(cohort), entry, question, seed, number)
        if finetune(source, volumes.store, cohort, volumes.runtime) != EXIT_FINISHED:
            by = volumes.runtime.stopped_by
            raise Stopped(f"{source.cfg.run.dir}: stopped by {by}; the same command again goes on")
        head = open_head(storage.join(str(source.cfg.train.ckpt_dir), f"{HEAD_NAME}.pt"))
        scores = predict_rows(head, volumes.store, cohort.rows, volumes.runtime)
        return scores, float(head.state["validation"]["score"])

    return {TUNED: _trained_cell(question, of_fold)}


class Stopped(UserError):
    """The command was stopped; the same command again goes on."""

    exit_code = EXIT_STOPPED


def _tuning_source(encoder: Encoder, entry: Entry, question: Question, seed: int, number: int) -> Source:
    """What a run of fine-tuning starts from: the encoder's weights, and a separate folder."""
    name = hashlib.sha256(entry.identity.encode()).hexdigest()[:12]
    folder = storage.join(question.folder, f"{name}_seed_{seed}_fold_{number}")
    of = encoder.source.cfg
    cfg = replace(
        of,
        seed=seed,
        run=replace(of.run, dir=folder),
        train=replace(of.train, ckpt_dir=storage.join(folder, "checkpoints")),
        finetune=replace(of.finetune, encoder="trained"),
        wandb=replace(of.wandb, mode="disabled"),
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


def _can_be_learnt(cohort: Cohort) -> bool:
    """Whether a probe can be fitted, chosen and judged."""
    train = cohort.fold == TRAIN
    varies = all(len(np.unique(column)) > 1 for column in cohort.target[train].T) and train.any()
    return bool(varies and (cohort.fold == VAL).any() and (cohort.fold == EVALUATED).any())


def _probed_cell(of_seeds: Sequence[Probed], masks: tuple[np.ndarray, ...] | None = None) -> Cell:
    """The cell of a probe a seed; `masks`, bool [n] of each cohort: of only these volumes."""
    return _cell([p.scored for p in of_seeds], [p.val_score for p in of_seeds], masks)


def _trained_cell(question: Question, of_fold: Callable[[int, int], tuple[np.ndarray, float]]) -> Cell:
    """The cell of a training for each seed and fold, whose scores [n, C] and validation `of_fold` says."""
    scored, vals = [], []
    for seed in question.seeds:
        folds = [of_fold(seed, number) for number in range(len(question.cohorts))]
        scores, of_val = zip(*folds, strict=True)
        scored.append(Scored(tuple(question.cohorts), tuple(scores)))
        vals.append(float(np.mean(of_val)))
    return _cell(scored, vals)


def _cell(
    scored: Sequence[Scored], vals: Sequence[float], masks: tuple[np.ndarray, ...] | None = None
) -> Cell:
    people = [len(np.unique(c.person[c.fold == TRAIN])) for s in scored for c in s.cohorts]
    return Cell(tuple(s.evaluated(masks) for s in scored), tuple(vals), max(people))
