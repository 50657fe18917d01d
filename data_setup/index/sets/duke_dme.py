"""Duke DME 2014 (Chiu): ten eyes with diabetic macular oedema as .mat; eleven B-scans of each are graded."""

from __future__ import annotations

from functools import partial

import numpy as np

from data_setup.index.sets import read
from data_setup.index.sets.facts import Fact, Labels, Plug, Scan, Shape, Task, Tree, fixed

SURFACES = ("ILM", "RNFL/GCL", "IPL/INL", "INL", "OPL", "IS/OS", "OS/RPE", "BM")
_FLUID, _UNGRADED = 1, 255


def _find(tree: Tree) -> list[Scan]:
    return [
        Scan(
            path=match.string,
            person_id=f"subject_{match[1]}",
            device="heidelberg_spectralis",
            protocol="macula_raster",
            spacing=fixed(0.123, 0.00387, 0.01133),
            yaml={"array": "images", "axes": ["H", "W", "D"], "value_range": [0, 255]},
            labels=partial(_labels, tree, match.string),
        )
        for match in tree.matches(r"(?:^|/)Subject_(\d\d)\.mat$")
    ]


def _labels(tree: Tree, path: str, shape: Shape) -> Labels:
    """The first grader's."""
    url = tree.url(path)
    fluid = read.checked(read.array(tree, path, "manualFluid1").transpose(2, 0, 1), shape, url)
    classes = np.where(fluid > 0, _FLUID, 0).astype(np.uint8)
    rows = read.matlab_surfaces(tree, path, "manualLayers1", (0, 2, 1), len(SURFACES), shape)
    # whatever fluid has there, NaN or 0: without a line nobody looked
    classes[np.isnan(fluid).all(axis=(1, 2)) | np.isnan(rows).all(axis=(0, 2))] = _UNGRADED
    return Labels(classes, rows)


PLUG = Plug(
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
    find=_find,
    tasks=(Task("configs/layers.yaml"), Task("configs/segmentation.yaml")),
    label_classes={_FLUID: "fluid", _UNGRADED: "unlabelled"},
    surfaces=SURFACES,
)
