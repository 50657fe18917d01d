"""Height maps and flow of the phantom with what real files do wrong: habits of devices, and faults.

In: a phantom tree, its manifest rows, names of quirks. Out: the phantom's files with them, and what was
planted: {"path", "kind", "expected_reason"}. A habit changes every file, a fault the files of one scan each,
in the order of the manifest.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from pydicom.config import disable_value_validation
from pydicom.sequence import Sequence as Items

from data_setup.export.items import make_item, make_uid, to_bytes
from data_setup.phantom import beside
from data_setup.phantom.beside import LINK, NOT_REPORTED, SURFACES_OF, scans_of
from data_setup.phantom.flow import SLABS
from data_setup.readers.heights import INVALID_UP_TO
from data_setup.tables.text import table_text

HEIGHT_HABITS = ("v2_class", "labels", "grid", "reversed", "invalid")
FLOW_HABITS = ("reversed", "grid", "bits16")
# the order of labels (Topcon) or of frames and labels (Spectralis) in released files
_TOPCON_LABELS = ("ILM", "RNFL/GCL", "GCL", "IPL/INL", "IS/OS", "OS/RPE", "BM", "OPL", "ELM", "CSI")
_SPECTRALIS_ORDER = ("ILM", "BM", "RNFL", "GCL", "IPL", "INL", "OPL", "ELM", "PR1", "PR2", "RPE")

Plant = Callable[[Any, str], None]  # (what was written, path of another structural scan)
Spoil = Callable[[Path], None]  # what is done to the written file


class Written:
    """A file of the phantom to change before it is written again."""

    def __init__(self, out: Path, path: object) -> None:
        self.path = str(path).strip("/")
        self.file = out / self.path
        self.ds = pydicom.dcmread(self.file)

    def to_photograph(self) -> None:
        self.ds.SOPClassUID = "1.2.840.10008.5.1.4.1.1.77.1.5.1"

    def save(self) -> None:
        self.file.write_bytes(to_bytes(self.ds))


class Image(Written):
    """A flow cube or an en-face image."""

    @property
    def pixels(self) -> np.ndarray:
        return self.ds.pixel_array

    def put(self, pixels: np.ndarray) -> None:
        data, bits = np.ascontiguousarray(pixels).tobytes(), 8 * pixels.itemsize
        self.ds.Rows, self.ds.Columns = pixels.shape[-2:]
        self.ds.BitsAllocated, self.ds.BitsStored, self.ds.HighBit = bits, bits, bits - 1
        self.ds.PixelData = data + b"\0" * (len(data) % 2)
        self.ds["PixelData"].VR = "OW" if bits == 16 else "OB"


class Heights(Written):
    """A height map with its line of the manifest."""

    def __init__(self, out: Path, row: dict[str, Any]) -> None:
        super().__init__(out, row[LINK.format("segmentation", "file_path")])
        self.row, self.device = row, self.path.split("/")[2]
        self.labels = [str(item.SegmentLabel) for item in self.ds.SegmentSequence]

    @property
    def heights(self) -> np.ndarray:
        shape = self.ds.NumberOfFrames, self.ds.Rows, self.ds.Columns
        return np.frombuffer(self.ds.FloatPixelData, "<f4").reshape(shape)

    def put(self, heights: np.ndarray) -> None:
        self.ds.NumberOfFrames, self.ds.Rows, self.ds.Columns = heights.shape
        self.ds.FloatPixelData = np.ascontiguousarray(heights, "<f4").tobytes()

    def name(self, labels: Sequence[str]) -> None:
        self.labels = list(labels)
        numbered = [{"SegmentNumber": n, "SegmentLabel": label} for n, label in enumerate(labels, start=1)]
        items = [make_item(**fields, SegmentAlgorithmType="AUTOMATIC") for fields in numbered]
        self.ds.SegmentSequence = Items(items)

    def refer_to(self, uid: str) -> None:
        self.ds.SharedFunctionalGroupsSequence[0].ReferencedImageSequence[0].ReferencedSOPInstanceUID = uid


class Flow:
    """The flow of a scan with its line of the manifest."""

    def __init__(self, out: Path, row: dict[str, Any]) -> None:
        self.row, self.cube = row, Image(out, row["flow_cube_file_path"])
        paths = [row[beside.ENFACE.format(number, "file_path")] for number in range(1, len(SLABS) + 1)]
        self.images = {slab: Image(out, path) for slab, path in zip(SLABS, paths, strict=True)}
        self.path = self.cube.path

    def cell(self, slab: str, name: str) -> str:
        """The column of an image in the manifest."""
        return beside.ENFACE.format([*SLABS].index(slab) + 1, name)

    def refer_to(self, uid: str) -> None:
        derivation = self.cube.ds.SharedFunctionalGroupsSequence[0].DerivationImageSequence[0]
        derivation.SourceImageSequence[0].ReferencedSOPInstanceUID = uid

    def save(self) -> None:
        for file in (self.cube, *self.images.values()):
            file.save()


def _keep(plan: Any, other: str) -> None:
    """Nothing: the file is spoilt later."""


def _row(**cells: str) -> Plant:
    """Cells of the manifest; their texts may name the `other` scan."""
    return lambda plan, other: plan.row.update({k: text.format(other=other) for k, text in cells.items()})


def _upside_down(plan: Heights, other: str) -> None:
    """Heights of some other scan: no edge of this one lies there."""
    rows = np.random.default_rng(0).permutation(plan.heights.shape[1])
    plan.put(plan.heights[:, rows, ::-1] - np.float32(0.35 * np.nanmax(plan.heights[0])))


def _lacking_surface(plan: Heights, other: str) -> None:
    plan.put(plan.heights[:-1])
    plan.name(plan.labels[:-1])


def _some_nan(plan: Heights, other: str) -> None:
    heights = plan.heights.copy()
    heights[:, 0, :3] = np.nan
    plan.put(heights)


def _other_scan(plan: Flow, other: str) -> None:
    """Flow that lies where this scan has vitreous and sclera."""
    plan.cube.put(np.roll(plan.cube.pixels[:, ::-1], plan.cube.pixels.shape[1] // 2, axis=1))


def _cropped_image(plan: Flow, other: str) -> None:
    image = plan.images["superficial"]
    image.put(image.pixels[: 2 * len(image.pixels) // 3])


def _unknown_slab(plan: Flow, other: str) -> None:
    text = plan.row[plan.cell("outer_retina", "ophthalmic_image_type")] = "Retina structural reflectance map"
    plan.images["outer_retina"].ds.OphthalmicImageTypeCodeSequence[0].CodeMeaning = text


def _absent_image(plan: Flow, other: str) -> None:
    plan.row[plan.cell("deep", "file_path")] += ".none"


def _integer_pixels(path: Path) -> None:
    ds = pydicom.dcmread(path)
    ds.PixelData = b"\0" * len(ds.FloatPixelData)
    ds["PixelData"].VR = "OB"
    del ds.FloatPixelData
    path.write_bytes(to_bytes(ds))


def _wrong_length(path: Path) -> None:
    ds = pydicom.dcmread(path)
    ds.Columns = int(ds.Columns) + 1
    path.write_bytes(to_bytes(ds))


def _cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: 2 * len(data) // 3])


def _no_dicom(path: Path) -> None:
    path.write_bytes(np.random.default_rng(0).bytes(2048))


_SCAN_UID, _SCAN_PATH, _MAP_UID, _MAP_PATH = beside.COLUMNS[-4:]
_NOWHERE = {_SCAN_UID: make_uid("nobody"), _SCAN_PATH: "/retinal_oct/structural_oct/nowhere.dcm"}
# kind -> what is planted, what is done to the file, and the reason of prepare
OF_BOTH: dict[str, tuple[Plant, Spoil | None, str | None]] = {
    "missing_file": (_keep, Path.unlink, "missing_file"),
    "unknown_scan": (_row(**_NOWHERE), None, "scan_not_in_store"),
    "contradiction": (_row(**{_SCAN_PATH: "{other}"}), None, "links_disagree"),
    "other_reference": (lambda plan, _: plan.refer_to(make_uid("another")), None, "wrong_reference"),
    "cut_file": (_keep, _cut, "truncated_pixel_data"),
    "not_dicom": (_keep, _no_dicom, "not_dicom"),
}
HEIGHT_FAULTS: dict[str, tuple[Plant, Spoil | None, str | None]] = OF_BOTH | {
    "no_segmentation": (
        *(_row(**dict.fromkeys((_MAP_UID, _MAP_PATH), NOT_REPORTED)), None),
        "no_segmentation",
    ),
    "other_scan": (_upside_down, None, "no_edge"),
    "lacking_surface": (_lacking_surface, None, "surface_count"),
    "all_invalid": (lambda plan, _: plan.put(np.full_like(plan.heights, -1)), None, "no_valid_heights"),
    "far_below": (lambda plan, _: plan.put(plan.heights + np.float32(4000)), None, "outside_volume"),
    "integer_pixels": (_keep, _integer_pixels, "missing_pixel_data"),
    "wrong_length": (_keep, _wrong_length, "header_mismatch"),
    "wrong_class": (lambda plan, _: plan.to_photograph(), None, "not_height_map"),
    "no_labels": (lambda plan, _: plan.name([]), None, None),
    "some_nan": (_some_nan, None, None),
}
CUBE_FAULTS = OF_BOTH | {
    "no_flow_cube": (
        *(_row(flow_cube_sop_instance_uid=NOT_REPORTED, flow_cube_file_path=NOT_REPORTED), None),
        "no_flow_cube",
    ),
    "other_scan": (_other_scan, None, "no_fit"),
    "other_field": (
        *(lambda plan, _: plan.cube.put(plan.cube.pixels[:, : 2 * plan.cube.pixels.shape[1] // 3]), None),
        "other_field",
    ),
    "constant": (lambda plan, _: plan.cube.put(0 * plan.cube.pixels), None, "constant_volume"),
    "wrong_class": (lambda plan, _: plan.cube.to_photograph(), None, "not_flow_cube"),
}
IMAGE_FAULTS: dict[str, tuple[Plant, Spoil | None, str | None]] = {
    "missing_image": (_absent_image, None, "missing_file"),
    "wrong_image_class": (lambda plan, _: plan.images["superficial"].to_photograph(), None, "not_en_face"),
    "cropped_image": (_cropped_image, None, "other_field"),
    "unknown_slab": (_unknown_slab, None, "unknown_slab"),
}
FLOW_FAULTS = CUBE_FAULTS | IMAGE_FAULTS
HEIGHT_QUIRKS = (*HEIGHT_HABITS, *HEIGHT_FAULTS)
FLOW_QUIRKS = (*FLOW_HABITS, *FLOW_FAULTS)


def write_heights(
    out: Path, rows: Sequence[dict[str, object]], quirks: Sequence[str], seed: int
) -> list[dict[str, object]]:
    """The phantom's height maps with `quirks`; returns what was planted."""
    beside.write_heights(out, rows)
    with disable_value_validation():  # the class of version 2 is no valid UID
        return _changed(out, rows, Heights, quirks, HEIGHT_FAULTS, partial(_height_habits, seed=seed))


def write_flow(
    out: Path, rows: Sequence[dict[str, object]], quirks: Sequence[str], seed: int
) -> list[dict[str, object]]:
    """The phantom's flow with `quirks`; returns what was planted."""
    beside.write_flow(out, rows, seed)
    return _changed(out, rows, Flow, quirks, FLOW_FAULTS, _flow_habits)


def _changed(
    out: Path,
    rows: Sequence[dict[str, object]],
    kind: type[Any],
    quirks: Sequence[str],
    table: Mapping[str, Any],
    habits: Callable[[Any, Sequence[str]], None],
) -> list[dict[str, object]]:
    """Change the written files and their lines of the manifest; a fault for each of the first scans."""
    faults = [name for name in quirks if name in table]
    paths = [str(row["filepath"]) for row in scans_of(out, rows)]
    assert len(faults) <= len(paths), "more participants"
    lines, planted = beside.read_manifest(out), []
    of_scan = {line[LINK.format("structural_oct", "file_path")]: line for line in lines}
    for place, scan in enumerate(paths if quirks else []):
        plan = kind(out, of_scan[scan])
        habits(plan, quirks)
        if place < len(faults):
            table[faults[place]][0](plan, paths[place - 1])
            planted.append((plan.path, faults[place]))
        plan.save()
    if quirks:
        (out / beside.MANIFEST).write_text(table_text(list(lines[0]), lines))
    for path, fault in planted:
        if (spoil := table[fault][1]) is not None:
            spoil(out / path)
    return [{"path": path, "kind": fault, "expected_reason": table[fault][2]} for path, fault in planted]


def _height_habits(plan: Heights, quirks: Sequence[str], seed: int) -> None:
    if "labels" in quirks and plan.device == "heidelberg_spectralis":
        plan.put(plan.heights[[plan.labels.index(label) for label in _SPECTRALIS_ORDER]])
        plan.name(_SPECTRALIS_ORDER)
    elif "labels" in quirks and plan.device.startswith("topcon"):
        plan.name([label for label in _TOPCON_LABELS if label in SURFACES_OF[plan.device]])
    if "grid" in quirks:
        plan.put(thinned(plan.heights))
    if "reversed" in quirks and "20x20" in plan.path:
        plan.put(plan.heights[:, ::-1])
    if "invalid" in quirks:
        rng = np.random.default_rng([seed, int(plan.row["person_id"])])
        plan.put(_with_holes(plan.heights, INVALID_UP_TO[plan.device], rng))
    if "v2_class" in quirks:
        plan.ds.SOPClassUID = "1.2.840.10008.5.1.4.xxxxx.1"


def _flow_habits(plan: Flow, quirks: Sequence[str]) -> None:
    for file in (plan.cube, *plan.images.values()):
        if "grid" in quirks and file is not plan.cube:
            before = file.pixels.shape
            file.put(np.rint(thinned(file.pixels[None]))[0].astype(np.uint8))
            wider = zip(file.ds.PixelSpacing, before, file.pixels.shape, strict=True)
            file.ds.PixelSpacing = [f"{mm * b / a:.10g}" for mm, b, a in wider]
        if "reversed" in quirks and "20x20" in plan.cube.path:
            file.put(file.pixels[::-1])
        if "bits16" in quirks:
            file.put(file.pixels.astype("<u2") * 257)


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
