"""Train decoders of OCTA slabs on an encoder: finetuning.train with task.kind=translation.

In: a checkpoint with a task's configuration, a store with flow. Out: `${train.ckpt_dir}/head.pt`
(finetuning.dense.head with `slabs`) and the log of a run. After each epoch the mean L1 of the validation
volumes decides which weights are kept. With finetune.against_random a second decoder reads the tokens of a
randomly initialised encoder.
"""

from __future__ import annotations

import logging

import numpy as np
from torch import nn

from finetuning.cohort.cohort import VAL
from finetuning.cohort.source import Source
from finetuning.dense.head import DenseHead, open_dense_head
from finetuning.dense.layers.planes import Planes
from finetuning.dense.training import Objective, open_volumes, train_head
from finetuning.dense.translation.decoder import OUTPUTS, SlabPlanes, slab_loss
from finetuning.dense.translation.metrics import l1
from finetuning.dense.translation.volumes import FlowVolumes, read_volumes
from utils.config.schema import StorageOptions
from utils.runtime.open import open_runtime

METRIC = "l1"
log = logging.getLogger(__name__)


def train_translation(source: Source) -> int:
    """Train what the configuration asks for; returns the exit code. Raises UserError."""
    volumes = open_volumes(source, read_volumes)
    log.info("slabs: %s; %s", ", ".join(volumes.names), volumes.summary)
    runtime = open_runtime(source.cfg.train.use_bf16)
    objective = Objective(
        num_outputs=OUTPUTS * len(volumes.names),
        metric=METRIC,
        sign=-1,
        planes=SlabPlanes,
        loss=slab_loss,
        score=lambda decoder, planes: validation_l1(decoder, planes, volumes),
    )
    slabs = {"slabs": list(volumes.names)}
    return train_head(source, volumes, objective, runtime, lambda _: slabs, ("validation L1", "{:.4f}"))


def validation_l1(decoder: nn.Module, planes: Planes, volumes: FlowVolumes) -> float:
    """Mean L1 of the validation volumes: over the slabs of a volume, then over volumes."""
    errors = []
    for row in map(int, volumes.of(VAL)):
        pairs = zip(planes.predict(decoder, row), volumes.read(row), strict=True)
        errors.append(np.nanmean([l1(*pair) for pair in pairs]))
    return float(np.mean(errors))


def open_translation_head(wanted: str, options: StorageOptions, encoder_url: str | None = None) -> DenseHead:
    """A head of slabs; as `open_dense_head`."""
    return open_dense_head(wanted, options, "slabs", per_name=OUTPUTS, encoder_url=encoder_url)
