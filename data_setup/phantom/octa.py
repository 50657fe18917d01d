"""OCTA files of the phantom as the data set ships them: height maps, flow cubes, en-face images, a manifest.

In: a phantom tree with its truth files, its manifest rows. Out: Height Map Segmentation files under
retinal_octa/segmentation, flow below retinal_octa/flow_cube (SOP class 1.2.840.10008.5.1.4.1.1.77.1.5.8) and
retinal_octa/enface (...77.1.5.7), and retinal_octa/manifest.tsv, which links them to the structural scans:
height maps begin it, flow adds its columns. Heights are the truth's surfaces, so an error measured against
them is an error against truth; a real device's are not. Flow is made by flow.py from the vessels of the eye.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydicom.dataset import Dataset, FileDataset
from pydicom.sequence import Sequence as Items
from pydicom.uid import UID, OphthalmicTomographyImageStorage

from data_setup.export.items import fill, make_code, make_item, make_uid, new_file, to_bytes
from data_setup.phantom.anatomy import SURFACES
from data_setup.phantom.dicom import MODEL_TEXT
from data_setup.phantom.files import write_file
from data_setup.phantom.flow import SLABS, flow_of, slab_image
from data_setup.phantom.groups import one
from data_setup.protocols import Triple, device_of_path, protocol_of_path
from data_setup.readers.heights import HEIGHT_MAP_CLASS
from data_setup.readers.octa import ENFACE_CLASS, FLOW_CLASS
from data_setup.tables.text import table_text

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
TYPE_TEXT = {  # of a slab in files and manifest; Zeiss uses other words
    "superficial": "Superficial vascular plexus flow",
    "deep": "Deep vascular plexus flow",
    "outer_retina": "Outer retina vasculature flow",
    "choriocapillaris": "Choriocapillaris vasculature flow",
}
ZEISS_TEXT = TYPE_TEXT | {"superficial": "Superficial retina vasculature flow"}
ENFACE = "associated_enface_{}_{}"
FLOW_COLUMNS: tuple[str, ...] = (*COLUMNS[:6],)
FLOW_COLUMNS += ("flow_cube_height", "flow_cube_width", "flow_cube_number_of_frames")
FLOW_COLUMNS += COLUMNS[6:8]
FLOW_COLUMNS += tuple(ENFACE.format(n, "ophthalmic_image_type") for n in range(1, 5))
FLOW_COLUMNS += ("flow_cube_sop_instance_uid", "flow_cube_file_path", *COLUMNS[8:])
FLOW_COLUMNS += tuple(
    ENFACE.format(n, part) for n in range(1, 5) for part in ("sop_instance_uid", "file_path")
)


@dataclass
class Heights:
    """One height map before it is written."""

    heights: np.ndarray  # float32 [S, D, W], in the order that is stored
    labels: list[str]
    row: dict[str, object]  # of the manifest
    path: str
    uid: str
    device: str
    reference: str  # SOPInstanceUID of the structural scan
    sop_class: str = HEIGHT_MAP_CLASS


@dataclass
class File:
    """One file before it is written."""

    pixels: np.ndarray  # uint8 [D, H, W] or [D, W]
    path: str
    uid: str
    sop_class: str
    spacing_mm: Triple  # B-scan distance, axial, lateral
    type_text: str = ""
    bits: int = 8


@dataclass
class Flow:
    """The flow of one scan before it is written."""

    cube: File
    images: dict[str, File]  # slab -> image
    row: dict[str, object]  # of the manifest
    reference: str  # SOPInstanceUID of the structural scan
    device: str


def write_heights(
    out: Path, rows: Sequence[dict[str, object]], change: Callable[[int, Heights], None] | None = None
) -> None:
    """Write the height maps of the OCTA-type scans among manifest `rows`, as `change` makes them."""
    table: list[dict[str, object]] = []
    for place, row in enumerate(scans_of(out, rows)):
        plan = _plan_heights(out, row)
        if change:
            change(place, plan)
        write_file(out / plan.path, to_bytes(_height_map(plan)))
        table.append(plan.row)
    _write_manifest(out, COLUMNS, table)


def write_flow(
    out: Path, rows: Sequence[dict[str, object]], seed: int, change: Callable[[int, Flow], None] | None = None
) -> None:
    """Write the flow of the OCTA-type scans of a known eye among manifest `rows`, as `change` makes it."""
    known = _known_rows(out)
    table: list[dict[str, object]] = []
    for place, row in enumerate(scans_of(out, rows)):
        begun = known.get(str(row["sop_instance_uid"]), {})
        if row["laterality"] not in ("L", "R"):  # nobody says whose vessels these are
            table += [begun] if begun else []
            continue
        plan = _plan_flow(out, row, seed)
        plan.row = begun | plan.row
        if change:
            change(place, plan)
        for number, image in enumerate(plan.images.values(), start=1):
            plan.row[ENFACE.format(number, "ophthalmic_image_type")] = image.type_text
        for file in (*plan.images.values(), plan.cube):
            write_file(out / file.path, to_bytes(_flow_file(file, plan)))
        table.append(plan.row)
    _write_manifest(out, FLOW_COLUMNS, table)


def _write_manifest(out: Path, columns: Sequence[str], table: Sequence[Mapping[str, object]]) -> None:
    """retinal_octa/manifest.tsv."""
    rows = [dict.fromkeys(columns, NOT_REPORTED) | dict(row) for row in table]
    write_file(out / "retinal_octa" / "manifest.tsv", table_text(columns, rows).encode())


def _known_rows(out: Path) -> dict[str, dict[str, object]]:
    """The manifest that height maps have begun, by structural scan."""
    path = out / "retinal_octa" / "manifest.tsv"
    if not path.exists():
        return {}
    header, *lines = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines())
    rows: list[dict[str, object]] = [dict(zip(header, line, strict=True)) for line in lines]
    return {str(row[LINK.format("structural_oct", "sop_instance_uid")]): row for row in rows}


def scans_of(out: Path, rows: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """The rows of OCTA-type scans that have a truth file."""
    return [row for row in rows if "octa_oct" in str(row["filepath"]) and _truth_path(out, row).exists()]


def _truth_path(out: Path, row: dict[str, object]) -> Path:
    """The truth file of a manifest row."""
    return out / "truth" / f"{row['sop_instance_uid']}.npz"


def _place(row: dict[str, object]) -> tuple[str, str, str, dict[str, object]]:
    """(device, DEVICE/PERSON/PERSON_PROTOCOL, eye, cells of the manifest) of one structural scan."""
    path = str(row["filepath"]).strip("/")
    protocol, device = protocol_of_path(path), device_of_path(path)
    assert protocol is not None, path
    assert device is not None, path
    place = f"{device}/{row['person_id']}/{row['person_id']}_{protocol.name.removesuffix('_oct')}"
    cells = {column: row[column] for column in COLUMNS if column in row} | {
        "imaging": "OCTA",
        LINK.format("structural_oct", "sop_instance_uid"): row["sop_instance_uid"],
        LINK.format("structural_oct", "file_path"): row["filepath"],
    }
    return device, place, str(row["laterality"]), cells


def _plan_heights(out: Path, row: dict[str, object]) -> Heights:
    """The map of one structural scan."""
    device, place, side, cells = _place(row)
    with np.load(_truth_path(out, row)) as truth:
        of_surface = dict(zip(SURFACES, truth["surfaces"], strict=True))
        of_surface["PR2"] = of_surface["EZ"] + np.float32(PR2_MM / truth["spacing_mm"][1])
    surfaces = SURFACES_OF[device]
    heights = np.stack([of_surface[name] for name in surfaces.values()]).astype(np.float32)
    uid = make_uid("heights", row["sop_instance_uid"])
    path = f"retinal_octa/segmentation/{place}_heightmap_{side.lower()}_{uid}.dcm"
    cells |= {
        LINK.format("segmentation", "sop_instance_uid"): uid,
        LINK.format("segmentation", "file_path"): f"/{path}",
        "associated_segmentation_type": "Heightmap",
        "associated_segmentation_number_of_frames": len(heights),
    }
    return Heights(heights, list(surfaces), cells, path, uid, device, str(row["sop_instance_uid"]))


def _plan_flow(out: Path, row: dict[str, object], seed: int) -> Flow:
    """The files of one structural scan."""
    device, place, side, cells = _place(row)
    with np.load(_truth_path(out, row)) as arrays:
        truth = dict(arrays)
    d_mm, h_mm, w_mm = (float(mm) for mm in truth["spacing_mm"])
    text = ZEISS_TEXT if device == "zeiss_cirrus" else TYPE_TEXT

    def file(kind: str, what: str, pixels: np.ndarray, sop_class: str) -> File:
        uid = make_uid(kind, what, row["sop_instance_uid"])
        path = f"retinal_octa/{kind}/{place}_{what}_{side.lower()}_{uid}.dcm"
        return File(pixels, path, uid, sop_class, (d_mm, h_mm, w_mm), text.get(what, ""))

    flow = flow_of(truth, int(str(row["person_id"])), side, seed)
    cube = file("flow_cube", "flow_cube", flow, FLOW_CLASS)
    images = {slab: file("enface", slab, slab_image(flow, truth, slab), ENFACE_CLASS) for slab in SLABS}
    cells |= {
        "flow_cube_height": flow.shape[1],
        "flow_cube_width": flow.shape[2],
        "flow_cube_number_of_frames": len(flow),
        "flow_cube_sop_instance_uid": cube.uid,
        "flow_cube_file_path": f"/{cube.path}",
    }
    for number, image in enumerate(images.values(), start=1):
        cells[ENFACE.format(number, "sop_instance_uid")] = image.uid
        cells[ENFACE.format(number, "file_path")] = f"/{image.path}"
    return Flow(cube, images, cells, str(row["sop_instance_uid"]), device)


def _reference(uid: str) -> Dataset:
    return make_item(ReferencedSOPClassUID=OphthalmicTomographyImageStorage, ReferencedSOPInstanceUID=uid)


def _height_map(plan: Heights) -> FileDataset:
    """The attributes that a reader may use; a frame a surface."""
    heights = np.ascontiguousarray(plan.heights, "<f4")
    references = Items([_reference(plan.reference)])
    return _file(
        HEIGHT_MAP_CLASS,
        plan.uid,
        plan,
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
        SharedFunctionalGroupsSequence=one(
            ReferencedImageSequence=references, DerivationImageSequence=Items()
        ),
        FloatPixelData=heights.tobytes(),
    )


def _flow_file(file: File, plan: Flow) -> FileDataset:
    """The attributes that a reader may use; frames of a cube as those of its structural scan."""
    is_cube = file.pixels.ndim == 3
    pixels = file.pixels.astype("<u2") * 257 if file.bits == 16 else file.pixels
    sources = Items([_reference(plan.reference)])
    d_mm, h_mm, w_mm = (f"{mm:.10g}" for mm in file.spacing_mm)
    if is_cube:
        shared = make_item(
            PixelMeasuresSequence=one(SliceThickness=d_mm, PixelSpacing=[h_mm, w_mm]),
            DerivationImageSequence=one(SourceImageSequence=sources),
            PlaneOrientationSequence=one(ImageOrientationPatient=["1", "0", "0", "0", "0", "-1"]),
        )
        places = [make_item(StackID="1", InStackPositionNumber=n + 1) for n in range(len(file.pixels))]
        own: dict[str, Any] = {
            "NumberOfFrames": len(file.pixels),
            "SharedFunctionalGroupsSequence": Items([shared]),
            "PerFrameFunctionalGroupsSequence": Items(
                make_item(FrameContentSequence=Items([place])) for place in places
            ),
        }
    else:
        code = make_code("0", "99PHANTOM", file.type_text)
        own = {
            "PixelSpacing": [d_mm, w_mm],
            "SourceImageSequence": sources,
            "OphthalmicImageTypeCodeSequence": code,
        }
    data = np.ascontiguousarray(pixels).tobytes()
    ds = _file(
        file.sop_class,
        file.uid,
        plan,
        ImageType=["DERIVED", "PRIMARY"],
        Modality="OPTBSV" if is_cube else "OPTENF",
        ImageLaterality=str(plan.row["laterality"]),
        Rows=file.pixels.shape[-2],
        Columns=file.pixels.shape[-1],
        BitsAllocated=file.bits,
        BitsStored=file.bits,
        HighBit=file.bits - 1,
        PixelRepresentation=0,
        PixelData=data + b"\0" * (len(data) % 2),
        **own,
    )
    ds["PixelData"].VR = "OW" if file.bits == 16 else "OB"
    return ds


def _file(sop_class: str, uid: str, plan: Heights | Flow, **attributes: Any) -> FileDataset:
    """A file about the scan of a plan with these attributes and those that all have."""
    ds = new_file(sop_class, uid)
    ds.file_meta.ImplementationClassUID = UID(make_uid("implementation"))
    manufacturer, model = MODEL_TEXT[plan.device]
    root = {
        "SOPClassUID": sop_class,
        "SOPInstanceUID": ds.file_meta.MediaStorageSOPInstanceUID,
        "Manufacturer": manufacturer,
        "ManufacturerModelName": model,
        "PatientID": str(plan.row["person_id"]),
        "PatientName": "",
        "SamplesPerPixel": 1,
        "PhotometricInterpretation": "MONOCHROME2",
    }
    fill(ds, root | attributes)
    return ds
