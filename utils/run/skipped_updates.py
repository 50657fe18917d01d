"""Updates that a training skipped, since their loss or gradient was not finite.

In: what each update reports, on the device. Out: warnings that name the steps and their volumes, and
NotFiniteError after too many in a row. Counters stay on the device until something reads them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from utils.runtime.single import Runtime

log = logging.getLogger(__name__)
MAX_BAD_STEPS = 10  # so many updates in a row that are not finite stop the run


class NotFiniteError(RuntimeError):
    """Too many updates in a row had a loss or a gradient that is not finite."""


class SkippedUpdates:
    """Counters on one process; all processes count the same."""

    def __init__(self, runtime: Runtime, in_a_row: int = 0, total: int = 0) -> None:
        self.runtime = runtime
        # steps since the last check, and whether they were finite
        self._recent: list[tuple[int, Tensor]] = []
        self._in_a_row, self._total = (self._counter(value) for value in (in_a_row, total))
        self._worst_run = self._counter(in_a_row)

    def _counter(self, value: int) -> Tensor:
        return self.runtime.to_device_replicated(torch.tensor(value))

    def count(self, step: int, is_finite: Tensor) -> None:
        """Update number `step` has been made, or skipped where its loss or gradient was not finite."""
        self._in_a_row = torch.where(is_finite, 0, self._in_a_row + 1)
        self._worst_run = torch.maximum(self._worst_run, self._in_a_row)
        self._total = self._total + (~is_finite).long()
        self._recent.append((step, is_finite))

    @property
    def in_a_row(self) -> int:
        """Updates skipped since the last one that was made."""
        return int(self._in_a_row)

    @property
    def total(self) -> int:
        """Updates skipped so far."""
        return int(self._total)

    def check(self, rows_of_step: Callable[[int], list[int]]) -> list[str]:
        """Name the updates skipped since the last call, and return the names; NotFiniteError after
        MAX_BAD_STEPS in a row, on every process. The first one logs.
        """
        recent, worst = self._recent, self._worst_run
        self._recent, self._worst_run = [], self._counter(0)
        skipped = [f"step {step}: rows {rows_of_step(step)}" for step, ok in recent if not bool(ok)]
        for text in skipped if self.runtime.group.is_first else []:
            log.warning("update skipped, loss or gradient not finite: %s of the store", text)
        worst_run = int(worst)
        if worst_run >= MAX_BAD_STEPS:
            raise NotFiniteError(
                f"loss or gradient not finite in {worst_run} updates in a row (limit {MAX_BAD_STEPS}); "
                f"last: {'; '.join(skipped[-3:])}"
            )
        return skipped
