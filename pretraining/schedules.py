"""Learning rate, target momentum and its product: pure functions of the optimizer step over the whole run.

Step s is the s-th update, 0 <= s < total_steps. Nothing here has state, so resuming needs none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from utils.config.recipes import recipe_of
from utils.config.schema import Config
from utils.errors import ConfigError

EMA_HALF_LIFE = 0.05  # of the run
EMA_MAXIMUM = 0.9995
VALIDATION_SHARE = 0.025  # volumes that validations read by default, of those that training reads
INIT_WEIGHT_LIMIT = 0.1  # a target with more of its random initialisation is no candidate for the best


def total_steps(cfg: Config, num_volumes: int) -> int:
    """max_steps, or the steps of `epochs` passes over num_volumes (a batch may span epochs)."""
    if cfg.train.max_steps is not None:
        return cfg.train.max_steps
    if cfg.train.epochs is None:
        raise ConfigError("train.epochs: expected epochs or max_steps, found neither")
    return math.ceil(cfg.train.epochs * num_volumes / cfg.train.global_batch_size)


def learning_rate(cfg: Config, step: int, total: int) -> float:
    """Linear warm-up, then as `Recipe.lr`: a cosine to the minimum, or constant and a linear cool-down."""
    optim = cfg.optim
    if not optim.use_scheduler:
        return optim.base_lr
    warmup = round(optim.warmup_ratio * total)
    if step < warmup:
        return optim.base_lr * (step + 1) / warmup
    if recipe_of(cfg.method).lr == "cosine":
        progress = (step - warmup) / max(1, total - 1 - warmup)
        factor = optim.min_lr_ratio + (1 - optim.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2
        return optim.base_lr * factor
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


def init_weight(cfg: Config, steps_done: int, total: int) -> float:
    """Share of the random initialisation left in the target after so many updates: the product of momenta."""
    momenta = [ema_momentum(cfg, step, total) for step in range(steps_done)]
    return float(np.prod(momenta)) if momenta else 1.0


@dataclass(frozen=True)
class Calendar:
    """What happens after how many updates."""

    total: int
    log_every: int
    validate_every: int
    save_every: int
    keep_every: int  # checkpoints that are never deleted

    @classmethod
    def of(cls, cfg: Config, num_volumes: int, validation_volumes: int = 0) -> Calendar:
        """`num_volumes` are trained on; a validation reads `validation_volumes`."""
        epoch = max(1, round(num_volumes / cfg.train.global_batch_size))  # in updates
        # so many epochs that a validation reads no more than its share of what they read
        epochs = max(1, math.ceil(validation_volumes / (VALIDATION_SHARE * num_volumes)))
        keep = cfg.train.ckpt_every_epochs * epoch
        return cls(
            total=total_steps(cfg, num_volumes),
            log_every=cfg.train.log_every_steps,
            validate_every=cfg.train.val_every_steps or epochs * epoch,
            save_every=cfg.train.ckpt_every_steps or keep,
            keep_every=keep,
        )

    def logs(self, done: int) -> bool:
        return done % self.log_every == 0 or done in (1, self.total)

    def validates(self, done: int) -> bool:
        return done % self.validate_every == 0 or done == self.total

    def saves(self, done: int) -> bool:
        return done % self.save_every == 0 or done % self.keep_every == 0 or done == self.total
