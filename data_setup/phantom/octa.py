"""Height maps of the phantom's OCTA-type scans as the data set ships them, and retinal_octa/manifest.tsv.

In: a phantom tree with its truth files, its manifest rows, quirks. Out: Height Map Segmentation files under
retinal_octa/segmentation, the manifest that links them to the structural scans, and what was planted:
{"path", "kind", "expected_reason"}, as in faults.py. The heights are the truth's surfaces, so an error
measured against them is an error against truth; a real device's are not.

A habit changes every file, a fault one file of the tree each, in the order of the manifest.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pydicom.config import disable_value_validation
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.sequence import Sequence as Items
from pydicom.uid import UID, ExplicitVRLittleEndian, OphthalmicTomographyImageStorage

from data_setup.phantom.anatomy import SURFACES
from data_setup.phantom.dicom import MODEL_TEXT, to_bytes
from data_setup.protocols import device_of_path, protocol_of_path
from data_setup.readers.heights import HEIGHT_MAP_CLASS, INVALID_UP_TO
from data_setup.writers.items import make_item, make_uid
from utils.errors import UserError

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
# the order of labels (Topcon) or of frames and labels (Spectralis) in released files
_TOPCON_LABELS = ("ILM", "RNFL/GCL", "GCL", "IPL/INL", "IS/OS", "OS/RPE", "BM", "OPL", "ELM", "CSI")
_SPECTRALIS_ORDER = ("ILM", "BM", "RNFL", "GCL", "IPL", "INL", "OPL", "ELM", "PR1", "PR2", "RPE")
HABITS = ("v2_class", "labels", "grid", "reversed", "invalid")
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
    device: str
    reference: str  # SOPInstanceUID of the structural scan
    other_path: str = ""  # of another structural scan of the tree
    sop_class: str = HEIGHT_MAP_CLASS
    change: list[Callable[[FileDataset], bytes]] = field(default_factory=list)  # what is written instead
    is_absent: bool = False


def _absent(plan: Planned) -> None:
    plan.is_absent = True


def _unlinked(plan: Planned) -> None:
    for part in ("sop_instance_uid", "file_path"):
        plan.row[LINK.format("segmentation", part)] = "Not reported"


def _unknown_scan(plan: Planned) -> None:
    plan.row[LINK.format("structural_oct", "sop_instance_uid")] = make_uid("nobody", plan.reference)
    plan.row[LINK.format("structural_oct", "file_path")] = "/retinal_oct/structural_oct/nowhere.dcm"


def _contradiction(plan: Planned) -> None:
    plan.row[LINK.format("structural_oct", "file_path")] = plan.other_path


def _other_reference(plan: Planned) -> None:
    plan.reference = make_uid("another", plan.reference)


def _upside_down(plan: Planned) -> None:
    """Heights of some other scan: no edge of this one lies there."""
    rows = np.random.default_rng(0).permutation(plan.heights.shape[1])
    plan.heights = plan.heights[:, rows, ::-1] - np.float32(0.35 * np.nanmax(plan.heights[0]))


def _lacking_surface(plan: Planned) -> None:
    plan.heights, plan.labels = plan.heights[:-1], plan.labels[:-1]


def _all_invalid(plan: Planned) -> None:
    plan.heights = np.full_like(plan.heights, -1.0)


def _far_below(plan: Planned) -> None:
    plan.heights = plan.heights + np.float32(4000)


def _no_labels(plan: Planned) -> None:
    plan.labels = []


def _some_nan(plan: Planned) -> None:
    plan.heights = plan.heights.copy()
    plan.heights[:, 0, :3] = np.nan


def _integer_pixels(plan: Planned) -> None:
    def write(ds: FileDataset) -> bytes:
        ds.PixelData = b"\0" * len(ds.FloatPixelData)
        ds["PixelData"].VR = "OB"
        del ds.FloatPixelData
        return to_bytes(ds)

    plan.change.append(write)


def _cut(plan: Planned) -> None:
    plan.change.append(lambda ds: to_bytes(ds)[: -len(ds.FloatPixelData) // 3])


def _wrong_length(plan: Planned) -> None:
    def write(ds: FileDataset) -> bytes:
        ds.Columns = int(ds.Columns) + 1
        return to_bytes(ds)

    plan.change.append(write)


def _photograph(plan: Planned) -> None:
    plan.sop_class = "1.2.840.10008.5.1.4.1.1.77.1.5.1"


def _no_dicom(plan: Planned) -> None:
    plan.change.append(lambda ds: np.random.default_rng(len(ds.FloatPixelData)).bytes(2048))


# kind -> what is done to the map, and the reason of prepare; None: the map is usable
FAULTS: dict[str, tuple[Callable[[Planned], None], str | None]] = {
    "missing_file": (_absent, "missing_file"),
    "no_segmentation": (_unlinked, "no_segmentation"),
    "unknown_scan": (_unknown_scan, "scan_not_in_store"),
    "contradiction": (_contradiction, "links_disagree"),
    "other_reference": (_other_reference, "wrong_reference"),
    "other_scan": (_upside_down, "no_edge"),
    "lacking_surface": (_lacking_surface, "surface_count"),
    "all_invalid": (_all_invalid, "no_valid_heights"),
    "far_below": (_far_below, "outside_volume"),
    "integer_pixels": (_integer_pixels, "missing_pixel_data"),
    "cut_file": (_cut, "truncated_pixel_data"),
    "wrong_length": (_wrong_length, "header_mismatch"),
    "wrong_class": (_photograph, "not_height_map"),
    "not_dicom": (_no_dicom, "not_dicom"),
    "no_labels": (_no_labels, None),
    "some_nan": (_some_nan, None),
}
QUIRKS = (*HABITS, *FAULTS)


def parse_quirks(text: str, quirks: tuple[str, ...] = QUIRKS, flag: str = "--heights") -> tuple[str, ...]:
    """`plain`, `all`, or names of `quirks` with commas between; raises UserError for another name."""
    if text in ("plain", "all"):
        return () if text == "plain" else quirks
    names = tuple(text.split(","))
    for name in names:
        if name not in quirks:
            raise UserError(f"{flag}: expected plain, all or some of {', '.join(quirks)}, found {name!r}")
    return names


def write_heights(
    out: Path, rows: Sequence[dict[str, object]], quirks: Sequence[str], seed: int
) -> list[dict[str, object]]:
    """Write the height maps of the OCTA-type scans among manifest `rows`; returns what was planted.

    Raises UserError where the tree has fewer such scans than faults are asked for.
    """
    scans = scans_of(out, rows)
    faults = [name for name in quirks if name in FAULTS]
    if len(scans) < len(faults):
        raise UserError(
            f"--heights: expected {len(faults)} scans of OCTA type for so many faults, found {len(scans)}; "
            "take more participants"
        )
    planted: list[dict[str, object]] = []
    table: list[dict[str, object]] = []
    for place, row in enumerate(scans):
        plan = _plan(out, row, quirks, seed)
        plan.other_path = str(scans[place - 1]["filepath"])
        kind = faults[place] if place < len(faults) else None
        if kind is not None:
            plant, reason = FAULTS[kind]
            plant(plan)
            planted.append({"path": plan.path, "kind": kind, "expected_reason": reason})
        if not plan.is_absent:
            _write(out / plan.path, plan)
        table.append(plan.row)
    folder = out / "retinal_octa"
    folder.mkdir(exist_ok=True)
    lines = ["\t".join(COLUMNS), *("\t".join(str(row[c]) for c in COLUMNS) for row in table)]
    (folder / "manifest.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return planted


def scans_of(out: Path, rows: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """The rows of OCTA-type scans that have a truth file."""
    return [row for row in rows if "octa_oct" in str(row["filepath"]) and truth_path(out, row).exists()]


def truth_path(out: Path, row: dict[str, object]) -> Path:
    """The truth file of a manifest row."""
    return out / "truth" / f"{row['sop_instance_uid']}.npz"


def _plan(out: Path, row: dict[str, object], quirks: Sequence[str], seed: int) -> Planned:
    """The map of one structural scan with the habits among `quirks`."""
    path = str(row["filepath"]).strip("/")
    protocol, device = protocol_of_path(path), device_of_path(path)
    assert protocol is not None, path
    assert device is not None, path
    with np.load(truth_path(out, row)) as truth:
        of_surface = dict(zip(SURFACES, truth["surfaces"], strict=True))
        of_surface["PR2"] = of_surface["EZ"] + np.float32(PR2_MM / truth["spacing_mm"][1])
    surfaces = SURFACES_OF[device]
    stored = list(surfaces)
    if "labels" in quirks and device == "heidelberg_spectralis":
        stored = list(_SPECTRALIS_ORDER)
    heights = np.stack([of_surface[surfaces[label]] for label in stored]).astype(np.float32)
    labels = stored
    if "labels" in quirks and device.startswith("topcon"):
        labels = [label for label in _TOPCON_LABELS if label in surfaces]
    rng = np.random.default_rng([seed, 0x0C, int(str(row["person_id"])), len(path)])
    if "grid" in quirks:
        heights = thinned(heights)
    if "reversed" in quirks and "20x20" in protocol.name:
        heights = heights[:, ::-1]
    if "invalid" in quirks:
        heights = _with_holes(heights, INVALID_UP_TO[device], rng)
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
    plan = Planned(heights, labels, known | links, f"{folder}/{name}", device, str(row["sop_instance_uid"]))
    if "v2_class" in quirks:
        plan.sop_class = "1.2.840.10008.5.1.4.xxxxx.1"
    return plan


def thinned(heights: np.ndarray) -> np.ndarray:
    """The same surfaces on a grid of two thirds of the B-scans and A-scans, over the same field."""
    num_d, num_w = (max(2, 2 * n // 3) for n in heights.shape[1:])
    for axis, num in ((1, num_d), (2, num_w)):
        size = heights.shape[axis]
        place = np.clip((np.arange(num) + 0.5) * size / num - 0.5, 0, size - 1)
        low = np.minimum(place.astype(int), size - 2)
        share = (place - low).astype(np.float32).reshape((-1, 1) if axis == 1 else (-1,))
        heights = heights.take(low, axis) * (1 - share) + heights.take(low + 1, axis) * share
    return heights.astype(np.float32)


def _with_holes(heights: np.ndarray, limit: float, rng: np.random.Generator) -> np.ndarray:
    """A block of B-scans and A-scans without heights, and some A-scans here and there."""
    holes = rng.random(heights.shape[1:]) < 0.03
    d, w = (int(rng.integers(n)) for n in holes.shape)
    holes[d : d + holes.shape[0] // 6, w : w + holes.shape[1] // 6] = True
    return np.where(holes, np.float32(limit), heights)


def _write(path: Path, plan: Planned) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with disable_value_validation():  # the class of version 2 is no valid UID
        ds = _dataset(plan)
        path.write_bytes(plan.change[0](ds) if plan.change else to_bytes(ds))


def _dataset(plan: Planned) -> FileDataset:
    """The attributes that a reader may use; a frame a surface."""
    uid = str(plan.row[LINK.format("segmentation", "sop_instance_uid")])
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = UID(HEIGHT_MAP_CLASS)
    meta.MediaStorageSOPInstanceUID = UID(uid if uid[:1].isdigit() else make_uid("unlinked", plan.path))
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.ImplementationClassUID = UID(make_uid("implementation"))
    ds = FileDataset(io.BytesIO(), {}, file_meta=meta, preamble=b"\0" * 128)
    manufacturer, model = MODEL_TEXT[plan.device]
    heights = np.ascontiguousarray(plan.heights, "<f4")
    reference = make_item(
        ReferencedSOPClassUID=OphthalmicTomographyImageStorage, ReferencedSOPInstanceUID=plan.reference
    )
    root = {
        "SOPInstanceUID": meta.MediaStorageSOPInstanceUID,
        "Modality": "SEG",
        "Manufacturer": manufacturer,
        "ManufacturerModelName": model,
        "PatientID": str(plan.row["person_id"]),
        "PatientName": "",
        "SamplesPerPixel": 1,
        "PhotometricInterpretation": "MONOCHROME2",
        "NumberOfFrames": len(heights),
        "Rows": heights.shape[1],
        "Columns": heights.shape[2],
        "BitsAllocated": 32,
        "SegmentSequence": Items(
            [
                make_item(SegmentNumber=number, SegmentLabel=label, SegmentAlgorithmType="AUTOMATIC")
                for number, label in enumerate(plan.labels, start=1)
            ]
        ),
        "SharedFunctionalGroupsSequence": Items(
            [make_item(ReferencedImageSequence=Items([reference]), DerivationImageSequence=Items())]
        ),
    }
    for keyword, value in root.items():
        setattr(ds, keyword, value)
    ds.SOPClassUID = plan.sop_class
    ds.FloatPixelData = heights.tobytes()
    return ds
