"""Gauges by hand."""

from __future__ import annotations

import math

import pytest
import torch

from models.vjepa3d import Output
from pretraining.monitor import SkillGauge, feature_spread, voxels_of_tokens


def output(prediction: torch.Tensor, target: torch.Tensor) -> Output:
    nothing = torch.zeros(1)
    return Output(nothing, prediction, target, nothing, nothing)


def filled_gauge(recipe: str, samples: torch.Tensor) -> SkillGauge:
    """A gauge that has seen targets [S, N, E] of the rows 100, 101 ..."""
    gauge = SkillGauge(samples.shape[1], samples.shape[2], recipe, torch.device("cpu"), capacity=64)
    gauge.add(samples, torch.arange(100, 100 + len(samples)))
    return gauge


def test_skill_by_hand_l1() -> None:
    torch.manual_seed(0)
    seen, ids = torch.randn(20, 6, 3), torch.tensor([[4, 1]])
    target = torch.randn(1, 2, 3)
    prediction = target + 0.1
    skill = filled_gauge("vjepa2", seen).skill(
        output(prediction, target), ids, torch.ones(1, 2), torch.tensor([5])
    )
    flat = seen.reshape(-1, 3).sort(0).values[(120 - 1) // 2]
    mean_loss = sum(float((target[0, m] - flat).abs().mean()) for m in range(2))
    position_loss = sum(
        float((target[0, m] - seen[:, ids[0, m]].sort(0).values[9]).abs().mean()) for m in range(2)
    )
    assert skill["train/skill_mean"] == pytest.approx(1 - 0.2 / mean_loss, abs=1e-5)
    assert skill["train/skill_position"] == pytest.approx(1 - 0.2 / position_loss, abs=1e-5)


def test_position_only_targets_give_no_skill_by_position() -> None:
    """A predictor that knows the position alone has skill against the mean and none against the position."""
    torch.manual_seed(0)
    pattern = torch.randn(1, 6, 3)
    seen = pattern + 0.1 * torch.randn(30, 6, 3)
    ids = torch.tensor([[0, 3, 5]])
    target = (pattern + 0.1 * torch.randn(1, 6, 3))[:, ids[0]]
    prediction = seen[:, ids[0]].median(0).values.unsqueeze(0)
    skill = filled_gauge("vjepa2", seen).skill(
        output(prediction, target), ids, torch.ones(1, 3), torch.tensor([5])
    )
    assert skill["train/skill_mean"] > 0.7
    assert skill["train/skill_position"] == pytest.approx(0.0, abs=1e-6)


def test_the_same_volume_does_not_count_as_another_sample() -> None:
    seen = torch.randn(20, 6, 3)
    gauge = filled_gauge("vjepa2", seen)
    args = (torch.tensor([[2]]), torch.ones(1, 1))
    target = torch.randn(1, 1, 3)
    other = gauge.skill(output(target + 1, target), *args, torch.tensor([5]))
    gauge.row_R[:10] = 7
    assert gauge.skill(output(target + 1, target), *args, torch.tensor([7])) == {
        "train/skill_mean": None,
        "train/skill_position": None,
    }  # 10 others are too few
    assert other["train/skill_mean"] is not None


def test_a_constant_target_has_no_skill() -> None:
    seen = torch.ones(20, 6, 3)
    target = torch.ones(1, 1, 3)
    skill = filled_gauge("vjepa2", seen).skill(
        output(target, target), torch.tensor([[2]]), torch.ones(1, 1), torch.tensor([5])
    )
    assert skill == {"train/skill_mean": None, "train/skill_position": None}


def test_methods_skill_compares_directions() -> None:
    seen = torch.randn(20, 6, 3)
    target = torch.nn.functional.normalize(torch.randn(1, 1, 3), dim=-1)
    skill = filled_gauge("methods", seen).skill(
        output(target * 5, target), torch.tensor([[2]]), torch.ones(1, 1), torch.tensor([5])
    )
    assert skill["train/skill_mean"] == pytest.approx(1.0, abs=1e-5)


def test_the_ring_keeps_the_newest_and_its_state() -> None:
    gauge = SkillGauge(6, 3, "vjepa2", torch.device("cpu"), capacity=4)
    for row in range(6):
        gauge.add(torch.full((1, 6, 3), float(row)), torch.tensor([row]))
    assert sorted(gauge.row_R.tolist()) == [2, 3, 4, 5]
    again = SkillGauge(6, 3, "vjepa2", torch.device("cpu"), capacity=4)
    again.load_state_dict(gauge.state_dict())
    again.add(torch.full((1, 6, 3), 9.0), torch.tensor([9]))
    assert sorted(again.row_R.tolist()) == [3, 4, 5, 9]


def test_feature_std_is_one_for_a_spread_and_zero_for_a_point() -> None:
    torch.manual_seed(0)
    spread = feature_spread(torch.randn(4, 500, 32), torch.ones(4, 500))
    assert spread["train/feature_std"] == pytest.approx(1.0, abs=0.02)
    assert abs(spread["train/feature_cosine"]) < 0.5
    point = feature_spread(torch.ones(4, 500, 32), torch.ones(4, 500))
    assert point["train/feature_std"] == pytest.approx(0.0, abs=1e-5)
    assert point["train/feature_cosine"] == pytest.approx(1.0, abs=1e-5)


def test_feature_std_by_hand_ignores_padding() -> None:
    tokens = torch.tensor([[[3.0, 4.0], [4.0, 3.0], [100.0, -7.0]]])
    valid = torch.tensor([[1.0, 1.0, 0.0]])
    by_hand = 0.1 * math.sqrt(2)  # .6 and .8 in both dimensions: std .1
    assert feature_spread(tokens, valid)["train/feature_std"] == pytest.approx(by_hand, abs=1e-6)


def test_voxels_of_tokens_follow_raster_order() -> None:
    mask = torch.zeros(1, 2 * 3 * 4, dtype=torch.bool)
    mask[0, 1 * 12 + 2 * 4 + 3] = True
    voxels = voxels_of_tokens(mask, (2, 3, 4), (4, 8, 2))
    assert voxels.shape == (1, 1, 8, 24, 8)
    assert voxels.nonzero()[:, 2].unique().tolist() == [4, 5, 6, 7]
    assert voxels.nonzero()[:, 3].unique().tolist() == list(range(16, 24))
    assert voxels.nonzero()[:, 4].unique().tolist() == [6, 7]
