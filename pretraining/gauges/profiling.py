"""`run.profile=true`: a trace of a few steps after the start, in RUN/profile.

In: the steps as the loop comes to them. Out: on a CPU or GPU one Chrome trace, `steps_FIRST_LAST.json.gz`,
for ui.perfetto.dev or chrome://tracing; on XLA a folder for TensorBoard's profile plugin. Steps are counted
as in the log: FIRST is the number of updates after the first traced step. Only the first process traces.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

from utils.config.schema import Config
from utils.runtime.single import Runtime

log = logging.getLogger(__name__)
WARM_UP_STEPS, TRACED_STEPS = 5, 3


class StepTrace:
    """Call `at` before each step, and `close` at the end."""

    def __init__(self, cfg: Config, runtime: Runtime, start: int) -> None:
        self.is_wanted = cfg.run.profile and runtime.group.is_first
        self.runtime = runtime
        self.first, self.last = start + WARM_UP_STEPS, start + WARM_UP_STEPS + TRACED_STEPS - 1
        self.path = Path(cfg.run.dir) / "profile" / f"steps_{self.first + 1:08d}_{self.last + 1:08d}"
        self._open, self._is_open = ExitStack(), False

    def at(self, step: int) -> bool:
        """Start or end the trace before update number `step`; True where it has just ended, which takes a
        while.
        """
        if self.is_wanted and step == self.first:
            self.runtime.synchronise()
            self._open.enter_context(self.runtime.write_trace(self.path))
            self._is_open = True
        is_over = self.is_wanted and step == self.last + 1
        if is_over:
            self.close()
        return is_over

    def close(self) -> None:
        """End the trace, if one is running."""
        if not self.is_wanted:
            return
        self.is_wanted = False
        if not self._is_open:
            log.warning("run.profile: no trace, the run ended before step %d", self.first + 1)
            return
        self.runtime.synchronise()
        try:
            self._open.close()
        except OSError as error:
            log.warning("%s: trace not written, training goes on: %s", self.path.parent, error)
