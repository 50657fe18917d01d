"""Who classes of voxels are learnt from and judged on: volumes with label volumes, by split.

In: a configuration, a store with label volumes. Out: `ClassVolumes`: rows, folds, the names of the classes,
and a row's classes as places among them: 0 the background, n the n-th name, IGNORED outside the acquired
field and where the labels say `unlabelled`, which is neither trained nor judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd

from data_setup.attach.stored import StoredLabels
from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import TRAIN, VAL
from finetuning.dense.folds import DenseVolumes, chosen_names, in_folds, with_labels
from utils.config.schema import Config
from utils.errors import UserError

IGNORED = 255
UNLABELLED = "unlabelled"  # the name of a class: voxels that nobody has looked at


@dataclass(frozen=True)
class ClassVolumes(DenseVolumes):
    """Volumes with a class for every voxel; `names` are those of the classes, without the background [C]."""

    labels: StoredLabels
    place_of: np.ndarray  # uint8 [256]: stored value -> 0, 1..C or IGNORED

    axes: ClassVar[str] = "dhw"

    def facts(self) -> pd.DataFrame:
        return self.labels.index[["row", "checksum", "volume"]]

    def read(self, row: int) -> np.ndarray:
        """uint8 [D, H, W]: 0, 1..C or IGNORED."""
        values = self.labels.read(row) if self.read_original is None else self.read_original(row)[0]
        places = self.place_of[values]
        result = np.full_like(places, IGNORED)
        self.cropped(row, result)[:] = self.cropped(row, places)
        return result

    def counts(self, row: int) -> np.ndarray:
        """Voxels of the background and of each class in the acquired field [C + 1]."""
        total = int(np.prod([part.stop - part.start for part in self.field(row)]))
        result = np.zeros(len(self.names) + 1, np.int64)
        for value, count in self.labels.counts(row).items():
            total -= count
            if (place := int(self.place_of[value])) != IGNORED:
                result[place] += count
        result[0] += total
        return result

    def names_of(self, row: int) -> frozenset[str]:
        counts = self.counts(row)[1:]
        return frozenset(name for name, count in zip(self.names, counts, strict=True) if count)

    def voxel_mm3(self, row: int) -> float:
        return float(np.prod(self.spacing_mm(row)))


def read_volumes(cfg: Config, store: PreparedStore) -> ClassVolumes:
    """The volumes with label volumes in the splits train, val and eval.split; raises UserError."""
    labels = StoredLabels.open(store.url, store.options)
    index = with_labels(cfg, store, labels.index, "labels")
    classes = labels.classes
    value_of = {name: value for value, name in classes.items() if name != UNLABELLED}
    names = chosen_names(cfg.task.names, value_of, store, "a class that is labelled")
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
