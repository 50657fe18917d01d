"""Height maps and flow of the phantom with what real files do wrong: habits of devices, and faults.

In: a phantom tree, its manifest rows, names of quirks. Out: the phantom's files with them, and what was
planted: {"path", "kind", "expected_reason"}. A habit changes every file, a fault the files of one scan each,
in the order of the manifest.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from pydicom.config import disable_value_validation

from data_setup.export.items import make_uid, to_bytes
from data_setup.phantom import octa
from data_setup.phantom.octa import LINK, NOT_REPORTED, SURFACES_OF, scans_of
from data_setup.readers.heights import INVALID_UP_TO

_PHOTOGRAPH = "1.2.840.10008.5.1.4.1.1.77.1.5.1"
HEIGHT_HABITS = ("v2_class", "labels", "grid", "reversed", "invalid")
FLOW_HABITS = ("reversed", "grid", "bits16")
# the order of labels (Topcon) or of frames and labels (Spectralis) in released files
_TOPCON_LABELS = ("ILM", "RNFL/GCL", "GCL", "IPL/INL", "IS/OS", "OS/RPE", "BM", "OPL", "ELM", "CSI")
_SPECTRALIS_ORDER = ("ILM", "BM", "RNFL", "GCL", "IPL", "INL", "OPL", "ELM", "PR1", "PR2", "RPE")

Plant = Callable[[Any, str], None]  # (plan, path of another structural scan), before the files are written
Spoil = Callable[[Path], None]  # what is done to the written file


def _keep(plan: Any, other: str) -> None:
    """Nothing: the file is spoilt later."""


def _unknown_scan(plan: Any, other: str) -> None:
    plan.row[LINK.format("structural_oct", "sop_instance_uid")] = make_uid("nobody", plan.reference)
    plan.row[LINK.format("structural_oct", "file_path")] = "/retinal_oct/structural_oct/nowhere.dcm"


def _contradiction(plan: Any, other: str) -> None:
    plan.row[LINK.format("structural_oct", "file_path")] = other


def _other_reference(plan: Any, other: str) -> None:
    plan.reference = make_uid("another", plan.reference)


def _without(*columns: str) -> Plant:
    return lambda plan, other: plan.row.update(dict.fromkeys(columns, NOT_REPORTED))


def _upside_down(plan: octa.Heights, other: str) -> None:
    """Heights of some other scan: no edge of this one lies there."""
    rows = np.random.default_rng(0).permutation(plan.heights.shape[1])
    plan.heights = plan.heights[:, rows, ::-1] - np.float32(0.35 * np.nanmax(plan.heights[0]))


def _lacking_surface(plan: octa.Heights, other: str) -> None:
    plan.heights, plan.labels = plan.heights[:-1], plan.labels[:-1]


def _all_invalid(plan: octa.Heights, other: str) -> None:
    plan.heights = np.full_like(plan.heights, -1.0)


def _far_below(plan: octa.Heights, other: str) -> None:
    plan.heights = plan.heights + np.float32(4000)


def _no_labels(plan: octa.Heights, other: str) -> None:
    plan.labels = []


def _some_nan(plan: octa.Heights, other: str) -> None:
    plan.heights = plan.heights.copy()
    plan.heights[:, 0, :3] = np.nan


def _height_photograph(plan: octa.Heights, other: str) -> None:
    plan.sop_class = _PHOTOGRAPH


def _other_scan(plan: octa.Flow, other: str) -> None:
    """Flow that lies where this scan has vitreous and sclera."""
    plan.cube.pixels = np.roll(plan.cube.pixels[:, ::-1], plan.cube.pixels.shape[1] // 2, axis=1)


def _other_field(plan: octa.Flow, other: str) -> None:
    plan.cube.pixels = plan.cube.pixels[:, : 2 * plan.cube.pixels.shape[1] // 3]


def _constant(plan: octa.Flow, other: str) -> None:
    plan.cube.pixels = np.zeros_like(plan.cube.pixels)


def _cube_photograph(plan: octa.Flow, other: str) -> None:
    plan.cube.sop_class = _PHOTOGRAPH


def _image_photograph(plan: octa.Flow, other: str) -> None:
    plan.images["superficial"].sop_class = _PHOTOGRAPH


def _cropped_image(plan: octa.Flow, other: str) -> None:
    image = plan.images["superficial"]
    image.pixels = image.pixels[: 2 * len(image.pixels) // 3]


def _unknown_slab(plan: octa.Flow, other: str) -> None:
    plan.images["outer_retina"].type_text = "Retina structural reflectance map"


def _absent_image(plan: octa.Flow, other: str) -> None:
    number = [*plan.images].index("deep") + 1
    path = plan.row[octa.ENFACE.format(number, "file_path")]
    plan.row[octa.ENFACE.format(number, "file_path")] = f"{path}.none"


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


# kind -> what is planted, what is done to the file, and the reason of prepare; None: the map is usable
HEIGHT_FAULTS: dict[str, tuple[Plant, Spoil | None, str | None]] = {
    "missing_file": (_keep, Path.unlink, "missing_file"),
    "no_segmentation": (
        _without(*(LINK.format("segmentation", part) for part in ("sop_instance_uid", "file_path"))),
        None,
        "no_segmentation",
    ),
    "unknown_scan": (_unknown_scan, None, "scan_not_in_store"),
    "contradiction": (_contradiction, None, "links_disagree"),
    "other_reference": (_other_reference, None, "wrong_reference"),
    "other_scan": (_upside_down, None, "no_edge"),
    "lacking_surface": (_lacking_surface, None, "surface_count"),
    "all_invalid": (_all_invalid, None, "no_valid_heights"),
    "far_below": (_far_below, None, "outside_volume"),
    "integer_pixels": (_keep, _integer_pixels, "missing_pixel_data"),
    "cut_file": (_keep, _cut, "truncated_pixel_data"),
    "wrong_length": (_keep, _wrong_length, "header_mismatch"),
    "wrong_class": (_height_photograph, None, "not_height_map"),
    "not_dicom": (_keep, _no_dicom, "not_dicom"),
    "no_labels": (_no_labels, None, None),
    "some_nan": (_some_nan, None, None),
}
CUBE_FAULTS: dict[str, tuple[Plant, Spoil | None, str]] = {
    "missing_file": (_keep, Path.unlink, "missing_file"),
    "no_flow_cube": (_without("flow_cube_sop_instance_uid", "flow_cube_file_path"), None, "no_flow_cube"),
    "unknown_scan": (_unknown_scan, None, "scan_not_in_store"),
    "contradiction": (_contradiction, None, "links_disagree"),
    "other_reference": (_other_reference, None, "wrong_reference"),
    "other_scan": (_other_scan, None, "no_fit"),
    "other_field": (_other_field, None, "other_field"),
    "constant": (_constant, None, "constant_volume"),
    "cut_file": (_keep, _cut, "truncated_pixel_data"),
    "wrong_class": (_cube_photograph, None, "not_flow_cube"),
    "not_dicom": (_keep, _no_dicom, "not_dicom"),
}
IMAGE_FAULTS: dict[str, tuple[Plant, Spoil | None, str]] = {
    "missing_image": (_absent_image, None, "missing_file"),
    "wrong_image_class": (_image_photograph, None, "not_en_face"),
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
    planted: list[tuple[str, str]] = []
    change = _planter(out, rows, [name for name in quirks if name in HEIGHT_FAULTS], HEIGHT_FAULTS, planted)

    def change_all(place: int, plan: octa.Heights) -> None:
        _height_habits(plan, quirks, seed)
        change(place, plan, plan.path)

    with disable_value_validation():  # the class of version 2 is no valid UID
        octa.write_heights(out, rows, change_all)
        return _spoilt(out, planted, HEIGHT_FAULTS)


def write_flow(
    out: Path, rows: Sequence[dict[str, object]], quirks: Sequence[str], seed: int
) -> list[dict[str, object]]:
    """The phantom's flow with `quirks`; returns what was planted."""
    planted: list[tuple[str, str]] = []
    change = _planter(out, rows, [name for name in quirks if name in FLOW_FAULTS], FLOW_FAULTS, planted)

    def change_all(place: int, plan: octa.Flow) -> None:
        _flow_habits(plan, quirks)
        change(place, plan, plan.cube.path)

    octa.write_flow(out, rows, seed, change_all)
    return _spoilt(out, planted, FLOW_FAULTS)


def _planter(
    out: Path,
    rows: Sequence[dict[str, object]],
    faults: Sequence[str],
    table: Any,
    planted: list[tuple[str, str]],
) -> Callable[[int, Any, str], None]:
    """Plants the fault of a place, and notes its path and kind."""
    paths = [str(row["filepath"]) for row in scans_of(out, rows)]
    assert len(faults) <= len(paths), "more participants"

    def change(place: int, plan: Any, path: str) -> None:
        if place < len(faults):
            table[faults[place]][0](plan, paths[place - 1])
            planted.append((path, faults[place]))

    return change


def _spoilt(out: Path, planted: Sequence[tuple[str, str]], table: Any) -> list[dict[str, object]]:
    for path, kind in planted:
        if (spoil := table[kind][1]) is not None:
            spoil(out / path)
    return [{"path": path, "kind": kind, "expected_reason": table[kind][2]} for path, kind in planted]


def _height_habits(plan: octa.Heights, quirks: Sequence[str], seed: int) -> None:
    if "labels" in quirks and plan.device == "heidelberg_spectralis":
        plan.heights = plan.heights[[plan.labels.index(label) for label in _SPECTRALIS_ORDER]]
        plan.labels = list(_SPECTRALIS_ORDER)
    elif "labels" in quirks and plan.device.startswith("topcon"):
        plan.labels = [label for label in _TOPCON_LABELS if label in SURFACES_OF[plan.device]]
    if "grid" in quirks:
        plan.heights = thinned(plan.heights)
    if "reversed" in quirks and "20x20" in plan.path:
        plan.heights = plan.heights[:, ::-1]
    if "invalid" in quirks:
        rng = np.random.default_rng([seed, int(str(plan.row["person_id"]))])
        plan.heights = _with_holes(plan.heights, INVALID_UP_TO[plan.device], rng)
    if "v2_class" in quirks:
        plan.sop_class = "1.2.840.10008.5.1.4.xxxxx.1"


def _flow_habits(plan: octa.Flow, quirks: Sequence[str]) -> None:
    for file in (plan.cube, *plan.images.values()):
        if "grid" in quirks and file is not plan.cube:
            before, (d_mm, h_mm, w_mm) = file.pixels.shape, file.spacing_mm
            file.pixels = np.rint(thinned(file.pixels[None]))[0].astype(np.uint8)
            d, w = (b / a for b, a in zip(before, file.pixels.shape, strict=True))
            file.spacing_mm = (d_mm * d, h_mm, w_mm * w)
        if "reversed" in quirks and "20x20" in plan.cube.path:
            file.pixels = file.pixels[::-1]
        if "bits16" in quirks:
            file.bits = 16


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
