"""Duke AMD 2013 (Farsiu): 269 eyes with intermediate AMD and 115 controls as .mat, three surfaces in each."""

from __future__ import annotations

from functools import partial

from data_setup.index.sets import read
from data_setup.index.sets.facts import Fact, Labels, Plug, Scan, Shape, Task, Tree, fixed

_CLASSES = {"AMD": "amd", "Control": "control"}
_SURFACES = ("ILM", "RPE", "BM")  # RPE: upper border of the RPE and drusen complex


def _find(tree: Tree) -> list[Scan]:
    pattern = r"(?:^|/)Farsiu_Ophthalmology_2013_(AMD|Control)_Subject_(\d+)\.mat$"
    return [
        Scan(
            path=match.string,
            person_id=f"{_CLASSES[match[1]]}_{match[2]}",
            device="bioptigen_sdoct",
            protocol="macula_6.7x6.7",
            spacing=fixed(0.067, 0.0045, 0.0067),
            yaml={"array": "images", "axes": ["H", "W", "D"], "value_range": [0, 255]},
            facts={"study_group": _CLASSES[match[1]]},
            labels=partial(_labels, tree, match.string),
        )
        for match in tree.matches(pattern)
    ]


def _labels(tree: Tree, path: str, shape: Shape) -> Labels:
    rows = read.matlab_surfaces(tree, path, "layerMaps", (2, 0, 1), len(_SURFACES), shape)
    age = read.array(tree, path, "Age").ravel()
    return Labels(surfaces=rows, facts={"age": f"{age[0]:.0f}"} if age.size == 1 else {})


PLUG = Plug(
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
    find=_find,
    tasks=(Task("configs/cls_linear_probe.yaml"), Task("configs/layers.yaml")),
    classes=_CLASSES,
    surfaces=_SURFACES,
)
