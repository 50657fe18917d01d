"""What layers, segmentation and translation differ in: a row of the table of finetuning.dense.kinds.

In: functions of a kind. Out: `Kind`, with which a head is trained, opened and evaluated
(finetuning.dense.evaluation).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from data_setup.store.reader import PreparedStore
from finetuning.cohort.source import Source
from finetuning.dense.decoder import reads_blocks
from finetuning.dense.examined import Examined
from finetuning.dense.folds import DenseVolumes
from finetuning.dense.head import DenseHead, open_dense_head
from finetuning.dense.planes import Planes
from finetuning.dense.training import Objective, open_volumes, train_head
from utils.config.schema import Config, StorageOptions
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime
from utils.tables import Table

Volumes = TypeVar("Volumes", bound=DenseVolumes)
Content = dict[str, Any]  # of an answer's file
Line = dict[str, Any]  # what is measured of a name in a volume
Predictions = Iterable[tuple[int, np.ndarray]]  # rows and what is predicted of them
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kind(Generic[Volumes]):
    """What is laid on the volumes, how it is learnt, and how it is judged."""

    name: str  # of task.kind, and of the answer's files
    names: str  # what a head's names are, and their key in its file
    read_volumes: Callable[[Config, PreparedStore], Volumes]

    # training
    planes: type[Planes]
    loss: Callable[[Config, Volumes, torch.device], Callable[[Tensor, Tensor], Tensor]]
    metric: str  # of the validation volumes
    sign: int  # 1 where more of it is better, else -1
    score: Callable[[Volumes, Predictions], dict[str, float]]  # `metric` and others of the validation volumes
    shown: tuple[str, str]  # title and format of the metric
    # what the head's file has beside dense_state, of the pre-trained arm's encoder
    state: Callable[[nn.Module, Source, Volumes, Runtime], dict[str, Any]]

    # evaluation
    title: str
    measure: Callable[[Volumes, int, np.ndarray, str], Sequence[Line]]  # a row's prediction by an arm
    columns: Mapping[str, tuple[str, str]]  # of these lines -> title and format; the first one decides
    gain: tuple[int, str]  # 1 where more of the first column is better, else -1; words of a difference
    write: Callable[[Examined[Volumes], Content], None]  # the other files
    notes: Sequence[str]
    # arms without an encoder, name -> what predicts a row
    baselines: Callable[[Volumes, DenseHead], Mapping[str, Callable[[int], np.ndarray]]] = lambda *_: {}
    drawn: Callable[[Volumes], Sequence[int]] = lambda _: ()  # rows whose predictions `write` needs
    more: Callable[[Examined[Volumes]], Content] = lambda _: {}  # of the answer
    points: Callable[[Content], Sequence[str]] = lambda _: ()  # of its page
    tables: Callable[[Content], Sequence[Table]] = lambda _: ()  # of its page, beside those of all kinds
    per_name: int = 1  # outputs of a decoder for each name
    background: int = 0  # outputs without a name
    keys: tuple[str, ...] = ()  # that a head's file must have

    def open_head(self, wanted: str, options: StorageOptions, encoder_url: str | None = None) -> DenseHead:
        """A head of this kind; as `open_dense_head`."""
        return open_dense_head(
            wanted, options, self.names, self.background, self.per_name, self.keys, encoder_url
        )

    def objective(self, cfg: Config, volumes: Volumes, runtime: Runtime) -> Objective:
        """What decoders of these volumes are trained for."""
        return Objective(
            num_outputs=self.per_name * len(volumes.names) + self.background,
            metric=self.metric,
            sign=self.sign,
            planes=self.planes,
            loss=self.loss(cfg, volumes, runtime.device),
            score=partial(self.score, volumes),
        )

    def train(self, source: Source, volumes: Volumes | None = None, runtime: Runtime | None = None) -> int:
        """Train what the configuration asks for; returns the exit code. `volumes`: in the place of those that
        the splits of the people give. Raises UserError.
        """
        source = replace(source, cfg=reads_blocks(source.cfg))
        volumes = open_volumes(source, self.read_volumes) if volumes is None else volumes
        log.info("%s: %s; %s", self.names, ", ".join(volumes.names), volumes.summary)
        runtime = runtime or open_runtime(source.cfg.train.use_bf16)
        objective = self.objective(source.cfg, volumes, runtime)

        def state(encoder: nn.Module) -> dict[str, Any]:
            return self.state(encoder, source, volumes, runtime)

        return train_head(source, volumes, objective, runtime, state, self.shown)
