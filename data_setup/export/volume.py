"""One volume to be written: voxels from superior to inferior where that is known, spacing, eye, names.

In: a row of a prepared store, or a row of a manifest. Out: an `ExportVolume`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np

from data_setup.manifest import Record
from data_setup.readers.faults import OCTReadError
from data_setup.readers.open_record import open_record
from data_setup.store.format import KEPT
from data_setup.store.reader import PreparedStore
from utils.config.schema import StorageOptions
from utils.errors import UserError


@dataclass(frozen=True)
class ExportVolume:
    """uint8 [D, H, W]; what nothing says is None."""

    stem: str  # of the file's name
    voxels: np.ndarray
    spacing_mm: tuple[float, float, float]
    is_ordered: bool  # D runs superior -> inferior; False: which way is unknown
    laterality: str | None  # L | R
    device: str | None
    protocol: str | None

    @property
    def d_order(self) -> str:
        """The word of a YAML for the direction of D."""
        return "superior_to_inferior" if self.is_ordered else "unknown"


def of_store(store: PreparedStore, row: int) -> ExportVolume:
    """A kept row on the store's grid, padding included; raises UserError, StorageError."""
    if row not in store.index.index:
        raise UserError(f"{store.url}: expected a row out of 0..{len(store.index) - 1}, found {row}")
    facts = store.index.loc[row]
    if facts.status != KEPT:
        raise UserError(f"{store.url}: row {row}: expected a kept one, found {facts.status}")
    d, h, w = (float(facts[f"spacing_after_{axis}"]) for axis in "dhw")
    return ExportVolume(
        stem=f"row_{row:06d}",
        voxels=store.read(row),
        spacing_mm=(d, h, w),
        is_ordered=facts.orientation_source != "unknown",
        laterality=_known(facts.laterality),
        device=_known(facts.device),
        protocol=_known(facts.protocol),
    )


def of_record(record: Record, options: StorageOptions) -> ExportVolume:
    """An original as it was acquired, 8 bits; raises UserError where it cannot be read, StorageError."""
    try:
        header, frames = open_record(record, options)
        voxels = np.stack(list(frames))
    except OCTReadError as error:
        raise UserError(str(error)) from None
    return ExportVolume(
        stem=_stem(record.path),
        voxels=voxels[::-1] if header.flip_d else voxels,
        spacing_mm=header.spacing_mm,
        is_ordered=header.orientation_source != "unknown",
        laterality=header.laterality or _known(record.laterality),
        device=header.device or _known(record.device),
        protocol=_known(record.protocol),
    )


def _known(value: object) -> str | None:
    return value if isinstance(value, str) and value not in ("", "unknown") else None


def _stem(path: str) -> str:
    """The path as one name: a/b/eye.nii.gz -> a__b__eye."""
    folder, name = str(PurePosixPath(path).parent), PurePosixPath(path).name
    stem = re.sub(r"(\.nii\.gz|\.ome\.tiff?|\.[a-z]\w{2,4})$", "", name, flags=re.IGNORECASE)
    return re.sub(r"[^\w.-]+", "_", "__".join([*(p for p in folder.split("/") if p not in ("", ".")), stem]))
