"""Volumes to embed, by row: those of a prepared store, or files through the path of prepare.

In: a store, or the scans of scans.py. Out: `read(row)` gives a `Volume` on the grid with its statistics, or a
`Reject` with its reason. Nothing here imports torch: reader processes start in a second.

Of files `Looks` says whether a scan looks like a retina, the right way up, only from its uint8 frames as they
pass on their way to the grid, no label, no model. Beside QUALITY_COLUMNS
    upright_share   share of A-scans whose brightness rises more sharply than it falls on the way down, by the
                    sum of cubed slopes: vitreous and the layer before the photoreceptors end sharply, the
                    choroid slowly. Near 1 of a retina, near 0 of one upside down, 1/2 of what has no layers
    grey_skew       skewness of grey values: most of a scan is dark; below 0 of an inverted one
    brightest_grey  the grey value that one in a thousand exceeds
    step_share      how much neighbouring B-scans differ, as a share of any two: near 1 where they are in no
                    order
    field_d, _h, _w of the scan in mm
Measured on 15 eyes of four devices and on the phantom's: docs/guides/embedding.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd
from scipy.ndimage import gaussian_filter

from data_setup.jobs import acquisition, read_volume
from data_setup.readers.dicom import OCTHeader
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.open_record import source_stat
from data_setup.store.format import INDEX_COLUMNS, KEPT, UNREAD
from data_setup.store.quality import Meter
from data_setup.store.reader import PreparedStore
from finetuning.cohort.ledger import volume_digests
from finetuning.embedding.scans import Scan, require_file, version_of
from utils import storage
from utils.config.schema import SpatialConfig, StorageOptions
from utils.workers import in_threads

LOOKS = ("upright_share", "grey_skew", "brightest_grey", "step_share", "field_d", "field_h", "field_w")
EDGE_ROWS = 2  # of blocks, beyond which a slope is that of the frame's edge
SMALL = 12  # rows and columns of the small picture that is kept of each B-scan
LEAST_FRAMES = 8  # fewer say nothing of their order
DAMAGED = "damaged"  # of a row of a store: its volume is missing, damaged or another one
BOX_COLUMNS = [f"valid_{axis}{end}" for axis in "dhw" for end in "01"]


class Looks(Meter):
    """A Meter that asks these questions too."""

    def __init__(self) -> None:
        super().__init__()
        self._rises: list[np.ndarray] = []  # of each frame, of each column of blocks with an edge in it
        self._skews: list[float] = []
        self._small: list[np.ndarray] = []
        self._greys = np.zeros(256)
        self._shape = (0, 0)

    def _look(self, frame: np.ndarray) -> None:
        super()._look(frame)
        assert self._before is not None
        self._shape = frame.shape
        self._greys += np.bincount(frame.ravel(), minlength=256)
        blocks = self._before
        smooth = gaussian_filter(blocks, (1.0, 0.5))
        slopes = np.diff(smooth, axis=0)[EDGE_ROWS:-EDGE_ROWS] ** 3
        self._rises.append((slopes.sum(axis=0) > 0)[np.abs(slopes).sum(axis=0) > 0])
        if (spread := float(blocks.std())) == 0:
            return
        scaled = (blocks - blocks.mean()) / spread
        self._skews.append(float((scaled**3).mean()))
        bright = np.maximum(scaled, 0).sum(axis=1)
        centre = round(float(bright @ np.arange(len(bright)) / bright.sum()))
        level = gaussian_filter(np.roll(scaled, len(bright) // 2 - centre, axis=0), len(bright) / (2 * SMALL))
        down, right = (max(1, n // SMALL) for n in level.shape)
        self._small.append(level[::down, ::right].ravel())

    def columns(self, spacing_mm: tuple[float, float, float]) -> dict[str, float]:
        """QUALITY_COLUMNS and LOOKS of the frames that have passed; NaN for what they do not say."""
        rises = np.concatenate(self._rises)
        count = np.cumsum(self._greys)
        lengths = (len(self._rises), *self._shape)
        values = {
            "upright_share": float(rises.mean()) if len(rises) else np.nan,
            "grey_skew": float(np.mean(self._skews)) if self._skews else np.nan,
            "brightest_grey": float(np.searchsorted(count, 0.999 * count[-1])),
            "step_share": self._step_share(),
            **{f"field_{axis}": n * mm for axis, n, mm in zip("dhw", lengths, spacing_mm, strict=True)},
        }
        return super().columns(spacing_mm) | {name: round(value, 4) for name, value in values.items()}

    def _step_share(self) -> float:
        """Von Neumann's ratio: squared difference of neighbours over that of any two."""
        if len(self._small) < LEAST_FRAMES:
            return np.nan
        apart = np.array(self._small)
        apart = apart - apart.mean(axis=0)
        of_any_two = 2 * (apart**2).sum() / (len(apart) - 1)
        steps = (np.diff(apart, axis=0) ** 2).sum() / (len(apart) - 1)
        return float(steps / of_any_two) if of_any_two > 0 else np.nan


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
        return self.store.planes

    @property
    def about(self) -> dict[str, Any]:
        return {"store": storage.absolute(self.store.url), "synthetic": self.store.attrs["synthetic"]}

    @property
    def index(self) -> pd.DataFrame:
        return self.store.index.loc[self.rows]

    def known(self, row: int) -> dict[str, Any]:
        """The fields of a row that need no reading."""
        columns = self.store.index.loc[row].to_dict()
        return {name: v.item() if isinstance(v, np.generic) else v for name, v in columns.items()}

    def reader(self, row: int) -> Callable[[], Volume | Reject]:
        return partial(_read_row, self.store, row, self.known(row))


def _read_row(store: PreparedStore, row: int, fields: dict[str, Any]) -> Volume | Reject:
    try:
        return Volume(store.read(row), fields)
    except storage.StorageError as error:
        is_away = isinstance(error, storage.StorageAwayError)
        return Reject(fields | {"status": DAMAGED, "message": str(error)}, is_away)


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

    def reader(self, row: int) -> Callable[[], Volume | Reject]:
        return partial(read_scan, row, self.scans[row], self.spatial, self.options, self.planes)


def read_scan(
    row: int, scan: Scan, spatial: SpatialConfig, options: StorageOptions, planes: str
) -> Volume | Reject:
    """One scan, read as prepare reads it."""
    record = scan.record
    fields: dict[str, Any] = {"row": row, "path": record.path, "listed": True}
    try:
        require_file(record.url)
        source = source_stat(record, options)
        fields |= {"source_size": float(source.size), "source_version": source.etag_or_mtime}
        header, volume, measured = read_volume(record, spatial, options, Looks, planes)
    except storage.StorageNotFoundError as error:
        return Reject(fields | {"status": RejectReason.MISSING_FILE.value, "message": error.problem})
    except storage.StorageError as error:
        is_away = isinstance(error, storage.StorageAwayError)
        return Reject(fields | {"status": UNREAD, "message": str(error)}, is_away)
    except OCTReadError as error:
        return Reject(fields | {"status": error.reason.value, "message": error.detail})
    fields |= {"status": KEPT, "sop_instance_uid": header.sop_instance_uid}
    fields |= scan.facts(header) | measured | acquisition(header)
    names = (*INDEX_COLUMNS, *LOOKS)
    return Volume(volume.voxels, {name: fields[name] for name in names if name in fields}, header)


Volumes = StoreVolumes | FileVolumes
