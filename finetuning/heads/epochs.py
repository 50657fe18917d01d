"""What trainers of heads share: epochs and their batches, the best epoch, a run that goes on.

In: a configuration and how many examples there are. Out: the places of each batch, in an order of each epoch
that the seed decides; the weights of the best epoch; the newest checkpoint of the same run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from utils.checkpoint import CheckpointError, load_newest
from utils.config.load import config_of_yaml
from utils.config.schema import Config, keys_with
from utils.errors import UserError
from utils.run.calendar import Calendar
from utils.run.folder import refuse_changes, refuse_lost_checkpoints

Weights = TypeVar("Weights")
log = logging.getLogger(__name__)


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
        """Keep what is better than all before it; NaN and infinity never are."""
        if all(map(math.isfinite, rank)) and rank > self.rank:
            self.rank, self.epoch, self.step, self.weights = rank, epoch, step, weights()


def newest_of_run(
    cfg: Config,
    kind: str,
    kinds: tuple[str, str],
    expected_of: Callable[[Mapping[str, Any]], Mapping[str, tuple[Any, str]]],
) -> dict[str, Any] | None:
    """The newest intact checkpoint of this run, if any; `kinds`: words of this training and of others,
    `expected_of` it: key -> (value, what it stands for). Raises UserError for another run's.
    """
    where = str(cfg.train.ckpt_dir)
    state = load_newest(where, cfg.data.storage_options)
    if state is None:
        refuse_lost_checkpoints(cfg)
        return None
    if state.get("kind") != kind:
        raise CheckpointError(f"{where}: expected checkpoints of {kinds[0]}, found those of {kinds[1]}")
    began_as = config_of_yaml(state["config"], where, to_go_on=True)
    refuse_changes(began_as, cfg, where, moved=keys_with("is_place"))
    for key, (value, text) in expected_of(state).items():
        if state[key] != value:
            raise UserError(f"{where}: expected {text} as the run began, found another; use another run.dir")
    log.info("resuming from step %d of %s", state["step"], where)
    return state
