"""data_setup/masks.py: exact counts, no leak through surplus, no plane of D favoured."""

import math
import time
from pathlib import Path

import numpy as np
import pytest

from data_setup.masks import MaskPlan, draw_mask
from tests.support.task_configs import below
from utils.config.load import load_config
from utils.config.schema import MaskFamily
from utils.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GRID = (16, 12, 12)
NUM = math.prod(GRID)
ALL_VALID = np.ones(NUM, dtype=bool)
TUBES = (MaskFamily(scale=0.15, tube=True), MaskFamily(scale=0.5, tube=True))
BOXES = (MaskFamily(scale=0.05, tube=False), MaskFamily(scale=0.2, tube=False))


def plan_of(families: tuple[MaskFamily, ...] | None, context: float = 0.4, target: float = 0.3) -> MaskPlan:
    num_context = NUM if families is None else round(context * NUM)
    return MaskPlan(GRID, num_context, round(target * NUM), families)


def planes(plan: MaskPlan, samples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Context and target tokens per plane of D: int [samples, D] each."""
    rng, per_plane = np.random.RandomState(seed), GRID[1] * GRID[2]
    drawn = [draw_mask(rng, plan, ALL_VALID) for _ in range(samples)]
    count = [[np.bincount(ids // per_plane, minlength=GRID[0]) for ids in pair] for pair in drawn]
    context, target = np.array(count).transpose(1, 0, 2)
    return context, target


def sigmas(values: np.ndarray) -> np.ndarray:
    """How many standard errors the mean over samples is from 0, per column."""
    return values.mean(0) / (values.std(0, ddof=1) / math.sqrt(len(values)))


@pytest.mark.parametrize("families", [TUBES, BOXES], ids=["tubes", "boxes"])
def test_counts_are_exact_and_sets_disjoint(families: tuple[MaskFamily, ...]) -> None:
    rng, plan = np.random.RandomState(0), plan_of(families)
    for _ in range(50):
        context, target = draw_mask(rng, plan, ALL_VALID)
        assert context.dtype == target.dtype == np.int64
        assert (len(context), len(target)) == (round(0.4 * NUM), round(0.3 * NUM))
        assert len(np.unique(np.concatenate([context, target]))) == len(context) + len(target)
        assert min(context.min(), target.min()) >= 0
        assert max(context.max(), target.max()) < NUM


UNIFORM = MaskPlan(GRID, NUM - round(0.6 * NUM), round(0.6 * NUM), None)  # of mae


@pytest.mark.parametrize("plan", [*(plan_of((family,)) for family in TUBES), UNIFORM], ids=range(3))
def test_tubes_and_single_tokens_are_equally_likely_in_every_plane(plan: MaskPlan) -> None:
    for count, total in zip(planes(plan, 600), (plan.num_context, plan.num_target), strict=True):
        assert np.abs(sigmas(count - total / GRID[0])).max() < 4


@pytest.mark.parametrize("family", BOXES, ids=str)
def test_boxes_are_symmetric_in_the_planes(family: MaskFamily) -> None:
    for count in planes(plan_of((family,)), 600):
        assert np.abs(sigmas((count - count[:, ::-1])[:, : GRID[0] // 2])).max() < 4


def test_surplus_of_the_union_never_returns_to_the_context() -> None:
    """A tube fills whole columns of D: one with a target has no context token, however much is dropped."""
    rng, plan = np.random.RandomState(1), plan_of(TUBES[1:], context=0.35, target=0.2)
    for _ in range(50):
        context, target = (set(ids % (GRID[1] * GRID[2])) for ids in draw_mask(rng, plan, ALL_VALID))
        assert not context & target


def test_one_family_is_drawn_per_sample() -> None:
    """Both families appear about equally often: one block of half the plane, or several small ones."""
    rng, plan = np.random.RandomState(2), plan_of(TUBES)
    sizes = []
    for _ in range(400):
        _, target = draw_mask(rng, plan, ALL_VALID)
        sizes.append(len(set(target % (GRID[1] * GRID[2]))))
    large = np.mean(
        np.array(sizes) >= 64
    )  # columns of one half-plane block; small blocks stop near 0.3 x 144
    assert abs(large - 0.5) < 4 * 0.5 / math.sqrt(400)


@pytest.mark.parametrize("families", [TUBES, None], ids=["tubes", "uniform"])
def test_valid_tokens_take_the_slots_first_and_padding_stands_last(
    families: tuple[MaskFamily, ...] | None,
) -> None:
    rng, plan = np.random.RandomState(3), plan_of(families)
    valid = np.zeros(GRID, dtype=bool)
    valid[:, 3:9, :] = True  # half of the grid
    valid = valid.ravel()
    for _ in range(50):
        context, target = draw_mask(rng, plan, valid)
        assert (len(context), len(target)) == (plan.num_context, plan.num_target)
        used = [context, target] if families else [target]
        for ids in used:
            flags = valid[ids]
            assert not np.any(flags[1:] & ~flags[:-1])


@pytest.mark.parametrize("num_valid", [0, 1, 2, 40, NUM // 3, NUM - 1, NUM])
@pytest.mark.parametrize("is_rest", [False, True], ids=["all is context", "the rest is context"])
def test_uniform_masks_take_one_share_of_valid_tokens_and_padding(num_valid: int, is_rest: bool) -> None:
    """Valid tokens first would mask every one of them where a third of the grid is valid."""
    num_target = round(0.6 * NUM)
    plan = MaskPlan(GRID, NUM - num_target if is_rest else NUM, num_target, None)
    valid = np.zeros(NUM, dtype=bool)
    valid[np.random.RandomState(6).permutation(NUM)[:num_valid]] = True
    context, target = draw_mask(np.random.RandomState(7), plan, valid)
    assert len(target) == len(np.unique(target)) == num_target
    hidden = valid[target].sum()
    assert abs(hidden - 0.6 * num_valid) <= 1
    if num_valid >= 2:
        assert 1 <= hidden < num_valid
    if is_rest:
        assert np.array_equal(np.sort(np.concatenate([context, target])), np.arange(NUM))
        assert not np.any(valid[context][1:] & ~valid[context][:-1])
    else:
        assert np.array_equal(context, np.arange(NUM))


def test_uniform_masks_of_nearly_everything_still_fit() -> None:
    valid = np.arange(8) < 7
    plan = MaskPlan((2, 2, 2), 8, 8, None)
    assert np.array_equal(draw_mask(np.random.RandomState(0), plan, valid)[1], np.arange(8))
    drawn = draw_mask(np.random.RandomState(0), plan, ~valid)
    assert [ids.tolist() for ids in drawn] == [list(range(8)), [7, *range(7)]]  # padding last


@pytest.mark.parametrize(("recipe", "ratio"), [("methods", 0.6), ("mae", 0.6), ("surroundings", 1)])
def test_uniform_plans_of_a_configuration(recipe: str, ratio: float) -> None:
    switch = [f"method.recipe={recipe}", *(["method.mask_ratio=null"] if ratio == 1 else [])]
    plan = MaskPlan.from_config(load_config(CONFIGS / "pretrain_vjepa_multi_domain.yaml", switch))
    assert (plan.families, plan.num_target) == (None, round(ratio * 9216))
    assert plan.num_context == (9216 - plan.num_target if recipe == "mae" else 9216)


def test_a_batch_of_8_takes_milliseconds() -> None:
    """Under 5 ms of a core's own time, the best of 20 draws, and half more for a slower host."""
    grid, seconds = (16, 24, 24), []
    num = math.prod(grid)
    for family in (*TUBES, *BOXES):
        rng, plan = np.random.RandomState(0), MaskPlan(grid, round(0.4 * num), round(0.3 * num), (family,))
        valid, best = np.ones(num, dtype=bool), math.inf
        for _ in range(20):
            start = time.thread_time()
            for _ in range(8):
                draw_mask(rng, plan, valid)
            best = min(best, time.thread_time() - start)
        seconds.append(best)
    print(seconds)
    assert max(seconds) < 0.0075, seconds


def test_padding_context_is_used_only_when_valid_tokens_run_out() -> None:
    rng, plan = np.random.RandomState(4), plan_of(TUBES[:1], context=0.2, target=0.3)
    valid = np.arange(NUM) % 2 == 0
    context, target = draw_mask(rng, plan, valid)
    assert valid[context].all()
    assert valid[target].mean() < 1  # the union is half padding, so its M slots cannot all be valid


def test_impossible_blocks_are_a_config_error() -> None:
    plan = plan_of((MaskFamily(scale=0.9, tube=True),))
    with pytest.raises(
        ConfigError, match=r"method\.mask_blocks: expected blocks .*scale=0\.9.* found none in 100"
    ):
        draw_mask(np.random.RandomState(0), plan, ALL_VALID)


def test_blocks_fit_narrow_grids() -> None:
    """A side that does not fit is cut, and the other one makes up for it."""
    plan = MaskPlan((2, 3, 40), 60, 100, (MaskFamily(scale=0.5, tube=True),))
    context, target = draw_mask(np.random.RandomState(0), plan, np.ones(240, dtype=bool))
    assert (len(context), len(target)) == (60, 100)


def test_a_small_field_still_has_targets_and_context() -> None:
    """A quarter of the grid is inside the scan: blocks that miss it altogether are drawn again."""
    plan = MaskPlan((4, 12, 8), 154, 115, (MaskFamily(scale=0.15), MaskFamily(scale=0.5)))
    valid = np.zeros((4, 12, 8), dtype=bool)
    valid[:, 5:8] = True
    for seed in range(300):
        context, target = draw_mask(np.random.RandomState(seed), plan, valid.ravel())
        assert valid.ravel()[context].any()
        assert valid.ravel()[target].any()


SHIPPED = sorted(set(CONFIGS.glob("*.yaml")) - {CONFIGS / "sweep_pretrain.yaml"})  # which is no configuration


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_every_shipped_configuration_has_masks(path: Path) -> None:
    plan = MaskPlan.from_config(load_config(path, base=below(path)))
    for seed in range(200):
        context, target = draw_mask(
            np.random.RandomState(seed), plan, np.ones(math.prod(plan.grid), dtype=bool)
        )
        assert (len(context), len(target)) == (plan.num_context, plan.num_target)
