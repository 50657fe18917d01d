"""What was measured of a head's predictions, and estimates of it over participants.

In: a line for every arm, volume and name. Out: means over a participant's volumes, then over participants,
with intervals of the bootstrap over participants, and the sentence that a paired difference allows.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import pandas as pd

from finetuning.cohort.cohort import EVALUATED
from finetuning.dense.folds import DenseVolumes
from finetuning.dense.head import DenseHead
from models.probes import intervals
from models.probes.intervals import could_show, doubt, interval95, participant_draws, sign_flip_p, verdict
from utils import storage
from utils.config.schema import Config

HEAD = "The head"
Volumes = TypeVar("Volumes", bound=DenseVolumes)


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
        """arm -> name -> column -> estimate."""
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
        """A table of the run's folder."""
        buffer = io.BytesIO()
        lines.to_parquet(buffer, index=False)
        storage.write_bytes(storage.join(self.cfg.run.dir, name), buffer.getvalue())
