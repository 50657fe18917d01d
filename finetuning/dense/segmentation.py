"""task.kind=segmentation: a class for every voxel, how decoders of them are trained and judged.

In: a store with label volumes (data_setup.prepare --labels). Out: `SEGMENTATION`. A head's file has
`classes`, name -> stored value. Classes of a row are places among the names: 0 the background, n the n-th
name, IGNORED outside the acquired field and where the labels say `unlabelled`, which is neither trained nor
judged. After each epoch the mean Dice of the classes, over the voxels of all validation volumes, decides
which weights are kept. An evaluation writes segmentation.json, segmentation.md and volumes.parquet (a line
for every arm, volume and class).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from monai.losses import DiceLoss
from scipy.ndimage import generate_binary_structure, label
from torch import Tensor, nn

from data_setup.attach.stored import StoredLabels
from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import TRAIN, VAL
from finetuning.cohort.source import Source
from finetuning.dense.folds import DenseVolumes, chosen_names, in_folds, with_labels
from finetuning.dense.head import PRETRAINED
from finetuning.dense.kind import Content, Examined, Kind, Line, Predictions
from finetuning.dense.planes import Moves, Planes
from utils.config.schema import Config
from utils.errors import UserError
from utils.runtime.single import Runtime

IGNORED = 255
UNLABELLED = "unlabelled"  # the name of a class: voxels that nobody has looked at
_dice = DiceLoss(include_background=False, batch=True)
TOUCHING = generate_binary_structure(3, 3)
NOTES = (
    "Dice is of one volume. A volume whose labels have none of a class has no Dice "
    "of it; what is predicted of it there is beside, in mm3.",
    "A lesion is what touches by faces, edges or corners; it is found where a prediction of its class shares "
    "a voxel with it, and a predicted one that shares none is false.",
    "Means are over a participant's volumes, then over participants; intervals resample participants.",
)
NL_OF_MM3 = 1000
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClassVolumes(DenseVolumes):
    """Volumes with a class for every voxel; `names` are those of the classes, without the background [C]."""

    labels: StoredLabels
    place_of: np.ndarray  # uint8 [256]: stored value -> 0, 1..C or IGNORED

    axes: ClassVar[str] = "dhw"

    def facts(self) -> pd.DataFrame:
        return self.labels.index[["row", "checksum", "volume"]]

    def read(self, row: int) -> np.ndarray:
        """uint8 [D, H, W]: 0, 1..C or IGNORED."""
        values = self.labels.read(row) if self.read_original is None else self.read_original(row)[0]
        places = self.place_of[values]
        result = np.full_like(places, IGNORED)
        self.cropped(row, result)[:] = self.cropped(row, places)
        return result

    def counts(self, row: int) -> np.ndarray:
        """Voxels of the background and of each class in the acquired field [C + 1]."""
        total = int(np.prod([part.stop - part.start for part in self.field(row)]))
        result = np.zeros(len(self.names) + 1, np.int64)
        for value, count in self.labels.counts(row).items():
            total -= count
            if (place := int(self.place_of[value])) != IGNORED:
                result[place] += count
        result[0] += total
        return result

    def names_of(self, row: int) -> frozenset[str]:
        counts = self.counts(row)[1:]
        return frozenset(name for name, count in zip(self.names, counts, strict=True) if count)

    def voxel_mm3(self, row: int) -> float:
        return float(np.prod(self.spacing_mm(row)))


def read_volumes(cfg: Config, store: PreparedStore) -> ClassVolumes:
    """The volumes with label volumes in the splits train, val and eval.split; raises UserError."""
    labels = StoredLabels.open(store.url, store.options)
    index = with_labels(cfg, store, labels.index, "labels")
    classes = labels.classes
    value_of = {name: value for value, name in classes.items() if name != UNLABELLED}
    names = chosen_names(cfg.task.names, value_of, store, "a class that is labelled")
    place_of = np.zeros(256, np.uint8)
    for place, name in enumerate(names, start=1):
        place_of[value_of[name]] = place
    place_of[[value for value, name in classes.items() if name == UNLABELLED]] = IGNORED
    folds = in_folds(cfg, index, store.url, "label volumes")
    volumes = ClassVolumes(store=store, names=names, labels=labels, place_of=place_of, **folds)
    _require_voxels(volumes)
    return volumes


def _require_voxels(volumes: ClassVolumes) -> None:
    """UserError for a class that no training volume has, or validation volumes without any class."""
    in_train = np.sum([volumes.counts(int(row)) for row in volumes.of(TRAIN)], axis=0)
    absent = [name for name, count in zip(volumes.names, in_train[1:], strict=True) if not count]
    if absent:
        raise UserError(
            f"task.names: expected classes with voxels in the training volumes, found none of "
            f"{', '.join(absent)}"
        )
    in_val = np.sum([volumes.counts(int(row)) for row in volumes.of(VAL)], axis=0)
    if not in_val[1:].any():
        raise UserError(
            f"{volumes.store.url}: split val: expected voxels of {', '.join(volumes.names)}, found none"
        )


def likeliest(outputs_BSdHW: Tensor) -> Tensor:
    """Places among the classes, uint8 [B, d, H, W]."""
    return outputs_BSdHW.argmax(dim=1).to(torch.uint8)


class ClassPlanes(Planes):
    """As `Planes`; the labels are places among the classes [B, d, H, W]."""

    d_axis = 0
    predicted_of = staticmethod(likeliest)

    def moved(self, truth: Tensor, moves: Moves) -> Tensor:
        return moves.classes(truth, IGNORED)


def segmentation_loss(logits_BSdHW: Tensor, truth_BdHW: Tensor, weight_S: Tensor) -> Tensor:
    """Soft Dice of MONAI (Milletari et al. 2016, V-Net) over the whole batch without the background, since a
    plane without a class says little about it, and cross-entropy, over the voxels that are not IGNORED.
    """
    truth = truth_BdHW.long()
    known = truth != IGNORED
    truth = torch.where(known, truth, 0)
    logits = logits_BSdHW.float()
    mask = known.unsqueeze(1)
    hot = F.one_hot(truth, logits.shape[1]).movedim(-1, 1) * mask
    dice = _dice(logits.softmax(dim=1) * mask, hot.float())
    entropy = F.cross_entropy(logits, truth, weight=weight_S, reduction="none")
    total = (weight_S[truth] * known).sum().clamp(min=1e-6)
    return dice + (entropy * known).sum() / total


def class_weights(volumes: ClassVolumes, how: str) -> np.ndarray:
    """Weights of background and classes in the cross-entropy, float32 [C + 1], their mean 1.

    `auto`: the root of a class's rarity among the training volumes' voxels; `none`: all the same.
    """
    counts = np.sum([volumes.counts(int(row)) for row in volumes.of(TRAIN)], axis=0)
    if how == "none":
        return np.ones(len(counts), np.float32)
    rarity = np.sqrt(counts.sum() / np.maximum(counts, 1))
    return (rarity / rarity.mean()).astype(np.float32)


def count_lesions(
    predicted_DHW: np.ndarray, truth_DHW: np.ndarray, num_classes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(labelled, found, false) lesions of each class [C], as NOTES say; IGNORED voxels are nobody's."""
    known, counts = truth_DHW != IGNORED, np.zeros((3, num_classes), np.int64)
    for place in range(num_classes):
        sides = (truth_DHW == place + 1, known & (predicted_DHW == place + 1))
        both = sides[0] & sides[1]
        (labelled, num_labelled), (predicted, num_predicted) = (label(side, TOUCHING) for side in sides)
        met = [len(np.unique(numbers[both])) for numbers in (labelled, predicted)]
        counts[:, place] = num_labelled, met[0], num_predicted - met[1]
    return counts[0], counts[1], counts[2]


def weighted_loss(
    cfg: Config, volumes: ClassVolumes, device: torch.device
) -> Callable[[Tensor, Tensor], Tensor]:
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
    values = {name: value for value, name in volumes.labels.classes.items()}
    return {"classes": {name: values[name] for name in volumes.names}}


def measure(volumes: ClassVolumes, row: int, predicted: np.ndarray, arm: str) -> list[Line]:
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
    write=lambda examined, _: examined.write_lines("volumes.parquet", examined.lines),
    notes=NOTES,
    more=more,
    points=points,
    background=1,
)
