"""How far a training is, as every trainer with checkpoints counts it, and how it ends.

In: the engine and what a checkpoint has of it. Out: counters for the next checkpoint; an exit code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from utils.errors import EXIT_FINISHED, EXIT_STOPPED
from utils.run.log import AnyLog
from utils.run.skipped_updates import SkippedUpdates
from utils.runtime.single import Runtime, StopRequested

Measured = TypeVar("Measured")


class RunProgress:
    """Counters of a run on one process; all processes count the same."""

    def __init__(self, runtime: Runtime, state: Mapping[str, Any]) -> None:
        self.runtime = runtime
        self.step: int = state["step"]  # updates made
        self.owes_validation: bool = state.get("owes_validation", False)  # SIGTERM cut it short
        self.skipped = SkippedUpdates(runtime, state["bad_run"], state["bad_total"])

    def state_dict(self) -> dict[str, Any]:
        """Plain values for the checkpoint."""
        return {
            "owes_validation": self.owes_validation,
            "step": self.step,
            "bad_run": self.skipped.in_a_row,
            "bad_total": self.skipped.total,
        }

    def validated(self, measure: Callable[[], Measured]) -> Measured | None:
        """What a validation finds; None where SIGTERM cuts it short, and then the next start owes it."""
        self.owes_validation = True
        with suppress(StopRequested):
            measured = measure()
            self.owes_validation = False
            return measured
        return None

    def end(self, total: int, best: str, run_log: AnyLog, *, is_over: bool) -> int:
        """Tell who is away how the run ended, with its best so far; returns the exit code."""
        how = "finished" if is_over else "stopped"
        run_log.alert(f"{how} at step {self.step} of {total}", best or "no best checkpoint")
        return EXIT_FINISHED if is_over else EXIT_STOPPED

    def alert_skipped(self, skipped: list[str], run_log: AnyLog) -> None:
        """Tell who is away of the updates that were skipped since the last line of the log."""
        if skipped:
            run_log.alert(f"updates skipped until step {self.step}: not finite", "; ".join(skipped[-3:]))
