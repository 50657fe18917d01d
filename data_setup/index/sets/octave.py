"""OCTAVE: 198 volumes of 19 B-scans in the raw layout of nnU-Net, with 13 tissues and lesions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial

from data_setup.index.sets import read
from data_setup.index.sets.facts import Fact, Labels, Plug, Scan, Shape, Task, Tree, fixed
from utils.errors import UserError

_NUM_CLASSES = 13


def _find(tree: Tree) -> list[Scan]:
    scans = []
    for match in tree.matches(r"(?:^|/)imagesTr/OCTAVE_([^_/]+)_([^/]+)_0000\.tif$"):
        labels = re.sub(r"(^|/)imagesTr/(.+)_0000\.tif$", r"\1labelsTr/\2.tif", match.string)
        scans.append(
            Scan(
                path=match.string,
                person_id=f"{match[1]}_{match[2]}",
                device="unknown",
                protocol="octave_19",
                spacing=fixed(0.24, 0.00387, 0.0115),
                facts={"study_group": match[1].lower()},
                labels=partial(_labels, tree, labels) if labels in tree.sizes else None,
            )
        )
    return scans


def _labels(tree: Tree, path: str, shape: Shape) -> Labels:
    return Labels(classes=read.classes_of(read.tiff(tree, path), shape, tree.url(path)))


def _names(tree: Tree) -> Mapping[int, str]:
    """The classes of dataset.json; raises UserError."""
    path = next((match.string for match in tree.matches(r"(?:^|/)dataset\.json$")), None)
    if path is None:
        raise UserError(f"{tree.root}: expected dataset.json, which names the classes, found none")
    try:
        labels = json.loads(tree.read(path))["labels"]
        return {int(value): str(name) for name, value in labels.items() if int(value) > 0}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{tree.url(path)}: expected labels: {{name: number}}, found another file") from error


PLUG = Plug(
    name="octave",
    title="OCTAVE",
    content=Fact("198 volumes of 19 B-scans", "c"),
    licence=Fact("CC BY-SA 4.0", "c"),
    access=Fact("Zenodo 14580071", "c"),
    citation=Fact("Kermany et al., Investigative Ophthalmology & Visual Science 2025", "r"),
    layout=Fact(
        """\
nnUNet_raw/Dataset001_OCTAVE/imagesTr/OCTAVE_<disease>_<number>_0000.tif    a page a B-scan
nnUNet_raw/Dataset001_OCTAVE/labelsTr/OCTAVE_<disease>_<number>.tif
nnUNet_raw/Dataset001_OCTAVE/dataset.json                                   names of the classes""",
        "+",
    ),
    spacing=Fact("0.24 x 0.00387 x 0.0115 mm is assumed", "n/v"),
    orientation=Fact("order of B-scans unknown; images have white rims, which stay", "+"),
    labels=Fact("voxels of 13 tissues and lesions, named in dataset.json; disease by the name", "+"),
    splits=Fact("one training part; the external tests are not redistributed", "r"),
    find=_find,
    tasks=(Task("configs/cls_linear_probe.yaml"), Task("configs/segmentation.yaml")),
    label_classes={value: f"class {value} of dataset.json" for value in range(1, _NUM_CLASSES + 1)},
    read_classes=_names,
)
