"""OLIVES: 96 eyes at many visits, 49 B-scans each, as folders of images; biomarkers of B-scans in a CSV."""

from __future__ import annotations

import re
from collections import defaultdict

from data_setup.index.sets import read
from data_setup.index.sets.facts import Fact, Plug, Scan, Task, Tree, fixed
from data_setup.tables.text import SIDES
from utils.errors import UserError

_PATH = "Path (Trial/Arm/Folder/Visit/Eye/Image Name)"
_NO_MARKERS = (_PATH, "Scan (n/49)", "Eye_ID", "BCVA", "CST", "Patient_ID")
_MARKERS = {"0": 0, "0.0": 0, "1": 1, "1.0": 1}
_CLASSES = {"Prime_FULL": "dr", "TREX DME": "dme"}
_EYE = r"/([^/]+)/([^/]+)/(OD|OS)/"  # patient, visit, eye
_PATTERNS = {
    "Prime_FULL": (rf"(?:^|/)(Prime_FULL){_EYE}\d+\.(?:png|tif)$", "[0-9]*"),
    "TREX DME": (rf"(?:^|/)(TREX DME)/[^/]+{_EYE}TREX.*_\d{{6}}\.(?:tif|jpeg)$", "TREX*"),
}


def _find(tree: Tree) -> list[Scan]:
    visits = _visits(tree)
    scans = []
    for trial, (pattern, files) in _PATTERNS.items():
        for folder, match in tree.folders(pattern).items():
            scans.append(
                Scan(
                    path=folder,
                    person_id=f"{_CLASSES[trial]}_{match[2]}",
                    device="heidelberg_spectralis",
                    protocol="macula_raster",
                    laterality=SIDES[match[4].lower()],
                    spacing=fixed(0.12, 0.00387, 0.0115),
                    files=files,
                    facts={"study_group": _CLASSES[trial]},
                    visit=visits.get(folder[folder.index(trial) :], {}),
                )
            )
    return scans


def _visits(tree: Tree) -> dict[str, dict[str, str]]:
    """{folder from the trial on: what the table says}: a biomarker is there where any B-scan has it."""
    rows: dict[str, list[dict[str, str]]] = defaultdict(list)
    for match in tree.matches(r"(?:^|/)Biomarker_Clinical_Data_Images\.csv$"):
        for row in read.sheet(tree, match.string, (_PATH, "BCVA", "CST")):
            rows[row[_PATH].strip("/").rpartition("/")[0]].append(row)
    visits = {}
    for folder, every in rows.items():
        markers = [name for name in every[0] if name not in _NO_MARKERS]
        known = {name: [_marker(tree, row, name) for row in every if row[name]] for name in markers}
        visits[folder] = {_slug(name): str(max(values)) for name, values in known.items() if values}
        visits[folder] |= {"bcva": every[0]["BCVA"], "cst": every[0]["CST"]}
    return visits


def _marker(tree: Tree, row: dict[str, str], name: str) -> int:
    """A cell of a biomarker; raises UserError."""
    if row[name] not in _MARKERS:
        raise UserError(f"{tree.root}: {row[_PATH]}: {name}: expected 0 or 1, found {row[name]!r}")
    return _MARKERS[row[name]]


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


PLUG = Plug(
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
    find=_find,
    tasks=(
        Task("configs/cls_linear_probe.yaml"),
        Task(
            "configs/cls_linear_probe.yaml",
            (
                "task.labels_path={out}/labels.tsv",
                "task.unit=volume",
                "task.kind=multilabel",
                "task.names=[fluid_irf,fluid_srf]",
            ),
        ),
    ),
    classes=_CLASSES,
)
