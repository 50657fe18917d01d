"""What `python -m finetuning.segment` does: predictions of whole scans as files in their own geometry.

In: a head of layers or segmentation, rows of its store or files. Out: a file or folder for each scan below
DIR, segments.jsonl and label_classes.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from data_setup.export.predictions import load_highdicom, write_height_map, write_nifti, write_png, write_seg
from data_setup.manifest import Record, read_records, unknown_record
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.store.format import KEPT, NORMALISATION
from data_setup.store.reader import PreparedStore
from finetuning.dense.head import DenseHead, head_kind
from finetuning.dense.layers.head import open_layers_head
from finetuning.dense.lines import SegmentLines
from finetuning.dense.segmentation.train import open_segmentation_head
from finetuning.dense.whole import WholeScan, classes_of_scan, outputs_of, read_whole, surfaces_of_scan
from finetuning.embedding.run import MAY_CHANGE, overridden
from utils import storage
from utils.config.load import storage_options_of
from utils.config.schema import Config
from utils.errors import EXIT_FAILURE, EXIT_FINISHED, UserError
from utils.log import setup_logging
from utils.provenance import provenance
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime
from utils.terminal import track

ENCODER = "model.checkpoint"
HEIGHTMAP = "heightmap"
ENDINGS = {"nifti": ".nii.gz", "png": "", "seg": ".dcm", HEIGHTMAP: ".dcm"}
DIGITS = 12  # of a checksum that a file's SoftwareVersions names


def draw(
    wanted: str,
    rows: str | None,
    files: Sequence[str] | None,
    form: str,
    out: str,
    overrides: Sequence[str],
) -> int:
    """Write the files; returns EXIT_FAILURE where a scan has none. Raises UserError."""
    setup_logging()
    head = _open(wanted, form, overrides)
    cfg = overridden(head.cfg, head.url, overrides, (*MAY_CHANGE, ENCODER))
    if head.state["normalisation"] != NORMALISATION:
        raise UserError(
            f"{head.url}: normalisation: expected {NORMALISATION}, found {head.state['normalisation']}"
        )
    if form == "seg":
        load_highdicom()
    records = of_rows(cfg, rows) if rows is not None else [unknown_record(url) for url in files or ()]
    _require_names(records)
    runtime = open_runtime(cfg.train.use_bf16)
    if form != HEIGHTMAP:
        named = {value: name for name, value in head.state["classes"].items()}
        storage.write_text(storage.join(out, "label_classes.yaml"), yaml.safe_dump(named))
    common = {"head_sha256": head.checksum, "encoder_sha256": head.state["encoder"]["checksum"]}
    common["commit"] = provenance(runtime)["commit"]
    common["precision"] = "bfloat16" if runtime.use_bf16 else "float32"
    num_bad = 0
    with closing(SegmentLines(out, form, records, common, cfg.data.storage_options)) as lines:
        todo = [record for record in records if record.path not in lines.done]
        for record in track(todo, len(todo), "segment", "scans"):
            line = _draw_one(head, cfg, record, form, out, runtime)
            lines.add(line)
            if line["status"] != KEPT:
                num_bad += 1
                print(f"no file: {line['path']}: {line['status']}: {line['message']}")
    print(f"{len(records) - num_bad} of {len(records)} scans in {out}; before: {len(lines.done)}")
    return EXIT_FAILURE if num_bad else EXIT_FINISHED


def _open(wanted: str, form: str, overrides: Sequence[str]) -> DenseHead:
    """The head that the format is of, its encoder from the override's place; raises UserError."""
    options = storage_options_of(overrides)
    kind = head_kind(wanted, options)
    expected = "layers" if form == HEIGHTMAP else "segmentation"
    if kind != expected:
        raise UserError(f"{wanted}: expected a head of {expected} with --format {form}, found one of {kind}")
    places = [word.removeprefix(f"{ENCODER}=") for word in overrides if word.startswith(f"{ENCODER}=")]
    open_head = open_layers_head if form == HEIGHTMAP else open_segmentation_head
    return open_head(wanted, options, places[-1] if places else None)


def of_rows(cfg: Config, rows: str) -> list[Record]:
    """The records of `all` kept rows of the store, or of those that `0,5` names; raises UserError."""
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    kept = store.kept.tolist()
    if rows != "all" and not re.fullmatch(r"\d+(,\d+)*", rows):
        raise UserError(f"--rows: expected all, or numbers with commas between, found {rows!r}")
    chosen = kept if rows == "all" else [int(number) for number in rows.split(",")]
    listing = read_records(cfg)
    by_path = {record.path: record for record in [*listing.records, *listing.filtered]}
    records = []
    for row in chosen:
        record = by_path.get(str(store.index.path.get(row))) if row in kept else None
        if record is None:
            expected = f"kept rows of {store.url} whose scans {cfg.data.manifest_path} lists"
            raise UserError(f"--rows: expected {expected}, found {row}")
        records.append(record)
    return records


def _draw_one(
    head: DenseHead, cfg: Config, record: Record, form: str, out: str, runtime: Runtime
) -> dict[str, Any]:
    """The line of one scan, whose file is written first."""
    options = cfg.data.storage_options
    line: dict[str, Any] = {"path": record.path, "status": KEPT, "message": None, "format": form}
    place = storage.join(out, _stem(record.path) + ENDINGS[form])
    version = head.checksum[:DIGITS]
    try:
        scan = read_whole(record, cfg, options, "dw" if form == HEIGHTMAP else "dhw")
        if form in ("seg", HEIGHTMAP) and not scan.header.transfer_syntax.startswith("1.2."):
            expected = f"a DICOM scan with --format {form}"
            raise OCTReadError(record.url, RejectReason.NOT_DICOM, expected, scan.header.transfer_syntax)
        outputs = outputs_of(head.arms[0], scan, cfg, runtime)
        if form == HEIGHTMAP:
            surfaces = surfaces_of_scan(outputs, scan)
            surfaces = scan.header.to_file_order(surfaces, 1)
            write_height_map(surfaces, head.names, record.url, version, place, options)
            return line | {"file": place, "surfaces": list(head.names)}
        values = np.array([0, *(head.state["classes"][name] for name in head.names)], np.uint8)
        labels = values[classes_of_scan(outputs, scan)]
        if form == "nifti":
            write_nifti(labels, scan.header, record.path, place, options)
        elif form == "png":
            write_png(scan.header.to_file_order(labels), place, options)
        else:
            labels = scan.header.to_file_order(labels)
            classes = {value: name for name, value in head.state["classes"].items()}
            write_seg(labels, classes, scan.header, version, place, options)
        return line | {"file": place, "classes": _sizes(labels, head, scan)}
    except storage.StorageNotFoundError as error:
        return line | {"status": RejectReason.MISSING_FILE.value, "message": error.problem}
    except OCTReadError as error:
        return line | {"status": error.reason.value, "message": error.detail}


def _require_names(records: Sequence[Record]) -> None:
    """Raise UserError where the files of two scans would have one name."""
    path_of: dict[str, str] = {}
    for record in records:
        name = _stem(record.path)
        if name in path_of:
            raise UserError(
                f"expected scans whose files have different names, found {path_of[name]} and "
                f"{record.path}; draw them into two folders"
            )
        path_of[name] = record.path


def _stem(path: str) -> str:
    """The path below the root without the ending of a file; of a file elsewhere its name."""
    is_elsewhere = "://" in path or path.startswith(("/", "."))
    name = Path(path).name if is_elsewhere else path
    return re.sub(r"(\.nii\.gz|\.ome\.tiff?|\.[A-Za-z]\w{0,4})$", "", name)


def _sizes(labels: np.ndarray, head: DenseHead, scan: WholeScan) -> dict[str, dict[str, float]]:
    """Voxels and mm3 of each class in the scan."""
    counts = np.bincount(labels.ravel(), minlength=256)
    voxel = float(np.prod(scan.header.spacing_mm))
    return {
        name: {"voxels": int(counts[value]), "mm3": float(counts[value] * voxel)}
        for name, value in head.state["classes"].items()
    }
