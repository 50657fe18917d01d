"""Writes and reads what lies on a store's volumes.

In: arrays of a row's volume, with what was measured. Out: the same by row. Layout of a Kind under the store's
URL, beside volumes/:
    ARRAY/                 a chunk a row, for each of its arrays
    ROWS/{row:06d}.json    what became of the row, written after its chunks: a row counts when this exists
    NAME.parquet           the same, compacted to its columns
    NAME_report.json       the summary of the last `data_setup.prepare` of its mode

A store without NAME.parquet has none.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import pandas as pd
import zarr

from data_setup.attach.kinds import COLUMNS, DEVICE_MAPS, FLOW, HEIGHTS, LABELS, ArrayOf, Kind
from data_setup.readers.octa import SLABS
from data_setup.store.format import KEPT, RowFiles, checksum, chunk_key, intact, write_table
from data_setup.store.writer import array_metadata
from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import UserError
from utils.storage.zarr_keys import ObjectStore


@dataclass(frozen=True)
class SideWriter:
    """Writes a kind; small and picklable, so that every worker process has one."""

    kind: Kind
    url: str  # of the store
    options: StorageOptions | None = None

    def is_there(self) -> bool:
        return self._has(self.kind.arrays[0])

    def attributes(self) -> dict[str, Any]:
        """Of the first array, which is there."""
        first = self.kind.arrays[0]
        return {**first.attributes, **self._array(first).attrs}

    def create(self, num_rows: int, image_size: tuple[int, int, int], **attributes: Any) -> None:
        """Make the arrays, or give those here `num_rows` rows; UserError where these are of another source
        or of other classes than `attributes`.
        """
        fixed = self.kind.fixed
        if fixed and self.is_there():
            given = {**self.kind.arrays[0].attributes, **attributes}[fixed]
            if (stored := self.attributes()[fixed]) != given:
                raise UserError(
                    f"{self.url}: {self.kind.name}: expected the {fixed} {stored} of the store, found "
                    f"{given}; one store has {self.kind.one}: prepare into another data.store"
                )
        for one in self.kind.arrays:
            if not self._has(one):
                self._make(one, (num_rows, *one.shape(image_size)), {**one.attributes, **attributes})
            elif (array := self._array(one)).shape[0] < num_rows:
                array.resize((num_rows, *array.shape[1:]))

    def _make(self, one: ArrayOf, shape: tuple[int, ...], attributes: Mapping[str, Any]) -> None:
        """Write the metadata of an array."""
        more = {"dtype": one.dtype, "fill_value": one.fill, "attributes": dict(attributes)}
        name, files = f"{one.name}/zarr.json", array_metadata(one.name, shape, one.dims, "shuffle", **more)
        storage.write_bytes(storage.join(self.url, name), files[name], self.options)

    def _has(self, one: ArrayOf) -> bool:
        return storage.exists(storage.join(self.url, one.name, "zarr.json"), self.options)

    def _array(self, one: ArrayOf) -> zarr.Array:
        return _open_array(self.url, one, self.options, read_only=False)

    def write_row(self, row: int, values: Sequence[np.ndarray] | None, fields: Mapping[str, Any]) -> None:
        """Write a chunk of each array (None: a file that is not used), then the row's JSON. What is shorter
        than its chunk is filled.
        """
        own = dict(fields)
        if values is not None:
            for one, value in zip(self.kind.arrays, values, strict=True):
                array = self._array(one)
                chunk = np.full(array.shape[1:], one.fill, one.dtype)
                chunk[: len(value)] = value
                array[row] = chunk
                own[one.checksum] = checksum(chunk)
        self.rows.write(row, own)

    @property
    def rows(self) -> RowFiles:
        return RowFiles(storage.join(self.url, self.kind.rows), self.options)

    def finalise(self, rows: Sequence[int]) -> pd.DataFrame:
        """Compact the JSON of `rows` to NAME.parquet."""
        written = self.rows.read()
        types = {name: COLUMNS[name][0] for name in self.kind.columns.split()}
        table = [{"reversed_d": False, **written[row], "row": row} for row in sorted(rows) if row in written]
        index = pd.DataFrame(table, columns=list(types)).astype(types)
        if self.kind.attributes_of is not None:
            attributes = self.kind.attributes_of(index[index.status == KEPT])
            self._array(self.kind.arrays[0]).update_attributes(attributes)
        return write_table(storage.join(self.url, f"{self.kind.name}.parquet"), index, self.options)

    def empty(self) -> list[str]:
        """Empty the table where no line of a manifest names a file any more; what was done, in words. The
        arrays stay, so that files that come back are not read again.
        """
        if not (self.is_there() and self.rows.read()):
            return []
        self.finalise([])
        return [f"{self.kind.name}.parquet of the store: emptied, no line of the manifest names any"]


class Stored:
    """A kind of a store for reading; picklable."""

    KIND: ClassVar[Kind]

    def __init__(self, url: str, options: StorageOptions | None, index: pd.DataFrame) -> None:
        self.url, self.options = url, options
        self.index = index  # the kind's columns of the kept rows; label = row

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_arrays"}

    @classmethod
    def open(cls, url: str, options: StorageOptions | None = None) -> Self:
        """Raises UserError where the store has none."""
        kind, name = cls.KIND, f"{cls.KIND.name}.parquet"
        index_url, command = storage.join(url, name), f"run data_setup.prepare --{cls.KIND.name}"
        try:
            data = storage.read_bytes(index_url, options)
        except storage.StorageNotFoundError as error:
            expected = f"expected {kind.what} in the store, found no {name}"
            raise UserError(f"{url}: {expected}; {command}") from error
        with intact(index_url, f"{command} again, which writes it"):
            index = pd.read_parquet(io.BytesIO(data))[kind.columns.split()]
        return cls(url, options, index[index.status == KEPT].set_index("row", drop=False).rename_axis(None))

    @cached_property
    def _arrays(self) -> list[zarr.Array]:
        return [_open_array(self.url, one, self.options, read_only=True) for one in self.KIND.arrays]

    def names(self, row: int) -> tuple[str, ...]:
        """The surfaces or slabs that a row has, from the vitreous down."""
        return tuple(name for name in str(self.index[self.KIND.names][row]).split("|") if name)

    def read(self, row: int) -> np.ndarray:
        """The chunk of a row; raises StorageError."""
        return self._chunk(row, 0)

    def _chunk(self, row: int, number: int) -> np.ndarray:
        """A row's chunk of the array of this number, whose checksum is compared; raises StorageError."""
        one = self.KIND.arrays[number]
        place = chunk_key(row, storage.join(self.url, one.name))
        json_url = f"{self.url}/{self.KIND.rows}/{row:06d}.json"
        advice = f"remove {json_url} and run data_setup.prepare --{self.KIND.name}"
        try:
            chunk = np.asarray(self._arrays[number][row])
        except (RuntimeError, ValueError) as error:  # of the codec
            problem = f"expected the {one.name} of row {row}, found {error}; {advice}"
            raise storage.StorageError(place, problem) from error
        if checksum(chunk) != self.index[one.checksum][row]:
            raise storage.StorageError(place, f"expected the {one.name} of row {row}, found others; {advice}")
        return chunk


class StoredHeights(Stored):
    """Height maps: float32 [S, D, W] in voxels, NaN where there is none."""

    KIND = HEIGHTS

    @property
    def source(self) -> str:
        """DEVICE_MAPS or OF_LABELS: who drew them."""
        return str(self._arrays[0].attrs.get("source", DEVICE_MAPS))

    def read(self, row: int) -> np.ndarray:
        """Of the row's own surfaces; raises StorageError."""
        return super().read(row)[: len(self.names(row))]


class StoredLabels(Stored):
    """Label volumes: uint8 [D, H, W]."""

    KIND = LABELS

    @property
    def classes(self) -> dict[int, str]:
        """value -> name, without the background."""
        stored: Any = self._arrays[0].attrs["classes"]
        return {int(value): str(name) for value, name in stored.items()}

    def counts(self, row: int) -> dict[int, int]:
        """value -> stored voxels of a row, without the background."""
        return parse_counts(str(self.index.voxels[row]))


class StoredFlow(Stored):
    """Flow: uint8 [D, H, W] of a cube, and its en-face images."""

    KIND = FLOW

    def read_slabs(self, row: int) -> dict[str, np.ndarray]:
        """Slab -> uint8 [D, W] of a row; raises StorageError."""
        chunk = self._chunk(row, 1)
        return {name: chunk[SLABS.index(name)] for name in self.names(row)}


def counts_text(labels_DHW: np.ndarray, classes: Mapping[int, str]) -> str:
    """`1=20|2=0`: the voxels of each class."""
    counts = np.bincount(labels_DHW.ravel(), minlength=256)
    return "|".join(f"{value}={counts[value]}" for value in sorted(classes))


def parse_counts(text: str) -> dict[int, int]:
    """What `counts_text` wrote."""
    return {int(value): int(count) for value, count in (part.split("=") for part in text.split("|"))}


def _open_array(url: str, one: ArrayOf, options: StorageOptions | None, read_only: bool) -> zarr.Array:
    """The array of a store; raises UserError for damaged metadata."""
    keys = ObjectStore(url, options, read_only=read_only)
    with intact(storage.join(url, one.name, "zarr.json")):
        return zarr.open_array(keys, path=one.name, mode="r" if read_only else "r+", zarr_format=3)
