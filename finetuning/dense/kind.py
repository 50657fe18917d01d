"""What layers, segmentation and translation differ in, and what was measured of the predictions of a head.

In: functions of a kind. Out: `Kind`, a row of the table of finetuning.dense.kinds, with which a head is
trained, opened and evaluated (finetuning.dense.evaluation). `Examined` has a line for every arm, volume and
name; its estimates are means over a participant's volumes, then over participants, with intervals of the
bootstrap over participants, and the sentence that a paired difference allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import EVALUATED
from finetuning.cohort.source import Source
from finetuning.dense.folds import DenseVolumes
from finetuning.dense.head import KEYS, Arm, DenseHead, encoders_of, new_decoder
from finetuning.dense.planes import Planes
from finetuning.features.kept import load_strictly
from finetuning.heads.head_file import head_url, require_size
from models.probes import intervals
from models.probes.intervals import could_show, doubt, interval95, participant_draws, sign_flip_p, verdict
from utils import storage
from utils.checkpoint import CheckpointError, load_checkpoint, well_formed
from utils.config.load import config_of_yaml
from utils.config.schema import Config, StorageOptions
from utils.runtime.single import Runtime
from utils.tables import Table

HEAD = "The head"
Volumes = TypeVar("Volumes", bound=DenseVolumes)
Content = dict[str, Any]  # of an answer's file
Line = dict[str, Any]  # what is measured of a name in a volume
Predictions = Iterable[tuple[int, np.ndarray]]  # rows and what is predicted of them


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
        """(paired difference of `first` from the arm `against`, the sentence that it allows)."""
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
        storage.write_bytes(storage.join(self.cfg.run.dir, name), lines.to_parquet(index=False))


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

    def num_outputs(self, names: Sequence[str]) -> int:
        """Of a decoder."""
        return self.per_name * len(names) + self.background

    def open_head(self, wanted: str, options: StorageOptions, encoder_url: str | None = None) -> DenseHead:
        """A head from its file or its run's folder, with its encoders: its own where they were trained, else
        that of the checkpoint, which may have moved to `encoder_url`.

        Raises CheckpointError for a damaged file or another encoder's checkpoint.
        """
        url = head_url(wanted)
        state = load_checkpoint(url, options)
        expected = f"the file of a head with {self.names}"
        if lost := sorted({*KEYS, *self.keys, self.names} - set(state)):
            raise CheckpointError(f"{url}: expected {expected}, found no {', '.join(lost[:3])}")
        with well_formed(url, expected):
            cfg = config_of_yaml(state["config"], url)
            require_size({"hidden": cfg.head.hidden}, url, 1)
            names, arms = tuple(str(name) for name in state[self.names]), []
            encoders = encoders_of(cfg, state, url, options, encoder_url)
            for name, weights in state["arms"].items():
                decoder = new_decoder(cfg, encoders[name].feature_width, self.num_outputs(names))
                load_strictly(decoder, weights, f"{url}: decoder of {name}")
                arms.append(Arm(name, encoders[name], decoder.eval().requires_grad_(False)))
            return DenseHead(url, state["checksum"], tuple(arms), names, cfg, state)
