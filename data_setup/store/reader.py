"""The prepared store: every volume on one grid, one Zarr v3 chunk each. Its layout, and the side that reads.

Layout under the store's URL, the same on a disk and in a bucket:
    zarr.json               attributes: format_version, geometry, normalisation, synthetic, source_root
    volumes/                uint8 [N, D, H, W], one chunk a volume, Blosc LZ4 + CRC32C; a reject has none
    records.jsonl           the ordered record list: line = row, only ever appended to
    rows/{row:06d}.json     what was measured, written after the row's chunk: a row counts when this exists
    index.parquet           both, compacted: INDEX_COLUMNS
    prepare_report.json     the summary of the last `data_setup.prepare`
    locks/                  one file per running prepare process

In: what data_setup/store/writer.py wrote. Out: uint8 volumes and the index, to everybody else. These two
modules alone open a store.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import zarr

from utils import storage
from utils.config.schema import SpatialConfig, StorageOptions
from utils.errors import UserError
from utils.storage import local_copies
from utils.storage.zarr_keys import ObjectStore

log = logging.getLogger(__name__)
FORMAT_VERSION = 1
NORMALISATION = "zscore_valid"  # what readers do with a volume: z-score over its valid voxels
KEPT, PENDING = "kept", "pending"  # the other statuses are reject reasons
UNREAD = "unread"  # of an attempt: storage did not answer; the row stays as it was

# column -> (pandas type, meaning). Lengths in mm; d, h, w = B-scan, axial, A-scan; text is missing as NaN.
INDEX_COLUMNS: dict[str, tuple[str, str]] = {
    "row": ("int64", "position in volumes and in records.jsonl"),
    "status": ("str", "kept, pending (not prepared yet), or the reason of the reject"),
    "message": ("str", "the reject in one line"),
    "listed": ("bool", "the record was in the manifest of the last prepare"),
    "person_id": ("str", "participant"),
    "device": ("str", "device folder"),
    "protocol": ("str", "Protocol.name of data_setup/protocols.py"),
    "region": ("str", "the manifest's anatomic_region"),
    "laterality": ("str", "L or R; unknown where manifest, file name and header do not tell"),
    "split": ("str", "recommended split: train, val or test"),
    "study_group": ("str", "of participants.tsv"),
    "clinical_site": ("str", "of participants.tsv"),
    "age": ("float64", "years"),
    "path": ("str", "DICOM file relative to the source root"),
    "sop_instance_uid": ("str", "DICOM SOPInstanceUID"),
    "source_size": ("float64", "bytes of the DICOM file"),
    "source_version": ("str", "its ETag or modification time when it was read"),
    **{f"shape_before_{a}": ("float64", f"voxels of the acquired volume along {a}") for a in "dhw"},
    **{f"spacing_before_{a}": ("float64", f"acquired voxel spacing along {a}") for a in "dhw"},
    **{f"spacing_after_{a}": ("float64", f"stored voxel spacing along {a}") for a in "dhw"},
    "spacing_source": ("str", "where the acquired spacing was found"),
    "orientation_source": ("str", "what told the direction of d"),
    "flipped_d": ("bool", "the file's frames ran inferior -> superior"),
    "bits_stored": ("float64", "of the DICOM pixels"),
    "transfer_syntax": ("str", "UID"),
    **{f"valid_{a}{i}": ("float64", f"valid box, half-open, along {a}") for a in "dhw" for i in "01"},
    "valid_fraction": ("float64", "share of the grid inside the acquired field"),
    "lost_fraction": ("float64", "share of the acquired field outside the grid"),
    "intensity_mean": ("float64", "over valid voxels, 0..255"),
    "intensity_std": ("float64", "over valid voxels, 0..255"),
    "checksum": ("str", "of the stored voxels: BLAKE2b, 16 bytes, hex"),
}
RECORD_COLUMNS = tuple(INDEX_COLUMNS)[4:15]  # taken from records.jsonl; those after them from rows/


class DamagedError(UserError):
    """A file of a store that is not what was written; one line with its URL."""


@contextmanager
def intact(url: str, advice: str = "restore it, or prepare into another data.store") -> Iterator[None]:
    """Errors of the parsers below about a file's content become a DamagedError."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DamagedError(
            f"{url}: expected a whole file of a prepared store, found a damaged one ({said}); {advice}"
        ) from error


def checksum(voxels: np.ndarray) -> str:
    """BLAKE2b (16 bytes, hex) of the voxels in C order."""
    return hashlib.blake2b(np.ascontiguousarray(voxels), digest_size=16).hexdigest()


def geometry_of(spatial: SpatialConfig) -> dict[str, Any]:
    """What the store's attributes say of the grid that every volume is on."""
    return {
        "image_size": list(spatial.image_size),
        "target_spacing": list(spatial.target_spacing),
        "resample": spatial.resample,
    }


class PreparedStore:
    """The read side: volumes and their index; picklable for loader workers."""

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
            raise UserError(
                f"{url}: expected a prepared store, found no index.parquet; run data_setup.prepare first"
            ) from error
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
            found = self.attrs["geometry"][key]
            if found != value:
                raise UserError(
                    f"{self.url}: {key}: expected {value} of the configuration, found {found}; "
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
        """The row's voxels; a damaged local copy is dropped, and the store's own chunk read instead, once."""
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
    """Of a local copy: a row prepared again has another checksum, so a stale copy is never asked for."""
    return f"{row}-{digest}"


def chunk_key(row: int, prefix: str = "") -> str:
    """The key of a row's chunk below `volumes`."""
    return storage.join(prefix, f"c.{row}.0.0.0")


def read_attrs(url: str, options: StorageOptions | None = None) -> dict[str, Any]:
    """The attributes of a store."""
    attrs_url = storage.join(url, "zarr.json")
    text = storage.read_text(attrs_url, options)
    with intact(attrs_url):
        return dict(json.loads(text)["attributes"])
