"""What the data benchmark reads: full-size phantom DICOM files and prepared stores, made once in a folder.

A phantom of 512 B-scans takes minutes to draw, so `RENDERED` are drawn at full height and width and the file
repeats them back and forth. Every frame is speckle of its scan, so decoding costs what it costs.
"""

from __future__ import annotations

import json
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
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
from utils.config.load import load_config
from utils.config.schema import Config
from utils.storage import StorageError

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "pretrain_oct_vjepa2.yaml"
PROTOCOLS = ("maestro2_3d_macula_oct_oct", "triton_macula_12x12_octa_oct")
SYNTAXES = {"uncompressed": "explicit", "jpeg2000": "j2k_lossy"}  # lossy 8:1, as Topcon's exports are
RENDERED = 32  # B-scans
WRITERS = 2  # processes that write files; 0: this one
# The recommended grid, and the same field in voxels of twice the size.
GRIDS = {
    (64, 384, 384): (0.09375, 0.006, 0.015625),
    (32, 192, 192): (0.1875, 0.012, 0.03125),
}
Shape = tuple[int, int, int]
FULL_SIZE: dict[str, Shape] = {name: BY_NAME[name].shape for name in PROTOCOLS}


def configure(size: Shape, spacing_mm: tuple[float, float, float], *overrides: str) -> Config:
    """The recommended recipe on another grid; the patch shrinks with a grid that it does not divide."""
    patch = [math.gcd(n, p) for n, p in zip(size, (4, 16, 16), strict=True)]
    grid = [f"spatial.image_size={list(size)}", f"spatial.target_spacing={list(spacing_mm)}"]
    return load_config(CONFIG, [*grid, f"spatial.patch_size={patch}", *overrides])


def dicom_files(work: Path, shapes: dict[str, Shape]) -> dict[str, dict[str, Path]]:
    """syntax -> protocol -> file of that protocol with `shapes[protocol]` voxels; written where missing."""
    files = {
        syntax: {
            name: work / "dicom" / syntax / f"9001_{name}_l_{'.'.join(map(str, shape))}.dcm"
            for name, shape in shapes.items()
        }
        for syntax in SYNTAXES
    }
    missing = [n for n in shapes if not all(by_name[n].exists() for by_name in files.values())]
    work_of = {n: (n, shapes[n], {s: files[s][n] for s in files}) for n in missing}
    if WRITERS == 0:
        for arguments in work_of.values():
            _write(*arguments)
    elif missing:
        with ProcessPoolExecutor(WRITERS, multiprocessing.get_context("spawn")) as pool:
            for job in [pool.submit(_write, *arguments) for arguments in work_of.values()]:
                job.result()
    return files


def _write(name: str, shape: Shape, paths: dict[str, Path]) -> None:
    protocol = BY_NAME[name]
    person = make_participants(1, 0)[0]
    scan = replace(person.scans[0], protocol=protocol)
    drawn = (min(RENDERED, shape[0]), *shape[1:])
    voxels = scan_volume(person, scan, 0, "full", drawn)[0].voxels
    back_and_forth = np.concatenate([voxels, voxels[::-1]])
    voxels = np.resize(back_and_forth, shape)
    for syntax, path in paths.items():
        spec = make_spec(person, scan, rescaled(protocol, shape), 0, "full", SYNTAXES[syntax])
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(write_volume(voxels, spec))
        partial.replace(path)


def make_jobs(paths: list[Path], store: Path, cfg: Config) -> list[Job]:
    """One row of an empty or known store per path; a path may come more than once."""
    writer = StoreWriter(str(store))
    writer.create(cfg.spatial, str(paths[0].parent), synthetic=True)
    records = [
        Record(
            person_id=f"9{i:03d}", device="any", protocol="", region="", laterality="unknown",
            path=f"{i}/{path.name}", url=str(path), sop_instance_uid="", shape=None, split="train",
            study_group=None, clinical_site=None, age=None,
        )
        for i, path in enumerate(paths)
    ]  # fmt: skip
    rows = writer.append_records([record_fields(record) for record in records])
    return [
        Job(row=row, record=record, writer=writer, spatial=cfg.spatial, options=cfg.data.storage_options)
        for row, record in zip(rows, records, strict=True)
    ]


def prepared_store(work: Path, paths: list[Path], cfg: Config, volumes: int) -> PreparedStore:
    """A store of `volumes` rows made from `paths` in turn; kept in `work` for the next run."""
    size = "x".join(map(str, cfg.spatial.image_size))
    folder = work / f"store_{size}_{volumes}"
    if not (folder / "index.parquet").exists():
        jobs = make_jobs([paths[i % len(paths)] for i in range(volumes)], folder, cfg)
        for job in jobs:
            outcome = prepare_row(job)
            if outcome.status != KEPT:
                raise StorageError(job.record.url, json.dumps([outcome.status, outcome.message]))
        jobs[0].writer.finalise([job.row for job in jobs])
    return PreparedStore.open(str(folder))
