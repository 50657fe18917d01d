"""The read side of the prepared store.

In: what data_setup/store/writer.py wrote, in the layout of data_setup/store/format.py. Out: uint8 volumes and
the index.
"""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import zarr

from data_setup.store.format import (
    FORMAT_VERSION,
    INDEX_COLUMNS,
    KEPT,
    chunk_key,
    geometry_of,
    intact,
    read_attrs,
)
from utils import storage
from utils.config.schema import SpatialConfig, StorageOptions
from utils.errors import UserError
from utils.storage import local_copies
from utils.storage.zarr_keys import ObjectStore

log = logging.getLogger(__name__)


class PreparedStore:
    """Volumes and their index; picklable for loader workers."""

    def __init__(
        self,
        url: str,
        options: StorageOptions | None,
        cache_dir: str | None,
        attrs: dict[str, Any],
        index: pd.DataFrame,
    ) -> None:
        self.url, self.options, self.cache_dir = url, options, cache_dir
        self.attrs = attrs  # format_version, geometry, normalisation, synthetic, source_root
        self.index = index  # INDEX_COLUMNS; label = row
        self.kept: np.ndarray = index.loc[index.status == KEPT, "row"].to_numpy()
        self._checksums = index.checksum.where(index.status == KEPT).to_dict()
        self._array: zarr.Array | None = None

    @classmethod
    def open(
        cls, url: str, options: StorageOptions | None = None, cache_dir: str | None = None
    ) -> PreparedStore:
        """Open for reading; cache_dir: local copies of remote volumes. Raises UserError."""
        index_url = storage.join(url, "index.parquet")
        try:
            data = storage.read_bytes(index_url, options)
        except storage.StorageNotFoundError as error:
            begun = storage.exists(storage.join(url, "records.jsonl"), options)
            expected = "a finalised store" if begun else "a prepared store"
            command = "data_setup.prepare with --finalise" if begun else "data_setup.prepare first"
            raise UserError(f"{url}: expected {expected}, found no index.parquet; run {command}") from error
        attrs = read_attrs(url, options)
        if attrs.get("format_version") != FORMAT_VERSION:
            raise UserError(
                f"{url}: format_version: expected {FORMAT_VERSION}, found {attrs.get('format_version')}"
            )
        with intact(index_url, "run data_setup.prepare again, which writes it"):
            index = pd.read_parquet(io.BytesIO(data))[list(INDEX_COLUMNS)]
        index = index.set_index("row", drop=False).rename_axis(None)
        return cls(url, options, cache_dir, attrs, index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_array": None}  # a worker opens its own

    @property
    def image_size(self) -> tuple[int, int, int]:
        """Voxels of every volume (D, H, W)."""
        d, h, w = self.attrs["geometry"]["image_size"]
        return d, h, w

    def require_geometry(self, spatial: SpatialConfig) -> None:
        """Raise UserError that names the first difference between this store and the configuration."""
        for key, value in geometry_of(spatial).items():
            stored = self.attrs["geometry"][key]
            if stored != value:
                raise UserError(
                    f"{self.url}: {key}: expected {value} of the configuration, found {stored}; "
                    "run data_setup.prepare into another store"
                )

    def read(self, row: int) -> np.ndarray:
        """uint8 [D, H, W] of a kept row; raises ValueError for another row, StorageError."""
        digest = self._checksums.get(row)
        if not isinstance(digest, str):
            status = self.index.status.get(row, "no such row")
            raise ValueError(f"{self.url}: row {row}: expected a kept row, found {status}")
        if self._array is None:
            self._array = self._open_array(self.cache_dir)
        try:
            voxels = self._decoded(self._array, row, digest)
        except storage.StorageAwayError:
            raise
        except (storage.StorageNotFoundError, RuntimeError, ValueError) as error:  # the last two: the codec
            raise storage.StorageError(
                storage.join(self.url, chunk_key(row, "volumes")),
                f"expected the volume of row {row}, found none or a damaged one ({error}); "
                f"remove {self.url}/rows/{row:06d}.json and prepare again",
            ) from error
        assert isinstance(voxels, np.ndarray)
        return voxels

    def _open_array(self, cache_dir: str | None) -> zarr.Array:
        names = {
            chunk_key(r, "volumes"): _copy_name(r, c)
            for r, c in self._checksums.items()
            if isinstance(c, str)
        }
        keys = ObjectStore(self.url, self.options, cache_dir=cache_dir, chunk_names=names)
        with intact(storage.join(self.url, "volumes", "zarr.json")):
            return zarr.open_array(keys, path="volumes", mode="r", zarr_format=3)

    def _decoded(self, array: zarr.Array, row: int, digest: str) -> Any:
        """The row's voxels; a damaged local copy is dropped and the chunk is read from the store."""
        try:
            return array[row]
        except (RuntimeError, ValueError):  # of the codec
            copy = Path(self.cache_dir or "", _copy_name(row, digest))
            if self.cache_dir is None or not storage.is_remote(self.url) or not local_copies.drop(copy):
                raise
            voxels = self._open_array(None)[row]
            log.warning("%s: a damaged local copy, read from the store again", copy)
            return voxels


def _copy_name(row: int, digest: str) -> str:
    """The file name of a local copy; a row prepared again has another checksum, hence another name."""
    return f"{row}-{digest}"
