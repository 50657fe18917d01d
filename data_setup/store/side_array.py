"""An array beside a store's volumes: a chunk a row, and a JSON a row that says what became of it.

In: a store's URL, the array's name. Out: what heights.py and labels.py of this folder write and read. A row
counts when its JSON exists, which is written after its chunk.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from data_setup.store.format import KEPT, checksum, intact, read_row_file
from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import UserError
from utils.storage.zarr_keys import ObjectStore
from utils.workers import in_threads


@dataclass(frozen=True)
class SideWriter:
    """Writes such an array; small and picklable, so that every worker process has one."""

    url: str  # of the store
    options: StorageOptions | None = None

    NAME: ClassVar[str]  # of the array
    ROWS: ClassVar[str]  # the folder of the rows' JSON

    def is_there(self) -> bool:
        return storage.exists(storage.join(self.url, self.NAME, "zarr.json"), self.options)

    def make(self, shape: tuple[int, ...], **more: Any) -> None:
        """Write the array's metadata; a chunk is a row. `more`: of zarr's create_array."""
        files: dict[str, Any] = {}
        zarr.create_group(zarr.storage.MemoryStore(files)).create_array(
            self.NAME,
            shape=shape,
            chunks=(1, *shape[1:]),
            compressors=[BloscCodec(cname="lz4", clevel=5, shuffle="shuffle"), Crc32cCodec()],
            chunk_key_encoding={"name": "default", "separator": "."},
            **more,
        )
        name = f"{self.NAME}/zarr.json"
        storage.write_bytes(storage.join(self.url, name), files[name].to_bytes(), self.options)

    def grow(self, num_rows: int) -> None:
        """Give the array `num_rows` rows, unless it has as many."""
        array = self.array()
        if array.shape[0] < num_rows:
            array.resize((num_rows, *array.shape[1:]))

    def array(self) -> zarr.Array:
        return open_array(self.url, self.NAME, self.options, read_only=False)

    def read_rows(self) -> dict[int, dict[str, Any]]:
        """row -> its JSON, of the rows that have a whole one."""
        names = storage.list_names(storage.join(self.url, self.ROWS), self.options)
        rows = sorted(int(match[1]) for n in names if (match := re.fullmatch(r"(\d+)\.json", n)))
        contents = in_threads(self._read_row, rows)
        return {row: fields for row, fields in zip(rows, contents, strict=True) if fields is not None}

    def _read_row(self, row: int) -> dict[str, Any] | None:
        return read_row_file(self._row_url(row), self.options)

    def _row_url(self, row: int) -> str:
        return storage.join(self.url, self.ROWS, f"{row:06d}.json")

    def write_fields(self, row: int, fields: Mapping[str, Any]) -> None:
        """Write a row's JSON."""
        text = json.dumps(dict(fields), sort_keys=True, indent=1, allow_nan=False) + "\n"
        storage.write_text(self._row_url(row), text, self.options)


def read_kept(
    url: str, name: str, columns: Collection[str], what: str, flag: str, options: StorageOptions | None
) -> pd.DataFrame:
    """`columns` of the rows of NAME.parquet that are kept; label = row.

    `what` it lists, and the `flag` of data_setup.prepare that writes it, are for the UserError where there is
    none.
    """
    index_url = storage.join(url, f"{name}.parquet")
    try:
        data = storage.read_bytes(index_url, options)
    except storage.StorageNotFoundError as error:
        raise UserError(
            f"{url}: expected {what} in the store, found no {name}.parquet; run data_setup.prepare {flag}"
        ) from error
    with intact(index_url, f"run data_setup.prepare {flag} again, which writes it"):
        index = pd.read_parquet(io.BytesIO(data))[list(columns)]
    return index[index.status == KEPT].set_index("row", drop=False).rename_axis(None)


def read_chunk(array: zarr.Array, row: int, place: str, expected: str, what: str, advice: str) -> np.ndarray:
    """A row's chunk, whose checksum is `expected`; raises StorageError with `what` and `advice`."""
    try:
        chunk = np.asarray(array[row])
    except (RuntimeError, ValueError) as error:  # of the codec
        problem = f"expected the {what} of row {row}, found {error}; {advice}"
        raise storage.StorageError(place, problem) from error
    if checksum(chunk) != expected:
        raise storage.StorageError(place, f"expected the {what} of row {row}, found others; {advice}")
    return chunk


def open_array(url: str, name: str, options: StorageOptions | None, read_only: bool) -> zarr.Array:
    """The array of a store; raises UserError for damaged metadata."""
    keys = ObjectStore(url, options, read_only=read_only)
    with intact(storage.join(url, name, "zarr.json")):
        return zarr.open_array(keys, path=name, mode="r" if read_only else "r+", zarr_format=3)
