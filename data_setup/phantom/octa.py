"""Height maps of the phantom's OCTA-type scans as the data set ships them, and retinal_octa/manifest.tsv.

In: a phantom tree with its truth files, its manifest rows. Out: Height Map Segmentation files under
retinal_octa/segmentation, and the manifest that links them to the structural scans. The heights are the
truth's surfaces, so an error measured against them is an error against truth; a real device's are not.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.sequence import Sequence as Items
from pydicom.uid import UID, ExplicitVRLittleEndian, OphthalmicTomographyImageStorage

from data_setup.export.writers.items import make_item, make_uid
from data_setup.phantom.anatomy import SURFACES
from data_setup.phantom.dicom import MODEL_TEXT, to_bytes
from data_setup.phantom.files import write_file
from data_setup.protocols import device_of_path, protocol_of_path
from data_setup.readers.heights import HEIGHT_MAP_CLASS

PR2_MM = 0.015  # the lower edge of the ellipsoid zone, as render.py draws it
# a device's surfaces from the vitreous down: its label, the phantom's surface
_TOPCON = {"ILM": "ILM", "RNFL/GCL": "RNFL_GCL", "GCL": "GCL_IPL", "IPL/INL": "IPL_INL", "OPL": "OPL_ONL"}
_TOPCON |= {"ELM": "ELM", "IS/OS": "EZ", "OS/RPE": "RPE", "BM": "BM"}
_SPECTRALIS = {"ILM": "ILM", "RNFL": "RNFL_GCL", "GCL": "GCL_IPL", "IPL": "IPL_INL", "INL": "INL_OPL"}
_SPECTRALIS |= {"OPL": "OPL_ONL", "ELM": "ELM", "PR1": "EZ", "PR2": "PR2", "RPE": "RPE", "BM": "BM"}
SURFACES_OF = {
    "heidelberg_spectralis": _SPECTRALIS,
    "topcon_maestro2": _TOPCON,
    "topcon_triton": _TOPCON | {"CSI": "CSI"},
    "zeiss_cirrus": {"ILM": "ILM", "RPE": "RPE"},
}
NOT_REPORTED = "Not reported"
LINK = "associated_{}_{}"
COLUMNS: tuple[str, ...] = ("person_id", "manufacturer", "manufacturers_model_name")
COLUMNS += ("anatomic_region", "imaging")
COLUMNS += ("laterality", "associated_segmentation_type", "associated_segmentation_number_of_frames")
COLUMNS += tuple(
    LINK.format(what, part)
    for what in ("structural_oct", "segmentation")
    for part in ("sop_instance_uid", "file_path")
)


@dataclass
class Planned:
    """One height map before it is written."""

    heights: np.ndarray  # float32 [S, D, W], in the order that is stored
    labels: list[str]
    row: dict[str, object]  # of the manifest
    path: str
    uid: str
    device: str
    reference: str  # SOPInstanceUID of the structural scan
    sop_class: str = HEIGHT_MAP_CLASS


def write_heights(
    out: Path,
    rows: Sequence[dict[str, object]],
    change: Callable[[int, Planned], None] | None = None,
) -> None:
    """Write the height maps of the OCTA-type scans among manifest `rows`, as `change` makes them."""
    table: list[dict[str, object]] = []
    for place, row in enumerate(scans_of(out, rows)):
        plan = _plan(out, row)
        if change:
            change(place, plan)
        write_file(out / plan.path, to_bytes(_dataset(plan)))
        table.append(plan.row)
    write_manifest(out, COLUMNS, table)


def write_manifest(out: Path, columns: Sequence[str], table: Sequence[Mapping[str, object]]) -> None:
    """retinal_octa/manifest.tsv."""
    lines = ["\t".join(columns)]
    lines += ["\t".join(str(row.get(c, NOT_REPORTED)) for c in columns) for row in table]
    write_file(out / "retinal_octa" / "manifest.tsv", ("\n".join(lines) + "\n").encode())


def scans_of(out: Path, rows: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """The rows of OCTA-type scans that have a truth file."""
    return [row for row in rows if "octa_oct" in str(row["filepath"]) and truth_path(out, row).exists()]


def truth_path(out: Path, row: dict[str, object]) -> Path:
    """The truth file of a manifest row."""
    return out / "truth" / f"{row['sop_instance_uid']}.npz"


def _plan(out: Path, row: dict[str, object]) -> Planned:
    """The map of one structural scan."""
    path = str(row["filepath"]).strip("/")
    protocol, device = protocol_of_path(path), device_of_path(path)
    assert protocol is not None, path
    assert device is not None, path
    with np.load(truth_path(out, row)) as truth:
        of_surface = dict(zip(SURFACES, truth["surfaces"], strict=True))
        of_surface["PR2"] = of_surface["EZ"] + np.float32(PR2_MM / truth["spacing_mm"][1])
    surfaces = SURFACES_OF[device]
    heights = np.stack([of_surface[name] for name in surfaces.values()]).astype(np.float32)
    uid = make_uid("heights", row["sop_instance_uid"])
    side = str(row["laterality"]).lower()
    name = f"{row['person_id']}_{protocol.name.removesuffix('_oct')}_heightmap_{side}_{uid}.dcm"
    folder = f"retinal_octa/segmentation/{device}/{row['person_id']}"
    links = {
        LINK.format("structural_oct", "sop_instance_uid"): row["sop_instance_uid"],
        LINK.format("structural_oct", "file_path"): row["filepath"],
        LINK.format("segmentation", "sop_instance_uid"): uid,
        LINK.format("segmentation", "file_path"): f"/{folder}/{name}",
        "associated_segmentation_type": "Heightmap",
        "associated_segmentation_number_of_frames": len(heights),
        "imaging": "OCTA",
    }
    known = {column: row[column] for column in COLUMNS if column in row}
    scan = str(row["sop_instance_uid"])
    return Planned(heights, list(surfaces), known | links, f"{folder}/{name}", uid, device, scan)


def _dataset(plan: Planned) -> FileDataset:
    """The attributes that a reader may use; a frame a surface."""
    heights = np.ascontiguousarray(plan.heights, "<f4")
    reference = make_item(
        ReferencedSOPClassUID=OphthalmicTomographyImageStorage, ReferencedSOPInstanceUID=plan.reference
    )
    return new_dataset(
        HEIGHT_MAP_CLASS,
        plan.uid,
        plan.device,
        plan.row,
        SOPClassUID=plan.sop_class,
        Modality="SEG",
        NumberOfFrames=len(heights),
        Rows=heights.shape[1],
        Columns=heights.shape[2],
        BitsAllocated=32,
        SegmentSequence=Items(
            make_item(SegmentNumber=number, SegmentLabel=label, SegmentAlgorithmType="AUTOMATIC")
            for number, label in enumerate(plan.labels, start=1)
        ),
        SharedFunctionalGroupsSequence=Items(
            [make_item(ReferencedImageSequence=Items([reference]), DerivationImageSequence=Items())]
        ),
        FloatPixelData=heights.tobytes(),
    )


def new_dataset(
    sop_class: str, uid: str, device: str, row: Mapping[str, object], **attributes: Any
) -> FileDataset:
    """A file about the scan of a manifest `row` with these attributes and those that all have."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = UID(sop_class)
    meta.MediaStorageSOPInstanceUID = UID(uid)
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.ImplementationClassUID = UID(make_uid("implementation"))
    ds = FileDataset(io.BytesIO(), {}, file_meta=meta, preamble=b"\0" * 128)
    manufacturer, model = MODEL_TEXT[device]
    root = {
        "SOPClassUID": sop_class,
        "SOPInstanceUID": meta.MediaStorageSOPInstanceUID,
        "Manufacturer": manufacturer,
        "ManufacturerModelName": model,
        "PatientID": str(row["person_id"]),
        "PatientName": "",
        "SamplesPerPixel": 1,
        "PhotometricInterpretation": "MONOCHROME2",
    }
    for keyword, value in (root | attributes).items():
        setattr(ds, keyword, value)
    return ds
