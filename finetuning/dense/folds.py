"""Volumes with labels of their own on the grid, in three folds by the split of their participants.

In: a configuration, a store, rows that have such labels. Out: `DenseVolumes`, which layers, segmentation and
translation extend by the labels; refusals of people that were seen before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from data_setup.attach.grid import box, reach
from data_setup.manifest import select_wanted
from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import EVALUATED, MIN_PARTICIPANTS, TRAIN, VAL, Cohort, count_seen
from finetuning.cohort.ledger import look_at
from utils.config.schema import Config
from utils.errors import UserError


@dataclass(frozen=True)
class DenseVolumes:
    """Volumes of the three folds; no person is in two (with eval.split=val those of val are in two)."""

    store: PreparedStore
    rows: np.ndarray  # of the store [n]
    fold: np.ndarray  # TRAIN, VAL or EVALUATED [n]
    person: np.ndarray  # str [n]
    names: tuple[str, ...]  # of the surfaces or slabs from the vitreous down, or of the classes

    # None: labels are those laid on the grid; else what reads the file of a row (dense/on_scan.py): what
    # it says over the scan's own voxels in the store's order, and the names in it
    read_original: Callable[[int], tuple[np.ndarray, tuple[str, ...]]] | None = field(
        default=None, kw_only=True
    )

    axes: ClassVar[str] = "dw"  # of what is laid on the volumes

    def of(self, fold: int) -> np.ndarray:
        """The rows of a fold."""
        return self.rows[self.fold == fold]

    def people(self, fold: int) -> list[str]:
        return sorted(set(self.person[self.fold == fold].tolist()))

    def read(self, row: int) -> np.ndarray:
        """The labels of a row: surfaces or slabs float32 [S, D, W], or classes uint8 [D, H, W]."""
        raise NotImplementedError

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

    @property
    def summary(self) -> str:
        """Volumes and participants of the folds in one line."""
        parts = []
        for name, fold in (("train", TRAIN), ("val", VAL), ("evaluated", EVALUATED)):
            parts.append(f"{name} {len(self.of(fold))} volumes of {len(self.people(fold))}")
        return f"{', '.join(parts)} participants"


def in_folds(cfg: Config, index: pd.DataFrame, where: str, what: str) -> dict[str, Any]:
    """The arrays rows, fold and person of the volumes of `index` in the splits train, val and eval.split.

    Raises UserError where a split has too few people with `what`; `where`: the store's URL.
    """
    splits = ("train", "val", cfg.eval.split)
    parts = [index[index["split"] == split] for split in splits]
    for part, split in zip(parts, splits, strict=True):
        people = part["person_id"].nunique()
        if people < MIN_PARTICIPANTS:
            raise UserError(
                f"{where}: split {split}: expected {MIN_PARTICIPANTS} participants or more with {what}, "
                f"found {people}"
            )
    table = pd.concat(parts)
    return {
        "rows": table["row"].to_numpy(),
        "fold": np.repeat([TRAIN, VAL, EVALUATED], [len(part) for part in parts]),
        "person": table["person_id"].to_numpy(str),
    }


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


def refuse_overlap(cfg: Config, volumes: DenseVolumes, seen: Sequence[str], url: str, stage: str) -> int:
    """How many evaluated participants were seen; UserError unless that is 0 or allowed."""
    return count_seen(cfg, volumes.people(EVALUATED), {stage: seen}, url)


def count_look(cfg: Config, volumes: DenseVolumes, checksum: str, arms: Sequence[str]) -> int | None:
    """Count this look at test participants in the ledger of the store; None where there is none."""
    if cfg.eval.split != "test":
        return None
    kind, target = cfg.task.kind, np.zeros((len(volumes.rows), 1))
    unit = volumes.rows.astype(str)
    cohort = Cohort(kind, volumes.names, volumes.rows, volumes.fold, target, unit, volumes.person)
    return look_at(volumes.store, [cohort], checksum, [kind, cfg.eval.split], f"{kind}: {', '.join(arms)}")
