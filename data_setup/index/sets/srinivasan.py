"""Duke 2014 (Srinivasan): 45 volumes of Spectralis as folders of TIFF; AMD, DME, normal."""

from __future__ import annotations

from data_setup.index.sets.facts import Fact, Plug, Scan, Task, Tree, fixed

_CLASSES = {"AMD": "amd", "DME": "dme", "NORMAL": "normal"}


def _find(tree: Tree) -> list[Scan]:
    pattern = r"(?:^|/)((AMD|DME|NORMAL)\d+)/TIFFs/8bitTIFFs/\d+\.tif$"
    return [
        Scan(
            path=folder,
            person_id=match[1],
            device="heidelberg_spectralis",
            protocol="macula_raster",
            spacing=fixed(0.12, 0.00387, 0.0115),
            facts={"study_group": _CLASSES[match[2]]},
        )
        for folder, match in tree.folders(pattern).items()
    ]


PLUG = Plug(
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
    find=_find,
    tasks=(Task("configs/cls_linear_probe.yaml"),),
    classes=_CLASSES,
)
