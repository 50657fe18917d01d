"""OIMHS: 125 eyes with macular holes; each PNG has a B-scan and, right beside it, its mask in colours."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from PIL import Image

from data_setup.index.sets import read
from data_setup.index.sets.facts import Fact, Labels, Plug, Scan, Shape, Task, Tree, fixed
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.images import ordered_images
from data_setup.readers.sidecar import Sidecar, reading

_NAMES = {1: "macular_hole", 2: "intraretinal_cyst", 3: "retina", 4: "choroid"}
_COLOURS = {1: (255, 0, 0), 2: (0, 255, 0), 3: (0, 0, 255), 4: (255, 255, 0)}  # but for red not verified
_CLASSES = {str(stage): f"stage_{stage}" for stage in range(1, 5)}
_SHEET = ("Patient ID", "Eye ID", "Age(years)", "Stage")


def _find(tree: Tree) -> list[Scan]:
    eyes = {
        row["Eye ID"]: row
        for match in tree.matches(r"(?:^|/)Demographics of the participants\.(?:xlsx|csv)$")
        for row in read.sheet(tree, match.string, _SHEET)
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
                    "study_group": _CLASSES.get(_agreed(both, "Stage"), ""),
                    "age": _agreed(both, "Age(years)"),
                },
                visit={"stage": stage} if (stage := _CLASSES.get(row.get("Stage", ""))) else {},
                labels=partial(_labels, tree, folder),
            )
        )
    return scans


def _agreed(rows: Sequence[Mapping[str, str]], column: str) -> str:
    """What both eyes of a person have there; empty where they differ: no row says which eye is which."""
    values = {row[column] for row in rows}
    return values.pop() if len(values) == 1 else ""


def _labels(tree: Tree, folder: str, shape: Shape) -> Labels:
    url = tree.url(folder)
    names = [path.rpartition("/")[2] for path in tree.sizes if path.rpartition("/")[0] == folder]
    masks = [_mask(tree, f"{folder}/{name}", url) for name in ordered_images(names, Sidecar(), url)]
    if len({mask.shape for mask in masks}) != 1:
        raise OCTReadError(url, RejectReason.FRAME_SIZE_MISMATCH, "masks of one size", "several")
    return Labels(classes=read.checked(np.stack(masks), shape, url))


def _mask(tree: Tree, path: str, url: str) -> np.ndarray:
    """uint8 [H, W] of the right half; raises OCTReadError for a colour without a name."""
    data = tree.read(path)
    with reading(url, RejectReason.CORRUPT_FILE, "an image and its mask"):
        pixels = np.asarray(Image.open(io.BytesIO(data), formats=("PNG",)).convert("RGB"))
    pixels = pixels[:, round(pixels.shape[1] / 2) :]
    mask, is_known = np.zeros(pixels.shape[:2], np.uint8), (pixels == 0).all(axis=-1)
    for value, colour in _COLOURS.items():
        is_class = (pixels == colour).all(axis=-1)
        mask[is_class] = value
        is_known |= is_class
    if not is_known.all():
        red, green, blue = pixels[~is_known][0]
        expected = f"colours {', '.join(f'{name} {_COLOURS[v]}' for v, name in _NAMES.items())} and black"
        raise OCTReadError(url, RejectReason.UNSUPPORTED_PIXELS, expected, f"({red}, {green}, {blue})")
    return mask


PLUG = Plug(
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
    find=_find,
    tasks=(
        Task(
            "configs/cls_linear_probe.yaml",
            (
                "task.labels_path={out}/labels.tsv",
                "task.unit=volume",
                "task.label_column=stage",
                "task.kind=ordinal",
                "task.names=[stage_1,stage_2,stage_3,stage_4]",
            ),
        ),
        Task("configs/segmentation.yaml"),
    ),
    classes=_CLASSES,
    label_classes=_NAMES,
)
