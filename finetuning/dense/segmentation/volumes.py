"""Who classes of voxels are learnt from and judged on: volumes with label volumes, by split.

In: a configuration, a store with label volumes. Out: `ClassVolumes`: rows, folds, the names of the classes,
and a row's classes as places among them: 0 the background, n the n-th name, IGNORED outside the acquired
field and where the labels say `unlabelled`, which is neither trained nor judged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_setup.attach.stored import StoredLabels
from data_setup.manifest import select_wanted
from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import TRAIN, VAL
from finetuning.dense.folds import DenseVolumes, in_folds, require_current
from utils.config.schema import Config
from utils.errors import UserError

IGNORED = 255
UNLABELLED = "unlabelled"  # the name of a class: voxels that nobody has looked at


@dataclass(frozen=True)
class ClassVolumes(DenseVolumes):
    """Volumes with a class for every voxel; `names` are those of the classes, without the background [C]."""

    labels: StoredLabels
    place_of: np.ndarray  # uint8 [256]: stored value -> 0, 1..C or IGNORED

    def read(self, row: int) -> np.ndarray:
        """uint8 [D, H, W]: 0, 1..C or IGNORED."""
        places = self.place_of[self.labels.read(row)]
        result = np.full_like(places, IGNORED)
        box = self.field(row)
        result[box] = places[box]
        return result

    def field(self, row: int) -> tuple[slice, slice, slice]:
        """The acquired field of a row."""
        record = self.store.index.loc[row]
        d, h, w = (slice(int(record[f"valid_{a}0"]), int(record[f"valid_{a}1"])) for a in "dhw")
        return d, h, w

    def counts(self, row: int) -> np.ndarray:
        """Voxels of the background and of each class in the acquired field [C + 1]."""
        record = self.store.index.loc[row]
        total = int(np.prod([record[f"valid_{a}1"] - record[f"valid_{a}0"] for a in "dhw"]))
        result = np.zeros(len(self.names) + 1, np.int64)
        for value, count in self.labels.counts(row).items():
            total -= count
            if (place := int(self.place_of[value])) != IGNORED:
                result[place] += count
        result[0] += total
        return result

    def voxel_mm3(self, row: int) -> float:
        return float(np.prod(self.spacing_mm(row)))


def read_volumes(cfg: Config, store: PreparedStore) -> ClassVolumes:
    """The volumes with label volumes in the splits train, val and eval.split; raises UserError."""
    labels = StoredLabels.open(store.url, store.options)
    index = store.index[store.index["listed"]]
    index = index[index["row"].isin(labels.index["row"]) & index["row"].isin(store.kept)]
    index = select_wanted(cfg, index)
    require_current(index, labels.index, store, "labels")
    classes = labels.classes
    value_of = {name: value for value, name in classes.items() if name != UNLABELLED}
    names = tuple(value_of) if cfg.task.names is None else tuple(cfg.task.names)
    if lacking := [name for name in names if name not in value_of] or ([] if names else ["none"]):
        expected = ", ".join(value_of) or "a class that is labelled"
        raise UserError(f"task.names: expected some of {expected} of {store.url}, found {', '.join(lacking)}")
    place_of = np.zeros(256, np.uint8)
    for place, name in enumerate(names, start=1):
        place_of[value_of[name]] = place
    place_of[[value for value, name in classes.items() if name == UNLABELLED]] = IGNORED
    folds = in_folds(cfg, index, store.url, "label volumes")
    volumes = ClassVolumes(store=store, names=names, labels=labels, place_of=place_of, **folds)
    _require_voxels(volumes)
    return volumes


def _require_voxels(volumes: ClassVolumes) -> None:
    """UserError for a class that no training volume has, or validation volumes without any class."""
    in_train = np.sum([volumes.counts(int(row)) for row in volumes.of(TRAIN)], axis=0)
    absent = [name for name, count in zip(volumes.names, in_train[1:], strict=True) if not count]
    if absent:
        raise UserError(
            f"task.names: expected classes with voxels in the training volumes, found none of "
            f"{', '.join(absent)}"
        )
    in_val = np.sum([volumes.counts(int(row)) for row in volumes.of(VAL)], axis=0)
    if not in_val[1:].any():
        raise UserError(
            f"{volumes.store.url}: split val: expected voxels of {', '.join(volumes.names)}, found none"
        )
