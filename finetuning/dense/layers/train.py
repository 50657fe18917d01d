"""Train decoders of surfaces on an encoder: what finetuning.train does with task.kind=layers.

In: a checkpoint with a task's configuration, a store with height maps. Out: `${train.ckpt_dir}/head.pt`
(finetuning.dense.layers.head) and the log of a run. After each epoch the boundary error of the validation
volumes decides which weights are kept. With finetune.against_random a second decoder reads the tokens of a
randomly initialised encoder (finetuning.dense.training).
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from torch import nn

from finetuning.cohort.cohort import TRAIN, VAL
from finetuning.cohort.source import Source
from finetuning.dense.layers.decoder import surface_loss
from finetuning.dense.layers.head import layers_state
from finetuning.dense.layers.metrics import boundary_error_um
from finetuning.dense.layers.planes import Planes
from finetuning.dense.layers.volumes import LayerVolumes, read_volumes
from finetuning.dense.training import Objective, open_volumes, train_head
from finetuning.features.familiarity import Familiarity, fit_familiarity
from finetuning.features.kept import KeptFeatures, features_folder, pooled_of_tokens
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime

OF_ALL = ""  # the protocol of mean_heights that stands for every other
METRIC = "error_um"
log = logging.getLogger(__name__)


def train_layers(source: Source) -> int:
    """Train what the configuration asks for; returns the exit code. Raises UserError."""
    volumes = open_volumes(source, read_volumes)
    log.info("surfaces: %s; %s", ", ".join(volumes.names), volumes.summary)
    runtime = open_runtime(source.cfg.train.use_bf16)
    objective = Objective(
        num_outputs=len(volumes.names),
        metric=METRIC,
        sign=-1,
        planes=Planes,
        loss=surface_loss,
        score=lambda decoder, planes: validation_error(decoder, planes, volumes),
    )

    def more(encoder: nn.Module) -> dict[str, Any]:
        familiarity = familiarity_of(encoder, source, volumes, runtime)
        return layers_state(volumes, mean_heights(volumes), familiarity)

    return train_head(source, volumes, objective, runtime, more, ("validation boundary error", "{:.2f} um"))


def validation_error(decoder: nn.Module, planes: Planes, volumes: LayerVolumes) -> float:
    """Mean boundary error of the validation volumes in um: over surfaces, then over volumes."""
    errors = []
    for row in map(int, volumes.of(VAL)):
        axial = volumes.spacing_mm(row)[1]
        each = boundary_error_um(planes.predict(decoder, row), volumes.read(row), axial)
        errors.append(each[volumes.marked(row)].mean())
    return float(np.mean(errors))


def familiarity_of(
    encoder: nn.Module, source: Source, volumes: LayerVolumes, runtime: Runtime
) -> Familiarity | None:
    """Of the training volumes' pooled features; a frozen encoder has kept their tokens."""
    cfg = source.cfg
    kept = KeptFeatures(encoder.requires_grad_(False), cfg, volumes.store, runtime, features_folder(cfg))
    rows, is_train = volumes.of(TRAIN), volumes.fold == TRAIN
    kept.keep_tokens(np.unique(rows))
    return fit_familiarity(pooled_of_tokens(kept, rows), volumes.person[is_train])


def mean_heights(volumes: LayerVolumes) -> dict[str, list[float | None]]:
    """Protocol -> mean height of each surface over the training volumes: what knows no image. OF_ALL: any."""
    by_protocol: dict[str, list[np.ndarray]] = {}
    for row in volumes.of(TRAIN):
        values = volumes.read(int(row))
        count = (~np.isnan(values)).sum(axis=(1, 2))
        mean = np.divide(
            np.nansum(values, axis=(1, 2)), count, out=np.full(len(count), np.nan), where=count > 0
        )
        for protocol in (str(volumes.store.index.protocol[row]), OF_ALL):
            by_protocol.setdefault(protocol, []).append(mean)
    result: dict[str, list[float | None]] = {}
    for protocol, means in by_protocol.items():
        table = np.stack(means)
        known = (~np.isnan(table)).sum(axis=0)
        sums = np.nansum(table, axis=0)
        result[protocol] = [float(s / n) if n else None for s, n in zip(sums, known, strict=True)]
    return result
