"""Who flow is learnt from and judged on: volumes with en-face slabs, by split.

In: a configuration, a store with flow. Out: `FlowVolumes`: rows, folds, the names of the slabs, and a row's
slabs as numbers from 0 to 1, NaN outside the acquired field and of a slab that the row lacks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_setup.attach.stored import StoredFlow
from data_setup.manifest import select_wanted
from data_setup.readers.octa import SLABS
from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import TRAIN
from finetuning.dense.folds import DenseVolumes, in_folds, require_current
from utils.config.schema import Config
from utils.errors import UserError


@dataclass(frozen=True)
class FlowVolumes(DenseVolumes):
    """Volumes with en-face slabs; `names` are those of the slabs from the vitreous down [S]."""

    flow: StoredFlow

    def read(self, row: int) -> np.ndarray:
        """float32 [S, D, W] in 0..1, NaN where nothing is known."""
        stored = self.flow.read_slabs(row)
        d, _, w = self.store.image_size
        result = np.full((len(self.names), d, w), np.nan, np.float32)
        box = self.field(row)
        for place, name in enumerate(self.names):
            if name in stored:
                result[place][box] = stored[name][box].astype(np.float32) / 255
        return result

    def field(self, row: int) -> tuple[slice, slice]:
        """The acquired field of a row along D and W."""
        record = self.store.index.loc[row]
        d, w = (slice(int(record[f"valid_{a}0"]), int(record[f"valid_{a}1"])) for a in "dw")
        return d, w


def read_volumes(cfg: Config, store: PreparedStore) -> FlowVolumes:
    """The volumes with flow in the splits train, val and eval.split; raises UserError."""
    flow = StoredFlow.open(store.url, store.options)
    index = store.index[store.index["listed"]]
    index = index[index["row"].isin(flow.index["row"]) & index["row"].isin(store.kept)]
    index = select_wanted(cfg, index)
    require_current(index, flow.index, store, "flow")
    of_rows = {int(row): set(flow.names(row)) for row in index["row"]}
    there = set().union(*of_rows.values()) if of_rows else set()
    wanted = cfg.task.names
    names = tuple(s for s in SLABS if s in there) if wanted is None else tuple(wanted)
    if lacking := [name for name in names if name not in there] or ([] if names else ["none"]):
        expected = ", ".join(s for s in SLABS if s in there) or "an en-face image"
        raise UserError(f"task.names: expected some of {expected} of {store.url}, found {', '.join(lacking)}")
    index = index.loc[[row for row, own in of_rows.items() if own & set(names)]]
    folds = in_folds(cfg, index, store.url, f"the slabs {', '.join(names)}")
    volumes = FlowVolumes(store=store, names=names, flow=flow, **folds)
    learnt = set().union(*(of_rows[int(row)] for row in volumes.of(TRAIN)))
    if unseen := [name for name in names if name not in learnt]:
        raise UserError(f"task.names: expected slabs of training volumes, found none of {', '.join(unseen)}")
    return volumes
