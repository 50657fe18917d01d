"""The read side of the prepared store.

In: what data_setup/store/writer.py wrote, in the layout of data_setup/store/format.py. Out: uint8 volumes and
the index.
"""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import zarr

from data_setup.resample import BLENDED, rule_of
from data_setup.store.format import (
    FORMAT_VERSION,
    INDEX_COLUMNS,
    KEPT,
    QUALITY_COLUMNS,
    checksum,
    chunk_key,
    geometry_of,
    intact,
    read_attrs,
)
from data_setup.store.place import INDEX, no_store
from utils import storage
from utils.config.schema import Config, SpatialConfig, StorageOptions
from utils.errors import EXIT_USER_ERROR, TransientError, UserError
from utils.storage import StorageAwayError, StorageError
from utils.storage.zarr_keys import ObjectStore, drop_copy
from utils.terminal import say, track
from utils.workers import executor_of, is_lost_worker

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
        digests = np.frombuffer(bytes.fromhex("".join(index.checksum[self.kept])), np.uint8).reshape(-1, 16)
        self.volumes = VolumeReader(url, options, cache_dir, self.kept, digests)

    @classmethod
    def open(
        cls, url: str, options: StorageOptions | None = None, cache_dir: str | None = None
    ) -> PreparedStore:
        """Open for reading; cache_dir: local copies of remote volumes. Raises UserError."""
        index_url = storage.join(url, INDEX)
        try:
            data = storage.read_bytes(index_url, options)
        except storage.StorageNotFoundError as error:
            raise no_store(url) from error
        attrs = read_attrs(url, options)
        if attrs.get("format_version") != FORMAT_VERSION:
            raise UserError(
                f"{url}: format_version: expected {FORMAT_VERSION}, found {attrs.get('format_version')}"
            )
        with intact(index_url, "run data_setup.prepare again, which writes it"):
            table = pd.read_parquet(io.BytesIO(data))
            unmeasured = [name for name in QUALITY_COLUMNS if name not in table]  # of an older store
            index = table.assign(**dict.fromkeys(unmeasured, np.nan))[list(INDEX_COLUMNS)]
        index = index.set_index("row", drop=False).rename_axis(None)
        return cls(url, options, cache_dir, attrs, index)

    @property
    def image_size(self) -> tuple[int, int, int]:
        """Voxels of every volume (D, H, W)."""
        d, h, w = self.attrs["geometry"]["image_size"]
        return d, h, w

    @property
    def planes(self) -> str:
        """What the planes of every volume are: a rule of data_setup/resample.py."""
        return rule_of(self.attrs["geometry"])

    def require_geometry(self, spatial: SpatialConfig) -> None:
        """Raise UserError that names the first difference between this store and the configuration."""
        for key, value in geometry_of(spatial, BLENDED).items():  # whatever the store's planes are
            stored = self.attrs["geometry"][key]
            if stored != value:
                raise UserError(
                    f"{self.url}: {key}: expected {value} of the configuration, found {stored}; "
                    "run data_setup.prepare into another store"
                )

    def read(self, row: int) -> np.ndarray:
        """uint8 [D, H, W] of a kept row; raises ValueError for another row, StorageError."""
        if row not in self.volumes:
            status = self.index.status.get(row, "no such row")
            raise ValueError(f"{self.url}: row {row}: expected a kept row, found {status}")
        return self.volumes.read(row)


class VolumeReader:
    """The volumes of some rows, without the index: 24 bytes a row, which is what loader workers get."""

    def __init__(
        self,
        url: str,
        options: StorageOptions | None,
        cache_dir: str | None,
        rows: np.ndarray,
        digests: np.ndarray,
    ) -> None:
        self.url, self.options = url, options
        self.cache_dir = cache_dir if storage.is_remote(url) else None
        self.rows = rows  # int64, ascending
        self.digests = digests  # uint8 [rows, 16]: the volumes' checksums
        self._array: zarr.Array | None = None
        self._compared: set[int] = set()  # rows whose local copy this process has compared with its checksum

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_array": None, "_compared": set()}  # a worker opens its own

    def __contains__(self, row: int) -> bool:
        place = np.searchsorted(self.rows, row)
        return bool(place < len(self.rows) and self.rows[place] == row)

    def digest(self, row: int) -> str:
        """The checksum of a row's volume as it was prepared."""
        return self.digests[np.searchsorted(self.rows, row)].tobytes().hex()

    def of(self, rows: np.ndarray) -> VolumeReader:
        """The same store with some of these rows, ascending."""
        digests = self.digests[np.searchsorted(self.rows, rows)]
        return type(self)(self.url, self.options, self.cache_dir, rows, digests)

    def read(self, row: int, compare: bool = False) -> np.ndarray:
        """uint8 [D, H, W] of one of the rows; raises StorageError.

        The codec finds damage inside a chunk; a chunk in another's place is found by the checksum, which is
        compared at the first read of a local copy, and where `compare` asks for it.
        """
        if self._array is None:
            self._array = self._open_array(self.cache_dir)
        compare = compare or (self.cache_dir is not None and row not in self._compared)
        try:
            voxels = self._decoded(self._array, row, compare)
        except storage.StorageAwayError:
            raise
        except (storage.StorageNotFoundError, RuntimeError, ValueError) as error:  # the last two: the codec
            raise storage.StorageError(
                storage.join(self.url, chunk_key(row, "volumes")),
                f"expected the volume of row {row}, found none, a damaged or another one ({error}); "
                f"remove {self.url}/rows/{row:06d}.json and prepare again",
            ) from error
        assert isinstance(voxels, np.ndarray)
        if self.cache_dir is not None:
            self._compared.add(row)
        return voxels

    def _open_array(self, cache_dir: str | None) -> zarr.Array:
        keys = ObjectStore(self.url, self.options, cache_dir=cache_dir, chunk_names=_CopyNames(self))
        with intact(storage.join(self.url, "volumes", "zarr.json")):
            return zarr.open_array(keys, path="volumes", mode="r", zarr_format=3)

    def _decoded(self, array: zarr.Array, row: int, compare: bool) -> Any:
        """The row's voxels; a damaged local copy is dropped and the chunk is read from the store."""
        try:
            return self._compare(array[row], row) if compare else array[row]
        except (RuntimeError, ValueError):  # of the codec, or another volume
            copy = Path(self.cache_dir or "", _copy_name(row, self.digest(row)))
            if self.cache_dir is None or not drop_copy(copy):
                raise
            voxels = self._compare(self._open_array(None)[row], row)
            log.warning("%s: a damaged local copy, read from the store again", copy)
            return voxels

    def _compare(self, voxels: Any, row: int) -> Any:
        """The voxels; raises ValueError when they are not those of the checksum."""
        actual, expected = checksum(voxels), self.digest(row)
        if actual != expected:
            raise ValueError(f"checksum: expected {expected}, found {actual}")
        return voxels


class _CopyNames(Mapping[str, str]):
    """Chunk key -> file name of its local copy, of a reader's rows."""

    def __init__(self, volumes: VolumeReader) -> None:
        self.volumes = volumes

    def __getitem__(self, key: str) -> str:
        match = re.fullmatch(r"volumes/c\.(\d+)\.0\.0\.0", key)
        if not match or int(match[1]) not in self.volumes:
            raise KeyError(key)
        return _copy_name(int(match[1]), self.volumes.digest(int(match[1])))

    def __iter__(self) -> Iterator[str]:
        return (chunk_key(int(row), "volumes") for row in self.volumes.rows)

    def __len__(self) -> int:
        return len(self.volumes.rows)


def _copy_name(row: int, digest: str) -> str:
    """The file name of a local copy; a row prepared again has another checksum, hence another name."""
    return f"{row}-{digest}"


_ROWS = 16  # of a job


def verify(cfg: Config, workers: int, cluster: str | None = None) -> int:
    """0, or EXIT_USER_ERROR when a volume is not what the index says; raises UserError."""
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options)
    count = len(store.kept)
    parts = [store.volumes.of(store.kept[start : start + _ROWS]) for start in range(0, count, _ROWS)]
    with executor_of(workers, cluster) as pool:
        outcomes = _outcomes([pool.submit(_read, part) for part in parts], store.url)
        problems = {row: text for row, text in track(outcomes, count, "verify", "volumes") if text}
    for _, problem in sorted(problems.items()):
        say(f"error: {problem}", file=sys.stderr)
    if problems:
        text = f"expected {count} volumes as in the index, found {len(problems)} that differ"
        say(f"error: {store.url}: {text}", file=sys.stderr)
        return EXIT_USER_ERROR
    say(f"{store.url}: {count} volumes are what the index says")
    return 0


def _outcomes(jobs: Sequence[Future[dict[int, str]]], url: str) -> Iterator[tuple[int, str]]:
    """What `_read` says of each row, as it comes; raises TransientError for a worker that is gone."""
    for job in as_completed(jobs):
        error = job.exception()
        if isinstance(error, BrokenProcessPool) or (error is not None and is_lost_worker(error)):
            text = "expected workers that live, found one that was killed, most often for lack of memory"
            raise TransientError(f"{url}: {text}; run again, with fewer --workers") from error
        yield from job.result().items()


def _read(volumes: VolumeReader) -> dict[int, str]:
    """Row -> what is wrong with its volume; empty for nothing."""
    problems = {}
    for row in volumes.rows.tolist():
        try:
            volumes.read(row, compare=True)
            problems[row] = ""
        except StorageAwayError:
            raise
        except StorageError as error:
            problems[row] = str(error)
    return problems
