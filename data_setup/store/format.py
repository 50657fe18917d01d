"""The format of the prepared store: every volume on one grid, one Zarr v3 chunk each.

Layout under the store's URL, the same on a disk and in a bucket:
    zarr.json               attributes: format_version, geometry, normalisation, synthetic, source_root,
                            splits (how validation participants are cut: data_setup/tables/splits.py)
    volumes/                uint8 [N, D, H, W], one chunk a volume, Blosc LZ4 + CRC32C; a reject has none
    records.jsonl           the ordered record list: line = row, only ever appended to
    rows/{row:06d}.json     what was measured, written after the row's chunk: a row counts when this exists
    index.parquet           both, compacted: INDEX_COLUMNS; a store without it is not finalised
    prepare_report.json     the summary of the last `data_setup.prepare` that wrote the index

Only writer.py and reader.py open a store; this file holds what they share.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from data_setup.resample import BLENDED
from utils import storage
from utils.config.schema import SpatialConfig, StorageOptions
from utils.errors import UserError
from utils.workers import in_threads

FORMAT_VERSION = 1
NORMALISATION = "zscore_valid"  # what readers do with a volume: z-score over its valid voxels
KEPT, PENDING = "kept", "pending"  # the other statuses are reject reasons
DUPLICATE = "duplicate_row"  # of the index alone: a file with the SOPInstanceUID and the voxels of another
UNREAD = "unread"  # of an attempt: storage did not answer; the row stays as it was

# of data_setup/store/quality.py; NaN in rows that were prepared before it was measured, and for rejects
QUALITY_COLUMNS: dict[str, tuple[str, str]] = {
    "quality": ("float64", "0 to 1: the worst of the five below, each between its limits"),
    "signal_db": ("float64", "retina over background, against the background's noise"),
    "clipped_share": ("float64", "share of A-scans whose retina touches the upper or lower edge"),
    "motion_um": ("float64", "mean axial jump between neighbouring B-scans"),
    "missing_share": ("float64", "share of B-scans that are blank or repeated"),
    "saturated_share": ("float64", "share of grey values at 255"),
}

# column -> (pandas type, meaning). Lengths in mm; d, h, w = B-scan, axial, A-scan; text is missing as NaN.
INDEX_COLUMNS: dict[str, tuple[str, str]] = {
    "row": ("int64", "position in volumes and in records.jsonl"),
    "status": ("str", "kept, pending (not prepared yet), or the reason of the reject"),
    "message": ("str", "the reject, or a doubt, in one line"),
    "listed": ("bool", "the record was in the manifest of the last prepare, whatever its filters"),
    "person_id": ("str", "participant"),
    "device": ("str", "device folder"),
    "protocol": ("str", "Protocol.name of data_setup/protocols.py"),
    "region": ("str", "the manifest's anatomic_region"),
    "laterality": ("str", "L or R; unknown where manifest, file name and header have none"),
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
    "orientation_source": ("str", "what gave the direction of d"),
    "flipped_d": ("bool", "the file's frames ran inferior -> superior"),
    "bits_stored": ("float64", "of the DICOM pixels"),
    "transfer_syntax": ("str", "UID"),
    **{f"valid_{a}{i}": ("float64", f"valid box, half-open, along {a}") for a in "dhw" for i in "01"},
    "valid_fraction": ("float64", "share of the grid inside the acquired field"),
    "lost_fraction": ("float64", "share of the acquired field outside the grid"),
    "intensity_mean": ("float64", "over valid voxels, 0..255"),
    "intensity_std": ("float64", "over valid voxels, 0..255"),
    "checksum": ("str", "of the stored voxels: BLAKE2b, 16 bytes, hex"),
    **QUALITY_COLUMNS,
}
RECORD_COLUMNS = tuple(INDEX_COLUMNS)[4:15]  # taken from records.jsonl; those after them from rows/


class DamagedError(UserError):
    """A file of a store is damaged; one line with its URL."""


@contextmanager
def intact(url: str, advice: str = "restore it, or prepare into another data.store") -> Iterator[None]:
    """Turn what parsers raise inside the block into a DamagedError about the file at `url`."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DamagedError(
            f"{url}: expected a whole file of a prepared store, found a damaged one ({reason}); {advice}"
        ) from error


def checksum(voxels: np.ndarray) -> str:
    """BLAKE2b (16 bytes, hex) of the voxels in C order."""
    return hashlib.blake2b(np.ascontiguousarray(voxels).data, digest_size=16).hexdigest()


def geometry_of(spatial: SpatialConfig, planes: str) -> dict[str, Any]:
    """The store's attribute `geometry`: the grid that every volume is on, and what its planes are
    (data_setup/resample.py), which earlier stores do not name.
    """
    return {
        "image_size": list(spatial.image_size),
        "target_spacing": list(spatial.target_spacing),
        "resample": spatial.resample,
    } | ({"planes": planes} if planes != BLENDED else {})


def chunk_key(row: int, prefix: str = "") -> str:
    """The key of a row's chunk below `volumes`."""
    return storage.join(prefix, f"c.{row}.0.0.0")


def read_attrs(url: str, options: StorageOptions | None = None) -> dict[str, Any]:
    attrs_url = storage.join(url, "zarr.json")
    text = storage.read_text(attrs_url, options)
    with intact(attrs_url):
        return dict(json.loads(text)["attributes"])


@dataclass(frozen=True)
class RowFiles:
    """The rows' JSON in one folder of a store; small and picklable."""

    folder: str  # its URL
    options: StorageOptions | None

    def url(self, row: int) -> str:
        return storage.join(self.folder, f"{row:06d}.json")

    def write(self, row: int, fields: Mapping[str, Any]) -> None:
        text = json.dumps(fields, sort_keys=True, indent=1, allow_nan=False) + "\n"
        storage.write_text(self.url(row), text, self.options)

    def read(self, wanted: Callable[[int], bool] = lambda row: True) -> dict[int, dict[str, Any]]:
        """Row -> its JSON, of the wanted rows that have a whole one, ascending."""
        names = storage.list_names(self.folder, self.options)
        rows = sorted(int(match[1]) for n in names if (match := re.fullmatch(r"(\d+)\.json", n)))
        rows = [row for row in rows if wanted(row)]
        contents = in_threads(self._read, rows)
        return {row: fields for row, fields in zip(rows, contents, strict=True) if fields is not None}

    def _read(self, row: int) -> dict[str, Any] | None:
        """None when it is damaged, so that the row is prepared again."""
        try:
            with intact(self.url(row)):
                fields = json.loads(storage.read_text(self.url(row), self.options))
                has_record = "path" in fields.get("record", {"path": ""})
                return fields if has_record and "status" in fields else None
        except DamagedError:
            return None


def write_table(url: str, table: pd.DataFrame, options: StorageOptions | None) -> pd.DataFrame:
    """Write a table as Parquet; returns it."""
    storage.write_bytes(url, table.to_parquet(index=False), options)
    return table
