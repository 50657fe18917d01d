"""The health of a run in one word, and why.

In: a run's metrics by step, as metrics.jsonl has them. Out: `Health`. The first rule that holds decides:
  diverged    the loss was not finite at or after its last finite value
  leaking     alarm/leak is 1 on the last line that has it
  collapsing  alarm/collapse is 1 there (pretraining.gauges.alarms says which signs raise it)
  stalled     the weights stand still: the last train/update_ratio is under STILL, or the updates of the last
              lines were skipped
  cannot say  the last validation has too few volumes or participants for a skill: more steps do not help
  too early   the gauge of learning has fewer than MIN_POINTS values, or rises and is not above its floor yet
  stalled     it does not rise and is not above its floor
  healthy     otherwise
The gauge of learning is the skill in validation, whose floor is 0; of a fine-tuning the score of the task,
whose floor is its first value. Whether it rises is what the 95 % interval of the Theil-Sen slope over its
last half says (scipy.stats.theilslopes). The loss is no gauge: it falls in a collapse, too. Nor is the skill
in training: it reads too high while the target moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from scipy.stats import theilslopes

from utils.report.run_files import TASK_SCORES, Points, like_the_last

SKILL = "val/skill_position"
MIN_POINTS = 4
SKILL_VOLUMES, SKILL_PEOPLE = 16, 4  # that validation needs for a skill (pretraining/gauges/skill.py)
STILL = 1e-9  # norm of an update / norm of the weights
SKIPPED_LINES = 3

HEALTHY, COLLAPSING, STALLED = "healthy", "collapsing", "stalled"
LEAKING, DIVERGED, EARLY, NEVER = "leaking", "diverged", "too early to say", "cannot say"
Series = Mapping[str, Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class Health:
    """One word, and sentences for it, the most important first."""

    word: str
    reasons: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"{self.word[0].upper()}{self.word[1:]}: {' '.join(self.reasons)}"


def health(series: Series, alarms: Sequence[tuple[int, str]], not_finite: Mapping[str, int]) -> Health:
    """The verdict on a run. `alarms`: (step, text) as they began; `not_finite`: metric -> its first step."""
    past = tuple(_past(series, alarms))
    diverged = _diverged(series, not_finite)
    if diverged:
        return Health(DIVERGED, (diverged, *past))
    for name, word, reason in (
        ("leak", LEAKING, "The alarm says that predictions see their targets."),
        ("collapse", COLLAPSING, "The alarm says that features lose their directions or their spread."),
    ):
        if _last(series, f"alarm/{name}") == 1:
            return Health(word, (reason, *_ranks(series), *past))
    still = _still(series)
    if still:
        return Health(STALLED, (still, *past))
    # what decides whether the run learns
    counts = {key: len(series.get(key, ())) for key in (*TASK_SCORES, SKILL)}
    gauge = next((key for key, count in counts.items() if count >= MIN_POINTS), None)
    if gauge is None and (without := _without_skill(series)):
        return Health(NEVER, (without, *_ranks(series), *past))
    if gauge is None:
        reason = f"Validation has {max(counts.values())} of the {MIN_POINTS} values that a verdict needs."
        return Health(EARLY, (reason, *_ranks(series), *past))
    floor = series[gauge][0][1] if gauge in TASK_SCORES else 0.0
    last, trend = series[gauge][-1][1], trend_of(series[gauge])
    words = f"{gauge} {trend} and ends at {last:.3g}"
    if last > floor:
        return Health(HEALTHY, (f"{words}.", *_ranks(series), *past))
    above = "its first value" if gauge in TASK_SCORES else "0, the best constant of each position"
    word = EARLY if trend == "rises" else STALLED
    return Health(word, (f"{words}, not above {above}.", *_ranks(series), *past))


def without_skill(volumes: float) -> str:
    """That a validation of so many volumes measured no skill, and what helps."""
    return (
        f"Validation of {volumes:.0f} volumes measures no skill, so there is no verdict and no checkpoint to "
        f"choose, however long the run: {SKILL_VOLUMES} volumes of {SKILL_PEOPLE} participants or more are "
        "needed, so more people to prepare."
    )


def _without_skill(series: Series) -> str:
    """without_skill, where the last validation in training measured none; else ""."""
    # before step 1 it is of a few volumes in every run
    volumes = [point for point in series.get("val/volumes", ()) if point[0] > 0]
    measured = {step for key in (*TASK_SCORES, SKILL) for step, _ in series.get(key, ())}
    return without_skill(volumes[-1][1]) if volumes and volumes[-1][0] not in measured else ""


def trend_of(points: Sequence[tuple[int, float]]) -> str:
    """`rises`, `falls` or `is level`, from the last half of the points, at least MIN_POINTS of them."""
    newest = points[-max(MIN_POINTS, len(points) // 2) :]
    steps, values = zip(*newest, strict=True)
    _, _, low, high = theilslopes(values, steps, 0.95)
    if low > 0:
        return "rises"
    return "falls" if high < 0 else "is level"


def _past(series: Series, alarms: Sequence[tuple[int, str]]) -> list[str]:
    """That alarms began, where none holds now."""
    holds = any(_last(series, f"alarm/{name}") == 1 for name in ("leak", "collapse"))
    if not alarms:
        return []
    steps = ", ".join(str(step) for step, _ in alarms)
    over = "" if holds else "; none holds at the end"
    return [f"Alarms began at step {steps}{over}."]


def _diverged(series: Series, not_finite: Mapping[str, int]) -> str:
    first = not_finite.get("train/loss")
    if first is None or ((points := series.get("train/loss", ())) and points[-1][0] > first):
        return ""
    return f"The loss is not finite from step {first} on."


def _still(series: Series) -> str:
    ratio = _last(series, "train/update_ratio")
    if ratio is not None and ratio < STILL:
        return f"The weights stand still: the last update was {ratio:.1g} of them."
    skipped = series.get("train/bad_steps", ())[-SKIPPED_LINES:]
    if len(skipped) == SKIPPED_LINES and all(a[1] < b[1] for a, b in pairwise(skipped)):
        return f"Updates are skipped: {skipped[-1][1]:.0f} were not finite."
    return ""


def _ranks(series: Series) -> list[str]:
    """What became of the directions in use, in validation, else in training."""
    ranks = {
        "val/rankme": like_the_last(series, "val/rankme"),
        "train/rankme": series.get("train/rankme", ()),
    }
    key = next((key for key, points in ranks.items() if len(points) > 1), None)
    if key is None:
        return []
    first, last = ranks[key][0][1], ranks[key][-1][1]
    return [f"{key} went from {first:.3g} to {last:.3g}."]


def _last(series: Mapping[str, Points | Sequence[tuple[int, float]]], key: str) -> float | None:
    return series[key][-1][1] if series.get(key) else None
