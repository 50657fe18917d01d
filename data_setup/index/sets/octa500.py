"""OCTA-500: 500 eyes of OCT and OCTA cubes as folders of BMP, with layers as .mat and diseases in a sheet."""

from __future__ import annotations

from functools import partial

from data_setup.index.sets import read
from data_setup.index.sets.facts import Fact, Labels, Plug, Scan, Shape, Task, Tree, of_field
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.tables.text import SIDES

_SURFACES = ("ILM", "IPL", "OPL", "IS/OS", "RPE", "BM")
_SPLITS = {  # the last id of each side, of 6 mm and of 3 mm scans
    "train": (10180, 10440),
    "val": (10200, 10450),
    "test": (10300, 10500),
}
_SHEET = ("ID", "OS/OD", "Age", "Disease")
_CLASSES = ("NORMAL", "AMD", "DR", "CNV", "CSC", "RVO", "OTHERS")


def _find(tree: Tree) -> list[Scan]:
    people = {
        row["ID"]: row
        for match in tree.matches(r"(?:^|/)Text labels\.xlsx$")
        for row in read.sheet(tree, match.string, _SHEET)
    }
    layers = {match[1]: match.string for match in tree.matches(r"(?:^|/)GT_Layers/(\d{5})\.mat$")}
    return [
        _scan(tree, folder, match[1], people.get(match[1], {}), layers.get(match[1]))
        for folder, match in tree.folders(r"(?:^|/)OCT/(\d{5})/\d+\.bmp$").items()
    ]


def _scan(tree: Tree, folder: str, number: str, person: dict[str, str], layers: str | None) -> Scan:
    is_wide = int(number) <= _SPLITS["test"][0]
    last = {split: ends[0] if is_wide else ends[1] for split, ends in _SPLITS.items()}
    disease = person.get("Disease", "").upper()
    return Scan(
        path=folder,
        person_id=number,
        device="optovue_rtvue_xr",
        protocol="octa_6x6" if is_wide else "octa_3x3",
        laterality=SIDES.get(person.get("OS/OD", "").lower(), ""),
        spacing=of_field(6, 2, 6) if is_wide else of_field(3, 2, 3),
        split=next((split for split, end in last.items() if int(number) <= end), ""),
        facts={"study_group": _PLUG_CLASSES.get(disease, ""), "age": person.get("Age", "")},
        labels=partial(_labels, tree, layers) if layers else None,
    )


def _labels(tree: Tree, path: str, shape: Shape) -> Labels:
    names = read.names_of_arrays(tree, path)
    if len(names) != 1:
        raise OCTReadError(tree.url(path), RejectReason.NOT_A_VOLUME, "one array", ", ".join(names))
    rows = read.matlab_surfaces(tree, path, names[0], (0, 1, 2), len(_SURFACES), shape)
    return Labels(surfaces=rows)


_PLUG_CLASSES = {name: name.lower() for name in _CLASSES}
PLUG = Plug(
    name="octa500",
    title="OCTA-500",
    content=Fact("500 eyes of 500 people, OCT and OCTA: 300 of 6 x 6 mm, 200 of 3 x 3 mm", "n/v"),
    licence=Fact("terms of IEEE DataPort", "n/v"),
    access=Fact("login at IEEE DataPort (open access)", "n/v"),
    citation=Fact("Li et al., OCTA-500, Medical Image Analysis 2024", "n/v"),
    layout=Fact(
        """\
.../OCT/10001/1.bmp ... 400.bmp     10001-10300 of 6 mm, 10301-10500 of 3 mm; OCTA/ beside it is not read
.../GT_Layers/10001.mat             assumed: one array [6 surfaces, B-scans, A-scans]
Text labels.xlsx                    columns ID, Sex, OS/OD, Age, Disease""",
        "+",
    ),
    spacing=Fact("6 or 3 mm square by 2 mm deep, over the image's size", "n/v"),
    orientation=Fact("unknown", "n/v"),
    labels=Fact("disease of seven; six surfaces (axes of their array and rows from 1 are assumed)", "n/v"),
    splits=Fact("by id: 10001-10180, -10200, -10300; 10301-10440, -10450, -10500", "+"),
    find=_find,
    tasks=(Task("configs/cls_linear_probe.yaml"), Task("configs/layers.yaml")),
    classes=_PLUG_CLASSES,
    surfaces=_SURFACES,
)
