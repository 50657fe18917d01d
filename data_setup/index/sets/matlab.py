"""Public sets whose volumes or labels are MATLAB arrays: OCTA-500, Duke AMD, Duke DME, OCTRIMA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from data_setup.index.sets import read
from data_setup.index.sets.facts import (
    PROBE,
    Fact,
    Labels,
    Plug,
    Scan,
    Shape,
    Task,
    Tree,
    Triple,
    fixed,
    of_field,
)
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.tables.text import SIDES

_IMAGES = {"axes": ["H", "W", "D"], "value_range": [0, 255]}

# OCTA-500: 500 eyes of OCT and OCTA cubes as folders of BMP, with layers as .mat and diseases in a sheet.
_OCTA500_SURFACES = ("ILM", "IPL", "OPL", "IS/OS", "RPE", "BM")
# the last id of each side, of 6 mm and of 3 mm scans
_OCTA500_SPLITS = {"train": (10180, 10440), "val": (10200, 10450), "test": (10300, 10500)}
_OCTA500_SHEET = ("ID", "OS/OD", "Age", "Disease")
_OCTA500_CLASSES = {name: name.lower() for name in ("NORMAL", "AMD", "DR", "CNV", "CSC", "RVO", "OTHERS")}


def _octa500_find(tree: Tree) -> list[Scan]:
    people = {
        row["ID"]: row
        for match in tree.matches(r"(?:^|/)Text labels\.xlsx$")
        for row in read.sheet(tree, match.string, _OCTA500_SHEET)
    }
    layers = {match[1]: match.string for match in tree.matches(r"(?:^|/)GT_Layers/(\d{5})\.mat$")}
    return [
        _octa500_scan(tree, folder, match[1], people.get(match[1], {}), layers.get(match[1]))
        for folder, match in tree.folders(r"(?:^|/)OCT/(\d{5})/\d+\.bmp$").items()
    ]


def _octa500_scan(tree: Tree, folder: str, number: str, person: dict[str, str], layers: str | None) -> Scan:
    is_wide = int(number) <= _OCTA500_SPLITS["test"][0]
    last = {split: ends[0] if is_wide else ends[1] for split, ends in _OCTA500_SPLITS.items()}
    disease = person.get("Disease", "").upper()
    return Scan(
        path=folder,
        person_id=number,
        device="optovue_rtvue_xr",
        protocol="octa_6x6" if is_wide else "octa_3x3",
        laterality=SIDES.get(person.get("OS/OD", "").lower(), ""),
        spacing=of_field(6, 2, 6) if is_wide else of_field(3, 2, 3),
        split=next((split for split, end in last.items() if int(number) <= end), ""),
        facts={"study_group": _OCTA500_CLASSES.get(disease, ""), "age": person.get("Age", "")},
        labels=partial(_octa500_labels, tree, layers) if layers else None,
    )


def _octa500_labels(tree: Tree, path: str, shape: Shape) -> Labels:
    names = read.names_of_arrays(tree, path)
    if len(names) != 1:
        raise OCTReadError(tree.url(path), RejectReason.NOT_A_VOLUME, "one array", ", ".join(names))
    rows = read.matlab_surfaces(tree, path, names[0], (0, 1, 2), len(_OCTA500_SURFACES), shape)
    return Labels(surfaces=rows)


OCTA500 = Plug(
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
    find=_octa500_find,
    tasks=(Task(PROBE), Task("configs/layers.yaml")),
    classes=_OCTA500_CLASSES,
    surfaces=_OCTA500_SURFACES,
)


# Duke AMD 2013 (Farsiu): 269 eyes with intermediate AMD and 115 controls as .mat, three surfaces in each.
_DUKE_AMD_CLASSES = {"AMD": "amd", "Control": "control"}
_DUKE_AMD_SURFACES = ("ILM", "RPE", "BM")  # RPE: upper border of the RPE and drusen complex


def _duke_amd_find(tree: Tree) -> list[Scan]:
    pattern = r"(?:^|/)Farsiu_Ophthalmology_2013_(AMD|Control)_Subject_(\d+)\.mat$"
    return [
        Scan(
            path=match.string,
            person_id=f"{_DUKE_AMD_CLASSES[match[1]]}_{match[2]}",
            device="bioptigen_sdoct",
            protocol="macula_6.7x6.7",
            spacing=fixed(0.067, 0.0045, 0.0067),
            yaml={"array": "images", **_IMAGES},
            facts={"study_group": _DUKE_AMD_CLASSES[match[1]]},
            labels=partial(_duke_amd_labels, tree, match.string),
        )
        for match in tree.matches(pattern)
    ]


def _duke_amd_labels(tree: Tree, path: str, shape: Shape) -> Labels:
    rows = read.matlab_surfaces(tree, path, "layerMaps", (2, 0, 1), len(_DUKE_AMD_SURFACES), shape)
    age = read.array(tree, path, "Age").ravel()
    return Labels(surfaces=rows, facts={"age": f"{age[0]:.0f}"} if age.size == 1 else {})


DUKE_AMD = Plug(
    name="duke_amd",
    title="Duke AMD 2013 (A2A SD-OCT)",
    content=Fact("384 people, 269 with AMD and 115 controls, 512 x 1000 x 100, 20 GB", "c"),
    licence=Fact("research only, no redistribution", "c"),
    access=Fact("from Duke's page, without registration", "n/v"),
    citation=Fact("Farsiu et al., Ophthalmology 2014", "n/v"),
    layout=Fact(
        """\
AMD/Farsiu_Ophthalmology_2013_AMD_Subject_1001.mat         images [H, W, D], layerMaps [D, W, 3], Age
Control/Farsiu_Ophthalmology_2013_Control_Subject_1001.mat""",
        "+",
    ),
    spacing=Fact("0.067 x 0.0045 x 0.0067 mm, as eyepy has it; its axial length is of a magazine", "+"),
    orientation=Fact("order of B-scans unknown; eyepy takes them from inferior to superior", "n/v"),
    labels=Fact(
        "AMD or control; ILM, upper border of the RPE and drusen complex, BM (rows from 1: assumed)", "n/v"
    ),
    splits=Fact("none", "+"),
    find=_duke_amd_find,
    tasks=(Task(PROBE), Task("configs/layers.yaml")),
    classes=_DUKE_AMD_CLASSES,
    surfaces=_DUKE_AMD_SURFACES,
)


# Duke DME 2014 (Chiu): ten eyes with diabetic macular oedema as .mat; eleven B-scans of each are graded.
SURFACES = ("ILM", "RNFL/GCL", "IPL/INL", "INL", "OPL", "IS/OS", "OS/RPE", "BM")
_DUKE_DME_FLUID, _UNGRADED = 1, 255


def _spectralis(
    tree: Tree,
    pattern: str,
    person: Callable[[str], object],
    array: str,
    spacing: Callable[[Shape], Triple],
    labels: Callable[[Tree, str, Shape], Labels],
) -> list[Scan]:
    """A volume for each .mat file, whose number in `pattern` says the person."""
    return [
        Scan(
            path=match.string,
            person_id=f"subject_{person(match[1])}",
            device="heidelberg_spectralis",
            protocol="macula_raster",
            spacing=spacing,
            yaml={"array": array, **_IMAGES},
            labels=partial(labels, tree, match.string),
        )
        for match in tree.matches(pattern)
    ]


def _duke_dme_labels(tree: Tree, path: str, shape: Shape) -> Labels:
    """The first grader's."""
    url = tree.url(path)
    fluid = read.checked(read.array(tree, path, "manualFluid1").transpose(2, 0, 1), shape, url)
    classes = np.where(fluid > 0, _DUKE_DME_FLUID, 0).astype(np.uint8)
    rows = read.matlab_surfaces(tree, path, "manualLayers1", (0, 2, 1), len(SURFACES), shape)
    # whatever fluid has there, NaN or 0: without a line nobody looked
    classes[np.isnan(fluid).all(axis=(1, 2)) | np.isnan(rows).all(axis=(0, 2))] = _UNGRADED
    return Labels(classes, rows)


DUKE_DME = Plug(
    name="duke_dme",
    title="Duke DME 2014",
    content=Fact("10 eyes of 10 people, 496 x 768 x 61, eleven graded B-scans each", "+"),
    licence=Fact("research use", "c"),
    access=Fact("from Duke's page, without registration", "n/v"),
    citation=Fact("Chiu et al., Biomedical Optics Express 2015", "n/v"),
    layout=Fact(
        """\
Subject_01.mat ... Subject_10.mat
    images [H, W, D], manualLayers1/2 [8, W, D], manualFluid1/2 [H, W, D]""",
        "+",
    ),
    spacing=Fact("0.123 x 0.00387 x 0.01133 mm: the middle of the ranges in the paper, as eyepy has it", "+"),
    orientation=Fact("order of B-scans unknown", "n/v"),
    labels=Fact(
        "fluid and eight surfaces of the first grader (rows from 1: assumed), the rest unlabelled", "+"
    ),
    splits=Fact("none", "+"),
    find=partial(
        _spectralis,
        pattern=r"(?:^|/)Subject_(\d\d)\.mat$",
        person=str,
        array="images",
        spacing=fixed(0.123, 0.00387, 0.01133),
        labels=_duke_dme_labels,
    ),
    tasks=(Task("configs/layers.yaml"), Task("configs/segmentation.yaml")),
    label_classes={_DUKE_DME_FLUID: "fluid", _UNGRADED: "unlabelled"},
    surfaces=SURFACES,
)


# Tian OCTRIMA: ten normal volumes of Spectralis as .mat with eight surfaces by two observers.
def _octrima_labels(tree: Tree, path: str, shape: Shape) -> Labels:
    """The first observer's."""
    return Labels(surfaces=read.matlab_surfaces(tree, path, "O1", (0, 2, 1), len(SURFACES), shape))


OCTRIMA = Plug(
    name="octrima",
    title="Tian OCTRIMA 3D",
    content=Fact("10 volumes of healthy eyes, 496 x 644 x 51", "c"),
    licence=Fact("CC BY 4.0", "c"),
    access=Fact("PLOS ONE supplement s002, direct", "c"),
    citation=Fact("Tian et al., PLOS ONE 2015, 10.1371/journal.pone.0133908", "c"),
    layout=Fact(
        "Subject 1.mat ... Subject 10.mat   volumedata [H, W, D]; O1, O2, auto [8, W, D]: names assumed",
        "n/v",
    ),
    spacing=Fact("0.12 x 0.0039 x 0.0117 mm is assumed", "n/v"),
    orientation=Fact("order of B-scans unknown", "n/v"),
    labels=Fact("eight surfaces by the first observer (rows from 1)", "n/v"),
    splits=Fact("none", "c"),
    find=partial(
        _spectralis,
        pattern=r"(?i)(?:^|/)subject[ _]?(\d+)\.mat$",
        person=int,
        array="volumedata",
        spacing=fixed(0.12, 0.0039, 0.0117),
        labels=_octrima_labels,
    ),
    tasks=(Task("configs/layers.yaml"),),
    surfaces=SURFACES,
)
