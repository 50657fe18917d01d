"""Predictions of whole scans as files in their own geometry: classes of voxels, or surfaces.

In: a head of layers or segmentation, scans. Out: below DIR at the scan's path nifti (.nii.gz), npz, png (a
folder, an image a B-scan), seg (DICOM Segmentation) or heightmap (DICOM Height Map Segmentation),
segments.jsonl with what was measured, and label_classes.yaml. A format of classes holds of a head of surfaces
the layers between them; heightmap holds only surfaces.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import yaml
from scipy.ndimage import label

from data_setup.export import predictions
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.open_record import kind_by_name
from data_setup.resample import rule_of
from data_setup.store.format import KEPT, UNREAD
from finetuning.cohort.ledger import values_digest
from finetuning.dense.head import DenseHead
from finetuning.dense.surfaces import NOT_GIVEN, RETINA, Foveas, layers_of, measured
from finetuning.dense.whole import WholeScan, classes_of_scan, outputs_of, read_whole, surfaces_of_scan
from finetuning.embedding.scans import Scan, require_file, version_of
from finetuning.embedding.stream import Fault, rejected
from finetuning.prediction.lines import Line, cautions_of
from utils import storage
from utils.config.schema import Config
from utils.errors import UserError
from utils.runtime.single import Runtime

LAYERS, HEIGHTMAP, NPZ = "layers", "heightmap", "npz"
ENDINGS = {"nifti": ".nii.gz", NPZ: ".npz", "png": "", "seg": ".dcm", HEIGHTMAP: ".dcm"}
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
TOUCHING = np.ones((3, 3, 3))  # voxels of one lesion: by a face, an edge or a corner
DIGITS = 12  # of a checksum that a file's SoftwareVersions names


class Files:
    """A file or folder of each scan's own geometry, and its line."""

    name = "segments.jsonl"  # of the lines

    def __init__(
        self,
        head: DenseHead,
        cfg: Config,
        scans: Sequence[Scan],
        form: str,
        out: str,
        runtime: Runtime,
        anonymous: bool = True,
        foveas: Foveas = NOT_GIVEN,
    ) -> None:
        """Writes label_classes.yaml of a format of classes. Raises UserError for two scans of one name."""
        self.head, self.cfg, self.form, self.out, self.runtime = head, cfg, form, out, runtime
        self.options, self.anonymous, self.foveas = cfg.data.storage_options, anonymous, foveas
        self.of_layers = form == HEIGHTMAP or head.state.get("kind") == LAYERS
        if form == "seg":
            predictions.load_highdicom()
        _require_names(scans)
        self.scans = {scan.record.path: scan for scan in scans}
        is_of_a_scan = form in OF_A_SCAN
        self.about: Line = {"format": form} | ({"anonymous": anonymous} if is_of_a_scan else {})
        self.notes = (ANONYMOUS if anonymous else NAMED,) if is_of_a_scan else ()  # a person reads them first
        self.versions = {path: version_of(scan.record, self.options) for path, scan in self.scans.items()}
        self.classes: dict[str, int] = (
            {name: value for value, name in enumerate(layers_of(head.names), 1) if name != RETINA}
            if self.of_layers
            else head.state["classes"]
        )
        if form != HEIGHTMAP and not (self.of_layers and form == NPZ):  # these hold surfaces
            named = {value: name for name, value in self.classes.items()}
            storage.write_text(storage.join(out, "label_classes.yaml"), yaml.safe_dump(named), self.options)

    def has_files(self, line: Line) -> bool:
        """Whether what an earlier line names is there."""
        return storage.exists(line["file"], self.options)

    def lines(self, paths: Sequence[str]) -> Iterator[Line]:
        return (self.line(self.scans[path]) for path in paths)

    def line(self, asked: Scan) -> Line:
        """The line of one scan, whose file is written first."""
        record = asked.record
        line: Line = {"path": record.path, "person": asked.person or None, "status": KEPT, "message": None}
        with Fault() as fault:
            try:
                require_file(record.url)
                axes, planes = "dw" if self.of_layers else "dhw", rule_of(self.head.state.get("geometry", {}))
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
                facts = asked.facts(scan.header)
                line |= {name: facts[name] for name in ("laterality", "device", "protocol")}
                warnings = cautions_of(scan.fields, None, self.head.state.get("spacings_mm", {}))
                return line | self._drawn(asked, scan) | {"warnings": warnings}
            except OCTReadError as error:
                return line | {"status": error.reason.value, "message": error.detail}
        assert fault.error is not None
        return rejected(line, fault.error).fields

    def _drawn(self, asked: Scan, scan: WholeScan) -> Line:
        """Write the file of one scan; its place, and what is in it. Raises OCTReadError, StorageError."""
        head, form, options, url = self.head, self.form, self.options, asked.record.url
        place = storage.join(self.out, stem_of(asked.name) + ENDINGS[form])
        if form in OF_A_SCAN and not scan.header.transfer_syntax.startswith("1.2."):
            expected = f"a DICOM scan with --format {form}"
            raise OCTReadError(url, RejectReason.NOT_DICOM, expected, scan.header.transfer_syntax)
        outputs = outputs_of(head.arms[0], scan, self.cfg, self.runtime)
        if not self.of_layers:
            values = np.array([0, *(self.classes[name] for name in head.names)], np.uint8)
            labels = values[classes_of_scan(outputs, scan)]
            self._write_classes(labels, asked, scan, place)
            return {"file": place, "classes": sizes(labels, self.classes, scan.header.spacing_mm)}
        rows = surfaces_of_scan(outputs, scan)
        in_file = scan.header.to_file_order(rows, 1)
        if form == HEIGHTMAP:
            version = head.checksum[:DIGITS]
            predictions.write_height_map(in_file, head.names, url, version, place, options, self.anonymous)
        elif form == NPZ:
            predictions.write_npz({"surfaces": in_file, "names": np.array(head.names)}, place, options)
        else:
            self._write_classes(between(rows, scan.header.shape[1]), asked, scan, place)
        fields = scan.fields | asked.facts(scan.header) | {"path": asked.record.path}
        sizes_um = measured(in_file, head.names, scan.header, fields, self.foveas)
        return {"file": place, "surfaces": list(head.names)} | sizes_um

    def _write_classes(self, labels: np.ndarray, asked: Scan, scan: WholeScan, place: str) -> None:
        """Classes in the order of the reader's frames as a file."""
        options, in_file = self.options, scan.header.to_file_order(labels)
        if self.form == "nifti":
            predictions.write_nifti(labels, scan.header, asked.record.path, place, options)
        elif self.form == NPZ:
            predictions.write_npz({"labels": in_file}, place, options)
        elif self.form == "png":
            predictions.write_png(in_file, place, options)
        else:
            classes = {value: name for name, value in self.classes.items()}
            version = self.head.checksum[:DIGITS]
            predictions.write_seg(in_file, classes, scan.header, version, place, options, self.anonymous)


def between(rows_SDW: np.ndarray, num_rows: int) -> np.ndarray:
    """Classes uint8 [D, H, W]: n from surface n on and above the next; 0 elsewhere and if unknown."""
    row = np.arange(num_rows)[:, None]
    labels = np.zeros((rows_SDW.shape[1], num_rows, rows_SDW.shape[2]), np.uint8)
    for number, (upper, lower) in enumerate(pairwise(rows_SDW), 1):
        labels[(row >= upper[:, None]) & (row < lower[:, None])] = number
    return labels


def _require_names(scans: Sequence[Scan]) -> None:
    """Raise UserError where the files of two scans would have one name."""
    path_of: dict[str, str] = {}
    for scan in scans:
        name, path = stem_of(scan.name), scan.record.path
        if name in path_of:
            raise UserError(
                f"expected scans whose files have different names, found {path_of[name]} and {path}; draw "
                "them into two folders"
            )
        path_of[name] = path


def stem_of(name: str) -> str:
    """A path below the folder that was asked about, without the ending of a file."""
    is_file = kind_by_name(name) is not None or name.lower().endswith((".dcm", ".dicom"))
    stem = re.sub(r"(\.nii\.gz|\.ome\.tiff?|\.[A-Za-z]\w{0,4})$", "", name) if is_file else name
    folder, slash, last = stem.rpartition("/")
    return f"{folder}{slash}{bounded(last)}"


def bounded(name: str) -> str:
    """A name with room for endings in a disk's 255 bytes: of a longer one the beginning and a digest."""
    content = os.fsencode(name)
    if len(content) <= LONGEST:
        return name
    return f"{content[: LONGEST - 9].decode('utf-8', 'ignore')}-{values_digest([name])[:8]}"


def sizes(
    labels_DHW: np.ndarray, classes: Mapping[str, int], spacing_mm: tuple[float, float, float]
) -> dict[str, dict[str, float]]:
    """Voxels, mm3 and nl of each class in the scan, and how many lesions: parts whose voxels touch."""
    counts = np.bincount(labels_DHW.ravel(), minlength=256)
    mm3 = counts * float(np.prod(spacing_mm))
    return {
        name: {"voxels": int(counts[value]), "mm3": float(mm3[value]), "nl": float(1000 * mm3[value])}
        | {"lesions": int(label(labels_DHW == value, TOUCHING)[1]) if counts[value] else 0}
        for name, value in classes.items()
    }
