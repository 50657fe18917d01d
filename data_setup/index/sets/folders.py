"""Public sets whose volumes are folders of images: Srinivasan, NEH-UT, OIMHS, OLIVES."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from PIL import Image

from data_setup.index.sets import read
from data_setup.index.sets.facts import OF_VOLUMES, PROBE, Fact, Labels, Plug, Scan, Shape, Task, Tree, fixed
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.images import ordered_images
from data_setup.readers.sidecar import Sidecar, reading
from data_setup.tables.text import SIDES
from utils.errors import UserError

# Duke 2014 (Srinivasan): 45 volumes of Spectralis as folders of TIFF; AMD, DME, normal.
_SRINIVASAN_CLASSES = {"AMD": "amd", "DME": "dme", "NORMAL": "normal"}


def _spectralis(
    tree: Tree,
    pattern: str,
    classes: Mapping[str, str],
    distance_mm: float,
    person: Callable[[re.Match[str]], str],
    eye: Callable[[re.Match[str]], str | None] = lambda match: None,
) -> list[Scan]:
    """A Spectralis volume for each folder, whose class `kind` of `pattern` says."""
    return [
        Scan(
            path=folder,
            person_id=person(match),
            device="heidelberg_spectralis",
            protocol="macula_raster",
            laterality=SIDES.get((eye(match) or "").lower(), ""),
            spacing=fixed(distance_mm, 0.00387, 0.0115),
            facts={"study_group": classes[match["kind"]]},
        )
        for folder, match in tree.folders(pattern).items()
    ]


SRINIVASAN = Plug(
    name="srinivasan",
    title="Duke 2014 (Srinivasan)",
    content=Fact("45 volumes: 15 of AMD, 15 of DME, 15 normal", "c"),
    licence=Fact("research only", "c"),
    access=Fact("from Duke's page, without registration", "n/v"),
    citation=Fact("Srinivasan et al., Biomedical Optics Express 2014", "n/v"),
    layout=Fact("Publication_Dataset/AMD1/TIFFs/8bitTIFFs/001.tif ...   AMD1-15, DME1-15, NORMAL1-15", "+"),
    spacing=Fact("in no file, and the protocols differ: 0.12 x 0.00387 x 0.0115 mm is assumed", "n/v"),
    orientation=Fact("order of B-scans unknown; images have white rims, which stay", "+"),
    labels=Fact("AMD, DME or normal, by the folder", "+"),
    splits=Fact("none", "+"),
    find=partial(
        _spectralis,
        pattern=r"(?:^|/)((?P<kind>AMD|DME|NORMAL)\d+)/TIFFs/8bitTIFFs/\d+\.tif$",
        classes=_SRINIVASAN_CLASSES,
        distance_mm=0.12,
        person=lambda match: match[1],
    ),
    tasks=(Task(PROBE),),
    classes=_SRINIVASAN_CLASSES,
)


# NEH-UT 2021: 441 eyes of Spectralis as folders of images; normal, drusen, CNV.
_NEH_UT_CLASSES = {"NORMAL": "normal", "DRUSEN": "drusen", "CNV": "cnv"}


NEH_UT = Plug(
    name="neh_ut",
    title="NEH-UT 2021",
    content=Fact("441 eyes, 16,822 B-scans", "c"),
    licence=Fact("CC BY 4.0", "c"),
    access=Fact("Mendeley Data 8kt969dhx6", "c"),
    citation=Fact("Sotoudeh-Paima et al., Computers in Biology and Medicine 2022", "n/v"),
    layout=Fact("NORMAL|DRUSEN|CNV/<subject>/[<eye>/]<number>.png|jpg|tif", "+"),
    spacing=Fact("in no file: 0.24 x 0.00387 x 0.0115 mm is assumed", "n/v"),
    orientation=Fact("order of B-scans unknown", "n/v"),
    labels=Fact("the worst class of the eye, by the folder; a CSV has B-scans one by one, not read", "+"),
    splits=Fact("none; a person with eyes of two classes would count as two", "n/v"),
    find=partial(
        _spectralis,
        pattern=r"(?:^|/)(?P<kind>NORMAL|DRUSEN|CNV)/([^/]+)/(?:([^/]+)/)?[^/]+\.(?:png|jpe?g|tiff?|bmp)$",
        classes=_NEH_UT_CLASSES,
        distance_mm=0.24,
        person=lambda match: f"{_NEH_UT_CLASSES[match['kind']]}_{match[2]}",
        eye=lambda match: match[3],
    ),
    tasks=(Task(PROBE),),
    classes=_NEH_UT_CLASSES,
)


# OIMHS: 125 eyes with macular holes; each PNG has a B-scan and, right beside it, its mask in colours.
_OIMHS_NAMES = {1: "macular_hole", 2: "intraretinal_cyst", 3: "retina", 4: "choroid"}
# but for red not verified
_OIMHS_COLOURS = {1: (255, 0, 0), 2: (0, 255, 0), 3: (0, 0, 255), 4: (255, 255, 0)}
_OIMHS_CLASSES = {str(stage): f"stage_{stage}" for stage in range(1, 5)}
_OIMHS_ORDER = f"task.names=[{','.join(_OIMHS_CLASSES.values())}]"
_OIMHS_SHEET = ("Patient ID", "Eye ID", "Age(years)", "Stage")


def _oimhs_find(tree: Tree) -> list[Scan]:
    eyes = {
        row["Eye ID"]: row
        for match in tree.matches(r"(?:^|/)Demographics of the participants\.(?:xlsx|csv)$")
        for row in read.sheet(tree, match.string, _OIMHS_SHEET)
    }
    scans = []
    for folder, match in tree.folders(r"(?:^|/)Images/(\d+)/\d+\.png$").items():
        row = eyes.get(match[1], {})
        both = [other for other in eyes.values() if other["Patient ID"] == row.get("Patient ID")]
        scans.append(
            Scan(
                path=folder,
                person_id=row.get("Patient ID") or f"eye_{match[1]}",
                device="unknown",
                protocol="macular_hole",
                spacing=fixed(0.12, 0.00387, 0.0115),
                yaml={"columns": [0.0, 0.5]},
                facts={
                    "study_group": _OIMHS_CLASSES.get(_oimhs_agreed(both, "Stage"), ""),
                    "age": _oimhs_agreed(both, "Age(years)"),
                },
                visit={"stage": stage} if (stage := _OIMHS_CLASSES.get(row.get("Stage", ""))) else {},
                labels=partial(_oimhs_labels, tree, folder),
            )
        )
    return scans


def _oimhs_agreed(rows: Sequence[Mapping[str, str]], column: str) -> str:
    """What both eyes of a person have there; empty where they differ: no row says which eye is which."""
    values = {row[column] for row in rows}
    return values.pop() if len(values) == 1 else ""


def _oimhs_labels(tree: Tree, folder: str, shape: Shape) -> Labels:
    url = tree.url(folder)
    names = [path.rpartition("/")[2] for path in tree.sizes if path.rpartition("/")[0] == folder]
    masks = [_oimhs_mask(tree, f"{folder}/{name}", url) for name in ordered_images(names, Sidecar(), url)]
    if len({mask.shape for mask in masks}) != 1:
        raise OCTReadError(url, RejectReason.FRAME_SIZE_MISMATCH, "masks of one size", "several")
    return Labels(classes=read.checked(np.stack(masks), shape, url))


def _oimhs_mask(tree: Tree, path: str, url: str) -> np.ndarray:
    """uint8 [H, W] of the right half; raises OCTReadError for a colour without a name."""
    data = tree.read(path)
    with reading(url, RejectReason.CORRUPT_FILE, "an image and its mask"):
        pixels = np.asarray(Image.open(io.BytesIO(data), formats=("PNG",)).convert("RGB"))
    pixels = pixels[:, round(pixels.shape[1] / 2) :]
    mask, is_known = np.zeros(pixels.shape[:2], np.uint8), (pixels == 0).all(axis=-1)
    for value, colour in _OIMHS_COLOURS.items():
        is_class = (pixels == colour).all(axis=-1)
        mask[is_class] = value
        is_known |= is_class
    if not is_known.all():
        red, green, blue = pixels[~is_known][0]
        colours = ", ".join(f"{name} {_OIMHS_COLOURS[v]}" for v, name in _OIMHS_NAMES.items())
        expected = f"colours {colours} and black"
        raise OCTReadError(url, RejectReason.UNSUPPORTED_PIXELS, expected, f"({red}, {green}, {blue})")
    return mask


OIMHS = Plug(
    name="oimhs",
    title="OIMHS",
    content=Fact("125 eyes of 119 people with macular holes, 3,859 B-scans", "c"),
    licence=Fact("CC0", "c"),
    access=Fact("figshare 23508453", "c"),
    citation=Fact("Ye et al., OIMHS, Scientific Data 2023", "n/v"),
    layout=Fact(
        """\
Images/<eye>/1.png ...                       left half the B-scan, right half its mask in colours
Demographics of the participants.xlsx        columns Patient ID, Eye ID, Age(years), Stage""",
        "+",
    ),
    spacing=Fact("in no file: 0.12 x 0.00387 x 0.0115 mm is assumed", "n/v"),
    orientation=Fact("order of B-scans unknown", "n/v"),
    labels=Fact(
        "stage of the hole, of each eye in labels.tsv; four masks, red is the hole, the other colours are "
        "assumed",
        "n/v",
    ),
    splits=Fact("none", "n/v"),
    find=_oimhs_find,
    tasks=(
        Task(PROBE, (*OF_VOLUMES, "task.label_column=stage", "task.kind=ordinal", _OIMHS_ORDER)),
        Task("configs/segmentation.yaml"),
    ),
    classes=_OIMHS_CLASSES,
    label_classes=_OIMHS_NAMES,
)


# OLIVES: 96 eyes at many visits, 49 B-scans each, as folders of images; biomarkers of B-scans in a CSV.
_OLIVES_PATH = "Path (Trial/Arm/Folder/Visit/Eye/Image Name)"
_OLIVES_NO_MARKERS = (_OLIVES_PATH, "Scan (n/49)", "Eye_ID", "BCVA", "CST", "Patient_ID")
_OLIVES_MARKERS = {"0": 0, "0.0": 0, "1": 1, "1.0": 1}
_OLIVES_CLASSES = {"Prime_FULL": "dr", "TREX DME": "dme"}
_OLIVES_EYE = r"/([^/]+)/([^/]+)/(OD|OS)/"  # patient, visit, eye
_OLIVES_PATTERNS = {
    "Prime_FULL": (rf"(?:^|/)(Prime_FULL){_OLIVES_EYE}\d+\.(?:png|tif)$", "[0-9]*"),
    "TREX DME": (rf"(?:^|/)(TREX DME)/[^/]+{_OLIVES_EYE}TREX.*_\d{{6}}\.(?:tif|jpeg)$", "TREX*"),
}


def _olives_find(tree: Tree) -> list[Scan]:
    visits = _olives_visits(tree)
    scans = []
    for trial, (pattern, files) in _OLIVES_PATTERNS.items():
        for folder, match in tree.folders(pattern).items():
            scans.append(
                Scan(
                    path=folder,
                    person_id=f"{_OLIVES_CLASSES[trial]}_{match[2]}",
                    device="heidelberg_spectralis",
                    protocol="macula_raster",
                    laterality=SIDES[match[4].lower()],
                    spacing=fixed(0.12, 0.00387, 0.0115),
                    files=files,
                    facts={"study_group": _OLIVES_CLASSES[trial]},
                    visit=visits.get(folder[folder.index(trial) :], {}),
                )
            )
    return scans


def _olives_visits(tree: Tree) -> dict[str, dict[str, str]]:
    """{folder from the trial on: what the table says}: a biomarker is there where any B-scan has it."""
    rows: dict[str, list[dict[str, str]]] = defaultdict(list)
    for match in tree.matches(r"(?:^|/)Biomarker_Clinical_Data_Images\.csv$"):
        for row in read.sheet(tree, match.string, (_OLIVES_PATH, "BCVA", "CST")):
            rows[row[_OLIVES_PATH].strip("/").rpartition("/")[0]].append(row)
    visits = {}
    for folder, every in rows.items():
        markers = [name for name in every[0] if name not in _OLIVES_NO_MARKERS]
        known = {name: [_olives_marker(tree, row, name) for row in every if row[name]] for name in markers}
        visits[folder] = {_olives_slug(name): str(max(values)) for name, values in known.items() if values}
        visits[folder] |= {"bcva": every[0]["BCVA"], "cst": every[0]["CST"]}
    return visits


def _olives_marker(tree: Tree, row: dict[str, str], name: str) -> int:
    """A cell of a biomarker; raises UserError."""
    if row[name] not in _OLIVES_MARKERS:
        raise UserError(f"{tree.root}: {row[_OLIVES_PATH]}: {name}: expected 0 or 1, found {row[name]!r}")
    return _OLIVES_MARKERS[row[name]]


def _olives_slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


OLIVES = Plug(
    name="olives",
    title="OLIVES",
    content=Fact("96 eyes, 3 to 27 visits each, 49 B-scans a volume", "c"),
    licence=Fact("CC BY 4.0", "c"),
    access=Fact("Zenodo 7105232, or gOLIVES at Hugging Face", "c"),
    citation=Fact("Prabhushankar et al., OLIVES, NeurIPS Datasets and Benchmarks 2022", "c"),
    layout=Fact(
        """\
.../Prime_FULL/01-001/W1/OD/0.png ...                 numbers alone are B-scans; other images are not read
.../TREX DME/GILA/0201GOS/V1/OS/TREX_..._000000.tif   arms GILA, Monthly, TREX
.../Biomarker_Clinical_Data_Images.csv                a line a B-scan of two visits of an eye: BCVA, CST,
                                                      and each other column a biomarker""",
        "+",
    ),
    spacing=Fact("0.12 x 0.00387 x 0.0115 mm is assumed for 49 B-scans of Spectralis", "n/v"),
    orientation=Fact("order of B-scans unknown", "n/v"),
    labels=Fact(
        "trial (DR or DME); biomarkers (16 by the paper, 8 by a catalogue), BCVA and CST of two visits of "
        "an eye in labels.tsv; a sheet of BCVA and CST of all visits is not read",
        "r",
    ),
    splits=Fact("none of the owners", "n/v"),
    find=_olives_find,
    tasks=(
        Task(PROBE),
        Task(PROBE, (*OF_VOLUMES, "task.kind=multilabel", "task.names=[fluid_irf,fluid_srf]")),
    ),
    classes=_OLIVES_CLASSES,
)
