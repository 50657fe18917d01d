"""Epochs of a trainer of heads: its batches, its best epoch, when patience ends, what it leaves.

In: a configuration and how many examples there are. Out: the places of each batch, in an order of each epoch
that the seed decides; the weights of the best epoch; `head.pt` in a run directory with a log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from finetuning.heads.head_file import write_head
from utils.config.schema import Config
from utils.run.calendar import Calendar
from utils.run.folder import claim_run_dir
from utils.run.history import NO_CHECKPOINT_YET
from utils.run.log import RunLog
from utils.runtime.single import Runtime

Weights = TypeVar("Weights")


@dataclass(frozen=True)
class Epochs:
    """Batches of `size` of so many examples, every one of which an epoch has once."""

    cfg: Config
    count: int
    size: int
    calendar: Calendar

    @classmethod
    def of(cls, cfg: Config, count: int, volumes: int = 1) -> Epochs:
        """`volumes`: so many of train.global_batch_size an example counts for."""
        size = min(cfg.train.global_batch_size // volumes, count)
        return cls(cfg, count, size, Calendar.of_epochs(cfg, math.ceil(count / size)))

    def batches(self, start: int = 0) -> Iterator[tuple[int, np.ndarray]]:
        """For every update from `start` its number, from 0, and the places of its examples."""
        for step in range(start, self.calendar.total):
            epoch, place = divmod(step, self.calendar.epoch)
            if place == 0 or step == start:
                order = np.random.default_rng([self.cfg.seed, epoch]).permutation(self.count)
            yield step, order[place * self.size : (place + 1) * self.size]

    def number(self, done: int) -> int:
        """The epoch, from 1, of the last of so many updates."""
        return math.ceil(done / self.calendar.epoch)

    def is_over(self, done: int, bests: Sequence[Best[Any]]) -> bool:
        """Whether for finetune.patience epochs nothing became better."""
        patience = self.cfg.finetune.patience
        last = max(best.epoch for best in bests)
        return patience is not None and self.number(done) - last >= patience


@dataclass
class Best(Generic[Weights]):
    rank: tuple[float, ...] = (-math.inf, -math.inf)  # more is better
    epoch: int = 0
    step: int = 0
    weights: Weights | None = None

    def offer(self, rank: tuple[float, ...], epoch: int, step: int, weights: Callable[[], Weights]) -> None:
        """Keep what is better than all before it; what is no number never is."""
        if all(map(math.isfinite, rank)) and rank > self.rank:
            self.rank, self.epoch, self.step, self.weights = rank, epoch, step, weights()


def hand_over(cfg: Config, state: dict[str, Any], runtime: Runtime, run_log: RunLog) -> str:
    """Write a head's file into the run's folder, which now has what it was for; returns its URL."""
    url = write_head(cfg, state)
    claim_run_dir(cfg, runtime)
    (Path(cfg.run.dir) / NO_CHECKPOINT_YET).unlink(missing_ok=True)
    run_log.artifact("head", url)
    return url
