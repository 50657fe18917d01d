"""Volumes to embed, by row: those of a prepared store, or DICOM files through the path of prepare.

In: a store, or URLs of files and folders. Out: `read(row)` gives a `Volume` on the grid with its statistics,
or a `Reject` with its reason. Nothing here imports torch: reader processes start in a second.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pandas as pd

from data_setup.jobs import acquisition, read_volume
from data_setup.manifest import unknown_record
from data_setup.protocols import BY_NAME
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.open_record import identify, kind_by_name
from data_setup.store.format import INDEX_COLUMNS, KEPT, UNREAD
from data_setup.store.reader import PreparedStore
from finetuning.embedding.looks import COLUMNS, Looks
from finetuning.features.digests import values_digest, volume_digests
from utils import storage
from utils.config.schema import SpatialConfig, StorageOptions
from utils.errors import UserError
from utils.storage.errors import split_scheme
from utils.workers import in_threads

log = logging.getLogger(__name__)
DAMAGED = "damaged"  # of a row of a store: its volume is missing, damaged or another one
_HEAD_BYTES = 132
BOX_COLUMNS = [f"valid_{axis}{end}" for axis in "dhw" for end in "01"]


@dataclass(frozen=True)
class Volume:
    """uint8 [D, H, W] on the grid, and what the store's index says, or would say, of it."""

    voxels: np.ndarray
    fields: dict[str, Any]  # INDEX_COLUMNS, and of files those of Looks, as far as they are known

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


def version_of(url: str, options: StorageOptions) -> str:
    """A digest that changes with the file; "" of one that cannot be looked at: its reader names the error."""
    try:
        source = storage.stat(url, options)
    except storage.StorageError:
        return ""
    return values_digest([url, source.size, source.etag_or_mtime])


def is_special(url: str) -> bool:
    """Whether a path is a pipe, a socket or a device, whose bytes may never come."""
    scheme, path = split_scheme(url)
    is_plain = os.path.isfile(path) or os.path.isdir(path)
    return scheme == "file" and os.path.exists(path) and not is_plain


def require_file(url: str) -> None:
    """Raise OCTReadError for what `is_special`."""
    if is_special(url):
        raise OCTReadError(url, RejectReason.UNSUPPORTED_FORMAT, "a file or a folder", "a pipe or a device")


class DicomVolumes:
    """DICOM files, each a row in the order of `urls`; as StoreVolumes."""

    uses_processes = True
    index = None  # the files alone say what they are

    def __init__(
        self, urls: Sequence[str], spatial: SpatialConfig, options: StorageOptions, planes: str
    ) -> None:
        self.urls, self.spatial, self.options, self.planes = list(urls), spatial, options, planes
        self.num_rows = len(self.urls)
        self.rows = list(range(self.num_rows))

    @cached_property
    def versions(self) -> list[str]:
        return in_threads(self._version, self.urls)

    def _version(self, url: str) -> str:
        return version_of(url, self.options)

    @property
    def about(self) -> dict[str, Any]:
        return {"files": [storage.absolute(url) for url in self.urls]}

    def known(self, row: int) -> dict[str, Any]:
        return {"row": row, "path": self.urls[row], "listed": True}

    def reader(self, row: int) -> DicomFile:
        return DicomFile(row, self.urls[row], self.spatial, self.options, self.planes)


@dataclass(frozen=True)
class DicomFile:
    """One file, read as prepare reads it; picklable."""

    row: int
    url: str
    spatial: SpatialConfig
    options: StorageOptions
    planes: str

    def __call__(self) -> Volume | Reject:
        fields: dict[str, Any] = {"row": self.row, "path": self.url, "listed": True}
        try:
            require_file(self.url)
            source = storage.stat(self.url, self.options)
            fields |= {"source_size": float(source.size), "source_version": source.etag_or_mtime}
            header, volume, measured = read_volume(
                unknown_record(self.url), self.spatial, self.options, Looks, self.planes
            )
        except storage.StorageNotFoundError as error:
            return Reject(fields | {"status": RejectReason.MISSING_FILE.value, "message": error.problem})
        except storage.StorageError as error:
            is_away = isinstance(error, storage.StorageAwayError)
            return Reject(fields | {"status": UNREAD, "message": str(error)}, is_away)
        except OCTReadError as error:
            return Reject(fields | {"status": error.reason.value, "message": error.detail})
        known = BY_NAME.get(header.protocol or "")
        fields |= {
            "status": KEPT,
            "laterality": header.laterality or "unknown",
            "device": header.device,
            "protocol": header.protocol,
            "region": known.region if known else None,
            "sop_instance_uid": header.sop_instance_uid,
        }
        fields |= measured | acquisition(header)
        names = (*INDEX_COLUMNS, *COLUMNS)
        return Volume(volume.voxels, {name: fields[name] for name in names if name in fields})


Volumes = StoreVolumes | DicomVolumes


def find_dicoms(places: Sequence[str], options: StorageOptions) -> list[str]:
    """The files that `places` mean, each once: a file itself, of a folder all DICOM files below it.

    In a folder these are the names that end in .dcm, and of names without a known ending (1.2.840.10008, as
    archives give them) those whose bytes are a DICOM file's. Raises UserError for a place that is not there,
    or a folder without one.
    """
    urls: dict[str, None] = {}
    for place in places:
        below = storage.find_names(place, options)
        if not below or below == [""]:
            if not storage.exists(place, options):
                raise UserError(f"--dicom: expected a DICOM file or a folder, found none at {place}")
            urls[place] = None
            continue
        names = [name for name in below if _is_dicom(storage.join(place, name), options)]
        if not names:
            raise UserError(f"--dicom: expected DICOM files below {place}, found none in {len(below)} files")
        urls |= dict.fromkeys(storage.join(place, name) for name in names)
    return list(urls)


def _is_dicom(url: str, options: StorageOptions) -> bool:
    if is_special(url):
        log.warning("%r: neither a file nor a folder: skipped", url)
        return False
    if kind_by_name(url) is not None:
        return kind_by_name(url) == "DICOM"
    is_index = PurePosixPath(url).name.upper() == "DICOMDIR"
    return not is_index and identify(storage.read_range(url, 0, _HEAD_BYTES, options))[0] == "DICOM"
