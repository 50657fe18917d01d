"""A store to read from: volumes of one phantom scan at the recommended grid, made once in a folder.

In: a configuration, and the size of the scan. Out: its store. A phantom of hundreds of B-scans takes minutes
to draw, so RENDERED are drawn at full height and width and the file repeats them back and forth.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from data_setup.jobs import Job, prepare_row
from data_setup.manifest import Record
from data_setup.phantom.cohort import make_participants
from data_setup.phantom.dicom import write_volume
from data_setup.phantom.files import make_spec, rescaled, scan_volume
from data_setup.protocols import BY_NAME
from data_setup.store.format import KEPT
from data_setup.store.reader import PreparedStore
from data_setup.store.writer import StoreWriter, record_fields
from utils.config.schema import Config
from utils.storage import StorageError

PROTOCOL = BY_NAME["maestro2_3d_macula_oct_oct"]
RENDERED = 32  # B-scans


def prepared_store(folder: Path, cfg: Config, scan: tuple[int, int, int], volumes: int) -> PreparedStore:
    """A store of so many rows of one scan; what the folder holds already is taken."""
    store = folder / f"store_{'x'.join(map(str, cfg.spatial.image_size))}_{volumes}"
    if not (store / "index.parquet").exists():
        path = write_scan(folder / f"{'x'.join(map(str, scan))}.dcm", scan)
        writer = StoreWriter(str(store))
        writer.create(cfg.spatial, str(folder), synthetic=True)
        records = [
            Record(
                person_id=f"9{i:03d}", device="any", protocol="", region="", laterality="unknown",
                path=f"{i}/{path.name}", url=str(path), sop_instance_uid="", shape=None, split="train",
                study_group=None, clinical_site=None, age=None,
            )
            for i in range(volumes)
        ]  # fmt: skip
        rows = writer.append_records([record_fields(record) for record in records])
        for row, record in zip(rows, records, strict=True):
            outcome = prepare_row(Job(row, record, writer, cfg.spatial, cfg.data.storage_options))
            if outcome.status != KEPT:
                raise StorageError(record.url, f"{outcome.status}: {outcome.message}")
        writer.finalise(rows)
    return PreparedStore.open(str(store))


def write_scan(path: Path, shape: tuple[int, int, int]) -> Path:
    """A DICOM file of an eye of the phantom, of this shape."""
    person = make_participants(1, 0)[0]
    scan = replace(person.scans[0], protocol=PROTOCOL)
    drawn = (min(RENDERED, shape[0]), *shape[1:])
    voxels = scan_volume(person, scan, 0, "full", drawn)[0].voxels
    voxels = np.resize(np.concatenate([voxels, voxels[::-1]]), shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    spec = make_spec(person, scan, rescaled(PROTOCOL, shape), 0, "full", "explicit")
    path.write_bytes(write_volume(voxels, spec))
    return path
