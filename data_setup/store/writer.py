"""The write side of the prepared store, used only by data_setup/prepare.py and jobs.py.

In: resampled volumes and what was measured. Out: chunks, row files, the record list, the index; the layout is
in data_setup/store/format.py. Every object is written whole, and a row's JSON comes after its chunk.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from data_setup.resample import NEAREST, Resampled, rule_of
from data_setup.store.format import (
    DUPLICATE,
    FORMAT_VERSION,
    INDEX_COLUMNS,
    KEPT,
    NORMALISATION,
    PENDING,
    RECORD_COLUMNS,
    RowFiles,
    checksum,
    chunk_key,
    geometry_of,
    intact,
    read_attrs,
    write_table,
)
from data_setup.store.place import INDEX
from data_setup.tables.splits import HASH
from utils import storage
from utils.config.schema import SpatialConfig, StorageOptions
from utils.errors import UserError
from utils.storage.zarr_keys import ObjectStore


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


@dataclass(frozen=True)
class StoreWriter:
    """Writes a store; small and picklable, so that every worker process has one."""

    url: str
    options: StorageOptions | None = None

    def create(
        self,
        spatial: SpatialConfig,
        source_root: str,
        synthetic: bool,
        num_rows: int = 0,
        rebase: bool = False,
    ) -> None:
        """Make a store of `num_rows` empty rows, or check that the one here has this geometry and source.

        Raises UserError. One store has one source: a path identifies a row only below one root; `rebase`
        says that the root is now `source_root`. One store has one rule of planes: that by which it was begun.
        Runs that start together write the same bytes.
        """
        attrs = {
            "format_version": FORMAT_VERSION,
            "geometry": geometry_of(spatial, NEAREST),
            "normalisation": NORMALISATION,
            "synthetic": synthetic,
            "source_root": storage.absolute(source_root),
        }
        if not storage.exists(storage.join(self.url, "volumes", "zarr.json"), self.options):
            shape, attrs = (num_rows, *spatial.image_size), attrs | {"splits": HASH}
            # Reads 3.8 GB/s on one core; with bitshuffle 1.8 GB/s, and 21 % smaller (real Triton volume).
            files = array_metadata("volumes", shape, "dhw", "noshuffle", attrs, dtype="uint8", fill_value=0)
            for name, data in files.items():  # the array last: its presence says that the store can be opened
                storage.write_bytes(storage.join(self.url, name), data, self.options)
            return
        stored = read_attrs(self.url, self.options)
        attrs["geometry"] = geometry_of(spatial, rule_of(stored.get("geometry", {})))
        moved = stored.get("source_root") != attrs["source_root"]
        for key, expected in attrs.items():
            if stored.get(key) != expected and not (rebase and key == "source_root"):
                advice = ", or --rebase if its files have moved there" if key == "source_root" else ""
                raise UserError(
                    f"{self.url}: {key}: expected {expected}, found {stored.get(key)}; "
                    f"give this configuration another data.store{advice}"
                )
        if moved:
            url = storage.join(self.url, "zarr.json")
            group = json.loads(storage.read_text(url, self.options))
            group["attributes"]["source_root"] = attrs["source_root"]
            storage.write_text(url, json.dumps(group, indent=2), self.options)

    @property
    def planes(self) -> str:
        """What the planes of the store's volumes are: its rule of data_setup/resample.py."""
        return rule_of(read_attrs(self.url, self.options)["geometry"])

    def _array(self) -> zarr.Array:
        keys = ObjectStore(self.url, self.options, read_only=False)
        with intact(storage.join(self.url, "volumes", "zarr.json")):
            return zarr.open_array(keys, path="volumes", mode="r+", zarr_format=3)

    def read_records(self) -> list[dict[str, Any]]:
        """The record of every row, in row order."""
        url = storage.join(self.url, "records.jsonl")
        if not storage.exists(url, self.options):
            return []
        with intact(url):
            records = [json.loads(line) for line in storage.read_text(url, self.options).splitlines()]
            [(_key(record), record["person_id"], record["split"]) for record in records]  # are there
            return records

    def append_records(
        self, records: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Give every record (the RECORD_COLUMNS) its row; new ones are appended, known ones keep theirs.

        Fields of a known record are updated (a split, an age), also where it is among `others`, which are
        not appended; a row in neither keeps its record.
        """
        stored = self.read_records()
        listed = list(stored)
        row_of = {_key(r): row for row, r in enumerate(listed)}
        rows = []
        for record in records:
            row = row_of.setdefault(_key(record), len(row_of))
            if row == len(listed):
                listed.append(record)
            listed[row] = record
            rows.append(row)
        for record in others:
            if _key(record) in row_of:
                listed[row_of[_key(record)]] = record
        if listed != stored:
            text = "".join(json.dumps(r, sort_keys=True) + "\n" for r in listed)
            storage.write_text(storage.join(self.url, "records.jsonl"), text, self.options)
        array = self._array()
        if array.shape[0] < len(listed):
            array.resize((len(listed), *array.shape[1:]))
        return rows

    def find_rows(self, records: Iterable[dict[str, Any]]) -> list[int]:
        """The rows of those records that have one."""
        keys = {_key(record) for record in records}
        return [row for row, record in enumerate(self.read_records()) if _key(record) in keys]

    def check_rows(self, records: Sequence[dict[str, Any]], rows: Sequence[int]) -> None:
        """Raise UserError when a record has lost its row since `append_records`."""
        keys = [_key(r) for r in self.read_records()]
        if any(keys[row : row + 1] != [_key(record)] for row, record in zip(rows, records, strict=True)):
            raise UserError(
                f"{self.url}/records.jsonl: expected every record in the row that it had at the start, found "
                "another list: two manifests were prepared here at once; remove the store and prepare again"
            )

    @property
    def rows(self) -> RowFiles:
        """rows/: those without a whole file are pending."""
        return RowFiles(storage.join(self.url, "rows"), self.options)

    def write_row(self, row: int, voxels: np.ndarray | None, fields: dict[str, Any]) -> None:
        """Write the chunk (None: a reject, which has none), then the row's JSON."""
        chunk = storage.join(self.url, "volumes", chunk_key(row))
        if voxels is not None:
            self._array()[row] = voxels
        elif storage.exists(chunk, self.options):  # it was kept once, and its source has changed
            storage.remove(chunk, self.options)
        self.rows.write(row, fields)

    def finalise(self, listed_rows: Iterable[int]) -> pd.DataFrame:
        """Compact records and row files to index.parquet; returns it."""
        written, listed = self.rows.read(), set(listed_rows)
        table = []
        for row, record in enumerate(self.read_records()):
            fields = written.get(row, {})
            if fields.get("record", record)["path"] != record["path"]:  # of a run with another manifest
                fields = {}
            fields = {"status": PENDING, "flipped_d": False, **fields, **record}
            if record["laterality"] == "unknown" and fields.get("header_laterality"):
                fields["laterality"] = fields["header_laterality"]
            table.append(fields | {"row": row, "listed": row in listed})
        _settle_repeats(table)
        types = {name: kind for name, (kind, _) in INDEX_COLUMNS.items()}
        index = pd.DataFrame(table, columns=list(types)).astype(types)
        return write_table(storage.join(self.url, INDEX), index, self.options)


def _settle_repeats(table: list[dict[str, Any]]) -> None:
    """Of kept rows with one SOPInstanceUID those of the same voxels count once; other voxels are other scans.
    The UID then identifies no volume, as after an anonymiser that gave it to all, so that it is left out.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in table:
        if row["listed"] and row["status"] == KEPT and row["sop_instance_uid"]:
            groups.setdefault(row["sop_instance_uid"], []).append(row)
    for rows in (rows for rows in groups.values() if len(rows) > 1):
        first: dict[str, dict[str, Any]] = {}
        for row in rows:
            one = first.setdefault(row["checksum"], row)
            if one is not row:
                message = f"expected another scan, found the SOPInstanceUID and the voxels of {one['path']!r}"
                other = (
                    "" if one["person_id"] == row["person_id"] else f", of another person, {one['person_id']}"
                )
                row |= {"status": DUPLICATE, "message": message + other}
            elif len(first) > 1:
                row["sop_instance_uid"] = ""
        if len(first) > 1:
            rows[0]["sop_instance_uid"] = ""


def array_metadata(
    name: str, shape: tuple[int, ...], dims: Sequence[str], shuffle: Any, group: Any = None, **more: Any
) -> dict[str, bytes]:
    """{name: content} of the zarr.json of a group and of its array, which has a chunk a row."""
    files: dict[str, Any] = {}
    zarr.create_group(zarr.storage.MemoryStore(files), attributes=group).create_array(
        name,
        shape=shape,
        chunks=(1, *shape[1:]),
        # The CRC finds any damage for 0.2 ms a volume; Blosc alone reads past the end of a cut chunk.
        compressors=[BloscCodec(cname="lz4", clevel=5, shuffle=shuffle), Crc32cCodec()],
        chunk_key_encoding={"name": "default", "separator": "."},  # one flat folder
        dimension_names=("row", *dims),
        **more,
    )
    return {path: files[path].to_bytes() for path in ("zarr.json", f"{name}/zarr.json")}


def record_fields(record: Any) -> dict[str, Any]:
    """The RECORD_COLUMNS of a manifest Record."""
    fields = asdict(record)
    return {name: fields[name] for name in RECORD_COLUMNS}


def _key(record: dict[str, Any]) -> str:
    return f"{record['path']}\t{record['sop_instance_uid']}"
