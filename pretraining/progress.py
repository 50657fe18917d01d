"""How far a run is, and what its next update has: learning rate and momentum.

Both are pure functions of the update s, 0 <= s < total_steps: a `Schedule`, whose only state is the length of
the run as it began. `Progress` counts what each update reports, for stopping, for the target's motion and for
the best checkpoint; its counters stay on the device until something reads them. Every checkpoint has both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.optimizer import warmup_cosine
from utils.config.recipes import recipe_of
from utils.config.schema import Config
from utils.errors import UserError
from utils.run.progress import RunProgress
from utils.runtime.single import Runtime

NEW_RUN: Mapping[str, Any] = {
    "step": 0,
    "bad_run": 0,
    "bad_total": 0,
    "init_weight": 1.0,  # share of the random initialisation in the target
    "best": {},
    "inherited": [],  # participants that the weights of method.init_from saw
    "imported_from": None,  # whose those weights were, if not ours
}
EMA_HALF_LIFE = 0.05  # of the run
EMA_MAXIMUM = 0.9995
INIT_WEIGHT_LIMIT = 0.1  # a target with more of its random initialisation is no candidate for the best


def learning_rate(cfg: Config, step: int, total: int) -> float:
    """Linear warm-up, then as `Recipe.lr`: a cosine to the minimum, or constant and a linear cool-down."""
    optim = cfg.optim
    if step < round(optim.warmup_ratio * total) or recipe_of(cfg.method).lr == "cosine":
        return warmup_cosine(optim, step, total)
    cooldown = round(optim.cooldown_ratio * total)
    into = step - (total - cooldown) + 1
    if into <= 0:
        return optim.base_lr
    return optim.base_lr * (1 - (1 - optim.min_lr_ratio) * into / cooldown)


def ema_momentum(cfg: Config, step: int, total: int) -> float:
    """As `Recipe.ema`: a cosine from ema_base to 1, or constant, by default a half-life of 5 % of the run."""
    base = cfg.method.ema_base
    if recipe_of(cfg.method).ema == "cosine":
        assert base is not None, "checked with the configuration"
        return 1 - (1 - base) * (1 + math.cos(math.pi * step / max(1, total - 1))) / 2
    return base if base is not None else min(EMA_MAXIMUM, 0.5 ** (1 / max(1.0, EMA_HALF_LIFE * total)))


def init_weight(cfg: Config, steps_done: int, total: int, start: int = 0) -> float:
    """Share of the target at update `start` left after `steps_done` updates: the product of momenta."""
    momenta = [ema_momentum(cfg, step, total) for step in range(start, steps_done)]
    return float(np.prod(momenta)) if momenta else 1.0


@dataclass(frozen=True)
class Schedule:
    """What every update has, as `at` returns it; its length is that of the run as it began."""

    cfg: Config
    total: int

    def at(self, step: int) -> tuple[float, float]:
        """Learning rate and momentum of update `step`."""
        return learning_rate(self.cfg, step, self.total), ema_momentum(self.cfg, step, self.total)

    def resumed(self, step: int, total: int) -> Schedule:
        """The schedule of a run that has made `step` updates and is now to end after `total`.

        A shorter run ends early on the schedule that it has; a longer one is refused by a UserError.
        """
        if step == 0:
            return Schedule(self.cfg, total)
        if total > self.total:
            raise UserError(
                f"train.max_steps: expected at most {self.total} updates, the length of the run as it began "
                f"(its schedule rests on it), found {total}; another run.dir with method.init_from starts a "
                "new run from these weights"
            )
        return self

    def state_dict(self) -> dict[str, Any]:
        """Plain values for the checkpoint, in the form of the versions that could make a run longer."""
        return {"total": self.total, "extensions": []}

    @classmethod
    def of_state(cls, cfg: Config, state: dict[str, Any]) -> Schedule:
        """What `state_dict` returned, with the configuration of the run; raises UserError for a run that
        another version made longer.
        """
        if state["extensions"]:
            raise UserError(
                f"train.ckpt_dir: expected a run of the length that it began with, {state['total']} updates, "
                "found one that optim.extend made longer, a key that is gone; another run.dir with "
                "method.init_from starts a new run from these weights"
            )
        return cls(cfg, state["total"])


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
