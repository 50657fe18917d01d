"""Alarms read numbers and nothing else: what they see, when, what they say, and what a resume changes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pretraining.gauges.alarms import Alarms, closing
from pretraining.gauges.monitor import Gauges
from pretraining.gauges.skill import SkillGauge
from pretraining.train import open_gauges, report
from tests.support.model_factory import nano_model, small_config
from utils.report.run_files import _series
from utils.run.log import RunLog
from utils.runtime.single import Runtime


def line(**changes: float | None) -> dict[str, float | None]:
    """A healthy log line."""
    healthy = {
        "train/rankme": 40.0,
        "train/feature_std": 0.9,
        "train/volume_share": 0.6,
        "train/feature_cosine": 0.5,
    }
    return healthy | {f"train/{key}": value for key, value in changes.items()}


def steps_of(lines: list[dict[str, float | None]]) -> list[tuple[str, int]]:
    """(name, index) of the alarms that these lines raise, one line per step."""
    alarms = Alarms()
    return [(alarm.name, alarm.step) for i, values in enumerate(lines) for alarm in alarms.update(i, values)]


@pytest.mark.parametrize(
    "bad", [{"rankme": 9.9}, {"feature_std": 0.09}, {"volume_share": 0.09}], ids=lambda bad: next(iter(bad))
)
def test_each_sign_of_collapse_counts_on_its_third_line(bad: dict[str, float]) -> None:
    assert steps_of([line(), line(**bad), line(**bad)]) == []
    assert steps_of([line(), line(**bad), line(**bad), line(**bad), line(**bad)]) == [("collapse", 3)]
    assert steps_of([line(), line(**bad), line(**bad), line(), line(**bad), line(**bad), line()]) == []
    just_not = {key: value * 1.2 for key, value in bad.items()}
    assert steps_of([line()] + 5 * [line(**just_not)]) == []


def test_the_rank_is_compared_with_its_highest() -> None:
    assert steps_of([line(rankme=20.0), line(rankme=100.0)] + 3 * [line(rankme=24.0)]) == [("collapse", 4)]
    assert steps_of([line(rankme=20.0), line(rankme=90.0)] + 3 * [line(rankme=24.0)]) == []


def test_a_rank_that_is_low_from_the_start_alarms_too() -> None:
    assert steps_of(4 * [line(rankme=2.4)]) == [("collapse", 2)]
    assert steps_of(4 * [line(rankme=2.6)]) == []


def test_voxels_as_targets_leave_the_fall_of_the_rank_out_and_nothing_else() -> None:
    gauges = Gauges(SkillGauge(6, 3, "l2", torch.device("cpu")), 1, has_fixed_targets=True)
    for step, values in enumerate([line(), *3 * [line(rankme=5.0)], *3 * [{"val/rankme": 5.0}]]):
        assert gauges.alarms.update(step, values) == []
    floors = [gauges.alarms.update(step, line(rankme=2.0)) for step in range(10, 13)]
    assert [len(begun) for begun in floors] == [0, 0, 1]
    spread = [gauges.alarms.update(step, line(feature_std=0.05)) for step in range(20, 23)]
    assert [len(begun) for begun in spread] == [0, 0, 1]


def test_a_loss_of_neighbours_lets_the_rank_fall_further() -> None:
    gauges = Gauges(
        SkillGauge(6, 3, "l1", torch.device("cpu")), 1, has_fixed_targets=False, has_neighbours=True
    )
    for step, values in enumerate([line(rankme=80.0), *3 * [line(rankme=12.0)]]):
        assert gauges.alarms.update(step, values) == []
    lower = [gauges.alarms.update(step, line(rankme=9.0)) for step in range(10, 13)]
    assert [len(begun) for begun in lower] == [0, 0, 1]


def test_a_loss_of_neighbours_lets_volumes_be_alike() -> None:
    alarms = Alarms(has_neighbours=True)
    alike = {"feature_std": 0.35, "feature_cosine": 0.99}
    assert [alarms.update(step, line(**alike)) for step in range(9)] == 9 * [[]]
    points = [alarms.update(step, line(feature_std=0.09, feature_cosine=0.99)) for step in range(10, 13)]
    assert [len(begun) for begun in points] == [0, 0, 1]


def test_a_run_without_the_loss_of_neighbours_has_the_usual_alarm() -> None:
    def rank_fall(kind: str, *words: str) -> dict[str, float]:
        cfg = small_config(kind, *words)
        run: Any = SimpleNamespace(
            cfg=cfg, model=nano_model(cfg), runtime=Runtime(torch.device("cpu"), use_bf16=False)
        )
        return open_gauges(run).alarms.rank_fall

    assert rank_fall("neighbour") == rank_fall("neighbour", "method.control=mismatched_targets")
    assert rank_fall("neighbour") != rank_fall("vjepa2")
    assert rank_fall("neighbour", "method.control=penalty_only") == rank_fall("vjepa2")


def test_the_rank_in_validation_counts_the_second_time() -> None:
    low = {"val/rankme": 11.0}
    assert steps_of([{"val/rankme": 80.0}, line(), low, line(), low]) == [("collapse", 4)]
    assert steps_of([{"val/rankme": 80.0}, low, {"val/rankme": 30.0}, low]) == []


def test_a_prediction_that_moves_with_its_targets_is_a_leak_at_once() -> None:
    assert steps_of([{"val/leak": 1e-5}, {"val/leak": 0.002}]) == [("leak", 1)]
    assert steps_of([{"val/leak": 1e-4}, {"val/leak": None}, {"val/leak": 0.0}]) == []


def test_only_a_skill_that_nothing_learned_reaches_is_a_leak() -> None:
    assert steps_of(2 * [{"val/skill_position": 0.96}]) == [("leak", 1)]
    assert steps_of([{"val/skill_position": 0.96}, {"val/skill_position": 0.94}]) == []
    assert steps_of(9 * [{"val/skill_position": 0.7}]) == []
    spoilt = {"val/skill_position": float("nan")}
    assert steps_of([spoilt, *2 * [{"val/skill_position": 0.99}]]) == [("leak", 2)]
    # a moving estimate decides nothing
    assert steps_of(9 * [line(skill_position=0.99)]) == []


def test_little_spread_of_features_that_are_alike_is_a_collapse() -> None:
    narrow = {"feature_std": 0.39, "feature_cosine": 0.985}
    assert steps_of([line(), *3 * [line(**narrow)]]) == [("collapse", 3)]
    assert steps_of([line(), *3 * [line(**narrow)], *9 * [line()]]) == [("collapse", 3)]
    assert steps_of([line()] + 9 * [line(**narrow | {"feature_std": 0.41})]) == []
    assert steps_of([line()] + 9 * [line(**narrow | {"feature_cosine": 0.97})]) == []
    assert steps_of([line()] + 9 * [line(**narrow | {"feature_cosine": None})]) == []


def test_an_alarm_ends_and_may_begin_again() -> None:
    alarms = Alarms()
    states = []
    for step, std in enumerate([0.9, 0.05, 0.05, 0.05, 0.05, 0.9, 0.05, 0.05, 0.05]):
        alarms.update(step, line(feature_std=std))
        states.append(alarms.states()["alarm/collapse"])
    assert states == [0, 0, 0, 1, 1, 0, 0, 0, 1]
    assert [alarm.step for alarm in alarms.raised] == [3, 8]


def test_it_says_what_it_saw_and_what_to_try() -> None:
    alarms = Alarms()
    for step, rank in enumerate([92.1, 6.3, 6.3, 6.3]):
        alarms.update(step, line(rankme=rank, feature_std=0.11))
    assert [alarm.text for alarm in alarms.raised] == [
        "features collapse: train/rankme fell from 92.1 to 6.3 (7% of its highest) (seen: train/rankme 6.3, "
        "train/feature_std 0.11, train/volume_share 0.6); try a lower "
        "optim.base_lr, method.regulariser vicreg or a larger method.regulariser_weight, or a higher "
        "method.ema_base"
    ]
    assert closing(alarms.raised) == [f"alarm at step 3: {alarms.raised[0].text}"]
    assert closing([]) == ["no alarm"]


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_resumed_history_alarms_like_a_whole_one(cut: int) -> None:
    lines = [line(), {"val/skill_position": 0.97}, {"val/skill_position": 0.97}, line(rankme=90.0)]
    lines += 3 * [line(rankme=13.0)] + [line(), {"val/rankme": 50.0}, *2 * [{"val/rankme": 7.0}]]
    whole, first, second = Alarms(), Alarms(), Alarms()
    for step, values in enumerate(lines):
        whole.update(step, values)
    for step in range(cut):
        first.update(step, lines[step])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in range(cut, len(lines)):
        second.update(step, lines[step])
    assert second.state_dict() == whole.state_dict()
    assert [(alarm.name, alarm.step) for alarm in whole.raised] == [
        ("leak", 2),
        ("collapse", 6),
        ("collapse", 10),
    ]


def test_an_alarm_reaches_the_log_the_metrics_and_the_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = small_config("vjepa2", "wandb.mode=offline", f"run.dir={tmp_path / 'run'}")
    run_log = RunLog(cfg, 0, 10, synthetic=True)
    gauges = Gauges(SkillGauge(6, 3, "l1", torch.device("cpu")), 1, has_fixed_targets=False)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 5):
            report(run_log, gauges, step, line(feature_std=0.05 if step > 1 else 0.9))
    run_log.close()
    assert "ALARM at step 4: features collapse: all features point one way" in caplog.text
    path = tmp_path / "run" / "metrics.jsonl"
    series, not_finite, alarms = _series(path.read_text(), path)
    assert series["alarm/collapse"] == [(1, 0), (2, 0), (3, 0), (4, 1)]
    assert not_finite == {}
    assert [(step, text[:17]) for step, text in alarms] == [(4, "features collapse")]
