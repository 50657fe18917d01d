"""Label volumes of a store: a class for every voxel of its volumes, on the volumes' own grid.

In: classes of a row's volume, with what was counted. Out: the same by row. Layout under the store's URL:
    labels/                    uint8 [N, D, H, W]; 0: background, and everything outside the acquired field
                               attributes: classes {value: name}
    label_rows/{row:06d}.json  what became of the row's labels, written after its chunk
    labels.parquet             the same, compacted: LABEL_COLUMNS
    labels_report.json         the summary of the last `data_setup.prepare --labels`

A store without labels.parquet has none.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import zarr

from data_setup.store.format import checksum, chunk_key
from data_setup.store.side_array import SideWriter, open_array, read_chunk, read_kept
from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import UserError

Classes = Mapping[int, str]  # value -> name, without the background
LABEL_COLUMNS: dict[str, tuple[str, str]] = {
    "row": ("int64", "of the store"),
    "status": ("str", "kept, or the reason why the labels are not used"),
    "message": ("str", "the reason in one line"),
    "path": ("str", "of the labels relative to the source root"),
    "source_size": ("float64", "bytes of the labels' file, or of all its images"),
    "source_version": ("str", "its ETag or modification time when it was read"),
    "volume": ("str", "checksum of the volume that the labels were laid on"),
    "voxels": ("str", "class=count of the stored voxels, | between"),
    "cut_share": ("float64", "share of the labelled voxels of the file that lie outside the grid"),
    "checksum": ("str", "of the stored labels: BLAKE2b, 16 bytes, hex"),
}


@dataclass(frozen=True)
class LabelWriter(SideWriter):
    """Writes label volumes; small and picklable, so that every worker process has one."""

    NAME = "labels"
    ROWS = "label_rows"

    def create(self, num_rows: int, image_size: tuple[int, int, int], classes: Classes) -> None:
        """Make the array, or give the one here `num_rows` rows; UserError where its classes are others."""
        if self.is_there():
            stored = classes_of(self.array())
            if stored != dict(classes):
                raise UserError(
                    f"{self.url}: labels: expected the classes {stored} of the store, found {dict(classes)}; "
                    "one store has one list of classes: prepare into another data.store"
                )
            self.grow(num_rows)
            return
        self.make(
            shape=(num_rows, *image_size),
            dtype="uint8",
            fill_value=0,
            dimension_names=("row", "d", "h", "w"),
            attributes={"classes": {str(value): name for value, name in classes.items()}},
        )

    def write_row(self, row: int, labels_DHW: np.ndarray | None, fields: Mapping[str, Any]) -> None:
        """Write the chunk (None: labels that are not used), then the row's JSON."""
        own = dict(fields)
        if labels_DHW is not None:
            self.array()[row] = labels_DHW
            own["checksum"] = checksum(labels_DHW)
        self.write_fields(row, own)

    def finalise(self, rows: Sequence[int]) -> pd.DataFrame:
        """Compact the JSON of `rows` to labels.parquet."""
        written = self.read_rows()
        types = {name: kind for name, (kind, _) in LABEL_COLUMNS.items()}
        table = [{**written[row], "row": row} for row in sorted(rows) if row in written]
        index = pd.DataFrame(table, columns=list(types)).astype(types)
        buffer = io.BytesIO()
        index.to_parquet(buffer, index=False)
        storage.write_bytes(storage.join(self.url, "labels.parquet"), buffer.getvalue(), self.options)
        return index


class StoredLabels:
    """The label volumes of a store for reading; picklable."""

    def __init__(self, url: str, options: StorageOptions | None, index: pd.DataFrame) -> None:
        self.url, self.options = url, options
        self.index = index  # LABEL_COLUMNS of the kept label volumes; label = row

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_array"}

    @classmethod
    def open(cls, url: str, options: StorageOptions | None = None) -> StoredLabels:
        """Raises UserError where the store has no label volumes."""
        index = read_kept(url, "labels", LABEL_COLUMNS, "label volumes", "--labels", options)
        return cls(url, options, index)

    @cached_property
    def _array(self) -> zarr.Array:
        return open_array(self.url, "labels", self.options, read_only=True)

    @property
    def classes(self) -> dict[int, str]:
        """value -> name, without the background."""
        return classes_of(self._array)

    def counts(self, row: int) -> dict[int, int]:
        """value -> stored voxels of a row, without the background."""
        return parse_counts(str(self.index.voxels[row]))

    def read(self, row: int) -> np.ndarray:
        """uint8 [D, H, W] of a row; raises StorageError."""
        place = chunk_key(row, storage.join(self.url, "labels"))
        advice = f"remove {self.url}/label_rows/{row:06d}.json and run data_setup.prepare --labels"
        return read_chunk(self._array, row, place, self.index.checksum[row], "labels", advice)


def classes_of(array: zarr.Array) -> dict[int, str]:
    """The classes in an array's attributes."""
    stored: Any = array.attrs["classes"]
    return {int(value): str(name) for value, name in stored.items()}


def counts_text(labels_DHW: np.ndarray, classes: Classes) -> str:
    """`1=20|2=0`: the voxels of each class."""
    counts = np.bincount(labels_DHW.ravel(), minlength=256)
    return "|".join(f"{value}={counts[value]}" for value in sorted(classes))


def parse_counts(text: str) -> dict[int, int]:
    """What `counts_text` wrote."""
    return {int(value): int(count) for value, count in (part.split("=") for part in text.split("|"))}
