"""Who flow is learnt from and judged on: volumes with en-face slabs, by split.

In: a configuration, a store with flow. Out: `FlowVolumes`: rows, folds, the names of the slabs, and a row's
slabs as numbers from 0 to 1, NaN outside the acquired field and of a slab that the row lacks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from data_setup.attach.stored import StoredFlow
from data_setup.readers.octa import SLABS
from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import TRAIN
from finetuning.dense.folds import DenseVolumes, chosen_names, in_folds, with_labels
from utils.config.schema import Config
from utils.errors import UserError


@dataclass(frozen=True)
class FlowVolumes(DenseVolumes):
    """Volumes with en-face slabs; `names` are those of the slabs from the vitreous down [S]."""

    flow: StoredFlow

    def facts(self) -> pd.DataFrame:
        return self.flow.index[["row", "enface_checksum", "volume", "slabs"]]

    def read(self, row: int) -> np.ndarray:
        """float32 [S, D, W] in 0..1, NaN where nothing is known."""
        if self.read_original is None:
            stored = self.flow.read_slabs(row)
        else:
            values, own = self.read_original(row)
            stored = dict(zip(own, values, strict=True))
        result = np.full((len(self.names), *next(iter(stored.values())).shape), np.nan, np.float32)
        box = self.field(row)
        for place, name in enumerate(self.names):
            if name in stored:
                result[place][box] = stored[name][box].astype(np.float32) / 255
        return result


def read_volumes(cfg: Config, store: PreparedStore) -> FlowVolumes:
    """The volumes with flow in the splits train, val and eval.split; raises UserError."""
    flow = StoredFlow.open(store.url, store.options)
    index = with_labels(cfg, store, flow.index, "flow")
    of_rows = {int(row): set(flow.names(row)) for row in index["row"]}
    known = [slab for slab in SLABS if any(slab in own for own in of_rows.values())]
    names = chosen_names(cfg.task.names, known, store, "an en-face image")
    index = index.loc[[row for row, own in of_rows.items() if own & set(names)]]
    folds = in_folds(cfg, index, store.url, f"the slabs {', '.join(names)}")
    volumes = FlowVolumes(store=store, names=names, flow=flow, **folds)
    learnt = set().union(*(of_rows[int(row)] for row in volumes.of(TRAIN)))
    if unseen := [name for name in names if name not in learnt]:
        raise UserError(f"task.names: expected slabs of training volumes, found none of {', '.join(unseen)}")
    return volumes
