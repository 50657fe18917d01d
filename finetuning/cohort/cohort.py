"""Who a task is learnt from and judged on: labelled volumes of the store in three folds.

In: a configuration, the store, the labels of finetuning.cohort.labels. Out: a `Cohort`: for every volume its
row in the store, its fold, its target and whom its prediction is for. With eval.protocol official the folds
are the splits of participants.tsv; with crossfit a cohort for each of eval.folds parts of all labelled people
that pre-training did not see (with eval.allow_overlap of all), so that each of them is evaluated once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from data_setup.manifest import select_wanted
from data_setup.store.reader import PreparedStore
from data_setup.tables.splits import seeded_order
from finetuning.cohort.labels import Labels, label_columns, read_labels, units_of
from utils.config.schema import DENSE_KINDS, Config
from utils.errors import ConfigError, UserError

TRAIN, VAL, EVALUATED = 0, 1, 2
MIN_PARTICIPANTS = 2  # in each fold
QUANTILES = 4  # strata of a value
WAYS_OUT = (
    "; fill recommended_split of participants.tsv and prepare again, or evaluate with "
    "eval.protocol=crossfit, or label more people"
)
CLASS_KINDS = ("classification", "ordinal")
Stratum = tuple[tuple[float, ...], ...]  # the distinct targets of a person, sorted
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cohort:
    """Labelled volumes of the folds, each fold in store order; no person is in two folds.

    With eval.split=val the rows of val come twice: as VAL and as EVALUATED.
    """

    kind: str  # of cfg.task.kind
    names: tuple[str, ...]  # classes (ordinal: lowest first), labels of multilabel, or the one value's column
    rows: np.ndarray  # store rows [n]
    fold: np.ndarray  # TRAIN, VAL or EVALUATED [n]
    target: np.ndarray  # float64 [n, T]: a class number or a value (T = 1); multilabel: 0 or 1 a name
    unit: np.ndarray  # str [n]: whom the prediction is for: SOP instance, PERSON_L or PERSON_R, or person
    person: np.ndarray  # str [n]
    unmatched: tuple[str, ...] = ()  # ids of the labels' table that the store does not have

    @property
    def num_outputs(self) -> int:
        """Numbers that a head predicts: one a class, one a label, or one value."""
        return 1 if self.kind == "regression" else len(self.names)

    def where(self, chosen: np.ndarray) -> Cohort:
        """Some of the volumes: a mask [n] or places."""
        names = ("rows", "fold", "target", "unit", "person")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})


def read_cohorts(cfg: Config, store: PreparedStore, seen: Collection[str]) -> list[Cohort]:
    """The cohorts of eval.protocol: one, or one a fold; `seen` are the people of pre-training."""
    if cfg.eval.protocol == "crossfit":
        return crossfit_cohorts(cfg, store, seen)
    return [read_cohort(cfg, store)]


def read_cohort(cfg: Config, store: PreparedStore) -> Cohort:
    """Kept, labelled volumes of splits train, val and eval.split; UserError if one is too small."""
    labels, index = _labelled_rows(cfg, store)
    splits = ("train", "val", cfg.eval.split)
    cohort = _cohort(cfg, labels, [index[index["split"] == split] for split in splits])
    for fold, split in enumerate(splits):
        _require_fold(cfg, cohort, fold, f"{store.url}: split {split}", WAYS_OUT)
    lacking = sorted(set(_classes(cohort)) - set(_classes(cohort, TRAIN)))
    if lacking:
        raise UserError(
            f"{cfg.task.label_column}: expected every class among the participants of split train, found "
            f"{[cohort.names[number] for number in lacking]} only in val or {cfg.eval.split}"
        )
    return _without_empty_classes(cohort, "split train")


def crossfit_cohorts(cfg: Config, store: PreparedStore, seen: Collection[str]) -> list[Cohort]:
    """A cohort a fold of all labelled people that are not in `seen`, or with eval.allow_overlap of all: fold
    k is EVALUATED, the next is VAL.

    Folds are of people, stratified by class, or by quantile of the value, and follow from cfg.seed. Every
    person is EVALUATED in one of them. UserError where a class has fewer than eval.folds people.
    """
    folds = cfg.eval.folds
    assert folds is not None
    labels, index = _labelled_rows(cfg, store)
    is_seen, where = index["person_id"].isin(list(seen)), f"{store.url}: labelled people"
    if is_seen.any() and not cfg.eval.allow_overlap:
        where += (
            " that pre-training did not see (eval.allow_overlap=true takes in the "
            f"{index['person_id'][is_seen].nunique()} others, of whom it saw images and no labels)"
        )
        index = index[~is_seen]
    whole = _cohort(cfg, labels, [index])
    _require_fold(cfg, whole, TRAIN, where)
    _require_people(cfg, whole, where)
    whole = _without_empty_classes(whole, where)
    people = sorted(set(whole.person.tolist()))
    place = {p: n for n, p in enumerate(seeded_order(people, cfg.seed, "crossfit"))}
    strata = _strata(whole, math.ceil(len(people) / folds))
    order = sorted(people, key=lambda p: (strata[p], place[p]))
    fold_of = {p: n % folds for n, p in enumerate(order)}
    part = np.array([fold_of[p] for p in whole.person.tolist()])
    cohorts = []
    for evaluated in range(folds):
        val = (evaluated + 1) % folds
        sides = [(part != evaluated) & (part != val), part == val, part == evaluated]
        cohort, at = _take(whole, sides), f"{where}: fold {evaluated + 1} of {folds}"
        _require_fold(cfg, cohort, TRAIN, at)
        lacking = sorted(set(_classes(cohort)) - set(_classes(cohort, TRAIN)))
        if lacking:
            names = [cohort.names[number] for number in lacking]
            raise UserError(f"{at}: expected every class to train on, found nobody of {names}")
        cohorts.append(cohort)
    return cohorts


def count_overlap(cfg: Config, cohort: Cohort, participants_seen: Iterable[str], url: str) -> int:
    """How many evaluated participants the checkpoint saw; UserError unless that is 0 or allowed."""
    people = cohort.person[cohort.fold == EVALUATED].tolist()
    return count_seen(cfg, people, {"pre-training": participants_seen}, url)


def count_seen(cfg: Config, people: Iterable[str], seen: Mapping[str, Iterable[str]], url: str) -> int:
    """How many evaluated people were seen in a training, by its name; UserError unless 0 or allowed."""
    shared = {stage: sorted(set(people) & set(ids)) for stage, ids in seen.items()}
    for stage, ids in shared.items():
        if ids and not cfg.eval.allow_overlap:
            raise UserError(
                f"{url}: expected no participant of split {cfg.eval.split} in its {stage}, found "
                f"{len(ids)} ({', '.join(ids[:3])}); eval.allow_overlap=true evaluates them all the same, "
                "and the table says so"
            )
    return len({person for ids in shared.values() for person in ids})


def seen_by_head(cfg: Config, state: Mapping[str, Any]) -> dict[str, list[str]]:
    """Whom a head's file says that a training saw; with eval.split=val its choice is no training."""
    people = state["participants"]
    seen = {"training": people["train"], "encoder's pre-training": state["pretraining_participants"]}
    return seen | ({"validation": people["val"]} if cfg.eval.split != "val" else {})


def low_shot(cohort: Cohort, fraction: float, seed: int) -> Cohort:
    """The same cohort with a share of its TRAIN participants, in (0, 1]; VAL and EVALUATED are unchanged.

    The share is stratified like the folds of crossfit and has each class (of a value each quarter, of
    multilabel each label's 0 and 1) at least once, so it may be larger than asked. Shares are nested: who is
    among 5 % is among 10 % of the same seed.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction: expected a number in (0, 1], found {fraction}")
    train = _take(cohort, [cohort.fold == TRAIN])
    strata = _strata(train, QUANTILES)
    members: dict[Stratum, list[str]] = {}
    for person in seeded_order(list(strata), seed, "low_shot"):
        members.setdefault(strata[person], []).append(person)
    place = {p: (n + 0.5) / len(ids) for ids in members.values() for n, p in enumerate(ids)}
    order = sorted(strata, key=lambda p: (place[p], strata[p], p))
    covered: set[tuple[int, float]] = set()
    first = []  # whom a walk along the order meets as the first of a class
    for person in order:
        classes = {(column, value) for row in strata[person] for column, value in enumerate(row)}
        if not classes <= covered:
            first.append(person)
            covered |= classes
    ranked = first + [p for p in order if p not in set(first)]
    count = max(len(first), math.floor(fraction * len(ranked) + 0.5))
    chosen = np.isin(cohort.person, ranked[:count])
    return _take(cohort, [chosen & (cohort.fold == TRAIN), cohort.fold == VAL, cohort.fold == EVALUATED])


def summary(fold: np.ndarray, person: np.ndarray) -> str:
    """Volumes and participants of the folds in one line."""
    parts = []
    for name, number in (("train", TRAIN), ("val", VAL), ("evaluated", EVALUATED)):
        chosen = person[fold == number]
        parts.append(f"{name} {len(chosen)} volumes of {len(np.unique(chosen))}")
    return f"{', '.join(parts)} participants"


def _labelled_rows(cfg: Config, store: PreparedStore) -> tuple[Labels, pd.DataFrame]:
    """The labels, and the kept rows of the store that have one and pass the filters, with a column `unit`."""
    if cfg.task.kind in DENSE_KINDS:
        raise ConfigError(
            f"task.kind: expected a kind with labels, found {cfg.task.kind}: finetuning.train and "
            "finetuning.evaluate --head take it"
        )
    listed = store.index[store.index["listed"]]
    labels = read_labels(cfg, listed)
    index = listed[listed["row"].isin(store.kept)]
    index = select_wanted(cfg, index)  # a store may hold more than the configuration asks for
    index = index.assign(unit=units_of(index, cfg.task.unit))
    nobody = int(index["unit"].isna().sum())
    if nobody:
        log.warning("%s: %d volumes of an unknown eye are left out", store.url, nobody)
    return labels, index[index["unit"].isin(list(labels.target))]


def _cohort(cfg: Config, labels: Labels, parts: Sequence[pd.DataFrame]) -> Cohort:
    """The cohort whose folds are `parts`, in the order TRAIN, VAL, EVALUATED."""
    index = pd.concat(parts)
    target = [labels.target[unit] for unit in index["unit"]]
    width = len(labels.names) if cfg.task.kind == "multilabel" else 1
    return Cohort(
        kind=cfg.task.kind,
        names=labels.names,
        rows=index.index.to_numpy(),
        fold=np.repeat(np.arange(len(parts)), [len(part) for part in parts]),
        target=np.array(target, np.float64).reshape(len(index), width),
        unit=index["unit"].to_numpy(str),
        person=index["person_id"].to_numpy(str),
        unmatched=labels.unmatched,
    )


def _take(cohort: Cohort, sides: Sequence[np.ndarray]) -> Cohort:
    """The cohort whose folds are these rows of `cohort`: a mask [n] a fold."""
    at = np.concatenate([np.flatnonzero(side) for side in sides])
    fold = np.repeat(np.arange(len(sides)), [int(side.sum()) for side in sides])
    return replace(cohort.where(at), fold=fold)


def _classes(cohort: Cohort, fold: int | None = None) -> list[int]:
    """The class numbers of a fold, or of all; none where the target is no class."""
    if cohort.kind not in CLASS_KINDS:
        return []
    chosen = cohort.target[:, 0] if fold is None else cohort.target[cohort.fold == fold, 0]
    return [int(number) for number in np.unique(chosen)]


def _without_empty_classes(cohort: Cohort, where: str) -> Cohort:
    """Class numbers without those that nobody has; UserError where task.names names one of these."""
    present = _classes(cohort)
    if cohort.kind not in CLASS_KINDS or len(present) == len(cohort.names):
        return cohort
    if cohort.kind == "ordinal":
        empty = [name for number, name in enumerate(cohort.names) if number not in present]
        raise UserError(f"task.names: expected classes of {where}, found nobody of {empty}")
    names = tuple(cohort.names[number] for number in present)
    return replace(cohort, names=names, target=np.searchsorted(present, cohort.target).astype(np.float64))


def _require_fold(cfg: Config, cohort: Cohort, fold: int, where: str, advice: str = "") -> None:
    """Raise UserError where a fold has too few people, or, VAL apart, nothing to tell apart."""
    chosen = cohort.fold == fold
    num_people = len(np.unique(cohort.person[chosen]))
    what = "classes" if cohort.kind in CLASS_KINDS else "values"
    for number, column in enumerate(label_columns(cfg.task)):
        num_values = len(np.unique(cohort.target[chosen, number]))
        if num_people < MIN_PARTICIPANTS or (fold != VAL and num_values < 2):
            raise UserError(
                f"{where}: expected {MIN_PARTICIPANTS} participants or more, of two {column} {what}, "
                f"found {num_people} of {num_values}: no probe is possible{advice}"
            )


def _require_people(cfg: Config, cohort: Cohort, where: str) -> None:
    """Raise UserError unless every class (0 and 1 of every label) has a person for each fold of crossfit."""
    folds = cfg.eval.folds or 0
    if cohort.kind == "regression":
        num_people = len(np.unique(cohort.person))
        groups = {f"people with {cfg.task.label_column}": (num_people, MIN_PARTICIPANTS * folds)}
    else:
        groups = {}
        for column, values in enumerate(cohort.target.T):
            for value in np.unique(values):
                name = cohort.names[int(value)] if cohort.kind in CLASS_KINDS else cohort.names[column]
                label = f"people of {name}" if cohort.kind in CLASS_KINDS else f"people with {name} {value:g}"
                groups[label] = (len(np.unique(cohort.person[values == value])), folds)
    for label, (count, needed) in groups.items():
        if count < needed:
            raise UserError(
                f"{where}: expected {needed} {label} or more for {folds} folds, found {count}; take a "
                "smaller eval.folds (3 or more), or labels without it"
            )


def _strata(cohort: Cohort, num_quantiles: int) -> dict[str, Stratum]:
    """Person -> the distinct targets of its units; of a value the quantile of its mean."""
    people, number = np.unique(cohort.person, return_inverse=True)
    if cohort.kind != "regression":
        rows: dict[str, set[tuple[float, ...]]] = {p: set() for p in people.tolist()}
        for person, target in zip(cohort.person.tolist(), cohort.target.tolist(), strict=True):
            rows[person].add(tuple(target))
        return {person: tuple(sorted(targets)) for person, targets in rows.items()}
    mean = np.bincount(number, cohort.target[:, 0]) / np.bincount(number)
    ranked = people[np.argsort(mean, kind="stable")].tolist()
    return {p: ((float(n * num_quantiles // len(ranked)),),) for n, p in enumerate(ranked)}
