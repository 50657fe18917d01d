"""Draw docs/pictures/architecture.png: `python -m docs.draw.architecture`. A box is a room."""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from utils.help_pages import Parser

FOLDER = Path(__file__).resolve().parents[1] / "pictures"
COLOURS = {"data": "#cfe3f7", "model": "#fbe0c3", "train": "#d7ecd4", "use": "#e6d9f2", "file": "#f2f2f2"}
# name, what it does, kind, column, row
BOXES = (
    ("any files", "DICOM, HEYEX,\nNIfTI, images", "file", 0, 1),
    ("data_setup", "manifest, readers,\nresample, prepare", "data", 1, 1),
    ("store", "Zarr v3: a volume a chunk,\nindex, splits, statistics", "file", 2, 1),
    ("data_setup.loader", "global batch =\nf(seed, step)", "data", 3, 1),
    ("models", "encoder, predictor,\nEMA target, losses", "model", 4, 0),
    ("pretraining", "train: step, schedules,\ngauges, probes, alarms", "train", 4, 1),
    ("utils.runtime", "CPU, GPU, torchrun,\nPyTorch/XLA", "train", 4, 2),
    ("run directory", "checkpoints, metrics,\nreport, dashboards", "file", 5, 1),
    ("finetuning", "train, evaluate, embed,\npredict, compare", "use", 6, 1),
)
ARROWS = (
    ("any files", "data_setup"),
    ("data_setup", "store"),
    ("store", "data_setup.loader"),
    ("data_setup.loader", "pretraining"),
    ("models", "pretraining"),
    ("utils.runtime", "pretraining"),
    ("pretraining", "run directory"),
    ("run directory", "finetuning"),
)
WIDTH, HEIGHT, GAP_X, GAP_Y = 1.9, 1.0, 0.35, 0.45


def centre(column: int, row: int) -> tuple[float, float]:
    """The middle of a box."""
    return column * (WIDTH + GAP_X) + WIDTH / 2, (2 - row) * (HEIGHT + GAP_Y) + HEIGHT / 2


def draw() -> Figure:
    """The flow from files to predictions, one box a room."""
    figure = Figure(figsize=(15.5, 4.6), layout="constrained")
    axis = figure.subplots()
    places = {name: centre(column, row) for name, _, _, column, row in BOXES}
    for name, words, kind, _, _ in BOXES:
        x, y = places[name]
        corner = (x - WIDTH / 2, y - HEIGHT / 2)
        box = FancyBboxPatch(
            corner, WIDTH, HEIGHT, boxstyle="round,pad=0,rounding_size=0.08", fc=COLOURS[kind], ec="#555555"
        )
        axis.add_patch(box)
        axis.text(x, y + 0.24, name, ha="center", va="center", fontsize=11, fontweight="bold")
        axis.text(x, y - 0.16, words, ha="center", va="center", fontsize=9)
    for start, end in ARROWS:
        (x0, y0), (x1, y1) = places[start], places[end]
        if x0 == x1:
            step = HEIGHT / 2 if y1 > y0 else -HEIGHT / 2
            ends = (x0, y0 + step), (x1, y1 - step)
        else:
            ends = (x0 + WIDTH / 2, y0), (x1 - WIDTH / 2, y1)
        axis.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=14, color="#333333"))
    axis.set_xlim(-0.1, 7 * (WIDTH + GAP_X))
    axis.set_ylim(-0.1, 3 * (HEIGHT + GAP_Y) - GAP_Y + 0.1)
    axis.set_aspect("equal")
    axis.axis("off")
    return figure


if __name__ == "__main__":
    Parser(
        prog="python -m docs.draw.architecture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    draw().savefig(FOLDER / "architecture.png", dpi=100)
