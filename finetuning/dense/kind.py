"""What layers, segmentation and translation differ in, and what was measured of the predictions of a head.

In: functions of a kind. Out: `Kind`, a row of the table of finetuning.dense.kinds, with which a head is
trained, opened and evaluated (finetuning.dense.evaluation). `Examined` has a line for every arm, volume and
name; its estimates are means over a participant's volumes, then over participants, with intervals of the
bootstrap over participants, and the sentence that a paired difference allows.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import EVALUATED
from finetuning.cohort.source import Source
from finetuning.dense.decoder import reads_blocks
from finetuning.dense.folds import DenseVolumes
from finetuning.dense.head import DenseHead, open_dense_head
from finetuning.dense.planes import Planes
from finetuning.dense.training import Objective, open_volumes, train_head
from models.probes import intervals
from models.probes.intervals import could_show, doubt, interval95, participant_draws, sign_flip_p, verdict
from utils import storage
from utils.config.schema import Config, StorageOptions
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime
from utils.tables import Table

HEAD = "The head"
Volumes = TypeVar("Volumes", bound=DenseVolumes)
Content = dict[str, Any]  # of an answer's file
Line = dict[str, Any]  # what is measured of a name in a volume
Predictions = Iterable[tuple[int, np.ndarray]]  # rows and what is predicted of them
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Examined(Generic[Volumes]):
    """The evaluated volumes of a head, with what was measured of every arm."""

    cfg: Config
    volumes: Volumes
    head: DenseHead
    lines: pd.DataFrame  # arm, row, person_id, name and what a kind measures
    drawn: Mapping[int, Mapping[str, np.ndarray]]  # row -> arm -> prediction, of the rows that are drawn
    on_grid: str | None = None  # why it was measured on the store's grid; None: on the scans' own voxels
    beside: tuple[str, ...] = ()  # arms that are in no head's file

    @property
    def arms(self) -> list[str]:
        """Those that were trained, the pre-trained one first."""
        return [*(arm.name for arm in self.head.arms), *self.beside]

    @cached_property
    def people(self) -> list[str]:
        return self.volumes.people(EVALUATED)

    @cached_property
    def draws(self) -> np.ndarray:
        """How often each participant is in a sample of the bootstrap [S, P]."""
        return participant_draws(len(self.people), intervals.BOOTSTRAP_SAMPLES, self.cfg.seed)

    def per_person(self, lines: pd.DataFrame, arm: str, column: str) -> np.ndarray:
        """Mean over the names of a volume, then over the volumes of each person [P]; NaN without one."""
        of_volume = lines[lines.arm == arm].groupby(["person_id", "row"])[column].mean()
        return of_volume.groupby("person_id").mean().reindex(self.people).to_numpy(float)

    def estimate(self, values_P: np.ndarray) -> dict[str, Any]:
        """Mean over people and its interval; people without a value are left out."""
        known = ~np.isnan(values_P)
        if not known.any():
            return {"value": None, "ci95": None, "people": 0}
        weights = self.draws[:, known].astype(float)
        drawn = weights.sum(axis=1) > 0
        means = weights[drawn] @ values_P[known] / weights[drawn].sum(axis=1)
        return {
            "value": float(values_P[known].mean()),
            "ci95": list(interval95(means)),
            "people": int(known.sum()),
        }

    def by_name(self, lines: pd.DataFrame, columns: Sequence[str]) -> dict[str, dict[str, dict[str, Any]]]:
        result: dict[str, dict[str, dict[str, Any]]] = {}
        for (arm, name), part in lines.groupby(["arm", "name"], sort=False):
            cells = {c: self.estimate(self.per_person(part, str(arm), c)) for c in columns}
            result.setdefault(str(arm), {})[str(name)] = cells
        return result

    def gain(
        self, gained_P: np.ndarray, against: str, what: str, first: str = "Pre-training"
    ) -> tuple[dict[str, Any], str]:
        """(the estimate of a paired difference of `first` from the arm called `against`, the sentence that it
        allows).
        """
        gained, known_P = self.estimate(gained_P), gained_P[~np.isnan(gained_P)]
        if gained["value"] is None:
            return gained, f"No difference from {against} can be shown: no participant has a value of both."
        gained["doubt"] = doubt(gained["ci95"], [len(known_P)], known_P)
        gained["p"], gained["could_have_shown"] = sign_flip_p(known_P), could_show(known_P)
        shown = gained["could_have_shown"]
        could = "no difference, however large" if shown is None else f"{shown:.3g}"
        words = verdict(gained["value"], gained["ci95"], first, against, what, gained["doubt"])
        return gained, f"{words} {len(known_P)} participants could have shown {could}."

    def write_lines(self, name: str, lines: pd.DataFrame) -> None:
        buffer = io.BytesIO()
        lines.to_parquet(buffer, index=False)
        storage.write_bytes(storage.join(self.cfg.run.dir, name), buffer.getvalue())


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
