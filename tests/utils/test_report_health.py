"""The verdict on a run: histories that are healthy, collapsing, stalled, leaking, diverged, too short."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pretraining.gauges.alarms import Alarms
from pretraining.gauges.skill import MIN_HALF
from pretraining.gauges.volumes import quarters
from utils.report.health import (
    COLLAPSING,
    DIVERGED,
    EARLY,
    HEALTHY,
    LEAKING,
    NEVER,
    SKILL_PEOPLE,
    STALLED,
    Health,
    health,
)

History = list[dict[str, float | None]]


def judge(history: History) -> Health:
    """What a run of these lines, ten steps apart, is called; the alarms are those of training."""
    alarms, series, not_finite = Alarms(), {}, {}
    raised: list[tuple[int, str]] = []
    for number, line in enumerate(history):
        step = 10 * (number + 1)
        raised += [(alarm.step, alarm.text) for alarm in alarms.update(step, line)]
        for key, value in (line | alarms.states()).items():
            if value is None or not math.isfinite(value):
                if value is not None:
                    not_finite.setdefault(key, step)
            else:
                series.setdefault(key, []).append((step, value))
    return health(series, raised, not_finite)


def training(skill: np.ndarray, rank: np.ndarray | float = 90.0, loss: np.ndarray | float = 0.5) -> History:
    """Lines with these values of skill, rank and loss, and a little noise."""
    noise = np.random.default_rng(0).normal(0, 0.002, len(skill))
    columns = np.broadcast_arrays(skill, rank, loss, noise)
    return [
        {
            "train/loss": float(lo + n),
            "train/update_ratio": 1e-3,
            "train/bad_steps": 0,
            "train/rankme": float(r),
            "val/rankme": float(r),
            "train/feature_std": 0.8,
            "val/skill_position": float(s + n),
        }
        for s, r, lo, n in zip(*columns, strict=True)
    ]


RISING, LEVEL = np.linspace(-0.1, 0.4, 12), np.full(12, -0.03)


def with_last(count: int, **values: float | list[float]) -> History:
    """A run that rises, of which the last lines have these values; of a list each line its own."""
    history = training(RISING)
    for number, line in enumerate(history[-count:]):
        line |= {key: value[number] if isinstance(value, list) else value for key, value in values.items()}
    return history


OVER = np.array([100, 100, 5, 5, 5, 5, 90, 90, 90, 90, 90, 90.0])
SCORES = [0.25, 0.3, 0.4, 0.45, 0.5, 0.5]
HISTORIES = {
    "rises": (
        training(RISING, rank=np.linspace(60, 110, 12)),
        HEALTHY, "val/skill_position rises and ends at 0.4", "val/rankme went from 60 to 110.",
    ),
    "learned, and levelled off": (training(np.full(12, 0.3)), HEALTHY),
    "collapsing, whatever its skill and loss do": (
        training(RISING, rank=np.geomspace(100, 3, 12), loss=np.linspace(0.8, 0.1, 12)),
        COLLAPSING, "Alarms began at step",
    ),
    "a collapse that is over": (training(RISING, rank=OVER), HEALTHY, "none holds at the end"),
    "a falling loss is no learning": (
        training(LEVEL, loss=np.linspace(0.8, 0.3, 12)), STALLED, "not above 0",
    ),
    "falls": (training(-RISING), STALLED),
    "weights that stand still": (with_last(1, **{"train/update_ratio": 1e-12}), STALLED),
    "updates that are skipped": (
        with_last(4, **{"train/bad_steps": [0, 1, 2, 3]}), STALLED, "3 were not finite",
    ),
    "a leak, with a good skill": (with_last(1, **{"val/leak": 0.2}), LEAKING),
    "a loss that is no number at the end": (
        with_last(3, **{"train/loss": math.nan}), DIVERGED, "from step 100 on",
    ),
    "a skipped update that is over": (
        with_last(3, **{"train/loss": [math.nan, math.nan, 0.4]}), HEALTHY,
    ),
    "few lines": (training(RISING)[:2], EARLY),
    "no line": ([], EARLY),
    "rises, below 0": (training(np.linspace(-0.9, -0.2, 12)), EARLY),
    "a fine-tuning's score rises": ([{"val/balanced_accuracy": score} for score in SCORES], HEALTHY),
    "a fine-tuning's score is level": ([{"val/balanced_accuracy": 0.25} for _ in SCORES], STALLED),
}  # fmt: skip


@pytest.mark.parametrize("name", HISTORIES)
def test_a_run_is_called(name: str) -> None:
    history, word, *texts = HISTORIES[name]
    verdict = judge(history)
    assert verdict.word == word
    assert all(text in verdict.text for text in texts), verdict.text


def test_a_validation_without_skill_is_not_too_early_for_ever() -> None:
    """Few volumes never give one; before step 1 they are few in every run."""
    few = [line | {"val/skill_position": None, "val/volumes": 3.0} for line in training(RISING)]
    verdict = judge(few)
    assert verdict.word == NEVER
    assert "3 volumes measures no skill" in verdict.text
    assert f"{2 * MIN_HALF} volumes of 4 participants or more are needed" in verdict.text
    assert max(quarters(["a", "b", "c", "d"])) == SKILL_PEOPLE - 1
    assert health({"val/volumes": [(0, 3.0)]}, [], {}).word == EARLY
    assert judge([line | {"val/volumes": 90.0} for line in training(RISING)[:2]]).word == EARLY


def test_skill_of_training_is_no_verdict_where_validation_has_few_points() -> None:
    history = training(RISING)
    for line in history[2:]:  # a moving estimate, which reads too high while the target moves
        line["train/skill_position"] = line.pop("val/skill_position")
    verdict = judge(history)
    assert verdict.word == EARLY
    assert "2 of the 4 values" in verdict.text
