"""How far a run is: its counters, saved and restored with every checkpoint.

In: what each update reports. Out: the numbers that decide about stopping, about the target's motion and about
which checkpoint is the best. Counters of every step stay on the device until something reads them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pretraining.schedules import INIT_WEIGHT_LIMIT, Schedule
from utils.run.progress import RunProgress
from utils.runtime.single import Runtime

log = logging.getLogger(__name__)
NEW_RUN: Mapping[str, Any] = {
    "step": 0,
    "bad_run": 0,
    "bad_total": 0,
    "init_weight": 1.0,  # share of the random initialisation in the target
    "best": {},
    "inherited": [],  # participants that the weights of method.init_from saw
    "imported_from": None,  # whose those weights were, if not ours
}


class Progress(RunProgress):
    """The counters of every run, and those of the target and of the best checkpoints."""

    def __init__(self, runtime: Runtime, schedule: Schedule, state: Mapping[str, Any] = NEW_RUN) -> None:
        super().__init__(runtime, state)
        self.schedule = schedule
        self.best: dict[str, float] = dict(state["best"])  # name of a best checkpoint -> its score
        self.inherited: list[str] = list(state["inherited"])
        self.imported_from: str | None = state.get("imported_from")  # an older checkpoint has none
        self._moves = self._counter(0)  # updates since the last look that should have moved the target
        weight = torch.tensor(state["init_weight"], dtype=torch.float64)
        self._init_weight = runtime.to_device_replicated(weight)

    def _counter(self, value: int) -> Tensor:
        return self.runtime.to_device_replicated(torch.tensor(value))

    def count(self, step: int, is_finite: Tensor, momentum: float) -> None:
        """Update number `step` has been made, or skipped where its loss or gradient was not finite."""
        kept = self.runtime.scalar(momentum)
        self.skipped.count(step, is_finite)
        self._moves = self._moves + (is_finite & (kept < 1)).long()
        self._init_weight = self._init_weight * torch.where(is_finite, kept, 1.0)
        self.step = step + 1

    @property
    def init_weight(self) -> float:
        """Share of the random initialisation that is left in the target: the product of momenta."""
        return float(self._init_weight)

    def take_moves(self) -> int:
        """Updates since the last call that should have moved the target."""
        moves, self._moves = int(self._moves), self._counter(0)
        return moves

    def best_names(self, measured: Mapping[str, float | None], *, is_warm: bool) -> list[str]:
        """Names under which this checkpoint is kept, because a measure is the best so far after warm-up.

        best_probe: highest val/probe. Without labels best_rankme: highest val/rankme with init_weight < 0.1
        and val/skill_position > 0. best_val_loss: lowest val/loss; for the record, not for choosing.
        """
        if not is_warm:
            return []
        scores: dict[str, float] = {}
        probe, rank, loss, skill = (
            measured[f"val/{name}"] for name in ("probe", "rankme", "loss", "skill_position")
        )
        if probe is not None:
            scores["best_probe"] = probe
        elif self.init_weight < INIT_WEIGHT_LIMIT and (skill or 0.0) > 0 and rank is not None:
            scores["best_rankme"] = rank
        if loss is not None and math.isfinite(loss):
            scores["best_val_loss"] = -loss
        names = [name for name, score in scores.items() if name not in self.best or score >= self.best[name]]
        self.best.update({name: scores[name] for name in names})
        return names

    def best_values(self) -> dict[str, float]:
        """The measure of each best checkpoint so far, as `best/probe`, `best/rankme` and `best/val_loss`."""
        sign = {"best_val_loss": -1.0}
        return {name.replace("_", "/", 1): sign.get(name, 1.0) * score for name, score in self.best.items()}

    def state_dict(self) -> dict[str, Any]:
        """Plain values for the checkpoint."""
        return {
            **super().state_dict(),
            "init_weight": self.init_weight,
            "best": dict(self.best),
            "inherited": list(self.inherited),
            "imported_from": self.imported_from,
            "schedule": self.schedule.state_dict(),
        }
