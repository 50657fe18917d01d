"""The prepared store: every volume on one grid, one Zarr v3 chunk each. The only place that opens it.

Layout under the store's URL, the same on a disk and in a bucket:
    zarr.json               attributes: format_version, geometry, normalisation, synthetic, source_root
    volumes/                uint8 [N, D, H, W], one chunk a volume, Blosc LZ4 + CRC32C; a reject has none
    records.jsonl           the ordered record list: line = row, only ever appended to
    rows/{row:06d}.json     what was measured, written after the row's chunk: a row counts when this exists
    index.parquet           both, compacted: INDEX_COLUMNS
    prepare_report.json     the summary of the last `data_setup.prepare`
    locks/                  one file per running prepare process

In: volumes and measurements from data_setup/prepare.py. Out: uint8 volumes and the index, to everybody else.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from data_setup.resample import Resampled
from utils import storage
from utils.config import SpatialConfig, StorageOptions, UserError
from utils.object_store import zarr_store

FORMAT_VERSION = 1
NORMALISATION = "zscore_valid"  # what readers do with a volume: z-score over its valid voxels
KEPT, PENDING = "kept", "pending"  # the other statuses are reject reasons
_READERS = 16  # small objects read at once; hides the latency of a bucket

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
_T = TypeVar("_T")
_R = TypeVar("_R")


class DamagedError(UserError):
    """A file of a store that is not what was written; one line with its URL."""


@contextmanager
def _intact(url: str, advice: str = "restore it, or prepare into another data.store") -> Iterator[None]:
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


def measure(volume: Resampled) -> dict[str, float | str]:
    """The index columns that follow from a resampled volume; statistics over valid voxels in 0..255."""
    d0, d1, h0, h1, w0, w1 = volume.valid_box
    count, total, squares = 0, 0.0, 0.0
    for plane in volume.voxels[d0:d1, h0:h1, w0:w1]:  # whole numbers below 2^53, so float64 sums are exact
        values = plane.ravel().astype(np.float64)
        count, total, squares = count + values.size, total + values.sum(), squares + values @ values
    mean = float(total / count)
    box = dict(zip([f"valid_{a}{i}" for a in "dhw" for i in "01"], volume.valid_box, strict=True))
    return {
        **dict(zip([f"spacing_after_{a}" for a in "dhw"], volume.spacing_mm, strict=True)),
        **box,
        "valid_fraction": volume.valid_fraction,
        "lost_fraction": volume.lost_fraction,
        "intensity_mean": mean,
        "intensity_std": float(max(0.0, squares / count - mean * mean) ** 0.5),
        "checksum": checksum(volume.voxels),
    }


def geometry_of(spatial: SpatialConfig) -> dict[str, Any]:
    """What the store's attributes say of the grid that every volume is on."""
    return {
        "image_size": list(spatial.image_size),
        "target_spacing": list(spatial.target_spacing),
        "resample": spatial.resample,
    }


@dataclass(frozen=True)
class StoreWriter:
    """The write side, used by prepare only; small and picklable, so that every worker process has one."""

    url: str
    options: StorageOptions | None = None

    def create(self, spatial: SpatialConfig, source_root: str, synthetic: bool) -> None:
        """Make an empty store, or check that the one here has this geometry and source; raises UserError.

        One store, one source: a path is a row's identity only below one root.
        """
        wanted = {
            "format_version": FORMAT_VERSION,
            "geometry": geometry_of(spatial),
            "normalisation": NORMALISATION,
            "synthetic": synthetic,
            "source_root": storage.absolute(source_root),
        }
        if storage.exists(storage.join(self.url, "volumes", "zarr.json"), self.options):
            found = read_attrs(self.url, self.options)
            for key, expected in wanted.items():
                if found.get(key) != expected:
                    raise UserError(
                        f"{self.url}: {key}: expected {expected}, found {found.get(key)}; "
                        "give this configuration a data.store of its own"
                    )
            return
        # The array comes last: its presence says that the store is complete enough to be opened.
        if not storage.exists(storage.join(self.url, "zarr.json"), self.options):
            keys = zarr_store(self.url, self.options, read_only=False)
            zarr.create_group(keys, attributes=wanted)
        with _intact(self.url):
            group = zarr.open_group(zarr_store(self.url, self.options, read_only=False), mode="r+")
        group.create_array(
            "volumes",
            shape=(0, *spatial.image_size),
            chunks=(1, *spatial.image_size),
            dtype="uint8",
            # Reads 3.8 GB/s on one core; with bitshuffle 1.8 GB/s, and 21 % smaller (real Triton volume).
            # The CRC finds any damage for 0.2 ms a volume; Blosc alone reads past the end of a cut chunk.
            compressors=[BloscCodec(cname="lz4", clevel=5, shuffle="noshuffle"), Crc32cCodec()],
            chunk_key_encoding={"name": "default", "separator": "."},  # one flat folder
            fill_value=0,
            dimension_names=("row", "d", "h", "w"),
        )

    def _array(self) -> zarr.Array:
        keys = zarr_store(self.url, self.options, read_only=False)
        with _intact(storage.join(self.url, "volumes", "zarr.json")):
            return zarr.open_array(keys, path="volumes", mode="r+", zarr_format=3)

    def read_records(self) -> list[dict[str, Any]]:
        """The record of every row, in row order."""
        url = storage.join(self.url, "records.jsonl")
        if not storage.exists(url, self.options):
            return []
        with _intact(url):
            return [json.loads(line) for line in storage.read_text(url, self.options).splitlines()]

    def append_records(self, records: Sequence[dict[str, Any]]) -> list[int]:
        """Give every record (the RECORD_COLUMNS) its row; new ones are appended, known ones keep theirs.

        Fields of a known record are updated (a split, an age); a row no longer listed keeps its record.
        """
        listed = self.read_records()
        row_of = {_key(r): row for row, r in enumerate(listed)}
        rows = []
        for record in records:
            row = row_of.setdefault(_key(record), len(row_of))
            if row == len(listed):
                listed.append(record)
            listed[row] = record
            rows.append(row)
        text = "".join(json.dumps(r, sort_keys=True) + "\n" for r in listed)
        url = storage.join(self.url, "records.jsonl")
        if not storage.exists(url, self.options) or storage.read_text(url, self.options) != text:
            storage.write_text(url, text, self.options)
        array = self._array()
        if array.shape[0] < len(listed):
            array.resize((len(listed), *array.shape[1:]))
        return rows

    def _row_url(self, row: int) -> str:
        return storage.join(self.url, "rows", f"{row:06d}.json")

    def read_rows(self, wanted: Callable[[int], bool] = lambda row: True) -> dict[int, dict[str, Any]]:
        """row -> what rows/{row}.json says, for the rows that have a whole one; the others are pending."""
        names = storage.list_names(storage.join(self.url, "rows"), self.options)
        rows = [int(match[1]) for n in names if (match := re.fullmatch(r"(\d+)\.json", n))]
        rows = [r for r in rows if wanted(r)]
        found = in_threads(self._read_row, rows)
        return {row: fields for row, fields in zip(rows, found, strict=True) if fields is not None}

    def _read_row(self, row: int) -> dict[str, Any] | None:
        """What rows/{row}.json says; None when it is damaged, which costs preparing one volume again."""
        try:
            with _intact(self._row_url(row)):
                fields = json.loads(storage.read_text(self._row_url(row), self.options))
                return fields if isinstance(fields, dict) and "status" in fields else None
        except DamagedError:
            return None

    def write_row(self, row: int, voxels: np.ndarray | None, fields: dict[str, Any]) -> None:
        """Write the chunk (None: a reject, which has none), then the row's JSON."""
        chunk = storage.join(self.url, "volumes", chunk_key(row))
        if voxels is not None:
            self._array()[row] = voxels
        elif storage.exists(chunk, self.options):  # it was kept once, and its source has changed
            storage.remove(chunk, self.options)
        self.write_fields(row, fields)

    def write_fields(self, row: int, fields: dict[str, Any]) -> None:
        """Write the row's JSON alone."""
        text = json.dumps(fields, sort_keys=True, indent=1, allow_nan=False) + "\n"
        storage.write_text(self._row_url(row), text, self.options)

    def finalise(self, listed_rows: Iterable[int]) -> pd.DataFrame:
        """Compact records and rows to index.parquet; returns it."""
        records, measured, listed = self.read_records(), self.read_rows(), set(listed_rows)
        table = []
        for row, record in enumerate(records):
            fields = {"status": PENDING, "flipped_d": False, **measured.get(row, {}), **record}
            if record["laterality"] == "unknown" and fields.get("header_laterality"):
                fields["laterality"] = fields["header_laterality"]
            table.append(fields | {"row": row, "listed": row in listed})
        types = {name: kind for name, (kind, _) in INDEX_COLUMNS.items()}
        index = pd.DataFrame(table, columns=list(types)).astype(types)
        buffer = io.BytesIO()
        index.to_parquet(buffer, index=False)
        storage.write_bytes(storage.join(self.url, "index.parquet"), buffer.getvalue(), self.options)
        return index


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
        with _intact(index_url, "run data_setup.prepare again, which writes it"):
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
            # A row prepared again has another checksum, so a stale local copy is never asked for.
            names = {
                chunk_key(r, "volumes"): f"{r}-{c}" for r, c in self._checksums.items() if isinstance(c, str)
            }
            keys = zarr_store(self.url, self.options, cache_dir=self.cache_dir, chunk_names=names)
            with _intact(storage.join(self.url, "volumes", "zarr.json")):
                self._array = zarr.open_array(keys, path="volumes", mode="r", zarr_format=3)
        try:
            voxels = self._array[row]
        except (storage.StorageNotFoundError, RuntimeError, ValueError) as error:  # the last two: the codec
            raise storage.StorageError(
                storage.join(self.url, chunk_key(row, "volumes")),
                f"expected the volume of row {row}, found none or a damaged one ({error}); "
                f"remove {self.url}/rows/{row:06d}.json and prepare again",
            ) from error
        assert isinstance(voxels, np.ndarray)
        return voxels


def chunk_key(row: int, prefix: str = "") -> str:
    """The key of a row's chunk below `volumes`."""
    return storage.join(prefix, f"c.{row}.0.0.0")


def read_attrs(url: str, options: StorageOptions | None = None) -> dict[str, Any]:
    """The attributes of a store."""
    attrs_url = storage.join(url, "zarr.json")
    text = storage.read_text(attrs_url, options)
    with _intact(attrs_url):
        return dict(json.loads(text)["attributes"])


def in_threads(function: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """[function(item) ...] for calls that wait for storage."""
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(function, items))


def record_fields(record: Any) -> dict[str, Any]:
    """The RECORD_COLUMNS of a manifest Record."""
    fields = asdict(record)
    return {name: fields[name] for name in RECORD_COLUMNS}


def _key(record: dict[str, Any]) -> str:
    return f"{record['path']}\t{record['sop_instance_uid']}"
