"""Who surfaces are learnt from and judged on: volumes with height maps, by split.

In: a configuration, a store with height maps. Out: `LayerVolumes`: rows, folds, the names of the surfaces,
and the heights of a row in the order of those names. Names are those of devices or of label files: two share
a surface where they call it the same, and a surface that one does not mark is NaN in its volumes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import numpy as np
import pandas as pd

from data_setup.attach.stored import OF_LABELS, StoredHeights
from data_setup.readers.heights import DEPTH_OF_LABEL
from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import TRAIN
from finetuning.dense.folds import DenseVolumes, in_folds, with_labels
from utils.config.schema import Config
from utils.errors import UserError

RETINA = "retina"  # from the first surface to the outer boundary
OUTER = ("BM", "RPE", "OS/RPE")  # of the retina; the first of them that is marked
log = logging.getLogger(__name__)


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
        """float32 [S, D, W] in voxels, or in rows of the scan, NaN where there is no height."""
        own = self.heights.names(row)
        if self.read_original is not None:
            values, own = self.read_original(row)
            values = self.inside(row, values)
        else:
            values = self.heights.read(row)
        result = np.full((len(self.names), *values.shape[1:]), np.nan, np.float32)
        for place, name in enumerate(self.names):
            if name in own:
                result[place] = values[own.index(name)]
        return result

    def marked(self, row: int) -> list[int]:
        """Places in `names` of the surfaces that are marked in the row."""
        own = set(self.heights.names(row))
        return [place for place, name in enumerate(self.names) if name in own]

    def names_of(self, row: int) -> frozenset[str]:
        return frozenset(self.names[place] for place in self.marked(row))

    def layers(self, row: int) -> dict[str, tuple[int, int]]:
        """As `layers_of`, of the surfaces that are marked in the row."""
        return layers_of(self.names, self.marked(row))


def layers_of(names: Sequence[str], marked: Sequence[int] | None = None) -> dict[str, tuple[int, int]]:
    """Name -> (upper, lower) places of the layers between neighbouring surfaces, and last of the retina where
    its borders are among them. `marked`: places of the surfaces that are there, else all.
    """
    marked = range(len(names)) if marked is None else marked
    place = {names[n]: n for n in marked}
    pairs = {f"{names[a]} to {names[b]}": (a, b) for a, b in pairwise(marked)}
    outer = next((place[name] for name in OUTER if name in place), None)
    return pairs | ({RETINA: (place["ILM"], outer)} if "ILM" in place and outer is not None else {})


def read_volumes(cfg: Config, store: PreparedStore) -> LayerVolumes:
    """The volumes with height maps in the splits train, val and eval.split; raises UserError."""
    heights = StoredHeights.open(store.url, store.options)
    index = with_labels(cfg, store, heights.index, "heights")
    of_rows = {int(row): heights.names(row) for row in index["row"]}
    names = _names(cfg, of_rows, heights.source)
    index = index.loc[[row for row, own in of_rows.items() if set(own) & set(names)]]
    folds = in_folds(cfg, index, store.url, f"the surfaces {', '.join(names)}")
    volumes = LayerVolumes(store=store, names=names, heights=heights, **folds)
    first = {of_rows[row]: row for row in reversed(volumes.of(TRAIN).tolist())}
    for row in first.values():
        _require_depths(volumes, row)
    return volumes


def _names(cfg: Config, of_rows: dict[int, tuple[str, ...]], source: str) -> tuple[str, ...]:
    """task.names, or all that label files name; of a device's maps those with a name that is known. Raises
    UserError.
    """
    there = set().union(*of_rows.values()) if of_rows else set()
    wanted = cfg.task.names
    if wanted is None:
        # a device that names nothing has surface_01, ..., which are others in each device
        known = {name for name in there if source == OF_LABELS or name.upper() in DEPTH_OF_LABEL}
        if len(known) < 2:
            raise UserError(
                "task.names: expected two or more named surfaces in the height maps, found "
                f"{_listed(there)}; name them in task.names"
            )
        if known < there:
            log.warning("surfaces without a name that is known are left out: %s", _listed(there - known))
        return _merged(sorted({tuple(n for n in own if n in known) for own in of_rows.values()}))
    lacking = [name for name in wanted if name not in there]
    if lacking:
        raise UserError(f"task.names: expected some of {_listed(there)}, found {_listed(lacking)}")
    return tuple(wanted)


def _merged(orders: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """All names in one order that agrees with each of these; names that devices know go by their depth where
    that is free. Raises UserError where two orders disagree.
    """
    places = {name: place for place, name in enumerate(dict.fromkeys(n for own in orders for n in own))}
    sorter: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(places, ()))
    for own in orders:
        for above, below in pairwise(own):
            sorter.add(below, above)
    try:
        sorter.prepare()
    except CycleError as error:
        names = " above ".join(error.args[1])
        raise UserError(
            f"task.names: expected one order of the surfaces in all files, found {names}; give their order, "
            "from the vitreous down, in task.names"
        ) from None
    result: list[str] = []
    ready, depth = set(sorter.get_ready()), 0
    while ready:
        rank = {name: (DEPTH_OF_LABEL.get(name.upper(), depth), places[name]) for name in ready}
        name = min(ready, key=rank.__getitem__)
        depth = rank[name][0]
        result.append(name)
        ready.remove(name)
        sorter.done(name)
        ready |= set(sorter.get_ready())
    return tuple(result)


def _require_depths(volumes: LayerVolumes, row: int) -> None:
    """Raise UserError unless the surfaces of a row lie in the order of their names: decoders order them."""
    values = volumes.read(row)
    for above, below in pairwise(volumes.marked(row)):
        distance = values[below] - values[above]
        if not np.isnan(distance).all() and np.nanmean(distance) < 0:
            upper, lower = volumes.names[above], volumes.names[below]
            raise UserError(
                f"task.names: expected surfaces from the vitreous down, found {lower} above {upper} in "
                f"{volumes.store.index.path[row]}; give their order in task.names"
            )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
