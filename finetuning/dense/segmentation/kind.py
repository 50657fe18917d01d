"""task.kind=segmentation: classes of voxels, how decoders of them are trained and judged.

In: a store with label volumes. Out: `SEGMENTATION`. A head's file has `classes`, name -> stored value. After
each epoch the mean Dice of the classes, over the voxels of all validation volumes, decides which weights are
kept. An evaluation writes segmentation.json, segmentation.md and volumes.parquet (a line for every arm,
volume and class).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from finetuning.cohort.source import Source
from finetuning.dense.examined import Examined
from finetuning.dense.head import PRETRAINED
from finetuning.dense.kind import Content, Kind, Line, Predictions
from finetuning.dense.segmentation.lesions import count_lesions
from finetuning.dense.segmentation.loss import ClassPlanes, class_weights, segmentation_loss
from finetuning.dense.segmentation.volumes import IGNORED, ClassVolumes, read_volumes
from utils.config.schema import Config
from utils.runtime.single import Runtime

NOTES = (
    "Dice is of one volume. A volume whose labels have none of a class has no Dice "
    "of it; what is predicted of it there is beside, in mm3.",
    "A lesion is what touches by faces, edges or corners; it is found where a prediction of its class shares "
    "a voxel with it, and a predicted one that shares none is false.",
    "Means are over a participant's volumes, then over participants; intervals resample participants.",
)
NL_OF_MM3 = 1000
log = logging.getLogger(__name__)


def weighted_loss(
    cfg: Config, volumes: ClassVolumes, device: torch.device
) -> Callable[[Tensor, Tensor], Tensor]:
    """segmentation_loss with the weights of the training volumes."""
    weights = class_weights(volumes, cfg.finetune.class_weights)
    shown = [f"{n} {w:.2f}" for n, w in zip(("background", *volumes.names), weights, strict=True)]
    log.info("weights of classes: %s", ", ".join(shown))
    return partial(segmentation_loss, weight_S=torch.from_numpy(weights).to(device))


def overlap(
    predicted_DHW: np.ndarray, truth_DHW: np.ndarray, num_classes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(shared, predicted, labelled) voxels of each class [C]; IGNORED voxels count nowhere."""
    known = truth_DHW != IGNORED
    predicted, truth = predicted_DHW[known].astype(np.int64), truth_DHW[known].astype(np.int64)
    pairs = np.bincount(truth * (num_classes + 1) + predicted, minlength=(num_classes + 1) ** 2)
    table = pairs.reshape(num_classes + 1, num_classes + 1)
    return table.diagonal()[1:], table.sum(axis=0)[1:], table.sum(axis=1)[1:]


def dice(shared: np.ndarray, predicted: np.ndarray, labelled: np.ndarray) -> np.ndarray:
    """Dice of each class; NaN where the labels have none of it."""
    result = np.full(shared.shape, np.nan)
    return np.divide(2 * shared, predicted + labelled, out=result, where=labelled > 0)


def validation_dice(volumes: ClassVolumes, predicted: Predictions) -> dict[str, float]:
    """Dice over the voxels of all validation volumes together, the mean over the classes that they have."""
    counts = [overlap(classes, volumes.read(row), len(volumes.names)) for row, classes in predicted]
    return {"dice": float(np.nanmean(dice(*np.sum(counts, axis=0))))}


def stored_values(_: nn.Module, source: Source, volumes: ClassVolumes, runtime: Runtime) -> dict[str, Any]:
    """`classes` of a head's file."""
    values = {name: value for value, name in volumes.labels.classes.items()}
    return {"classes": {name: values[name] for name in volumes.names}}


def measure(volumes: ClassVolumes, row: int, predicted: np.ndarray, arm: str) -> list[Line]:
    """A line for every class of a volume."""
    truth, nothing = volumes.read(row), float("nan")
    counts = overlap(predicted, truth, len(volumes.names))
    lesions = count_lesions(predicted, truth, len(volumes.names))
    of_volume, voxel = dice(*counts), volumes.voxel_mm3(row)
    lines = []
    for place, (name, value, seen, labelled) in enumerate(
        zip(volumes.names, of_volume, *counts[1:], strict=True)
    ):
        line: Line = {"name": name, "dice": float(value)}
        line |= {"predicted_mm3": float(seen * voxel), "labelled_mm3": float(labelled * voxel)}
        line["absent_mm3"] = float(seen * voxel) if labelled == 0 else nothing
        line["error_nl"] = float(abs(seen - labelled) * voxel * NL_OF_MM3)
        there, hits, line["false_lesions"] = (int(count[place]) for count in lesions)
        line |= {"lesions": there, "lesions_found": hits, "sensitivity": hits / there if there else nothing}
        lines.append(line)
    return lines


def more(examined: Examined[ClassVolumes]) -> Content:
    """How many volumes have each class, and how many lesions of it."""
    lines = examined.lines[examined.lines.arm == PRETRAINED]
    return {
        "labelled_volumes": {n: int((part.labelled_mm3 > 0).sum()) for n, part in lines.groupby("name")},
        "lesions": {n: int(part.lesions.sum()) for n, part in lines.groupby("name")},
    }


def points(content: Content) -> list[str]:
    return [
        f"{name}: {content['labelled_volumes'][name]} volumes with it, {content['lesions'][name]} lesions."
        for name in content["names"]
    ]


def write(examined: Examined[ClassVolumes], content: Content) -> None:
    examined.write_lines("volumes.parquet", examined.lines)


SEGMENTATION = Kind(
    name="segmentation",
    names="classes",
    read_volumes=read_volumes,
    planes=ClassPlanes,
    loss=weighted_loss,
    metric="dice",
    sign=1,
    score=validation_dice,
    shown=("validation Dice", "{:.3f}"),
    state=stored_values,
    title="Classes of voxels",
    measure=measure,
    columns={
        "dice": ("Dice", ".3f"),
        "absent_mm3": ("mm3 seen where there is none", ".4f"),
        "error_nl": ("Error of volume, nl", ".2f"),
        "sensitivity": ("Share of lesions found", ".2f"),
        "false_lesions": ("False lesions a volume", ".2f"),
    },
    gain=(1, "mean Dice"),
    write=write,
    notes=NOTES,
    more=more,
    points=points,
    background=1,
)
