"""How long a run waits before it ends by itself; docs/guides/unattended.md says what that must be above."""

from __future__ import annotations

DATA_S = 600.0  # for a loader worker that gives no batch: it is named, and the run stops
STALL_S = 1800.0  # for a finished step, evaluation batch or checkpoint; more than DATA_S, which says more
