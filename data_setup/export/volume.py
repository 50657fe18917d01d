"""One volume to be written, and as NIfTI or OME-TIFF with a YAML for what the format has no place for.

In: a row of a prepared store, or a row of a manifest. Out: an `ExportVolume`, from superior to inferior where
that is known; the files' names and bytes. The NIfTI world is right, anterior, superior in mm, as
data_setup/readers/nifti.py reads it: W to the patient's left, H to posterior, D to inferior. The YAML
(data_setup/readers/sidecar.py) says eye, device, protocol, and whether the direction of D is known.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import nibabel as nib
import numpy as np
import tifffile
import yaml

from data_setup.manifest import Record, records_of_table
from data_setup.readers.faults import OCTReadError
from data_setup.readers.open_record import open_record
from data_setup.store.format import KEPT
from data_setup.store.reader import PreparedStore
from utils.config.schema import StorageOptions
from utils.errors import UserError

_ALIGNED = 2  # the code of a form that was measured


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


def rows_of_store(url: str, *rows: str, options: StorageOptions) -> Iterator[ExportVolume]:
    """Kept rows of a store by their numbers as text; raises UserError, StorageError."""
    for row in rows:
        if not row.isdecimal():
            raise UserError(f"{url}: expected rows as whole numbers, found {row!r}")
    if not rows:
        raise UserError(f"{url}: expected STORE and one row or more, found no row")
    store = PreparedStore.open(url, options)
    return (of_store(store, int(row)) for row in rows)


def originals(
    manifest: str, root: str | None, names: Sequence[str], options: StorageOptions
) -> Iterator[ExportVolume]:
    """Files by their paths in a manifest, below its folder or `root`; raises UserError, StorageError."""
    root = root or manifest.rpartition("/")[0] or "."
    records = {record.path: record for record in records_of_table(manifest, root, options)}
    for name in names:
        if name.strip("/") not in records:
            raise UserError(f"{manifest}: expected a filepath of the table, found {name!r}")
    return (of_record(records[name.strip("/")], options) for name in names)


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


def nifti_files(volume: ExportVolume) -> dict[str, bytes]:
    """{name: content} of a .nii.gz [W, H, D] and its YAML."""
    d, h, w = volume.spacing_mm
    image = nib.Nifti1Image(volume.voxels.transpose(2, 1, 0), np.diag([-w, -h, -d, 1.0]))
    image.header.set_xyzt_units("mm")
    image.set_sform(image.affine, _ALIGNED)
    image.set_qform(image.affine, _ALIGNED)
    return {
        f"{volume.stem}.nii.gz": gzip.compress(image.to_bytes(), mtime=0),
        f"{volume.stem}.yaml": _sidecar(volume),
    }


def ome_files(volume: ExportVolume) -> dict[str, bytes]:
    """{name: content} of an .ome.tif, a page a B-scan, and its YAML."""
    d, h, w = volume.spacing_mm
    physical = {"PhysicalSizeZ": d, "PhysicalSizeY": h, "PhysicalSizeX": w}
    units = {f"{name}Unit": "mm" for name in physical}
    buffer = io.BytesIO()
    digest = hashlib.blake2b(volume.voxels.tobytes() + volume.stem.encode(), digest_size=16).digest()
    metadata = {"axes": "ZYX", **physical, **units, "UUID": str(uuid.UUID(bytes=digest))}  # else a random one
    tifffile.imwrite(buffer, volume.voxels, ome=True, metadata=metadata, photometric="minisblack")
    return {f"{volume.stem}.ome.tif": buffer.getvalue(), f"{volume.stem}.yaml": _sidecar(volume)}


def _sidecar(volume: ExportVolume) -> bytes:
    facts = {
        "d_order": volume.d_order,
        "laterality": volume.laterality,
        "device": volume.device,
        "protocol": volume.protocol,
    }
    known = {key: value for key, value in facts.items() if value is not None}
    return yaml.safe_dump(known, sort_keys=False).encode()
