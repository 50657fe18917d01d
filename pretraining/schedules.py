"""Learning rate, momentum and its product: pure functions of the optimizer step.

Step s is the s-th update, 0 <= s < total_steps. The only state is the length of the run as it began: a
`Schedule`, which every checkpoint keeps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.optimizer import warmup_cosine
from utils.config.recipes import recipe_of
from utils.config.schema import Config
from utils.errors import UserError

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
