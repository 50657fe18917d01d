"""Flow cubes and en-face images of the phantom's OCTA-type scans as the data set ships them.

In: a phantom tree with its truth files, its manifest rows, quirks. Out: files below retinal_octa/flow_cube
(SOP class 1.2.840.10008.5.1.4.1.1.77.1.5.8) and retinal_octa/enface (...77.1.5.7), their columns of
retinal_octa/manifest.tsv, which height maps may have begun, and what was planted: {"path", "kind",
"expected_reason"}, as in faults.py. Flow is made by flow.py from the vessels of the eye.

A habit changes every file, a fault one scan of the tree each, in the order of the manifest.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.sequence import Sequence as Items
from pydicom.uid import UID, ExplicitVRLittleEndian, OphthalmicTomographyImageStorage

from data_setup.phantom.dicom import MODEL_TEXT, to_bytes
from data_setup.phantom.flow import SLABS, flow_of, slab_image
from data_setup.phantom.octa import COLUMNS as HEIGHT_COLUMNS
from data_setup.phantom.octa import LINK, scans_of, thinned, truth_path
from data_setup.protocols import device_of_path, protocol_of_path
from data_setup.readers.octa import ENFACE_CLASS, FLOW_CLASS
from data_setup.writers.items import make_code, make_item, make_uid
from utils.errors import UserError

TYPE_TEXT = {  # of a slab in files and manifest; Zeiss has words of its own
    "superficial": "Superficial vascular plexus flow",
    "deep": "Deep vascular plexus flow",
    "outer_retina": "Outer retina vasculature flow",
    "choriocapillaris": "Choriocapillaris vasculature flow",
}
ZEISS_TEXT = TYPE_TEXT | {"superficial": "Superficial retina vasculature flow"}
HABITS = ("reversed", "grid", "bits16")
ENFACE = "associated_enface_{}_{}"
COLUMNS: tuple[str, ...] = (*HEIGHT_COLUMNS[:6],)
COLUMNS += ("flow_cube_height", "flow_cube_width", "flow_cube_number_of_frames")
COLUMNS += HEIGHT_COLUMNS[6:8]
COLUMNS += tuple(ENFACE.format(n, "ophthalmic_image_type") for n in range(1, 5))
COLUMNS += ("flow_cube_sop_instance_uid", "flow_cube_file_path", *HEIGHT_COLUMNS[8:])
COLUMNS += tuple(ENFACE.format(n, part) for n in range(1, 5) for part in ("sop_instance_uid", "file_path"))
NOT_REPORTED = "Not reported"


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
    is_absent: bool = False
    change: list[Callable[[bytes], bytes]] = field(default_factory=list)  # what is written instead


@dataclass
class Planned:
    """The files of one scan before they are written."""

    cube: File
    images: dict[str, File]  # slab -> image
    row: dict[str, object]  # of the manifest
    reference: str  # SOPInstanceUID of the structural scan
    device: str
    other_path: str = ""  # of another structural scan of the tree


def _absent(plan: Planned) -> None:
    plan.cube.is_absent = True


def _unlinked(plan: Planned) -> None:
    plan.row |= {"flow_cube_sop_instance_uid": NOT_REPORTED, "flow_cube_file_path": NOT_REPORTED}


def _unknown_scan(plan: Planned) -> None:
    plan.row[LINK.format("structural_oct", "sop_instance_uid")] = make_uid("nobody", plan.reference)
    plan.row[LINK.format("structural_oct", "file_path")] = "/retinal_oct/structural_oct/nowhere.dcm"


def _contradiction(plan: Planned) -> None:
    plan.row[LINK.format("structural_oct", "file_path")] = plan.other_path


def _other_reference(plan: Planned) -> None:
    plan.reference = make_uid("another", plan.reference)


def _other_scan(plan: Planned) -> None:
    """Flow that lies where this scan has vitreous and sclera."""
    plan.cube.pixels = np.roll(plan.cube.pixels[:, ::-1], plan.cube.pixels.shape[1] // 2, axis=1)


def _other_field(plan: Planned) -> None:
    plan.cube.pixels = plan.cube.pixels[:, : 2 * plan.cube.pixels.shape[1] // 3]


def _constant(plan: Planned) -> None:
    plan.cube.pixels = np.zeros_like(plan.cube.pixels)


def _cut(plan: Planned) -> None:
    plan.cube.change.append(lambda data: data[: 2 * len(data) // 3])


def _photograph(plan: Planned) -> None:
    plan.cube.sop_class = "1.2.840.10008.5.1.4.1.1.77.1.5.1"


def _no_dicom(plan: Planned) -> None:
    plan.cube.change.append(lambda data: np.random.default_rng(len(data)).bytes(2048))


def _absent_image(plan: Planned) -> None:
    plan.images["deep"].is_absent = True


def _other_image(plan: Planned) -> None:
    plan.images["superficial"].sop_class = "1.2.840.10008.5.1.4.1.1.77.1.5.1"


def _cropped_image(plan: Planned) -> None:
    image = plan.images["superficial"]
    image.pixels = image.pixels[: 2 * len(image.pixels) // 3]


def _unknown_slab(plan: Planned) -> None:
    plan.images["outer_retina"].type_text = "Retina structural reflectance map"


# kind -> what is done, and the reason of prepare; of the first group the cube's, of the second an image's
CUBE_FAULTS: dict[str, tuple[Callable[[Planned], None], str]] = {
    "missing_file": (_absent, "missing_file"),
    "no_flow_cube": (_unlinked, "no_flow_cube"),
    "unknown_scan": (_unknown_scan, "scan_not_in_store"),
    "contradiction": (_contradiction, "links_disagree"),
    "other_reference": (_other_reference, "wrong_reference"),
    "other_scan": (_other_scan, "no_fit"),
    "other_field": (_other_field, "other_field"),
    "constant": (_constant, "constant_volume"),
    "cut_file": (_cut, "truncated_pixel_data"),
    "wrong_class": (_photograph, "not_flow_cube"),
    "not_dicom": (_no_dicom, "not_dicom"),
}
IMAGE_FAULTS: dict[str, tuple[Callable[[Planned], None], str]] = {
    "missing_image": (_absent_image, "missing_file"),
    "wrong_image_class": (_other_image, "not_en_face"),
    "cropped_image": (_cropped_image, "other_field"),
    "unknown_slab": (_unknown_slab, "unknown_slab"),
}
FAULTS = CUBE_FAULTS | IMAGE_FAULTS
QUIRKS = (*HABITS, *FAULTS)


def write_flow(
    out: Path, rows: Sequence[dict[str, object]], quirks: Sequence[str], seed: int
) -> list[dict[str, object]]:
    """Write flow cubes and en-face images of the OCTA-type scans among manifest `rows`; returns what was
    planted. Raises UserError where the tree has fewer such scans than faults are asked for.
    """
    scans = scans_of(out, rows)
    faults = [name for name in quirks if name in FAULTS]
    if len(scans) < len(faults):
        raise UserError(
            f"--flow: expected {len(faults)} scans of OCTA type for so many faults, found {len(scans)}; "
            "take more participants"
        )
    known = _known_rows(out)
    planted: list[dict[str, object]] = []
    table: list[dict[str, object]] = []
    for place, row in enumerate(scans):
        plan = _plan(out, row, quirks, seed)
        plan.row = known.get(str(row["sop_instance_uid"]), {}) | plan.row
        plan.other_path = str(scans[place - 1]["filepath"])
        kind = faults[place] if place < len(faults) else None
        if kind is not None:
            plant, reason = FAULTS[kind]
            plant(plan)
            planted.append({"path": plan.cube.path, "kind": kind, "expected_reason": reason})
        for number, image in enumerate(plan.images.values(), start=1):
            plan.row[ENFACE.format(number, "ophthalmic_image_type")] = image.type_text
            _write(out, image, plan)
        _write(out, plan.cube, plan)
        table.append(plan.row)
    (out / "retinal_octa").mkdir(exist_ok=True)
    lines = [
        "\t".join(COLUMNS),
        *("\t".join(str(row.get(c, NOT_REPORTED)) for c in COLUMNS) for row in table),
    ]
    (out / "retinal_octa" / "manifest.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return planted


def _known_rows(out: Path) -> dict[str, dict[str, object]]:
    """The manifest that height maps have begun, by structural scan."""
    path = out / "retinal_octa" / "manifest.tsv"
    if not path.exists():
        return {}
    header, *lines = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines())
    rows: list[dict[str, object]] = [dict(zip(header, line, strict=True)) for line in lines]
    return {str(row[LINK.format("structural_oct", "sop_instance_uid")]): row for row in rows}


def _plan(out: Path, row: dict[str, object], quirks: Sequence[str], seed: int) -> Planned:
    """The files of one structural scan with the habits among `quirks`."""
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
    scale = (1.0, 1.0)
    if "grid" in quirks:
        before = cube[:, 0].shape
        images = {slab: np.rint(thinned(image[None]))[0].astype(np.uint8) for slab, image in images.items()}
        small = images["deep"].shape
        scale = (before[0] / small[0], before[1] / small[1])
    if "reversed" in quirks and "20x20" in protocol.name:
        cube, images = cube[::-1], {slab: image[::-1] for slab, image in images.items()}
    stem = f"{row['person_id']}_{protocol.name.removesuffix('_oct')}"
    place = f"{device}/{row['person_id']}/{stem}"
    text = ZEISS_TEXT if device == "zeiss_cirrus" else TYPE_TEXT
    bits = 16 if "bits16" in quirks else 8

    def file(kind: str, what: str, pixels: np.ndarray, sop_class: str, spacing: Sequence[float]) -> File:
        uid = make_uid(kind, what, row["sop_instance_uid"])
        url = f"retinal_octa/{kind}/{place}_{what}_{side.lower()}_{uid}.dcm"
        return File(
            pixels, url, uid, sop_class, (spacing[0], spacing[1], spacing[2]), text.get(what, ""), bits
        )

    own = file("flow_cube", "flow_cube", cube, FLOW_CLASS, (d_mm, h_mm, w_mm))
    spacing = (d_mm * scale[0], h_mm, w_mm * scale[1])
    made = {slab: file("enface", slab, image, ENFACE_CLASS, spacing) for slab, image in images.items()}
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


def _write(out: Path, file: File, plan: Planned) -> None:
    if file.is_absent:
        return
    data = to_bytes(_dataset(file, plan))
    path = out / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file.change[0](data) if file.change else data)


def _dataset(file: File, plan: Planned) -> FileDataset:
    """The attributes that a reader may use; frames of a cube as those of its structural scan."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = UID(file.sop_class)
    meta.MediaStorageSOPInstanceUID = UID(file.uid)
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.ImplementationClassUID = UID(make_uid("implementation"))
    ds = FileDataset(io.BytesIO(), {}, file_meta=meta, preamble=b"\0" * 128)
    manufacturer, model = MODEL_TEXT[plan.device]
    is_cube = file.pixels.ndim == 3
    pixels = file.pixels.astype("<u2") * 257 if file.bits == 16 else file.pixels
    root = {
        "ImageType": ["DERIVED", "PRIMARY"],
        "SOPClassUID": file.sop_class,
        "SOPInstanceUID": file.uid,
        "Modality": "OPTBSV" if is_cube else "OPTENF",
        "Manufacturer": manufacturer,
        "ManufacturerModelName": model,
        "PatientID": str(plan.row["person_id"]),
        "PatientName": "",
        "ImageLaterality": str(plan.row["laterality"]),
        "SamplesPerPixel": 1,
        "PhotometricInterpretation": "MONOCHROME2",
        "Rows": file.pixels.shape[-2],
        "Columns": file.pixels.shape[-1],
        "BitsAllocated": file.bits,
        "BitsStored": file.bits,
        "HighBit": file.bits - 1,
        "PixelRepresentation": 0,
    }
    for keyword, value in root.items():
        setattr(ds, keyword, value)
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
