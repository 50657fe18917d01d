"""Tian OCTRIMA: ten normal volumes of Spectralis as .mat with eight surfaces by two observers."""

from __future__ import annotations

from functools import partial

from data_setup.index.sets import read
from data_setup.index.sets.duke_dme import SURFACES
from data_setup.index.sets.facts import Fact, Labels, Plug, Scan, Shape, Task, Tree, fixed

_VOLUME, _OBSERVER = "volumedata", "O1"


def _find(tree: Tree) -> list[Scan]:
    return [
        Scan(
            path=match.string,
            person_id=f"subject_{int(match[1])}",
            device="heidelberg_spectralis",
            protocol="macula_raster",
            spacing=fixed(0.12, 0.0039, 0.0117),
            yaml={"array": _VOLUME, "axes": ["H", "W", "D"], "value_range": [0, 255]},
            labels=partial(_labels, tree, match.string),
        )
        for match in tree.matches(r"(?i)(?:^|/)subject[ _]?(\d+)\.mat$")
    ]


def _labels(tree: Tree, path: str, shape: Shape) -> Labels:
    """The first observer's."""
    return Labels(surfaces=read.matlab_surfaces(tree, path, _OBSERVER, (0, 2, 1), len(SURFACES), shape))


PLUG = Plug(
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
    find=_find,
    tasks=(Task("configs/layers.yaml"),),
    surfaces=SURFACES,
)
