"""Predictions of whole scans as files in their own geometry: classes of voxels, or surfaces.

In: a head of layers or segmentation, scans. Out: below DIR at the scan's path nifti (.nii.gz), png (a folder,
an image a B-scan), seg (DICOM Segmentation) or heightmap (DICOM Height Map Segmentation), segments.jsonl with
voxels and mm3 of each class, and label_classes.yaml.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

import numpy as np
import yaml

from data_setup.export.predictions import load_highdicom, write_height_map, write_nifti, write_png, write_seg
from data_setup.manifest import Record, read_records
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.resample import rule_of
from data_setup.store.format import KEPT, UNREAD
from data_setup.store.reader import PreparedStore
from finetuning.dense.head import DenseHead
from finetuning.dense.whole import WholeScan, classes_of_scan, outputs_of, read_whole, surfaces_of_scan
from finetuning.embedding.stream import Fault, rejected
from finetuning.embedding.volumes import require_file, version_of
from finetuning.features.digests import values_digest
from finetuning.prediction.cautions import cautions_of
from finetuning.prediction.lines import Line
from utils import storage
from utils.config.schema import Config
from utils.errors import UserError
from utils.runtime.single import Runtime

HEIGHTMAP = "heightmap"
ENDINGS = {"nifti": ".nii.gz", "png": "", "seg": ".dcm", HEIGHTMAP: ".dcm"}
OF_A_SCAN = ("seg", HEIGHTMAP)  # DICOM that refers to a scan, and may name its patient
ANONYMOUS = (
    "the files name nobody: no patient, dates or accession number; study and series have other UIDs than the "
    "scan's (--no-anonymous keeps the scan's own)"
)
NAMED = (
    "the files name whom the scans name: patient, birth date, sex, study date and time, accession number, "
    "referring physician"
)
LONGEST = 200  # bytes of a name
DIGITS = 12  # of a checksum that a file's SoftwareVersions names


class Files:
    """A file or folder of each scan's own geometry, and its line."""

    name = "segments.jsonl"  # of the lines

    def __init__(
        self,
        head: DenseHead,
        cfg: Config,
        records: Sequence[Record],
        form: str,
        out: str,
        runtime: Runtime,
        anonymous: bool = True,
    ) -> None:
        """Writes label_classes.yaml of a head of classes. Raises UserError for two scans of one name."""
        self.head, self.cfg, self.form, self.out, self.runtime = head, cfg, form, out, runtime
        self.options, self.anonymous = cfg.data.storage_options, anonymous
        if form == "seg":
            load_highdicom()
        _require_names(records)
        self.records = {record.path: record for record in records}
        if form != HEIGHTMAP:
            named = {value: name for name, value in head.state["classes"].items()}
            storage.write_text(storage.join(out, "label_classes.yaml"), yaml.safe_dump(named), self.options)

    @property
    def about(self) -> Line:
        """Common to all lines."""
        return {"format": self.form} | ({"anonymous": self.anonymous} if self.form in OF_A_SCAN else {})

    @property
    def notes(self) -> Sequence[str]:
        """What a person reads first: whom the files name."""
        return (ANONYMOUS if self.anonymous else NAMED,) if self.form in OF_A_SCAN else ()

    @property
    def versions(self) -> dict[str, str]:
        """Path of a scan -> a digest that changes with its file."""
        return {path: version_of(record.url, self.options) for path, record in self.records.items()}

    def has_files(self, line: Line) -> bool:
        """Whether what an earlier line names is there."""
        return storage.exists(line["file"], self.options)

    def lines(self, paths: Sequence[str]) -> Iterator[Line]:
        """Those of some scans, in their order."""
        return (self.line(self.records[path]) for path in paths)

    def line(self, record: Record) -> Line:
        """The line of one scan, whose file is written first."""
        line: Line = {"path": record.path, "status": KEPT, "message": None}
        with Fault() as fault:
            try:
                require_file(record.url)
                axes, planes = (
                    "dw" if self.form == HEIGHTMAP else "dhw",
                    rule_of(self.head.state.get("geometry", {})),
                )
                scan = read_whole(record, self.cfg, self.options, axes, planes)
            except storage.StorageNotFoundError as error:
                return line | {"status": RejectReason.MISSING_FILE.value, "message": error.problem}
            except storage.StorageAwayError:
                raise
            except storage.StorageError as error:
                return line | {"status": UNREAD, "message": error.problem}
            except OCTReadError as error:
                return line | {"status": error.reason.value, "message": error.detail}
            try:
                return line | self._drawn(record, scan) | {"warnings": cautions_of(scan.fields, None)}
            except OCTReadError as error:
                return line | {"status": error.reason.value, "message": error.detail}
        assert fault.error is not None
        return rejected(line, fault.error).fields

    def _drawn(self, record: Record, scan: WholeScan) -> Line:
        """Write the file of one scan; its place, and what is in it. Raises OCTReadError, StorageError."""
        head, cfg, form, options = self.head, self.cfg, self.form, self.options
        version = head.checksum[:DIGITS]
        place = storage.join(self.out, _stem(record.path) + ENDINGS[form])
        if form in OF_A_SCAN and not scan.header.transfer_syntax.startswith("1.2."):
            expected = f"a DICOM scan with --format {form}"
            raise OCTReadError(record.url, RejectReason.NOT_DICOM, expected, scan.header.transfer_syntax)
        outputs = outputs_of(head.arms[0], scan, cfg, self.runtime)
        if form == HEIGHTMAP:
            surfaces = scan.header.to_file_order(surfaces_of_scan(outputs, scan), 1)
            write_height_map(surfaces, head.names, record.url, version, place, options, self.anonymous)
            return {"file": place, "surfaces": list(head.names)}
        values = np.array([0, *(head.state["classes"][name] for name in head.names)], np.uint8)
        labels = values[classes_of_scan(outputs, scan)]
        if form == "nifti":
            write_nifti(labels, scan.header, record.path, place, options)
        elif form == "png":
            write_png(scan.header.to_file_order(labels), place, options)
        else:
            classes = {value: name for name, value in head.state["classes"].items()}
            labels_of_file = scan.header.to_file_order(labels)
            write_seg(labels_of_file, classes, scan.header, version, place, options, self.anonymous)
        return {"file": place, "classes": _sizes(labels, head, scan)}


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
    is_elsewhere = "://" in path or path.startswith(("/", ".")) or ".." in PurePosixPath(path).parts
    name = PurePosixPath(path).name if is_elsewhere else path
    stem = re.sub(r"(\.nii\.gz|\.ome\.tiff?|\.[A-Za-z]\w{0,4})$", "", name)
    folder, slash, last = stem.rpartition("/")
    return f"{folder}{slash}{bounded(last)}"


def bounded(name: str) -> str:
    """A name with room for endings in the 255 bytes that disks allow: of a longer one the beginning and a
    digest.
    """
    content = os.fsencode(name)
    if len(content) <= LONGEST:
        return name
    return f"{content[: LONGEST - 9].decode('utf-8', 'ignore')}-{values_digest([name])[:8]}"


def _sizes(labels: np.ndarray, head: DenseHead, scan: WholeScan) -> dict[str, dict[str, float]]:
    """Voxels and mm3 of each class in the scan."""
    counts = np.bincount(labels.ravel(), minlength=256)
    voxel = float(np.prod(scan.header.spacing_mm))
    return {
        name: {"voxels": int(counts[value]), "mm3": float(counts[value] * voxel)}
        for name, value in head.state["classes"].items()
    }
