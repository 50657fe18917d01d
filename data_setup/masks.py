"""Which tokens the context encoder sees and which it must predict: fixed counts, one mask per sample.

In: a random state, a `MaskPlan` of the configuration, and which tokens are valid. Out: int64 token ids,
always exactly K context and M target of them, so a compiled step is compiled once. After V-JEPA's multi-block
masks (Bardes et al. 2024), without their trim of each batch to its smallest mask, which starves the last
planes of D (docs/concepts/architecture.md shows it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from utils.config.recipes import recipe_of
from utils.config.schema import Config, MaskFamily
from utils.errors import ConfigError

MAX_REDRAWS = 100
ASPECTS = 0.75, 1.5  # height / width of a block in tokens, as V-JEPA's


@dataclass(frozen=True)
class MaskPlan:
    """What all masks of a run have in common. Where `families` is None, targets are drawn uniformly, and the
    context is all positions or the rest (num_context); targets may be all positions too.
    """

    grid: tuple[int, int, int]
    num_context: int
    num_target: int
    families: tuple[MaskFamily, ...] | None

    @classmethod
    def from_config(cls, cfg: Config) -> MaskPlan:
        """The plan of method.recipe; ConfigError when a ratio rounds to no token at all."""
        method, grid, recipe = cfg.method, cfg.grid, recipe_of(cfg.method)
        num_tokens = math.prod(grid)
        ratio = method.mask_ratio if recipe.masks else 1.0
        if ratio is not None:
            num_target = round(ratio * num_tokens)
            num_context = num_tokens - num_target if recipe.hidden == "all_but_context" else num_tokens
            plan = cls(grid, num_context, num_target, None)
        else:
            assert method.context_ratio is not None
            assert method.target_ratio is not None
            assert method.mask_blocks is not None
            num_context = round(method.context_ratio * num_tokens)
            num_target = min(round(method.target_ratio * num_tokens), num_tokens - num_context)
            plan = cls(grid, num_context, num_target, tuple(method.mask_blocks))
        if plan.num_context < 1 or plan.num_target < 1:
            raise ConfigError(
                f"method.*_ratio: expected at least 1 context and 1 target token, found {plan.num_context} "
                f"and {plan.num_target} of the {num_tokens} tokens of grid {list(grid)}"
            )
        return plan


def draw_mask(rng: np.random.RandomState, plan: MaskPlan, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(context, target): int64 ids [K] and [M], disjoint unless context is all positions; valid [N] bool.

    Padding is last in both. Blocks: one family is drawn per sample, and blocks are added until their
    union holds M tokens. Valid tokens take the slots first; surplus tokens belong to neither set. A draw
    without a valid token on both sides would teach nothing and is repeated, up to 100 times. Uniform: the
    same share of the valid tokens as of the padding. Raises ConfigError when 100 draws leave fewer than K
    tokens for the context.
    """
    num_tokens = math.prod(plan.grid)
    assert valid.shape == (num_tokens,), (valid.shape, plan.grid)
    if plan.families is None:
        is_target = _draw_uniform(rng, plan.num_target, valid)
        target = _padding_last(np.flatnonzero(is_target), valid)
        if plan.num_context == num_tokens:
            return np.arange(num_tokens), target
        return _padding_last(np.flatnonzero(~is_target), valid), target
    family = plan.families[rng.randint(len(plan.families))]
    fitting: tuple[np.ndarray, np.ndarray] | None = None
    for _ in range(MAX_REDRAWS):
        union = _draw_union(rng, plan.grid, family, plan.num_target)
        inside, outside = np.flatnonzero(union), np.flatnonzero(~union)
        if len(outside) >= plan.num_context:
            fitting = outside, inside
            if valid[inside].any() and valid[outside].any():
                break
    if fitting is not None:
        outside, inside = fitting
        context = _choose(rng, outside, plan.num_context, valid)
        return context, _choose(rng, inside, plan.num_target, valid)
    raise ConfigError(
        f"method.mask_blocks: expected blocks of {family} that hold {plan.num_target} target tokens of grid "
        f"{list(plan.grid)} and leave {plan.num_context} for the context, found none in {MAX_REDRAWS} draws; "
        "lower the block's scale, method.context_ratio or method.target_ratio"
    )


def _choose(rng: np.random.RandomState, ids: np.ndarray, count: int, valid: np.ndarray) -> np.ndarray:
    """`count` of `ids` at random, valid ones before any padding; both parts in raster order, padding last."""
    order = rng.random_sample(len(ids)) + ~valid[ids]
    chosen = np.zeros(len(ids), dtype=bool)
    chosen[np.argpartition(order, count - 1)[:count]] = True
    return _padding_last(ids[chosen], valid)


def _padding_last(ids: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """The ids with padding moved to the end; the order is otherwise kept."""
    return np.concatenate([ids[valid[ids]], ids[~valid[ids]]])


def _draw_uniform(rng: np.random.RandomState, num_target: int, valid: np.ndarray) -> np.ndarray:
    """bool [N] with num_target set, the same share of the valid tokens as of the padding.

    Where only a third of the grid is valid, valid tokens first would mask every one of them. One valid token
    on either side at least, where there are two and room for it.
    """
    num_tokens, num_valid = len(valid), int(np.count_nonzero(valid))
    share = min(max(1, round(num_target * num_valid / num_tokens)), num_valid - 1)
    from_valid = max(0, share, num_target - (num_tokens - num_valid))
    order = rng.random_sample(num_tokens)
    chosen = np.zeros(num_tokens, dtype=bool)
    for ids, count in (
        (np.flatnonzero(valid), from_valid),
        (np.flatnonzero(~valid), num_target - from_valid),
    ):
        if count > 0:
            chosen[ids[np.argpartition(order[ids], count - 1)[:count]]] = True
    return chosen


def _draw_union(
    rng: np.random.RandomState, grid: tuple[int, int, int], family: MaskFamily, num_target: int
) -> np.ndarray:
    """bool [N]: the union of the first blocks that together hold at least num_target tokens."""
    union = np.zeros(grid, dtype=bool)
    while np.count_nonzero(union) < num_target:
        corner = []
        for size, extent in zip(grid, _block_size(rng, grid, family), strict=True):
            start = rng.randint(size - extent + 1)
            corner.append(slice(start, start + extent))
        union[tuple(corner)] = True
    return union.ravel()


def _block_size(
    rng: np.random.RandomState, grid: tuple[int, int, int], family: MaskFamily
) -> tuple[int, int, int]:
    """Tokens along (D, H, W) of one block of the family's scale and a random aspect, at most the grid's."""
    size_d, size_h, size_w = grid
    # A box takes the same share of D as of a plane's sides, so scale is its share of the whole grid.
    d = size_d if family.tube else max(1, round(size_d * family.scale ** (1 / 3)))
    area = size_h * size_w * (family.scale if family.tube else family.scale ** (2 / 3))
    aspect = rng.uniform(*ASPECTS)
    w = min(max(1, round(math.sqrt(area / aspect)), math.ceil(area / size_h)), size_w)
    # Where the wanted width does not fit, the height makes up for it; the line above does the reverse.
    h = math.sqrt(area * aspect) if math.sqrt(area / aspect) <= size_w else area / size_w
    return d, min(max(1, round(h)), size_h), w
