"""Train decoders of voxel classes on a frozen encoder: finetuning.train with task.kind=segmentation.

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

from data_setup.store.reader import PreparedStore
from finetuning.cohort import VAL
from finetuning.dense.folds import refuse_overlap
from finetuning.dense.head import DenseHead, dense_state, open_dense_head
from finetuning.dense.training import (
    Objective,
    decoders,
    format_arms,
    head_is_written,
    open_run_log,
    train_arms,
    validations,
)
from finetuning.head_file import write_head
from finetuning.layers.planes import Planes
from finetuning.pooled import check_fit
from finetuning.segmentation.loss import class_weights, segmentation_loss
from finetuning.segmentation.metrics import dice, overlap
from finetuning.segmentation.planes import ClassPlanes
from finetuning.segmentation.volumes import ClassVolumes, read_volumes
from finetuning.source import Source
from utils.config.schema import StorageOptions
from utils.errors import EXIT_FINISHED
from utils.run_dir import claim_run_dir, held_run
from utils.runtime.open import open_runtime

METRIC = "dice"
log = logging.getLogger(__name__)


def train_segmentation(source: Source) -> int:
    """Train what the configuration asks for; returns the exit code. Raises UserError."""
    cfg = source.cfg
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    check_fit(cfg, store, source.state, source.url)
    volumes = read_volumes(cfg, store)
    refuse_overlap(cfg, volumes, source.state["participants"], source.url, "pre-training")
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
    with held_run(cfg, runtime), open_run_log(source, volumes) as run_log:
        bests = train_arms(source, volumes, objective, runtime, run_log)
        validation = validations(bests)
        values = {name: value for value, name in volumes.labels.classes.items()}
        state = dense_state(source, store, volumes, decoders(bests), validation)
        state |= {"classes": {name: values[name] for name in volumes.names}}
        url = write_head(cfg, state)
        claim_run_dir(cfg, runtime)
        head_is_written(cfg)
        run_log.artifact("head", url)
    print(format_arms(validation, "validation Dice", "{:.3f}", METRIC))
    print(f"head: {url}\nnext: python -m finetuning.evaluate --head {url}")
    return EXIT_FINISHED


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
