"""Volumes to embed, by row: those of a prepared store, or files through the path of prepare.

In: a store, or the scans of scans.py. Out: `read(row)` gives a `Volume` on the grid with its statistics, or a
`Reject` with its reason. Nothing here imports torch: reader processes start in a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from data_setup.jobs import acquisition, read_volume
from data_setup.readers.dicom import OCTHeader
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.open_record import source_stat
from data_setup.store.format import INDEX_COLUMNS, KEPT, UNREAD
from data_setup.store.reader import PreparedStore
from finetuning.embedding.looks import COLUMNS, Looks
from finetuning.embedding.scans import Scan, require_file, version_of
from finetuning.features.digests import volume_digests
from utils import storage
from utils.config.schema import SpatialConfig, StorageOptions
from utils.workers import in_threads

DAMAGED = "damaged"  # of a row of a store: its volume is missing, damaged or another one
BOX_COLUMNS = [f"valid_{axis}{end}" for axis in "dhw" for end in "01"]


@dataclass(frozen=True)
class Volume:
    """uint8 [D, H, W] on the grid, and what the store's index says, or would say, of it."""

    voxels: np.ndarray
    fields: dict[str, Any]  # INDEX_COLUMNS, and of files those of Looks, as far as they are known
    header: OCTHeader | None = None  # of a file

    @property
    def valid_box(self) -> np.ndarray:
        """float32 [6], half-open."""
        return np.array([self.fields[name] for name in BOX_COLUMNS], np.float32)


@dataclass(frozen=True)
class Reject:
    """A row without features: its status and message are in `fields`."""

    fields: dict[str, Any]
    is_away: bool = False  # storage did not answer, but may later


class StoreVolumes:
    """The kept rows of a prepared store; rows are positions in features' tables, and stay."""

    uses_processes = False  # reading is work for a disk only

    def __init__(self, store: PreparedStore) -> None:
        self.store = store
        self.num_rows = len(store.index)  # the highest row and one
        self.rows: list[int] = store.kept.tolist()  # to embed, ascending

    @cached_property
    def versions(self) -> list[str]:
        """For each row a digest that changes with its volume."""
        return volume_digests(self.store, np.array(self.rows))

    @property
    def planes(self) -> str:
        """What the planes of the volumes are: a rule of data_setup/resample.py."""
        return self.store.planes

    @property
    def about(self) -> dict[str, Any]:
        """What identifies the collection, for embed.json."""
        return {"store": storage.absolute(self.store.url), "synthetic": self.store.attrs["synthetic"]}

    @property
    def index(self) -> pd.DataFrame:
        """What the store says of the rows, in their order."""
        return self.store.index.loc[self.rows]

    def known(self, row: int) -> dict[str, Any]:
        """The fields of a row that need no reading."""
        columns = self.store.index.loc[row].to_dict()
        return {name: v.item() if isinstance(v, np.generic) else v for name, v in columns.items()}

    def reader(self, row: int) -> _StoreRow:
        """What reads a row, here or in another process."""
        return _StoreRow(self.store, row, self.known(row))


@dataclass(frozen=True)
class _StoreRow:
    store: PreparedStore
    row: int
    fields: dict[str, Any]

    def __call__(self) -> Volume | Reject:
        try:
            return Volume(self.store.read(self.row), self.fields)
        except storage.StorageError as error:
            is_away = isinstance(error, storage.StorageAwayError)
            return Reject(self.fields | {"status": DAMAGED, "message": str(error)}, is_away)


class FileVolumes:
    """Files and folders of any kind, each a row in the order of `scans`; as StoreVolumes."""

    uses_processes = True
    index = None  # the files alone say what they are

    def __init__(
        self, scans: Sequence[Scan], spatial: SpatialConfig, options: StorageOptions, planes: str
    ) -> None:
        self.scans, self.spatial, self.options, self.planes = list(scans), spatial, options, planes
        self.num_rows = len(self.scans)
        self.rows = list(range(self.num_rows))

    @property
    def paths(self) -> list[str]:
        """How lines and tables name the rows."""
        return [scan.record.path for scan in self.scans]

    @cached_property
    def versions(self) -> list[str]:
        return in_threads(lambda scan: version_of(scan.record, self.options), self.scans)

    @property
    def about(self) -> dict[str, Any]:
        return {"files": [storage.absolute(path) for path in self.paths]}

    def known(self, row: int) -> dict[str, Any]:
        return {"row": row, "path": self.scans[row].record.path, "listed": True}

    def reader(self, row: int) -> ScanFile:
        return ScanFile(row, self.scans[row], self.spatial, self.options, self.planes)


@dataclass(frozen=True)
class ScanFile:
    """One scan, read as prepare reads it; picklable."""

    row: int
    scan: Scan
    spatial: SpatialConfig
    options: StorageOptions
    planes: str

    def __call__(self) -> Volume | Reject:
        record = self.scan.record
        fields: dict[str, Any] = {"row": self.row, "path": record.path, "listed": True}
        try:
            require_file(record.url)
            source = source_stat(record, self.options)
            fields |= {"source_size": float(source.size), "source_version": source.etag_or_mtime}
            header, volume, measured = read_volume(record, self.spatial, self.options, Looks, self.planes)
        except storage.StorageNotFoundError as error:
            return Reject(fields | {"status": RejectReason.MISSING_FILE.value, "message": error.problem})
        except storage.StorageError as error:
            is_away = isinstance(error, storage.StorageAwayError)
            return Reject(fields | {"status": UNREAD, "message": str(error)}, is_away)
        except OCTReadError as error:
            return Reject(fields | {"status": error.reason.value, "message": error.detail})
        fields |= {"status": KEPT, "sop_instance_uid": header.sop_instance_uid}
        fields |= self.scan.facts(header) | measured | acquisition(header)
        names = (*INDEX_COLUMNS, *COLUMNS)
        return Volume(volume.voxels, {name: fields[name] for name in names if name in fields}, header)


Volumes = StoreVolumes | FileVolumes
