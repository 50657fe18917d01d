"""What happens after how many updates: pure functions of the configuration and of the step.

In: a configuration and how many volumes are trained on. Out: a `Calendar`, the same for every trainer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from utils.config.schema import Config
from utils.errors import ConfigError

VALIDATION_SHARE = 0.025  # volumes that validations read by default, of those that training reads


def total_steps(cfg: Config, num_volumes: int) -> int:
    """max_steps, or the steps of `epochs` passes over num_volumes (a batch may span epochs)."""
    if cfg.train.max_steps is not None:
        return cfg.train.max_steps
    if cfg.train.epochs is None:
        raise ConfigError("train.epochs: expected epochs or max_steps, found neither")
    return math.ceil(cfg.train.epochs * num_volumes / cfg.train.global_batch_size)


@dataclass(frozen=True)
class Calendar:
    """What happens after how many updates."""

    total: int
    epoch: int  # updates that read about every training volume once
    log_every: int
    validate_every: int
    save_every: int
    keep_every: int  # checkpoints that stay: every train.ckpt_every_epochs, thinned to train.keep_epochs

    @classmethod
    def of(cls, cfg: Config, num_volumes: int, validation_volumes: int = 0) -> Calendar:
        """Batches of `num_volumes` may span epochs; a validation reads `validation_volumes`."""
        epoch = max(1, round(num_volumes / cfg.train.global_batch_size))
        total = total_steps(cfg, num_volumes)
        rhythm = cfg.train.ckpt_every_epochs * epoch
        keep = rhythm * max(1, math.ceil(total // rhythm / cfg.train.keep_epochs))
        # so many epochs that a validation reads no more than its share of what they read
        epochs = max(1, math.ceil(validation_volumes / (VALIDATION_SHARE * num_volumes)))
        return cls(
            total=total,
            epoch=epoch,
            log_every=cfg.train.log_every_steps,
            validate_every=cfg.train.val_every_steps or epochs * epoch,
            save_every=cfg.train.ckpt_every_steps or rhythm,
            keep_every=keep,
        )

    @classmethod
    def of_epochs(cls, cfg: Config, epoch: int) -> Calendar:
        """Of a trainer that validates after each epoch of `epoch` updates, and has no checkpoints."""
        total = cfg.train.max_steps
        if total is None:
            assert cfg.train.epochs is not None, "checked with the configuration"
            total = cfg.train.epochs * epoch
        return cls(total, epoch, cfg.train.log_every_steps, epoch, save_every=total, keep_every=total)

    def logs(self, done: int) -> bool:
        return done % self.log_every == 0 or done in (1, self.total)

    def validates(self, done: int) -> bool:
        return done % self.validate_every == 0 or done == self.total

    def saves(self, done: int) -> bool:
        return done % self.save_every == 0 or done % self.keep_every == 0 or done == self.total
