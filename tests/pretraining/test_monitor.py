"""Gauges and alarms by hand."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.vjepa3d import Output
from pretraining.gauges.alarms import Alarms, closing
from pretraining.gauges.monitor import Gauges, target_drift, update_ratio, voxels_of_tokens
from pretraining.gauges.skill import MIN_HALF, SkillGauge, validation_skill
from pretraining.train import open_gauges, report
from tests.support.model_factory import nano_model, small_config
from utils.report.run_files import _series
from utils.run.log import RunLog
from utils.runtime.single import Runtime


def filled_gauge(loss: str, samples: torch.Tensor, valid: torch.Tensor | None = None) -> SkillGauge:
    """A gauge that has seen targets [S, N, E] of the rows 100, 101 ..."""
    gauge = SkillGauge(samples.shape[1], samples.shape[2], loss, torch.device("cpu"), capacity=64)
    everywhere = torch.ones(samples.shape[:2], dtype=torch.bool)
    gauge.add(samples, everywhere if valid is None else valid, torch.arange(100, 100 + len(samples)))
    return gauge


def skills(
    gauge: SkillGauge, prediction: torch.Tensor, target: torch.Tensor, ids: list[int], row: int = 5
) -> list:
    """[skill_mean, skill_position] as the training loop computes them, of one sample."""
    result = gauges_of(gauge, prediction, target, ids, row)
    return [result["train/skill_mean"], result["train/skill_position"]]


def gauges_of(
    gauge: SkillGauge, prediction: torch.Tensor, target: torch.Tensor, ids: list[int], row: int = 5
) -> dict[str, float | None]:
    """All gauges of one sample."""
    gauges = Gauges(gauge, 1, has_fixed_targets=False)
    gauges.begin(measure=True)
    observe(gauges, torch.randn(1, 4, 3), torch.ones(1, 4), prediction, target, ids, row)
    return gauges.finish()


def observe(
    gauges: Gauges,
    context: torch.Tensor,
    context_valid: torch.Tensor,
    prediction: torch.Tensor,
    target: torch.Tensor,
    ids: list[int],
    row: int,
) -> None:
    """A micro-batch of volumes of the rows from `row` on, with the same targets in all of them."""
    n, num_tokens = len(context), gauges.skill.num_tokens
    features = torch.zeros(n, num_tokens, target.shape[-1])
    batch = {
        "target": torch.tensor([ids] * n),
        "target_valid": torch.ones(n, len(ids)),
        "context_valid": context_valid,
        "token_valid": torch.ones(n, num_tokens, dtype=torch.bool),
        "row": torch.arange(row, row + n),
    }
    gauges.observe(Output(torch.zeros(n), prediction, target, context, features, None), batch)


def test_skill_by_hand_l1() -> None:
    torch.manual_seed(0)
    seen, ids = torch.randn(20, 6, 3), [4, 1]
    target = torch.randn(1, 2, 3)
    skill = skills(filled_gauge("l1", seen), target + 0.1, target, ids)
    flat = seen.reshape(-1, 3).sort(0).values[(120 - 1) // 2]
    mean_loss = sum(float((target[0, m] - flat).abs().mean()) for m in range(2))
    position_loss = sum(
        float((target[0, m] - seen[:, ids[m]].sort(0).values[9]).abs().mean()) for m in range(2)
    )
    assert skill[0] == pytest.approx(1 - 0.2 / mean_loss, abs=1e-5)
    assert skill[1] == pytest.approx(1 - 0.2 / position_loss, abs=1e-5)


def test_position_only_targets_give_no_skill_by_position() -> None:
    """A predictor that knows the position alone has skill against the mean and none against the position."""
    torch.manual_seed(0)
    pattern = torch.randn(1, 6, 3)
    seen = pattern + 0.1 * torch.randn(30, 6, 3)
    ids = [0, 3, 5]
    target = (pattern + 0.1 * torch.randn(1, 6, 3))[:, ids]
    prediction = seen[:, ids].median(0).values.unsqueeze(0)
    skill = skills(filled_gauge("l1", seen), prediction, target, ids)
    assert skill[0] > 0.7
    assert skill[1] == pytest.approx(0.0, abs=1e-6)


def test_padding_in_the_ring_does_not_flatter_the_skill() -> None:
    torch.manual_seed(0)
    seen = torch.randn(60, 6, 3)
    valid = torch.rand(60, 6) > 0.5
    target = torch.randn(1, 2, 3)
    spoilt = seen.masked_fill(~valid.unsqueeze(-1), 50.0)
    ids = [2, 5]
    assert skills(filled_gauge("l1", spoilt, valid), target + 0.1, target, ids) == pytest.approx(
        skills(filled_gauge("l1", seen, valid), target + 0.1, target, ids)
    )
    flattered = skills(filled_gauge("l1", spoilt), target + 0.1, target, ids)
    assert flattered[1] > skills(filled_gauge("l1", spoilt, valid), target + 0.1, target, ids)[1]


def test_padding_targets_are_not_scored() -> None:
    torch.manual_seed(0)
    gauge = filled_gauge("l1", torch.randn(20, 6, 3))
    target = torch.randn(1, 2, 3)
    prediction = target + torch.tensor([[[0.1], [9.0]]])
    ids, valid = torch.tensor([[4, 1]]), torch.tensor([[1.0, 0.0]])
    losses = gauge.losses([gauge.select(prediction, target, ids, valid)], torch.tensor([5]))
    assert float(losses[0]) == pytest.approx(0.1, abs=1e-5)
    assert float(losses[3]) == 1


def test_the_floor_is_per_token() -> None:
    """Targets that all but vanished are no yardstick, however many of them there are."""
    torch.manual_seed(0)
    gauge = filled_gauge("l1", 1e-7 * torch.randn(20, 60, 3))
    target = 1e-7 * torch.randn(1, 60, 3)
    assert skills(gauge, target, target, list(range(60))) == [None, None]
    gauge = filled_gauge("l1", 1e-5 * torch.randn(20, 60, 3))
    assert skills(gauge, 100 * target, 100 * target, list(range(60))) == [1.0, 1.0]


def test_the_same_volume_does_not_count_as_another_sample() -> None:
    gauge = filled_gauge("l1", torch.randn(20, 6, 3))
    target = torch.randn(1, 1, 3)
    assert skills(gauge, target + 1, target, [2])[0] is not None
    gauge.row_R[:10] = 7
    assert skills(gauge, target + 1, target, [2], row=7) == [None, None]  # 10 others are too few


def test_a_constant_target_has_no_skill() -> None:
    target = torch.ones(1, 1, 3)
    assert skills(filled_gauge("l1", torch.ones(20, 6, 3)), target, target, [2]) == [None, None]


def test_methods_skill_compares_directions() -> None:
    target = torch.nn.functional.normalize(torch.randn(1, 1, 3), dim=-1)
    skill = skills(filled_gauge("normalised_l2", torch.randn(20, 6, 3)), target * 5, target, [2])
    assert skill[0] == pytest.approx(1.0, abs=1e-5)


def test_the_ring_keeps_the_newest_and_its_state() -> None:
    def add(gauge: SkillGauge, row: int) -> None:
        gauge.add(torch.full((1, 6, 3), float(row)), torch.ones(1, 6, dtype=torch.bool), torch.tensor([row]))

    gauge = SkillGauge(6, 3, "l1", torch.device("cpu"), capacity=4)
    for row in range(6):
        add(gauge, row)
    assert sorted(gauge.row_R.tolist()) == [2, 3, 4, 5]
    again = SkillGauge(6, 3, "l1", torch.device("cpu"), capacity=4)
    again.load_state_dict(gauge.state_dict())
    assert bool(again.valid_RP.all())
    add(again, 9)
    assert sorted(again.row_R.tolist()) == [3, 4, 5, 9]


def spread(tokens: torch.Tensor, valid: torch.Tensor, parts: int = 1) -> dict[str, float | None]:
    """feature_std and feature_cosine of context tokens [B, K, E], in so many micro-batches."""
    gauges = Gauges(SkillGauge(6, 3, "l1", torch.device("cpu")), len(tokens), has_fixed_targets=False)
    gauges.begin(measure=True)
    for some, weight in zip(tokens.chunk(parts), valid.chunk(parts), strict=True):
        nothing = torch.zeros(len(some), 1, 3)
        observe(gauges, some, weight, nothing, nothing, [0], 0)
    return gauges.finish()


def test_gauges_see_the_whole_global_batch() -> None:
    torch.manual_seed(0)
    tokens, valid = torch.randn(4, 50, 8), (torch.rand(4, 50) > 0.3).float()
    whole, parts = spread(tokens, valid), spread(tokens, valid, 4)
    for key in ("train/feature_std", "train/feature_cosine", "train/rankme"):
        assert parts[key] == pytest.approx(whole[key], rel=1e-4)


def test_feature_std_is_one_for_a_spread_and_zero_for_a_point() -> None:
    torch.manual_seed(0)
    wide = spread(torch.randn(4, 500, 32), torch.ones(4, 500))
    assert wide["train/feature_std"] == pytest.approx(1.0, abs=0.02)
    assert abs(wide["train/feature_cosine"]) < 0.5
    point = spread(torch.ones(4, 500, 32), torch.ones(4, 500))
    assert point["train/feature_std"] == pytest.approx(0.0, abs=1e-3)
    assert point["train/feature_cosine"] == pytest.approx(1.0, abs=1e-5)


def test_feature_std_by_hand_ignores_padding() -> None:
    tokens = torch.tensor([[[3.0, 4.0], [4.0, 3.0], [100.0, -7.0]]])
    valid = torch.tensor([[1.0, 1.0, 0.0]])
    by_hand = 0.1 * math.sqrt(2)  # .6 and .8 in both dimensions: std .1
    assert spread(tokens, valid)["train/feature_std"] == pytest.approx(by_hand, abs=1e-6)


def test_voxels_of_tokens_follow_raster_order() -> None:
    mask = torch.zeros(1, 2 * 3 * 4, dtype=torch.bool)
    mask[0, 1 * 12 + 2 * 4 + 3] = True
    voxels = voxels_of_tokens(mask, (2, 3, 4), (4, 8, 2))
    assert voxels.shape == (1, 1, 8, 24, 8)
    assert voxels.nonzero()[:, 2].unique().tolist() == [4, 5, 6, 7]
    assert voxels.nonzero()[:, 3].unique().tolist() == list(range(16, 24))
    assert voxels.nonzero()[:, 4].unique().tolist() == [6, 7]


def test_what_the_position_does_not_tell() -> None:
    """Targets that repeat one pattern hold nothing of the volume; targets without a pattern hold all."""
    torch.manual_seed(0)
    ids, target = [0, 3, 5], torch.randn(1, 3, 3)

    def share(seen: torch.Tensor, target: torch.Tensor) -> float | None:
        gauge = filled_gauge("l1", seen)
        return gauges_of(gauge, target, target, ids)["train/volume_share"]

    pattern = torch.randn(1, 6, 3)
    assert share(pattern.expand(30, -1, -1), pattern[:, ids]) == pytest.approx(0.0, abs=1e-6)
    assert share(torch.randn(60, 6, 3), target) == pytest.approx(1.0, abs=0.15)


def test_mae_skill_is_of_squared_errors_and_means() -> None:
    seen = torch.zeros(20, 6, 2)
    seen[:, :, 0] = torch.arange(20.0).unsqueeze(1)  # mean 9.5, median 9
    target = torch.tensor([[[10.5, 0.0]]])
    skill = skills(filled_gauge("l2", seen), target + torch.tensor([0.5, 0.0]), target, [2])
    assert skill == pytest.approx([0.75, 0.75])  # 1 - 0.25 / 1


def test_the_baseline_knows_no_volume_of_the_batch() -> None:
    """Neither the sample's own nor its neighbours' entries: so accumulation changes no skill."""
    gauge = filled_gauge("l1", torch.randn(40, 6, 3, generator=torch.Generator().manual_seed(0)))
    target = torch.zeros(1, 1, 3)
    scored = [gauge.select(target + 1, target, torch.tensor([[2]]), torch.ones(1, 1))]
    alone = gauge.losses(scored, torch.tensor([5]))
    gauge.ring_RPE[:20] = 1e3  # rows 100 to 119
    beside = gauge.losses(scored, torch.arange(100, 120))
    assert float(beside[1]) < 1, "an entry of the batch is in the baseline"
    assert float(alone[3]) == float(beside[3]) == 1
    assert float(gauge.losses(scored, torch.arange(100, 130))[3]) == 0  # 10 others are too few


def test_rank_of_context_tokens_by_hand() -> None:
    """Four tokens on a cross have two equal singular values; padding is not looked at."""
    cross = torch.tensor([[[1.0, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0], [9, 9, 9]]])
    valid = torch.tensor([[1.0, 1, 1, 1, 0]])
    assert spread(cross, valid)["train/rankme"] == pytest.approx(2.0)
    flat = cross * torch.tensor([1.0, 0.0, 0.0])
    assert spread(flat, valid)["train/rankme"] == pytest.approx(1.0)
    assert spread(cross.log(), valid)["train/rankme"] is None


def test_drift_is_relative_to_the_target() -> None:
    model = nano_model(small_config())
    assert float(target_drift(model)) == 0
    with torch.no_grad():
        for parameter in model.encoder.parameters():
            parameter.mul_(1.5)
    assert float(target_drift(model)) == pytest.approx(0.5, rel=1e-5)


def test_update_ratio_is_what_the_optimizer_did() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(30, 20))
    optimizer = torch.optim.AdamW([weight], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for _ in range(5):
        before = weight.detach().clone()
        weight.grad = torch.randn(30, 20)
        optimizer.step()
        moved = (weight.detach() - before).norm() / weight.detach().norm()
        assert float(update_ratio(optimizer)) == pytest.approx(float(moved), rel=1e-4)


def volumes_of(people: int, *, seed: int, scale: float = 1.0, spread: float = 1.0) -> tuple:
    """(targets [V, P, E], position means [P, E], quarters [V]) of three alike volumes a participant."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(12, 16, generator=generator)
    own = 0.7 * torch.randn(people, 1, 12, 16, generator=generator)
    noise = 0.7 * torch.randn(people, 3, 12, 16, generator=generator)
    targets = scale * (means + spread * (own + noise)).flatten(0, 1)
    return targets, scale * means, torch.arange(people).repeat_interleave(3) % 4


def skill_of(prediction: torch.Tensor, targets: torch.Tensor, quarters: torch.Tensor, loss: str) -> tuple:
    everywhere = torch.ones(targets.shape[:2], dtype=torch.bool)
    counts = everywhere.clone()
    counts[:, ::3] = False  # positions that are no targets
    return validation_skill((prediction, targets, counts), targets, everywhere, quarters, loss)


@pytest.mark.parametrize("loss", ["l1", "l2"])
@pytest.mark.parametrize("people", [8, 20, 80])
def test_who_knows_the_position_alone_has_no_skill_in_validation(people: int, loss: str) -> None:
    """However few volumes the baseline rests on: the true position means are no better than it, nor is a
    small step from them; who sees the volume is, and an untrained prediction is far worse.
    """
    by_seed = []
    for seed in range(6):
        targets, means, quarters = volumes_of(people, seed=seed)
        knows = skill_of(means.expand_as(targets), targets, quarters, loss)
        by_seed.append(knows[1])
        sees = skill_of(targets + 0.3 * (means - targets), targets, quarters, loss)
        assert sees[1] > 0.5
        assert sees[0] > sees[1]
        assert skill_of(torch.zeros_like(targets), targets, quarters, loss)[1] < -0.2
        assert knows[0] > 0.2, "the mean over all positions is an easy baseline"
    assert -0.04 < sum(by_seed) / len(by_seed) < 0.01


def test_skill_in_validation_is_none_where_it_would_rest_on_too_little() -> None:
    targets, _, quarters = volumes_of(8, seed=0)
    assert skill_of(targets, targets, quarters, "l1") == (1, 1)
    few = slice(0, 2 * MIN_HALF - 4)
    assert skill_of(targets[few], targets[few], quarters[few], "l1") == (None, None)
    assert skill_of(targets, targets, quarters // 2 * 2, "l1") == (None, None), "empty quarters"
    still = torch.ones_like(targets)
    assert skill_of(still, still, quarters, "l1") == (None, None)


def test_the_participants_that_fit_a_baseline_are_not_scored_on_it() -> None:
    """Each participant has a target of its own: whoever fitted on the scored ones would be nearer."""
    people, quarters = 8, torch.arange(8).repeat_interleave(3) % 4
    targets = torch.randn(people, 1, 12, 16, generator=torch.Generator().manual_seed(0))
    targets = targets.expand(-1, 3, -1, -1).flatten(0, 1)
    valid = torch.ones(targets.shape[:2], dtype=torch.bool)
    scored = torch.zeros_like(targets), targets, valid
    baseline = 0.0
    for halves in ((0, 2), (2, 0)):
        fit = (quarters // 2 == halves[0] // 2).nonzero().flatten()
        others = (quarters // 2 != halves[0] // 2).nonzero().flatten()
        full, one, two = (
            (targets[others] - targets[part].mean(0)).square().mean(-1).sum()
            for part in (fit, fit[quarters[fit] % 2 == 0], fit[quarters[fit] % 2 == 1])
        )
        baseline += float(2 * full - (one + two) / 2)
    expected = 1 - float(targets.square().mean(-1).sum()) / baseline
    assert validation_skill(scored, targets, valid, quarters, "l2")[1] == pytest.approx(expected, rel=1e-5)


# ---- alarms read numbers and nothing else: what they see, when, what they say, and what a resume changes


def line(**changes: float | None) -> dict[str, float | None]:
    """A healthy log line."""
    healthy = {"rankme": 40.0, "feature_std": 0.9, "volume_share": 0.6, "feature_cosine": 0.5}
    return {f"train/{key}": value for key, value in (healthy | changes).items()}


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


NARROW = {"feature_std": 0.29, "feature_cosine": 0.985}
LOW, HIGH, ALIKE = {"val/rankme": 11.0}, {"val/rankme": 80.0}, 3 * [line(**NARROW)]
COLLAPSES = [
    # the rank is compared with its highest, and is an alarm where it is low from the start
    ([line(rankme=20.0), line(rankme=100.0), *3 * [line(rankme=24.0)]], 4),
    ([line(rankme=20.0), line(rankme=90.0), *3 * [line(rankme=24.0)]], None),
    (4 * [line(rankme=2.4)], 2),
    (4 * [line(rankme=2.6)], None),
    # in validation it counts the second time
    ([HIGH, line(), LOW, line(), LOW], 4),
    ([HIGH, LOW, {"val/rankme": 30.0}, LOW], None),
    # little spread of features that are alike
    ([line(), *ALIKE], 3),
    ([line(), *ALIKE, *9 * [line()]], 3),
    ([line()] + 9 * [line(**NARROW | {"feature_std": 0.35})], None),  # real eyes have more
    ([line()] + 9 * [line(**NARROW | {"feature_cosine": 0.97})], None),
    ([line()] + 9 * [line(**NARROW | {"feature_cosine": None})], None),
]


@pytest.mark.parametrize(("lines", "step"), COLLAPSES)
def test_what_is_a_collapse_and_when(lines: list[dict[str, float | None]], step: int | None) -> None:
    assert steps_of(lines) == ([] if step is None else [("collapse", step)])


@pytest.mark.parametrize("has_hidden", [True, False])
def test_fixed_targets_leave_the_fall_of_the_rank_out_and_nothing_else(has_hidden: bool) -> None:
    """Where nothing is hidden also spread and skill; a low rank and targets of little volume remain."""
    gauge = SkillGauge(6, 3, "l2", torch.device("cpu"))
    gauges = Gauges(gauge, 1, has_fixed_targets=True, has_hidden=has_hidden)
    for step, values in enumerate([line(), *3 * [line(rankme=5.0)], *3 * [{"val/rankme": 5.0}]]):
        assert gauges.alarms.update(step, values) == []
    for low in (line(feature_std=0.05), line(**NARROW), {"val/skill_position": 0.97}):
        begun = [gauges.alarms.update(step, low) for step in range(20, 23)]
        assert sum(map(len, begun)) == has_hidden
        assert gauges.alarms.update(23, line() | {"val/skill_position": 0.5}) == []
    floors = [gauges.alarms.update(step, line(rankme=2.0)) for step in range(10, 13)]
    assert [len(begun) for begun in floors] == [0, 0, 1]
    volume = [gauges.alarms.update(step, line(volume_share=0.05)) for step in range(30, 33)]
    assert [len(begun) for begun in volume] == [0, 0, 1]


def test_a_loss_of_neighbours_lets_the_rank_fall_further() -> None:
    gauges = Gauges(
        SkillGauge(6, 3, "l1", torch.device("cpu")), 1, has_fixed_targets=False, has_neighbours=True
    )
    for step, values in enumerate([line(rankme=80.0), *3 * [line(rankme=12.0)]]):
        assert gauges.alarms.update(step, values) == []
    lower = [gauges.alarms.update(step, line(rankme=9.0)) for step in range(10, 13)]
    assert [len(begun) for begun in lower] == [0, 0, 1]


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


def test_a_prediction_that_moves_with_its_targets_is_a_leak_at_once() -> None:
    assert steps_of([{"val/leak": 1e-5}, {"val/leak": 0.002}]) == [("leak", 1)]
    assert steps_of([{"val/leak": 1e-4}, {"val/leak": None}, {"val/leak": 0.0}]) == []


def test_only_a_skill_that_nothing_learned_reaches_is_a_leak() -> None:
    assert steps_of(2 * [{"val/skill_position": 0.96}]) == [("leak", 1)]
    assert steps_of([{"val/skill_position": 0.96}, {"val/skill_position": 0.94}]) == []
    assert steps_of(9 * [{"val/skill_position": 0.7}]) == []
    assert steps_of([{"val/skill_position": x} for x in (float("nan"), 0.99, 0.99)]) == [("leak", 2)]
    # a moving estimate decides nothing
    assert steps_of(9 * [line(skill_position=0.99)]) == []


def test_an_alarm_ends_and_may_begin_again() -> None:
    alarms, states = Alarms(), []
    for step, std in enumerate([0.9, 0.05, 0.05, 0.05, 0.05, 0.9, 0.05, 0.05, 0.05]):
        alarms.update(step, line(feature_std=std))
        states.append(alarms.states()["alarm/collapse"])
    assert states == [0, 0, 0, 1, 1, 0, 0, 0, 1]
    assert [alarm.step for alarm in alarms.raised] == [3, 8]


def test_it_says_what_it_saw_and_what_to_try() -> None:
    alarms, fixed = Alarms(), Alarms(has_fixed_targets=True)
    for step, rank in enumerate([92.1, 6.3, 6.3, 6.3]):
        alarms.update(step, line(rankme=rank, feature_std=0.11))
        fixed.update(step, line(rankme=rank / 4, feature_std=0.11))
    assert [alarm.text for alarm in alarms.raised] == [
        "features collapse: train/rankme fell from 92.1 to 6.3 (7% of its highest) (seen: train/rankme 6.3, "
        "train/feature_std 0.11, train/volume_share 0.6); try a lower optim.base_lr, or method.regulariser "
        "vicreg with a larger weight, or a higher method.ema_base"
    ]
    assert fixed.raised[0].text.endswith("vicreg with a larger weight")  # no teacher moves
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
