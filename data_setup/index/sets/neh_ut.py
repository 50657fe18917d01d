"""NEH-UT 2021: 441 eyes of Spectralis as folders of images; normal, drusen, CNV."""

from __future__ import annotations

from data_setup.index.sets.facts import Fact, Plug, Scan, Task, Tree, fixed
from data_setup.tables.text import SIDES

_CLASSES = {"NORMAL": "normal", "DRUSEN": "drusen", "CNV": "cnv"}
_IMAGE = r"[^/]+\.(?:png|jpe?g|tiff?|bmp)$"


def _find(tree: Tree) -> list[Scan]:
    pattern = rf"(?:^|/)(NORMAL|DRUSEN|CNV)/([^/]+)/(?:([^/]+)/)?{_IMAGE}"
    return [
        Scan(
            path=folder,
            person_id=f"{_CLASSES[match[1]]}_{match[2]}",
            device="heidelberg_spectralis",
            protocol="macula_raster",
            laterality=SIDES.get((match[3] or "").lower(), ""),
            spacing=fixed(0.24, 0.00387, 0.0115),
            facts={"study_group": _CLASSES[match[1]]},
        )
        for folder, match in tree.folders(pattern).items()
    ]


PLUG = Plug(
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
    find=_find,
    tasks=(Task("configs/cls_linear_probe.yaml"),),
    classes=_CLASSES,
)
