"""Volumes that have labels on the grid, in three folds by the split of their participants.

In: a configuration, a store, rows that have such labels. Out: `DenseVolumes`, which layers, segmentation and
translation extend by the labels; refusals of people that were seen before. With eval.protocol official the
folds are the splits of participants.tsv; with crossfit `crossed` gives the folds of each of eval.folds parts
of the people.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
import pandas as pd

from data_setup.attach.grid import box, reach
from data_setup.manifest import select_wanted
from data_setup.store.reader import PreparedStore
from data_setup.tables.splits import seeded_order
from finetuning.cohort.cohort import EVALUATED, MIN_PARTICIPANTS, TRAIN, VAL, Cohort
from finetuning.cohort.ledger import look_at
from utils.config.schema import Config
from utils.errors import UserError

VAL_SHARE = 0.2  # of the people that are not evaluated, who choose the best epoch, with crossfit
Self = TypeVar("Self", bound="DenseVolumes")


@dataclass(frozen=True)
class DenseVolumes:
    """Volumes of the three folds; no person is in two (with eval.split=val those of val are in two; with
    crossfit all are in all, until `crossed` chooses).
    """

    store: PreparedStore
    rows: np.ndarray  # of the store [n]
    fold: np.ndarray  # TRAIN, VAL or EVALUATED [n]
    person: np.ndarray  # str [n]
    names: tuple[str, ...]  # of the surfaces or slabs from the vitreous down, or of the classes

    # None: labels are those laid on the grid; else what reads the file of a row (dense/evaluation.py): what
    # it says over the scan's own voxels in the store's order, and the names in it
    read_original: Callable[[int], tuple[np.ndarray, tuple[str, ...]]] | None = field(
        default=None, kw_only=True
    )

    axes: ClassVar[str] = "dw"  # of what is laid on the volumes

    def of(self, fold: int) -> np.ndarray:
        return self.rows[self.fold == fold]

    def people(self, fold: int) -> list[str]:
        return sorted(set(self.person[self.fold == fold].tolist()))

    def read(self, row: int) -> np.ndarray:
        """The labels of a row: surfaces or slabs float32 [S, D, W], or classes uint8 [D, H, W]."""
        raise NotImplementedError

    def names_of(self, row: int) -> frozenset[str]:
        return frozenset(self.names)

    def facts(self) -> pd.DataFrame:
        """For every row with labels what they rest on: a change of it is another question."""
        raise NotImplementedError

    def field(self, row: int) -> tuple[slice, ...]:
        """The acquired field of a row along `axes`; of the scan's own voxels those that the grid reaches."""
        record = self.store.index.loc[row]
        if self.read_original is not None:
            return reach(record, self.store.attrs["geometry"], self.axes)
        return box(record, self.axes)

    def cropped(self, row: int, values: np.ndarray) -> np.ndarray:
        """Values [..., *axes] in the acquired field."""
        place: Any = (..., *self.field(row))
        return values[place]

    def inside(self, row: int, values_SDW: np.ndarray) -> np.ndarray:
        """Values [S, D, W] in the acquired field, NaN outside."""
        result = np.full_like(values_SDW, np.nan)
        self.cropped(row, result)[:] = self.cropped(row, values_SDW)
        return result

    def spacing_mm(self, row: int) -> tuple[float, float, float]:
        """Of the stored volume, or of the scan, whichever the labels are read over (d, h, w)."""
        when = "after" if self.read_original is None else "before"
        d, h, w = (float(self.store.index[f"spacing_{when}_{axis}"][row]) for axis in "dhw")
        return d, h, w


def in_folds(cfg: Config, index: pd.DataFrame, where: str, what: str) -> dict[str, Any]:
    """The arrays rows, fold and person of the volumes of `index` in the splits train, val and eval.split.

    Raises UserError where a split has too few people with `what`; `where`: the store's URL.
    """
    is_crossed = cfg.eval.protocol == "crossfit"
    splits = ("train", "val", cfg.eval.split)
    parts = [index if is_crossed else index[index["split"] == split] for split in splits]
    needed = MIN_PARTICIPANTS + 1 if is_crossed else MIN_PARTICIPANTS  # to train, to choose, to evaluate
    for part, split in zip(parts, splits, strict=True):
        people = part["person_id"].nunique()
        if people < needed:
            place = "all splits, with crossfit" if is_crossed else f"split {split}"
            raise UserError(
                f"{where}: {place}: expected {needed} participants or more with {what}, found {people}"
            )
    table = pd.concat(parts)
    return {
        "rows": table["row"].to_numpy(),
        "fold": np.repeat([TRAIN, VAL, EVALUATED], [len(part) for part in parts]),
        "person": table["person_id"].to_numpy(str),
    }


def crossed(cfg: Config, volumes: Self, seen: Collection[str]) -> list[Self]:
    """The folds of eval.folds parts of the people, or of every person: each is evaluated once, a share of the
    others chooses the best epoch, the rest trains. People follow from cfg.seed; those with the same names of
    labels are spread over the parts.

    Volumes are those of eval.protocol=crossfit. People in `seen` are left out unless eval.allow_overlap.
    Raises UserError where a name has nobody to train on, or nobody is left to choose.
    """
    where, everybody = volumes.store.url, set(volumes.people(EVALUATED))
    people = sorted(everybody if cfg.eval.allow_overlap else everybody - set(seen))
    count = cfg.eval.folds or len(people)
    if len(people) < max(count, MIN_PARTICIPANTS + 1):
        left_out = len(everybody) - len(people)
        raise UserError(
            f"{where}: expected {max(count, MIN_PARTICIPANTS + 1)} people with labels or more for {count} "
            f"folds, found {len(people)} ({left_out} that pre-training saw are left out; "
            "eval.allow_overlap=true takes them in)"
        )
    has: dict[str, frozenset[str]] = dict.fromkeys(people, frozenset[str]())
    for row, person in zip(volumes.rows.tolist(), volumes.person.tolist(), strict=True):
        if person in has:
            has[person] |= volumes.names_of(row)
    place = {p: n for n, p in enumerate(seeded_order(people, cfg.seed, "crossfit"))}
    order = sorted(people, key=lambda p: (sorted(has[p]), place[p]))
    folds = []
    for part in range(count):
        evaluated, rest = order[part::count], [p for n, p in enumerate(order) if n % count != part]
        val = _choosing(sorted(rest, key=place.__getitem__), has, volumes.names)
        train = [p for p in rest if p not in val]
        at = f"{where}: fold {part + 1} of {count}"
        if lost := [name for name in volumes.names if not any(name in has[p] for p in train)]:
            raise UserError(f"{at}: expected people to train on with {', '.join(lost)}, found nobody")
        if not any(has[p] for p in val):
            raise UserError(f"{at}: expected a person with labels to choose the best epoch, found nobody")
        chosen = np.zeros(len(volumes.rows), bool)
        for fold, members in ((TRAIN, train), (VAL, [*val]), (EVALUATED, evaluated)):
            chosen |= (volumes.fold == fold) & np.isin(volumes.person, members)
        cut = {key: getattr(volumes, key)[chosen] for key in ("rows", "fold", "person")}
        folds.append(replace(volumes, **cut))
    return folds


def _choosing(people: Sequence[str], has: Mapping[str, Collection[str]], names: Sequence[str]) -> set[str]:
    """Who chooses the best epoch: of each name somebody, then the next; nobody needed for training."""
    chosen: list[str] = []

    def is_spare(person: str) -> bool:
        others = [p for p in people if p != person and p not in chosen]
        return all(any(name in has[p] for p in others) for name in has[person])

    for name in names:
        if not any(name in has[p] for p in chosen):
            chosen += [p for p in people if name in has[p] and is_spare(p)][:1]
    wanted = max(1, round(VAL_SHARE * len(people)))
    for person in people:
        if len(chosen) < wanted and person not in chosen and is_spare(person):
            chosen.append(person)
    return set(chosen)


def with_labels(cfg: Config, store: PreparedStore, laid_on: pd.DataFrame, what: str) -> pd.DataFrame:
    """The index of the kept volumes that the configuration wants and that have labels (`what`).

    Raises UserError where a volume was prepared again after its labels were laid on it.
    """
    index = store.index[store.index["listed"]]
    index = index[index["row"].isin(laid_on["row"]) & index["row"].isin(store.kept)]
    index = select_wanted(cfg, index)
    volumes = laid_on.loc[index["row"], "volume"].to_numpy()
    stale = index["row"][index["checksum"].to_numpy() != volumes].tolist()
    if stale:
        raise UserError(
            f"{store.url}: expected {what} that were laid on the volumes as they are, found older ones in "
            f"{len(stale)} rows ({', '.join(map(str, stale[:3]))}); run data_setup.prepare --{what}"
        )
    return index


def chosen_names(
    wanted: Sequence[str] | None, present: Collection[str], store: PreparedStore, nothing: str
) -> tuple[str, ...]:
    """The names that task.names asks for, or all that are present; raises UserError for one
    that is not. `nothing`: in the error, of a store without any.
    """
    names = tuple(present) if wanted is None else tuple(wanted)
    if lacking := [name for name in names if name not in present] or ([] if names else ["none"]):
        expected = ", ".join(present) or nothing
        raise UserError(f"task.names: expected some of {expected} of {store.url}, found {', '.join(lacking)}")
    return names


def count_look(cfg: Config, volumes: DenseVolumes, checksum: str, arms: Sequence[str]) -> int | None:
    """Count this look at test participants in the ledger of the store; None where there is none."""
    if cfg.eval.split != "test" and cfg.eval.protocol == "official":
        return None
    kind, target = cfg.task.kind, np.zeros((len(volumes.rows), 1))
    unit = volumes.rows.astype(str)
    protocol = [kind, cfg.eval.split if cfg.eval.protocol == "official" else f"{cfg.eval.folds} folds"]
    cohort = Cohort(kind, volumes.names, volumes.rows, volumes.fold, target, unit, volumes.person)
    return look_at(volumes.store, [cohort], checksum, protocol, f"{kind}: {', '.join(arms)}")
