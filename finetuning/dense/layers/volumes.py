"""Who surfaces are learnt from and judged on: volumes with height maps, by split.

In: a configuration, a store with height maps. Out: `LayerVolumes`: rows, folds, the names of the surfaces,
and the device's heights of a row in the order of those names. Names are the devices' own words: two devices
share a surface where they call it the same, and a surface that a device does not mark is NaN in its volumes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd

from data_setup.attach.kinds import OF_LABELS
from data_setup.attach.stored import StoredHeights
from data_setup.readers.heights import DEPTH_OF_LABEL
from data_setup.store.reader import PreparedStore
from finetuning.dense.folds import DenseVolumes, in_folds, with_labels
from utils.config.schema import Config
from utils.errors import UserError

RETINA = "retina"  # from the first surface to the outer boundary
OUTER = ("BM", "RPE", "OS/RPE")  # of the retina; the first of them that a device marks


@dataclass(frozen=True)
class LayerVolumes(DenseVolumes):
    """Volumes with the heights of surfaces; `names` are the surfaces from the vitreous down [S]."""

    heights: StoredHeights

    @property
    def truth(self) -> str:
        """What the heights are called in a table: `device` or `labels`."""
        return "labels" if self.heights.source == OF_LABELS else "device"

    def facts(self) -> pd.DataFrame:
        return self.heights.index[["row", "checksum", "volume", "surfaces"]]

    def read(self, row: int) -> np.ndarray:
        """float32 [S, D, W] in voxels, NaN where the device has no height."""
        own = self.heights.names(row)
        values = self.heights.read(row)
        result = np.full((len(self.names), *values.shape[1:]), np.nan, np.float32)
        for place, name in enumerate(self.names):
            if name in own:
                result[place] = values[own.index(name)]
        return result

    def marked(self, row: int) -> list[int]:
        """Places in `names` of the surfaces that the row's device marks."""
        own = set(self.heights.names(row))
        return [place for place, name in enumerate(self.names) if name in own]

    def names_of(self, row: int) -> frozenset[str]:
        return frozenset(self.names[place] for place in self.marked(row))

    def layers(self, row: int) -> dict[str, tuple[int, int]]:
        """Name -> (upper, lower) places of the layers between neighbouring surfaces of the row's device."""
        return {f"{self.names[a]} to {self.names[b]}": (a, b) for a, b in pairwise(self.marked(row))}

    def retina(self, row: int) -> tuple[int, int] | None:
        """(upper, lower) places of the whole retina; None where its borders are no surfaces of the row."""
        own = [self.names[place] for place in self.marked(row)]
        lower = next((name for name in OUTER if name in own), None)
        if "ILM" not in own or lower is None:
            return None
        return self.names.index("ILM"), self.names.index(lower)


def read_volumes(cfg: Config, store: PreparedStore) -> LayerVolumes:
    """The volumes with height maps in the splits train, val and eval.split; raises UserError."""
    heights = StoredHeights.open(store.url, store.options)
    index = with_labels(cfg, store, heights.index, "heights")
    names = _names(cfg, {row: heights.names(row) for row in index["row"]})
    marked = [row for row in index["row"] if set(heights.names(row)) & set(names)]
    index = index.loc[marked]
    folds = in_folds(cfg, index, store.url, f"the surfaces {', '.join(names)}")
    return LayerVolumes(store=store, names=names, heights=heights, **folds)


def _names(cfg: Config, of_rows: dict[int, tuple[str, ...]]) -> tuple[str, ...]:
    """task.names, or all that the maps name, by depth; raises UserError."""
    there = set().union(*of_rows.values()) if of_rows else set()
    wanted = cfg.task.names
    if wanted is None:
        known = {name for name in there if name.upper() in DEPTH_OF_LABEL}
        if len(known) < 2:
            raise UserError(
                "task.names: expected two or more named surfaces in the height maps, found "
                f"{_listed(there)}; name them in task.names"
            )
        return tuple(sorted(known, key=lambda name: (DEPTH_OF_LABEL[name.upper()], name)))
    lacking = [name for name in wanted if name not in there]
    if lacking:
        raise UserError(f"task.names: expected some of {_listed(there)}, found {_listed(lacking)}")
    return tuple(wanted)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
