"""Train decoders of voxel classes on an encoder: finetuning.train with task.kind=segmentation.

In: a checkpoint with a task's configuration, a store with label volumes. Out: `${train.ckpt_dir}/head.pt`
(finetuning.dense.head with `classes`, name -> stored value) and the log of a run. After each epoch the mean
Dice of the classes, over the voxels of all validation volumes, decides which weights are kept. With
finetune.against_random a second decoder reads the tokens of a randomly initialised encoder.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import nn

from finetuning.cohort.cohort import VAL
from finetuning.cohort.source import Source
from finetuning.dense.head import DenseHead, open_dense_head
from finetuning.dense.layers.planes import Planes
from finetuning.dense.segmentation.loss import class_weights, segmentation_loss
from finetuning.dense.segmentation.metrics import dice, overlap
from finetuning.dense.segmentation.planes import ClassPlanes
from finetuning.dense.segmentation.volumes import ClassVolumes, read_volumes
from finetuning.dense.training import Objective, open_volumes, train_head
from utils.config.schema import StorageOptions
from utils.runtime.open import open_runtime

METRIC = "dice"
log = logging.getLogger(__name__)


def train_segmentation(source: Source) -> int:
    """Train what the configuration asks for; returns the exit code. Raises UserError."""
    cfg = source.cfg
    volumes = open_volumes(source, read_volumes)
    weights = class_weights(volumes, cfg.finetune.class_weights)
    shown = [f"{n} {w:.2f}" for n, w in zip(("background", *volumes.names), weights, strict=True)]
    log.info("classes and their weights: %s; %s", ", ".join(shown), volumes.summary)
    runtime = open_runtime(cfg.train.use_bf16)
    weight_S = torch.from_numpy(weights).to(runtime.device)
    objective = Objective(
        num_outputs=len(volumes.names) + 1,
        metric=METRIC,
        sign=1,
        planes=ClassPlanes,
        loss=lambda outputs, truth: segmentation_loss(outputs, truth, weight_S),
        score=lambda decoder, planes: validation_dice(decoder, planes, volumes),
    )
    values = {name: value for value, name in volumes.labels.classes.items()}
    classes = {name: values[name] for name in volumes.names}
    return train_head(
        source, volumes, objective, runtime, lambda _: {"classes": classes}, ("validation Dice", "{:.3f}")
    )


def validation_dice(decoder: nn.Module, planes: Planes, volumes: ClassVolumes) -> float:
    """Dice over the voxels of all validation volumes together, the mean over the classes that they have."""
    counts = [
        overlap(planes.predict(decoder, row), volumes.read(row), len(volumes.names))
        for row in map(int, volumes.of(VAL))
    ]
    return float(np.nanmean(dice(*np.sum(counts, axis=0))))


def open_segmentation_head(wanted: str, options: StorageOptions, encoder_url: str | None = None) -> DenseHead:
    """A head of voxel classes; as `open_dense_head`."""
    return open_dense_head(wanted, options, "classes", background=1, encoder_url=encoder_url)
