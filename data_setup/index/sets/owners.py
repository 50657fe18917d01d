"""What the owners of a public set keep in their tables, names and arrays: the code of each set.

In: a plug of the catalogue and a tree. Out: scans with what a line of the catalogue cannot say, and labels.
A `refine` reads the tables of a tree once and gives the change of a scan; a `read_labels` opens one file.
"""

import io
import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tifffile
from PIL import Image

from data_setup.index.sets.facts import Labels, Plug, Scan, Shape, Tree, folder_of, of_field
from data_setup.readers import arrays
from data_setup.readers.dicom import open_file
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.images import ordered_images
from data_setup.readers.labels import whole_numbers
from data_setup.readers.sidecar import Sidecar, reading
from data_setup.tables.text import SIDES, read_cells, require_columns
from utils.errors import UserError

Refine = Callable[[Scan, re.Match[str]], Scan]

# ---- OCTA-500
# the last id of each side, of 6 mm and of 3 mm scans
_OCTA500_SPLITS = {"train": (10180, 10440), "val": (10200, 10450), "test": (10300, 10500)}
_OCTA500_SHEET = ("ID", "OS/OD", "Age", "Disease")


def octa500(plug: Plug, tree: Tree) -> Refine:
    sheets = tree.matches(r"(?:^|/)Text labels\.xlsx$")
    people = {row["ID"]: row for match in sheets for row in sheet(tree, match.string, _OCTA500_SHEET)}
    layers = {match[1]: match.string for match in tree.matches(r"(?:^|/)GT_Layers/(\d{5})\.mat$")}

    def refine(scan: Scan, match: re.Match[str]) -> Scan:
        person, number = people.get(match["id"], {}), int(match["id"])
        mm = 6 if number <= _OCTA500_SPLITS["test"][0] else 3
        last = {split: ends[mm == 3] for split, ends in _OCTA500_SPLITS.items()}
        group = plug.classes.get(person.get("Disease", "").upper(), "")
        path = layers.get(match["id"])
        return replace(
            scan,
            protocol=f"octa_{mm}x{mm}",
            laterality=SIDES.get(person.get("OS/OD", "").lower(), ""),
            spacing=of_field(mm, 2, mm),
            split=next((split for split, end in last.items() if number <= end), ""),
            facts={"study_group": group, "age": person.get("Age", "")},
            labels=partial(_octa500_labels, tree, path, len(plug.surfaces)) if path else None,
        )

    return refine


def _octa500_labels(tree: Tree, path: str, count: int, shape: Shape) -> Labels:
    with open_file(tree.url(path), tree.options) as file:
        names = list(arrays.list_arrays(file, tree.url(path)))
    if len(names) != 1:
        raise OCTReadError(tree.url(path), RejectReason.NOT_A_VOLUME, "one array", ", ".join(names))
    return Labels(surfaces=matlab_surfaces(tree, path, names[0], (0, 1, 2), count, shape))


# ---- Duke AMD (RPE: upper border of the RPE and drusen complex), Duke DME and OCTRIMA: the first grader's
DUKE_DME_FLUID, _UNGRADED = 1, 255


def duke_amd_labels(tree: Tree, path: str, shape: Shape) -> Labels:
    age = array(tree, path, "Age").ravel()
    rows = matlab_surfaces(tree, path, "layerMaps", (2, 0, 1), 3, shape)
    return Labels(surfaces=rows, facts={"age": f"{age[0]:.0f}"} if age.size == 1 else {})


def duke_dme_labels(tree: Tree, path: str, shape: Shape) -> Labels:
    url = tree.url(path)
    fluid = checked(array(tree, path, "manualFluid1").transpose(2, 0, 1), shape, url)
    classes = np.where(fluid > 0, DUKE_DME_FLUID, 0).astype(np.uint8)
    rows = matlab_surfaces(tree, path, "manualLayers1", (0, 2, 1), 8, shape)
    # whatever fluid has there, NaN or 0: without a line nobody looked
    classes[np.isnan(fluid).all(axis=(1, 2)) | np.isnan(rows).all(axis=(0, 2))] = _UNGRADED
    return Labels(classes, rows)


def octrima_labels(tree: Tree, path: str, shape: Shape) -> Labels:
    return Labels(surfaces=matlab_surfaces(tree, path, "O1", (0, 2, 1), 8, shape))


# ---- RETOUCH
_RETOUCH_DEVICES = {"cirrus": "zeiss_cirrus", "spectralis": "heidelberg_spectralis", "topcon": "topcon_3doct"}


def retouch(plug: Plug, tree: Tree) -> Refine:
    def refine(scan: Scan, match: re.Match[str]) -> Scan:
        maker = next((name for name in _RETOUCH_DEVICES if name in scan.path.lower()), "unknown")
        path = f"{folder_of(scan.path)}/reference.mhd"
        labels = partial(_retouch_labels, plug, tree, path) if path in tree.sizes else None
        device = _RETOUCH_DEVICES.get(maker, "unknown")
        return replace(scan, device=device, protocol=f"retouch_{maker}", labels=labels)

    return refine


def _retouch_labels(plug: Plug, tree: Tree, path: str, shape: Shape) -> Labels:
    values = classes_of(metaimage(tree, path), shape, tree.url(path))
    facts = {name: str(int((values == value).any())) for value, name in plug.label_classes.items()}
    return Labels(classes=values, facts=facts)


# ---- OLIVES: biomarkers of B-scans in a CSV
OLIVES_PATH = "Path (Trial/Arm/Folder/Visit/Eye/Image Name)"
_OLIVES_NO_MARKERS = (OLIVES_PATH, "Scan (n/49)", "Eye_ID", "BCVA", "CST", "Patient_ID")
_OLIVES_MARKERS = {"0": 0, "0.0": 0, "1": 1, "1.0": 1}


def olives(plug: Plug, tree: Tree) -> Refine:
    visits = _olives_visits(tree)

    def refine(scan: Scan, match: re.Match[str]) -> Scan:
        trial, files = ("TREX DME", "TREX*") if match["trex"] else ("Prime_FULL", "[0-9]*")
        group, visit = plug.classes[trial], visits.get(scan.path[scan.path.index(trial) :], {})
        person = f"{group}_{scan.person_id}"
        return replace(scan, person_id=person, files=files, facts={"study_group": group}, visit=visit)

    return refine


def _olives_visits(tree: Tree) -> dict[str, dict[str, str]]:
    """{folder from the trial on: what the table says}: a biomarker is there where any B-scan has it."""
    rows: dict[str, list[dict[str, str]]] = defaultdict(list)
    for match in tree.matches(r"(?:^|/)Biomarker_Clinical_Data_Images\.csv$"):
        for row in sheet(tree, match.string, (OLIVES_PATH, "BCVA", "CST")):
            rows[folder_of(row[OLIVES_PATH].strip("/"))].append(row)
    visits = {}
    for folder, every in rows.items():
        markers = [name for name in every[0] if name not in _OLIVES_NO_MARKERS]
        known = {name: [_olives_marker(tree, row, name) for row in every if row[name]] for name in markers}
        slugs = {name: re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") for name in markers}
        visits[folder] = {slugs[name]: str(max(values)) for name, values in known.items() if values}
        visits[folder] |= {"bcva": every[0]["BCVA"], "cst": every[0]["CST"]}
    return visits


def _olives_marker(tree: Tree, row: dict[str, str], name: str) -> int:
    """A cell of a biomarker; raises UserError."""
    if row[name] not in _OLIVES_MARKERS:
        raise UserError(f"{tree.root}: {row[OLIVES_PATH]}: {name}: expected 0 or 1, found {row[name]!r}")
    return _OLIVES_MARKERS[row[name]]


# ---- OIMHS: each PNG has a B-scan and, right beside it, its mask in colours; but for red not verified
OIMHS_COLOURS = {1: (255, 0, 0), 2: (0, 255, 0), 3: (0, 0, 255), 4: (255, 255, 0)}
_OIMHS_SHEET = ("Patient ID", "Eye ID", "Age(years)", "Stage")


def oimhs(plug: Plug, tree: Tree) -> Refine:
    sheets = tree.matches(r"(?:^|/)Demographics of the participants\.(?:xlsx|csv)$")
    eyes = {row["Eye ID"]: row for match in sheets for row in sheet(tree, match.string, _OIMHS_SHEET)}

    def refine(scan: Scan, match: re.Match[str]) -> Scan:
        row = eyes.get(match["id"], {})
        both = [other for other in eyes.values() if other["Patient ID"] == row.get("Patient ID")]
        stage = plug.classes.get(row.get("Stage", ""))
        group = plug.classes.get(_oimhs_agreed(both, "Stage"), "")
        return replace(
            scan,
            person_id=row.get("Patient ID") or scan.person_id,
            facts={"study_group": group, "age": _oimhs_agreed(both, "Age(years)")},
            visit={"stage": stage} if stage else {},
            labels=partial(_oimhs_labels, plug, tree, scan.path),
        )

    return refine


def _oimhs_agreed(rows: Sequence[Mapping[str, str]], column: str) -> str:
    """What both eyes of a person have there; empty where they differ: no row says which eye is which."""
    values = {row[column] for row in rows}
    return values.pop() if len(values) == 1 else ""


def _oimhs_labels(plug: Plug, tree: Tree, folder: str, shape: Shape) -> Labels:
    url = tree.url(folder)
    names = [path.rpartition("/")[2] for path in tree.sizes if folder_of(path) == folder]
    ordered = ordered_images(names, Sidecar(), url)
    masks = [_oimhs_mask(plug, tree, f"{folder}/{name}", url) for name in ordered]
    if len({mask.shape for mask in masks}) != 1:
        raise OCTReadError(url, RejectReason.FRAME_SIZE_MISMATCH, "masks of one size", "several")
    return Labels(classes=checked(np.stack(masks), shape, url))


def _oimhs_mask(plug: Plug, tree: Tree, path: str, url: str) -> np.ndarray:
    """uint8 [H, W] of the right half; raises OCTReadError for a colour without a name."""
    data = tree.read(path)
    with reading(url, RejectReason.CORRUPT_FILE, "an image and its mask"):
        pixels = np.asarray(Image.open(io.BytesIO(data), formats=("PNG",)).convert("RGB"))
    pixels = pixels[:, round(pixels.shape[1] / 2) :]
    mask, is_known = np.zeros(pixels.shape[:2], np.uint8), (pixels == 0).all(axis=-1)
    for value, colour in OIMHS_COLOURS.items():
        is_class = (pixels == colour).all(axis=-1)
        mask[is_class] = value
        is_known |= is_class
    if not is_known.all():
        colours = ", ".join(f"{name} {OIMHS_COLOURS[v]}" for v, name in plug.label_classes.items())
        actual = "({}, {}, {})".format(*pixels[~is_known][0])
        expected = f"colours {colours} and black"
        raise OCTReadError(url, RejectReason.UNSUPPORTED_PIXELS, expected, actual)
    return mask


# ---- OCTAVE: the raw layout of nnU-Net
OCTAVE_CLASSES = {value: f"class {value} of dataset.json" for value in range(1, 14)}


def octave(plug: Plug, tree: Tree) -> Refine:
    def refine(scan: Scan, match: re.Match[str]) -> Scan:
        path = re.sub(r"(^|/)imagesTr/(.+)_0000\.tif$", r"\1labelsTr/\2.tif", scan.path)
        labels = partial(_octave_labels, tree, path) if path in tree.sizes else None
        return replace(scan, facts={"study_group": match["disease"].lower()}, labels=labels)

    return refine


def _octave_labels(tree: Tree, path: str, shape: Shape) -> Labels:
    url, data = tree.url(path), io.BytesIO(tree.read(path))
    with reading(url, RejectReason.CORRUPT_FILE, "a TIFF file of labels"):
        pages = np.asarray(tifffile.imread(data))
    return Labels(classes=classes_of(pages, shape, url))


def octave_names(tree: Tree) -> Mapping[int, str]:
    """The classes of dataset.json; raises UserError."""
    path = next((match.string for match in tree.matches(r"(?:^|/)dataset\.json$")), None)
    if path is None:
        raise UserError(f"{tree.root}: expected dataset.json, which names the classes, found none")
    try:
        labels = json.loads(tree.read(path), object_pairs_hook=_once)["labels"]
        names = _once([(int(value), str(name)) for name, value in labels.items()])
        return {value: name for value, name in names.items() if value > 0}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{tree.url(path)}: expected labels: {{name: number}}, found another file") from error


def _once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """The pairs of a JSON object; raises ValueError for a key given twice."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)


# ---- FairVision: a third of the people each for AMD, diabetic retinopathy and glaucoma
FAIRVISION_LABELS = {"AMD": "amd_condition", "DR": "dr_subtype", "Glaucoma": "glaucoma"}
FAIRVISION_SPLITS = {"Training": "train", "Validation": "val", "Test": "test"}


def fairvision(plug: Plug, tree: Tree) -> Refine:
    def refine(scan: Scan, match: re.Match[str]) -> Scan:
        return replace(
            scan,
            person_id=scan.person_id.lower(),
            protocol=scan.protocol.lower(),
            split=FAIRVISION_SPLITS[match["split"]],
            labels=partial(_fairvision_labels, plug, tree, scan.path, FAIRVISION_LABELS[match["set"]]),
        )

    return refine


def _fairvision_labels(plug: Plug, tree: Tree, path: str, label: str, shape: Shape) -> Labels:
    """The class as in the owners' own README, which counts them 0 to 3, and 0 and 1."""
    facts, start = scalars(tree, path, (label,), ("age",)), f"{label} "
    words = {k.removeprefix(start): name for k, name in plug.classes.items() if k.startswith(start)}
    if (value := facts[label]) not in words:
        expected = f"{label} of {', '.join(words)}"
        raise OCTReadError(tree.url(path), RejectReason.NOT_LABELS, expected, repr(value[:40]))
    return Labels(facts=facts | {label: words[value]})


# ---- what several read
def sheet(tree: Tree, path: str, required: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a .csv or the first sheet of an .xlsx as text; raises UserError, StorageError."""
    header, rows = read_cells(tree.url(path), tree.options, is_padded=True)
    require_columns(header, required, tree.url(path))
    return [{k: v.strip() for k, v in zip(header, cells, strict=True)} for cells in rows.values()]


def array(tree: Tree, path: str, name: str) -> np.ndarray:
    """An array of a .mat or .npz, axes as MATLAB or NumPy has them; raises OCTReadError, StorageError."""
    with open_file(tree.url(path), tree.options) as file:
        return arrays.load_array(file, tree.url(path), name)


def metaimage(tree: Tree, path: str) -> np.ndarray:
    """A MetaImage of x = W, y = H, z = D as [D, H, W]; raises OCTReadError, StorageError."""
    url = tree.url(path)
    with open_file(url, tree.options) as file:
        meta = arrays.read_metaimage_header(file, url)
        return arrays.read_voxels(file, url, meta, tree.options).transpose(2, 1, 0)


def checked(values: np.ndarray, shape: tuple[int, ...], url: str) -> np.ndarray:
    """The same array; raises OCTReadError where its shape is not that of the scan."""
    if values.shape != shape:
        expected = f"labels of {' x '.join(map(str, shape))}, as the scan"
        raise OCTReadError(
            url, RejectReason.FRAME_SIZE_MISMATCH, expected, " x ".join(map(str, values.shape))
        )
    return values


def classes_of(values: np.ndarray, shape: tuple[int, ...], url: str) -> np.ndarray:
    """uint8 of the same whole numbers; raises OCTReadError where they are others, or not of the shape."""
    return whole_numbers(checked(values, shape, url), url)


def scalars(tree: Tree, path: str, required: Sequence[str], optional: Sequence[str]) -> dict[str, str]:
    """Single values of an .npz as text; raises OCTReadError where one is missing, StorageError."""
    url = tree.url(path)
    with (
        open_file(url, tree.options) as file,
        reading(url, RejectReason.CORRUPT_FILE, "an .npz file"),
        np.load(file, allow_pickle=False) as content,
    ):
        present = set(content.files)
        names = [name for name in (*required, *optional) if name in present]
        values = {name: str(content[name].item()) for name in names}
    if lacking := [name for name in required if name not in present]:
        expected = f"an .npz with {', '.join(lacking)}"
        raise OCTReadError(url, RejectReason.NOT_LABELS, expected, ", ".join(sorted(present)[:6]))
    return values


def matlab_surfaces(tree: Tree, path: str, name: str, axes: Shape, count: int, shape: Shape) -> np.ndarray:
    """float32 [S, D, W], rows from 0, of an array of a .mat, for `count` surfaces of a scan of `shape`.
    `axes`: the places of S, D and W in the file. Raises OCTReadError, StorageError.
    """
    values = array(tree, path, name).transpose(axes)
    rows = checked(values, (count, shape[0], shape[2]), tree.url(path))
    # MATLAB counts from 1; where there is none it has NaN, 0 or less
    return np.where(rows > 0, rows - 1, np.nan).astype(np.float32)
