"""How likely a token of each plane of D is to be context or target: fixed counts, uniform, V-JEPA 2's trim.

    python -m benchmarks.mask_planes [--batches 200]

V-JEPA 2 takes the complement of its blocks as context, their union as target, and cuts every sample of a
batch to the smallest one, at the end of the raster-ordered lists; raster order runs over D first, so the cut
always falls on the last planes. That sampler is re-modelled here in a few lines (block size once per batch,
places per sample, prefix trim). For batches of 8 and 24 the tables show the probability that a token of a
plane is context, or target, the last plane over the first, the tokens per sample and the time that one core
needs to draw a batch. docs/concepts/masks.md holds the numbers and what they mean.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import numpy as np

from data_setup.masks import MaskPlan, draw_mask
from utils.cli import number_from, run_cli
from utils.config.schema import MaskFamily
from utils.help_pages import Parser

GRID = (16, 24, 24)
BATCHES = (8, 24)  # samples; 24 is the published batch of one device
NUM = math.prod(GRID)
SHOWN = (0, 3, 7, 8, 12, 15)  # planes
ASPECT = (0.75, 1.5)
Masks = list[tuple[np.ndarray, np.ndarray]]  # context and target ids of every sample
Scheme = Callable[[np.random.RandomState, int], Masks]


def upstream(blocks: int, scale: float) -> Scheme:
    """V-JEPA 2's masks: blocks that span all of D, then the trim to the batch's smallest mask."""

    def draw(rng: np.random.RandomState, batch: int) -> Masks:
        size_h, size_w = GRID[1:]
        area, aspect = int(size_h * size_w * scale), rng.uniform(*ASPECT)
        h = min(round(math.sqrt(area * aspect)), size_h)
        w = min(round(math.sqrt(area / aspect)), size_w)
        masks: Masks = []
        while len(masks) < batch:
            visible = np.ones(GRID, dtype=bool)
            for _ in range(blocks):
                first_h, first_w = rng.randint(size_h - h + 1), rng.randint(size_w - w + 1)
                visible[:, first_h : first_h + h, first_w : first_w + w] = False
            if visible.any():
                masks.append((np.flatnonzero(visible), np.flatnonzero(~visible)))
        keep, keep_target = (min(len(pair[side]) for pair in masks) for side in (0, 1))
        return [(context[:keep], target[:keep_target]) for context, target in masks]

    return draw


def fixed(*families: MaskFamily) -> Scheme:
    """This project's masks: 0.4 N context and 0.3 N target tokens."""
    plan, valid = MaskPlan(GRID, round(0.4 * NUM), round(0.3 * NUM), families), np.ones(NUM, dtype=bool)
    return lambda rng, batch: [draw_mask(rng, plan, valid) for _ in range(batch)]


def uniform(rng: np.random.RandomState, batch: int) -> Masks:
    """The yardstick: 0.4 N context and 0.3 N target tokens of a random permutation."""
    orders = [rng.permutation(NUM) for _ in range(batch)]
    first, last = round(0.4 * NUM), round(0.7 * NUM)
    return [(order[:first], order[first:last]) for order in orders]


SCHEMES: dict[str, Scheme] = {
    "fixed counts, tubes .15": fixed(MaskFamily(0.15, True, ASPECT)),
    "fixed counts, tubes .5": fixed(MaskFamily(0.5, True, ASPECT)),
    "fixed counts, boxes .05": fixed(MaskFamily(0.05, False, ASPECT)),
    "uniform": uniform,
    "trimmed, 8 tubes .15": upstream(8, 0.15),
    "trimmed, 2 tubes .7": upstream(2, 0.7),
}


def measure(draw: Scheme, batch: int, batches: int) -> tuple[np.ndarray, float]:
    """Mean context and target tokens per plane and sample, [2, D]; median milliseconds per batch."""
    rng, counts, seconds = np.random.RandomState(0), np.zeros((2, GRID[0])), []
    for _ in range(batches):
        start = time.perf_counter()
        masks = draw(rng, batch)
        seconds.append(time.perf_counter() - start)
        for side, ids in enumerate(zip(*masks, strict=True)):
            counts[side] += np.bincount(np.concatenate(ids) // (GRID[1] * GRID[2]), minlength=GRID[0])
    return counts / (batches * batch), float(np.median(seconds)) * 1e3


def main() -> None:
    """Print the tables."""
    parser = Parser(
        prog="python -m benchmarks.mask_planes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--batches", type=number_from(1), default=200)
    batches = parser.parse_args().batches
    for batch in BATCHES:
        measured = {name: measure(draw, batch, batches) for name, draw in SCHEMES.items()}
        for side, what in enumerate(("context", "target")):
            print(f"grid {GRID}, batch {batch}, {batches} batches; p(a token of plane d is {what})")
            print(f"{'':24}" + "".join(f"  d={d:<4}" for d in SHOWN) + " last/first  tokens  ms/batch")
            for name, (counts, milliseconds) in measured.items():
                share = counts[side] / (GRID[1] * GRID[2])
                cells = "".join(f"  {share[d]:.3f} " for d in SHOWN)
                total = counts[side].sum()
                print(f"{name:24}{cells} {share[-1] / share[0]:10.2f} {total:7.0f} {milliseconds:9.2f}")
            print()


if __name__ == "__main__":
    run_cli(main)
