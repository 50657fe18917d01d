"""The one line of a training that a person reads; metrics.jsonl has every number.

In: each update as it is handed over, and the metrics that the loop reads anyway: nothing here waits for a
device. Out: on a terminal a line that stays at the bottom, elsewhere a short line for each log line; both
kinds get a line for each validation, and log.txt gets all of them.

    step 120 of 480, 2 min left, no alarm: loss 0.512, skill 0.012, RankMe 61.2, 11.2 volumes/s, data wait 1 %
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping

from utils.terminal import LiveLine, Pace, is_interactive

log = logging.getLogger(__name__)
Values = Mapping[str, float | None]
TRAINING = {
    "train/loss": "loss {:.4g}",
    "train/skill_position": "skill {:.3f}",
    "train/rankme": "RankMe {:.1f}",
    "perf/volumes_per_s": "{:.3g} volumes/s",
    "perf/data_wait_fraction": "data wait {:.0f} %",
}
VALIDATION = {
    "val/loss": "loss {:.4g}",
    "val/skill_position": "skill {:.3f}",
    "val/rankme": "RankMe {:.1f}",
    "val/probe": "probe {:.3f}",
    # the metrics of finetuning.heads.objective
    "val/balanced_accuracy": "balanced accuracy {:.3f}",
    "val/quadratic_kappa": "quadratic kappa {:.3f}",
    "val/mean_auroc": "mean AUROC {:.3f}",
    "val/minus_the_squared_error": "squared error {:.4g}",
    # of finetuning.dense.kinds
    "val/error_um": "boundary error {:.2f} um",
    "val/dice": "Dice {:.3f}",
    "val/l1": "L1 {:.4f}",
}
SCALE = {"perf/data_wait_fraction": 100.0, "val/minus_the_squared_error": -1.0}  # shown times this
SLOW_DATA = 0.2  # share of the time spent waiting for data from which the line says so


def health(values: Values, skipped_before: float = 0.0) -> str:
    """A word on how the run is, the gravest first; 'no alarm' promises no more than that.

    `skipped_before`: train/bad_steps of the line before.
    """
    raised = [key.removeprefix("alarm/") for key, v in values.items() if key.startswith("alarm/") and v]
    if raised:
        return f"ALARM: {' and '.join(raised)}"
    if (values.get("train/bad_steps") or 0.0) > skipped_before:
        return "updates skipped: not finite"
    if (values.get("perf/data_wait_fraction") or 0.0) > SLOW_DATA:
        return "waits for data"
    return "no alarm"


def words(values: Values, forms: Mapping[str, str]) -> list[str]:
    """The numbers of `forms` that are there, in its order."""
    there = {key: value * SCALE.get(key, 1.0) for key, value in values.items() if value is not None}
    return [form.format(there[key]) for key, form in forms.items() if key in there]


class TrainingLine:
    """The line of one run, on its first process; `close` gives the terminal back."""

    def __init__(self, step: int, total: int) -> None:
        self.step, self.total = step, total
        self._pace: Pace | None = None
        self._numbers: list[str] = []  # of the newest log line
        self._word = ""
        self._skipped = 0.0 if step == 0 else math.inf  # a resumed run has announced those before it
        self._live = LiveLine() if is_interactive() else None
        self._draw(step, at_once=True)

    def advance(self) -> None:
        """One update has been handed to the device; the first one, which may compile, sets no pace."""
        self.step += 1
        if self._pace is None:
            self._pace = Pace(self.step, self.total, time.monotonic())
        self._draw(self.step)

    def metrics(self, step: int, values: Values) -> None:
        """The metrics after `step` updates: those of a log line, or of a validation. Those of a second arm
        have its name before theirs: arm/train/loss.
        """
        arm = next((key.split("/")[0] for key in values if key.split("/")[1:2] in (["train"], ["val"])), "")
        values = {key.removeprefix(f"{arm}/"): value for key, value in values.items()}
        if any(key.startswith("val/") for key in values):
            text = ", ".join([*words(values, VALIDATION), *self._alarm(values)])
            log.info("validation%s at step %d: %s", f" of {arm}" if arm else "", step, text)
            if self._alarm(values):
                self._word = health(values, self._skipped)
                self._draw(step, at_once=True)
            return
        self._word = health(values, self._skipped)
        self._skipped = values.get("train/bad_steps") or 0.0
        self._numbers = words(values, TRAINING)
        log.info("%s", self._text(step), extra={"is_shown": self._live is None})
        self._draw(step, at_once=True)  # before `advance` counts this update

    def _alarm(self, values: Values) -> list[str]:
        """The word on a validation, where it has alarms to speak of."""
        return [health(values)] if any(key.startswith("alarm/") for key in values) else []

    def _text(self, step: int) -> str:
        forecast = "" if self._pace is None else self._pace.text(step, time.monotonic())
        # the word comes before the numbers, which a narrow terminal cuts off
        head = ", ".join(filter(None, (f"step {step} of {self.total}", forecast, self._word)))
        return f"{head}: {', '.join(self._numbers)}" if self._numbers else head

    def _draw(self, step: int, *, at_once: bool = False) -> None:
        if self._live is not None:
            style = "bold red" if self._word.startswith("ALARM") else ""
            self._live.show(self._text(step), style, at_once=at_once)

    def close(self) -> None:
        if self._live is not None:
            self._live.close()
