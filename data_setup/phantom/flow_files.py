"""Flow cubes and en-face images of the phantom's OCTA-type scans as the data set ships them.

In: a phantom tree with its truth files, its manifest rows. Out: files below retinal_octa/flow_cube (SOP class
1.2.840.10008.5.1.4.1.1.77.1.5.8) and retinal_octa/enface (...77.1.5.7), their columns of
retinal_octa/manifest.tsv, which height maps may have begun. Flow is made by flow.py from the vessels of the
eye.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydicom.dataset import Dataset, FileDataset
from pydicom.sequence import Sequence as Items
from pydicom.uid import OphthalmicTomographyImageStorage

from data_setup.export.writers.items import make_code, make_item, make_uid
from data_setup.phantom.dicom import to_bytes
from data_setup.phantom.files import write_file
from data_setup.phantom.flow import SLABS, flow_of, slab_image
from data_setup.phantom.octa import COLUMNS as HEIGHT_COLUMNS
from data_setup.phantom.octa import LINK, new_dataset, scans_of, truth_path, write_manifest
from data_setup.protocols import device_of_path, protocol_of_path
from data_setup.readers.octa import ENFACE_CLASS, FLOW_CLASS

TYPE_TEXT = {  # of a slab in files and manifest; Zeiss has words of its own
    "superficial": "Superficial vascular plexus flow",
    "deep": "Deep vascular plexus flow",
    "outer_retina": "Outer retina vasculature flow",
    "choriocapillaris": "Choriocapillaris vasculature flow",
}
ZEISS_TEXT = TYPE_TEXT | {"superficial": "Superficial retina vasculature flow"}
ENFACE = "associated_enface_{}_{}"
COLUMNS: tuple[str, ...] = (*HEIGHT_COLUMNS[:6],)
COLUMNS += ("flow_cube_height", "flow_cube_width", "flow_cube_number_of_frames")
COLUMNS += HEIGHT_COLUMNS[6:8]
COLUMNS += tuple(ENFACE.format(n, "ophthalmic_image_type") for n in range(1, 5))
COLUMNS += ("flow_cube_sop_instance_uid", "flow_cube_file_path", *HEIGHT_COLUMNS[8:])
COLUMNS += tuple(ENFACE.format(n, part) for n in range(1, 5) for part in ("sop_instance_uid", "file_path"))


@dataclass
class File:
    """One file before it is written."""

    pixels: np.ndarray  # uint8 [D, H, W] or [D, W]
    path: str
    uid: str
    sop_class: str
    spacing_mm: tuple[float, float, float]  # B-scan distance, axial, lateral
    type_text: str = ""
    bits: int = 8


@dataclass
class Planned:
    """The files of one scan before they are written."""

    cube: File
    images: dict[str, File]  # slab -> image
    row: dict[str, object]  # of the manifest
    reference: str  # SOPInstanceUID of the structural scan
    device: str


def write_flow(
    out: Path,
    rows: Sequence[dict[str, object]],
    seed: int,
    change: Callable[[int, Planned], None] | None = None,
) -> None:
    """Write the flow of the OCTA-type scans among manifest `rows`, as `change` makes it."""
    known = _known_rows(out)
    table: list[dict[str, object]] = []
    for place, row in enumerate(scans_of(out, rows)):
        plan = _plan(out, row, seed)
        plan.row = known.get(str(row["sop_instance_uid"]), {}) | plan.row
        if change:
            change(place, plan)
        for number, image in enumerate(plan.images.values(), start=1):
            plan.row[ENFACE.format(number, "ophthalmic_image_type")] = image.type_text
        for file in (*plan.images.values(), plan.cube):
            write_file(out / file.path, to_bytes(_dataset(file, plan)))
        table.append(plan.row)
    write_manifest(out, COLUMNS, table)


def _known_rows(out: Path) -> dict[str, dict[str, object]]:
    """The manifest that height maps have begun, by structural scan."""
    path = out / "retinal_octa" / "manifest.tsv"
    if not path.exists():
        return {}
    header, *lines = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines())
    rows: list[dict[str, object]] = [dict(zip(header, line, strict=True)) for line in lines]
    return {str(row[LINK.format("structural_oct", "sop_instance_uid")]): row for row in rows}


def _plan(out: Path, row: dict[str, object], seed: int) -> Planned:
    """The files of one structural scan."""
    path = str(row["filepath"]).strip("/")
    protocol, device = protocol_of_path(path), device_of_path(path)
    assert protocol is not None, path
    assert device is not None, path
    with np.load(truth_path(out, row)) as arrays:
        truth = dict(arrays)
    side = str(row["laterality"])
    cube = flow_of(truth, int(str(row["person_id"])), side, seed)
    images = {slab: slab_image(cube, truth, slab) for slab in SLABS}
    d_mm, h_mm, w_mm = (float(mm) for mm in truth["spacing_mm"])
    spacing = (d_mm, h_mm, w_mm)
    stem = f"{row['person_id']}_{protocol.name.removesuffix('_oct')}"
    place = f"{device}/{row['person_id']}/{stem}"
    text = ZEISS_TEXT if device == "zeiss_cirrus" else TYPE_TEXT

    def file(kind: str, what: str, pixels: np.ndarray, sop_class: str) -> File:
        uid = make_uid(kind, what, row["sop_instance_uid"])
        url = f"retinal_octa/{kind}/{place}_{what}_{side.lower()}_{uid}.dcm"
        return File(pixels, url, uid, sop_class, spacing, text.get(what, ""))

    own = file("flow_cube", "flow_cube", cube, FLOW_CLASS)
    made = {slab: file("enface", slab, image, ENFACE_CLASS) for slab, image in images.items()}
    facts: dict[str, object] = {column: row[column] for column in HEIGHT_COLUMNS if column in row}
    facts |= {
        "imaging": "OCTA",
        "flow_cube_height": cube.shape[1],
        "flow_cube_width": cube.shape[2],
        "flow_cube_number_of_frames": len(cube),
        "flow_cube_sop_instance_uid": own.uid,
        "flow_cube_file_path": f"/{own.path}",
        LINK.format("structural_oct", "sop_instance_uid"): row["sop_instance_uid"],
        LINK.format("structural_oct", "file_path"): row["filepath"],
    }
    for number, image in enumerate(made.values(), start=1):
        facts[ENFACE.format(number, "sop_instance_uid")] = image.uid
        facts[ENFACE.format(number, "file_path")] = f"/{image.path}"
    return Planned(own, made, facts, str(row["sop_instance_uid"]), device)


def _dataset(file: File, plan: Planned) -> FileDataset:
    """The attributes that a reader may use; frames of a cube as those of its structural scan."""
    is_cube = file.pixels.ndim == 3
    pixels = file.pixels.astype("<u2") * 257 if file.bits == 16 else file.pixels
    ds = new_dataset(
        file.sop_class,
        file.uid,
        plan.device,
        plan.row,
        ImageType=["DERIVED", "PRIMARY"],
        Modality="OPTBSV" if is_cube else "OPTENF",
        ImageLaterality=str(plan.row["laterality"]),
        Rows=file.pixels.shape[-2],
        Columns=file.pixels.shape[-1],
        BitsAllocated=file.bits,
        BitsStored=file.bits,
        HighBit=file.bits - 1,
        PixelRepresentation=0,
    )
    source = make_item(
        ReferencedSOPClassUID=OphthalmicTomographyImageStorage, ReferencedSOPInstanceUID=plan.reference
    )
    d_mm, h_mm, w_mm = (f"{mm:.10g}" for mm in file.spacing_mm)
    if is_cube:
        ds.NumberOfFrames = len(file.pixels)
        measures = make_item(SliceThickness=d_mm, PixelSpacing=[h_mm, w_mm])
        derivation = make_item(SourceImageSequence=Items([source]))
        ds.SharedFunctionalGroupsSequence = Items(
            [
                make_item(
                    PixelMeasuresSequence=Items([measures]),
                    DerivationImageSequence=Items([derivation]),
                    PlaneOrientationSequence=Items(
                        [make_item(ImageOrientationPatient=["1", "0", "0", "0", "0", "-1"])]
                    ),
                )
            ]
        )
        ds.PerFrameFunctionalGroupsSequence = Items([_frame(number) for number in range(len(file.pixels))])
    else:
        ds.PixelSpacing = [d_mm, w_mm]
        ds.SourceImageSequence = Items([source])
        ds.OphthalmicImageTypeCodeSequence = make_code("0", "99PHANTOM", file.type_text)
    data = np.ascontiguousarray(pixels).tobytes()
    ds.PixelData = data + b"\0" * (len(data) % 2)
    ds["PixelData"].VR = "OW" if file.bits == 16 else "OB"
    return ds


def _frame(number: int) -> Dataset:
    return make_item(
        FrameContentSequence=Items([make_item(StackID="1", InStackPositionNumber=number + 1)]),
    )
