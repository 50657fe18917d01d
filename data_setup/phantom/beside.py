"""What lies beside the phantom's scans as a data set ships it: OCTA with its manifest, labels of voxels.

In: a phantom tree with its truth files, its manifest rows. Out: Height Map Segmentation files under
retinal_octa/segmentation, flow below retinal_octa/flow_cube (SOP class 1.2.840.10008.5.1.4.1.1.77.1.5.8) and
retinal_octa/enface (...77.1.5.7), and retinal_octa/manifest.tsv, which links them to the structural scans:
height maps begin it, flow adds its columns. Heights are the truth's surfaces, so an error measured against
them is an error against truth; a real device's are not. Flow is made by flow.py from the vessels of the eye.

Labels: labels/<sop uid>.npz for every good volume, in the frame order of its file, the manifest's column
label_volume, and label_classes.yaml beside it. `lesions`: drusen, fluid and hyperreflective foci, few and
small, as the render has drawn them. `layers`: every layer of the retina is a class; then label_surfaces names
the surfaces between them, too. They are the truth itself.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydicom.dataset import FileDataset
from pydicom.sequence import Sequence as Items
from pydicom.uid import UID, OphthalmicTomographyImageStorage

from data_setup.export.items import fill, make_code, make_item, make_uid, new_file, to_bytes
from data_setup.phantom.anatomy import SURFACES
from data_setup.phantom.dicom import MODEL_TEXT, one
from data_setup.phantom.files import save_npz, write_file
from data_setup.phantom.flow import SLABS, flow_of, slab_image
from data_setup.phantom.render import LESIONS
from data_setup.protocols import device_of_path, protocol_of_path
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
LABEL_KINDS = ("lesions", "layers")
LABEL_FOLDER = "labels"
_NAMED = SURFACES_OF["topcon_triton"]  # the names that most devices have -> the phantom's
MANIFEST = "retinal_octa/manifest.tsv"
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


def write_heights(out: Path, rows: Sequence[dict[str, object]]) -> None:
    """Write the height maps of the OCTA-type scans among manifest `rows`."""
    _write_manifest(out, COLUMNS, [_write_map(out, row) for row in scans_of(out, rows)])


def write_flow(out: Path, rows: Sequence[dict[str, object]], seed: int) -> None:
    """Write the flow of the OCTA-type scans of a known eye among manifest `rows`."""
    known = {str(row[LINK.format("structural_oct", "sop_instance_uid")]): row for row in read_manifest(out)}
    table: list[dict[str, object]] = []
    for row in scans_of(out, rows):
        begun = known.get(str(row["sop_instance_uid"]), {})
        if row["laterality"] in ("L", "R"):  # of the others nobody says whose vessels these are
            begun = begun | _write_flow(out, row, seed)
        table += [begun] if begun else []
    _write_manifest(out, FLOW_COLUMNS, table)


def _write_manifest(out: Path, columns: Sequence[str], table: Sequence[Mapping[str, object]]) -> None:
    rows = [dict.fromkeys(columns, NOT_REPORTED) | dict(row) for row in table]
    write_file(out / MANIFEST, table_text(columns, rows).encode())


def read_manifest(out: Path) -> list[dict[str, object]]:
    """The rows of the manifest that was written so far."""
    path = out / MANIFEST
    if not path.exists():
        return []
    header, *lines = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines())
    return [dict(zip(header, line, strict=True)) for line in lines]


def scans_of(out: Path, rows: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """The rows of OCTA-type scans that have a truth file."""
    return [row for row in rows if "octa_oct" in str(row["filepath"]) and _truth_path(out, row).exists()]


def _truth_path(out: Path, row: dict[str, object]) -> Path:
    return out / "truth" / f"{row['sop_instance_uid']}.npz"


def _place(row: dict[str, object]) -> tuple[str, str, dict[str, object]]:
    """(device, DEVICE/PERSON/PERSON_PROTOCOL, cells of the manifest) of one structural scan."""
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
    return device, place, cells


def _write_map(out: Path, row: dict[str, object]) -> dict[str, object]:
    """Write the height map of one structural scan, a frame a surface; its cells of the manifest."""
    device, place, cells = _place(row)
    with np.load(_truth_path(out, row)) as truth:
        of_surface = dict(zip(SURFACES, truth["surfaces"], strict=True))
        of_surface["PR2"] = of_surface["EZ"] + np.float32(PR2_MM / truth["spacing_mm"][1])
    surfaces = SURFACES_OF[device]
    heights = np.stack([of_surface[name] for name in surfaces.values()]).astype("<f4")
    uid = make_uid("heights", row["sop_instance_uid"])
    path = f"retinal_octa/segmentation/{place}_heightmap_{str(row['laterality']).lower()}_{uid}.dcm"
    ds = _file(
        *(HEIGHT_MAP_CLASS, uid, device, row),
        Modality="SEG",
        NumberOfFrames=len(heights),
        Rows=heights.shape[1],
        Columns=heights.shape[2],
        BitsAllocated=32,
        SegmentSequence=Items(
            make_item(SegmentNumber=number, SegmentLabel=label, SegmentAlgorithmType="AUTOMATIC")
            for number, label in enumerate(surfaces, start=1)
        ),
        SharedFunctionalGroupsSequence=one(
            ReferencedImageSequence=_references(row), DerivationImageSequence=Items()
        ),
        FloatPixelData=heights.tobytes(),
    )
    write_file(out / path, to_bytes(ds))
    return cells | {
        LINK.format("segmentation", "sop_instance_uid"): uid,
        LINK.format("segmentation", "file_path"): f"/{path}",
        "associated_segmentation_type": "Heightmap",
        "associated_segmentation_number_of_frames": len(heights),
    }


def _write_flow(out: Path, row: dict[str, object], seed: int) -> dict[str, object]:
    """Write the flow of one structural scan and its slabs; its cells of the manifest."""
    device, place, cells = _place(row)
    with np.load(_truth_path(out, row)) as arrays:
        truth = dict(arrays)
    d_mm, h_mm, w_mm = (f"{mm:.10g}" for mm in truth["spacing_mm"])
    side = str(row["laterality"])

    def write(kind: str, what: str, pixels: np.ndarray, sop_class: str, **attributes: Any) -> tuple[str, str]:
        """The file's UID and its path in the manifest."""
        uid = make_uid(kind, what, row["sop_instance_uid"])
        path = f"retinal_octa/{kind}/{place}_{what}_{side.lower()}_{uid}.dcm"
        data = np.ascontiguousarray(pixels).tobytes()
        ds = _file(
            *(sop_class, uid, device, row),
            ImageType=["DERIVED", "PRIMARY"],
            ImageLaterality=side,
            Rows=pixels.shape[-2],
            Columns=pixels.shape[-1],
            BitsAllocated=8,
            BitsStored=8,
            HighBit=7,
            PixelRepresentation=0,
            PixelData=data + b"\0" * (len(data) % 2),
            **attributes,
        )
        ds["PixelData"].VR = "OB"
        write_file(out / path, to_bytes(ds))
        return uid, f"/{path}"

    flow = flow_of(truth, int(str(row["person_id"])), side, seed)
    places = [make_item(StackID="1", InStackPositionNumber=n + 1) for n in range(len(flow))]
    uid, path = write(  # frames as those of the structural scan
        *("flow_cube", "flow_cube", flow, FLOW_CLASS),
        Modality="OPTBSV",
        NumberOfFrames=len(flow),
        SharedFunctionalGroupsSequence=one(
            PixelMeasuresSequence=one(SliceThickness=d_mm, PixelSpacing=[h_mm, w_mm]),
            DerivationImageSequence=one(SourceImageSequence=_references(row)),
            PlaneOrientationSequence=one(ImageOrientationPatient=["1", "0", "0", "0", "0", "-1"]),
        ),
        PerFrameFunctionalGroupsSequence=Items(
            make_item(FrameContentSequence=Items([place])) for place in places
        ),
    )
    cells |= {
        "flow_cube_height": flow.shape[1],
        "flow_cube_width": flow.shape[2],
        "flow_cube_number_of_frames": len(flow),
        "flow_cube_sop_instance_uid": uid,
        "flow_cube_file_path": path,
    }
    text = ZEISS_TEXT if device == "zeiss_cirrus" else TYPE_TEXT
    for number, slab in enumerate(SLABS, start=1):
        uid, path = write(
            *("enface", slab, slab_image(flow, truth, slab), ENFACE_CLASS),
            Modality="OPTENF",
            PixelSpacing=[d_mm, w_mm],
            SourceImageSequence=_references(row),
            OphthalmicImageTypeCodeSequence=make_code("0", "99PHANTOM", text[slab]),
        )
        facts = {"sop_instance_uid": uid, "file_path": path, "ophthalmic_image_type": text[slab]}
        cells |= {ENFACE.format(number, name): fact for name, fact in facts.items()}
    return cells


def _references(row: dict[str, object]) -> Items:
    uid = str(row["sop_instance_uid"])
    return one(ReferencedSOPClassUID=OphthalmicTomographyImageStorage, ReferencedSOPInstanceUID=uid)


def _file(sop_class: str, uid: str, device: str, row: dict[str, object], **attributes: Any) -> FileDataset:
    """A file about a scan with these attributes and those that all have: what a reader may use."""
    ds = new_file(sop_class, uid)
    ds.file_meta.ImplementationClassUID = UID(make_uid("implementation"))
    manufacturer, model = MODEL_TEXT[device]
    root = {
        "SOPClassUID": sop_class,
        "SOPInstanceUID": uid,
        "Manufacturer": manufacturer,
        "ManufacturerModelName": model,
        "PatientID": str(row["person_id"]),
        "PatientName": "",
        "SamplesPerPixel": 1,
        "PhotometricInterpretation": "MONOCHROME2",
    }
    fill(ds, root | attributes)
    return ds


def write_labels(out: Path, kind: str) -> None:
    """Write the labels of every volume that has a truth file, and name them in the manifest."""
    manifest = out / "retinal_oct" / "manifest.tsv"
    lines = [line.split("\t") for line in manifest.read_text(encoding="utf-8").splitlines()]
    header, rows = lines[0], lines[1:]
    (out / LABEL_FOLDER).mkdir()
    columns = ["label_volume", *(["label_surfaces"] if kind == "layers" else [])]
    classes: dict[int, str] = {}
    for row in rows:
        uid = row[header.index("sop_instance_uid")]
        truth = out / "truth" / f"{uid}.npz"
        if not truth.exists():
            row += [""] * len(columns)
            continue
        with np.load(truth) as arrays:
            labels, classes = arrays["lesions"].astype(np.uint8), dict(enumerate(LESIONS[1:], start=1))
            if kind == "layers":
                labels, classes = of_layers(arrays)
            surfaces = dict(zip(arrays["surface_names"].tolist(), arrays["surfaces"], strict=True))
        save_npz(out / LABEL_FOLDER / f"{uid}.npz", {"labels": labels})
        row.append(f"/{LABEL_FOLDER}/{uid}.npz")
        if kind == "layers":
            named = np.stack([surfaces[name] for name in _NAMED.values()]).astype(np.float32)
            content = {"surfaces": named, "names": np.array(list(_NAMED))}
            save_npz(out / LABEL_FOLDER / f"{uid}_surfaces.npz", content)
            row.append(f"/{LABEL_FOLDER}/{uid}_surfaces.npz")
    text = "\n".join("\t".join(line) for line in [[*header, *columns], *rows])
    manifest.write_text(text + "\n", encoding="utf-8")
    named_classes = yaml.safe_dump(classes, sort_keys=True)
    manifest.with_name("label_classes.yaml").write_text(named_classes, encoding="utf-8")


def of_layers(truth: np.lib.npyio.NpzFile) -> tuple[np.ndarray, dict[int, str]]:
    """(number of the layer uint8 [D, H, W], their names): a voxel is in the layer that its centre is in."""
    surfaces = truth["surfaces"]
    rows = np.arange(int(truth["shape"][1]))[None, :, None]
    labels = np.sum([rows >= surface[:, None, :] for surface in surfaces], axis=0)
    labels[labels == len(surfaces)] = 0  # below the last surface
    return labels.astype(np.uint8), dict(enumerate(truth["layer_names"].tolist(), start=1))
