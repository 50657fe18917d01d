"""The verdict on a run: histories that are healthy, collapsing, stalled, leaking, diverged, too short."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pretraining.gauges.alarms import Alarms
from pretraining.gauges.skill import MIN_HALF
from pretraining.gauges.validation import quarters
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


def test_a_healthy_run() -> None:
    verdict = judge(training(RISING, rank=np.linspace(60, 110, 12)))
    assert verdict.word == HEALTHY
    assert "val/skill_position rises and ends at 0.4" in verdict.text
    assert "val/rankme went from 60 to 110." in verdict.reasons
    assert judge(training(np.full(12, 0.3))).word == HEALTHY  # it has learned, and levelled off


def test_a_collapsing_run_whatever_its_skill_and_loss_do() -> None:
    verdict = judge(training(RISING, rank=np.geomspace(100, 3, 12), loss=np.linspace(0.8, 0.1, 12)))
    assert verdict.word == COLLAPSING
    assert any(reason.startswith("Alarms began at step") for reason in verdict.reasons)


def test_a_collapse_that_is_over_is_told_and_no_more() -> None:
    rank = np.array([100, 100, 5, 5, 5, 5, 90, 90, 90, 90, 90, 90.0])
    verdict = judge(training(RISING, rank=rank))
    assert verdict.word == HEALTHY
    assert "none holds at the end" in verdict.text


def test_a_stalled_run() -> None:
    verdict = judge(training(LEVEL, loss=np.linspace(0.8, 0.3, 12)))  # a falling loss is no learning
    assert verdict.word == STALLED
    assert "not above 0" in verdict.text
    assert judge(training(-RISING)).word == STALLED


def test_weights_that_stand_still_are_a_stall() -> None:
    history = training(RISING)
    history[-1]["train/update_ratio"] = 1e-12
    assert judge(history).word == STALLED
    history = training(RISING)
    for number, line in enumerate(history[-4:]):
        line["train/bad_steps"] = number
    verdict = judge(history)
    assert verdict.word == STALLED
    assert "3 were not finite" in verdict.text


def test_a_leak_is_worse_than_a_good_skill() -> None:
    history = training(RISING)
    history[-1]["val/leak"] = 0.2
    assert judge(history).word == LEAKING


def test_a_loss_that_is_no_number_at_the_end() -> None:
    history = training(RISING)
    for line in history[-3:]:
        line["train/loss"] = math.nan
    verdict = judge(history)
    assert verdict.word == DIVERGED
    assert "from step 100 on" in verdict.text
    history[-1]["train/loss"] = 0.4  # a skipped update is over
    assert judge(history).word == HEALTHY


@pytest.mark.parametrize("history", [training(RISING)[:2], [], training(np.linspace(-0.9, -0.2, 12))])
def test_too_early_to_say(history: History) -> None:
    assert judge(history).word == EARLY


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


def test_a_fine_tuning_is_judged_by_its_score() -> None:
    scores = [0.25, 0.3, 0.4, 0.45, 0.5, 0.5]
    assert judge([{"val/balanced_accuracy": score} for score in scores]).word == HEALTHY
    assert judge([{"val/balanced_accuracy": 0.25} for _ in scores]).word == STALLED
