"""How likely a token of each plane of D is to be context: fixed counts against a trim to the batch minimum.

    python -m benchmarks.mask_planes [--batches 200]

V-JEPA 2 takes the complement of its blocks as context and cuts every sample of a batch to the smallest one,
at the end of the raster-ordered list; raster order runs over D first, so the cut always falls on the last
planes. That sampler is re-modelled here in a few lines (block size once per batch, places per sample, prefix
trim). The table shows the probability that a token of a plane is context, the last plane over the first, and
the time that one core needs to draw a batch of 8.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import numpy as np

from data_setup.masks import MaskPlan, draw_mask
from utils.config import MaskFamily

GRID = (16, 24, 24)
BATCH = 8
NUM = math.prod(GRID)
SHOWN = (0, 3, 7, 8, 12, 15)  # planes
ASPECT = (0.75, 1.5)


def upstream_context(rng: np.random.RandomState, blocks: int, scale: float) -> list[np.ndarray]:
    """Context ids of a batch after the trim: blocks span all of D, their union is hidden."""
    size_h, size_w = GRID[1:]
    area, aspect = int(size_h * size_w * scale), rng.uniform(*ASPECT)
    h = min(round(math.sqrt(area * aspect)), size_h)
    w = min(round(math.sqrt(area / aspect)), size_w)
    contexts = []
    while len(contexts) < BATCH:
        visible = np.ones(GRID, dtype=bool)
        for _ in range(blocks):
            top, left = rng.randint(size_h - h + 1), rng.randint(size_w - w + 1)
            visible[:, top : top + h, left : left + w] = False
        if visible.any():
            contexts.append(np.flatnonzero(visible))
    keep = min(map(len, contexts))
    return [context[:keep] for context in contexts]


def fixed_context(rng: np.random.RandomState, plan: MaskPlan) -> list[np.ndarray]:
    """Context ids of a batch with this project's masks."""
    valid = np.ones(NUM, dtype=bool)
    return [draw_mask(rng, plan, valid)[0] for _ in range(BATCH)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=200)
    batches = parser.parse_args().batches

    def plan(*families: MaskFamily) -> MaskPlan:
        return MaskPlan(GRID, round(0.4 * NUM), round(0.3 * NUM), families)

    short, long = MaskFamily(0.15, True, ASPECT), MaskFamily(0.5, True, ASPECT)
    box = MaskFamily(0.05, False, ASPECT)
    uniform = np.random.RandomState.permutation
    schemes: dict[str, Callable[[np.random.RandomState], list[np.ndarray]]] = {
        "fixed counts, tubes .15": lambda rng: fixed_context(rng, plan(short)),
        "fixed counts, tubes .5": lambda rng: fixed_context(rng, plan(long)),
        "fixed counts, boxes .05": lambda rng: fixed_context(rng, plan(box)),
        "uniform": lambda rng: [uniform(rng, NUM)[: round(0.4 * NUM)] for _ in range(BATCH)],
        "trimmed, 8 tubes .15": lambda rng: upstream_context(rng, 8, 0.15),
        "trimmed, 2 tubes .7": lambda rng: upstream_context(rng, 2, 0.7),
    }
    print(f"grid {GRID}, batch {BATCH}, {batches} batches; p(a token of plane d is context)")
    print(f"{'':24}" + "".join(f"  d={d:<4}" for d in SHOWN) + " last/first  ms/batch")
    for name, draw in schemes.items():
        rng, counts, seconds = np.random.RandomState(0), np.zeros(GRID[0]), []
        for _ in range(batches):
            start = time.perf_counter()
            contexts = draw(rng)
            seconds.append(time.perf_counter() - start)
            counts += np.bincount(np.concatenate(contexts) // (GRID[1] * GRID[2]), minlength=GRID[0])
        share = counts / (batches * BATCH * GRID[1] * GRID[2])
        cells = "".join(f"  {share[d]:.3f} " for d in SHOWN)
        print(f"{name:24}{cells} {share[-1] / share[0]:10.2f} {np.median(seconds) * 1e3:9.2f}")


if __name__ == "__main__":
    main()
