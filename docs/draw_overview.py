"""Draw docs/pictures/overview.png and masks.png: `python -m docs.draw_overview [--run DIR]`.

In: a run on the phantom, whose snapshots are of two steps at least. Out: the pictures of the documents.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.cli import run_cli
from utils.errors import UserError
from utils.help_pages import Parser
from utils.report.pictures import (
    CONTEXT_RGB,
    TARGET_RGB,
    Snapshot,
    bscan_with_masks,
    load_snapshot,
    masked,
    pca_colours,
    show_mm,
)

GAMMA = 0.7  # the vitreous and the choroid of a B-scan are dark in print
FOLDER = Path(__file__).resolve().parent / "pictures"


def overview(first: Snapshot, last: Snapshot) -> Figure:
    """A B-scan, its context and target tokens, and its patch features at two steps of training."""
    plane, patch = last.volume.shape[0] // 2, last.patch
    image = (last.volume[plane] / 255.0) ** GAMMA
    before_N3, after_N3 = _matched_components(first, last)
    figure = Figure(figsize=(11, 5.3), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    show_mm(axes[0, 0], image, last.spacing[1:], None)
    show_mm(axes[0, 1], masked(last, plane, image), last.spacing[1:], None)
    for axis, colour_N3 in ((axes[1, 0], before_N3), (axes[1, 1], after_N3)):
        colour_HW3 = colour_N3.reshape(*last.grid, 3)[plane // patch[0]]
        colour_HW3 = colour_HW3.repeat(patch[1], axis=0).repeat(patch[2], axis=1)
        show_mm(axis, 0.7 * colour_HW3 + 0.3 * np.sqrt(image[..., None]), last.spacing[1:], None)
    titles = (
        "1  One B-scan of a synthetic OCT volume",
        "2  The same, as tokens and masks",
        "3  Token features before training, as colours",
        f"4  Token features after training, {_step_of(last)}",
    )
    for axis, title in zip(axes.flat, titles, strict=True):
        axis.set_title(title, fontsize="large", loc="left", fontweight="bold")
    for axis in axes[:, 0]:
        axis.set_ylabel("axial, mm")
    for axis in axes[1]:
        axis.set_xlabel("A-scan direction, mm")
    _draw_grid(axes[0, 1], last)
    keys = [Patch(color=CONTEXT_RGB, label="context: seen by the encoder")]
    keys += [Patch(color=TARGET_RGB, label="target: its features are predicted")]
    keys += [Patch(color="#333333", label="neither")]
    keys += [Patch(color="none", label="3 and 4: similar colours, similar features")]
    figure.legend(handles=keys, loc="outside lower center", ncols=4, frameon=False, fontsize="medium")
    return figure


def _step_of(snapshot: Snapshot) -> str:
    """`step 160` of a title that ends with it."""
    return snapshot.title.rpartition(", ")[2]


def _draw_grid(axis: Axes, snapshot: Snapshot) -> None:
    """Thin lines between the tokens of a B-scan."""
    (_, rows, columns), (_, height, width) = snapshot.grid, snapshot.patch
    for row in range(1, rows):
        axis.axhline(row * height * snapshot.spacing[1], color="white", linewidth=0.3, alpha=0.5)
    for column in range(1, columns):
        axis.axvline(column * width * snapshot.spacing[2], color="white", linewidth=0.3, alpha=0.5)


def _matched_components(first: Snapshot, last: Snapshot) -> tuple[np.ndarray, np.ndarray]:
    """Colours [N, 3] of two snapshots of one volume; the last takes the order and signs of the first.

    The order and signs of principal components are arbitrary, so equal places would otherwise change colour.
    """
    keep = last.valid > 0
    before_N3, after_N3 = (pca_colours(s.features, keep)[0] for s in (first, last))
    correlation = np.corrcoef(before_N3[keep].T, after_N3[keep].T)[:3, 3:]
    order = max(permutations(range(3)), key=lambda p: float(np.abs(correlation[range(3), p]).sum()))
    turned = correlation[range(3), order] < 0
    after_N3 = after_N3[:, order]
    return before_N3, np.where(turned, 1 - after_N3, after_N3)


def draw_docs(run: Path, folder: Path) -> list[Path]:
    """Write the pictures of the documents from the snapshots of a run on the phantom; returns their paths.

    UserError: the run has fewer than two steps with pictures of its first volume.
    """
    paths = sorted((run / "snapshots").glob("*.npz"))
    paths = [path for path in paths if path.stem.partition("_row_")[2] == paths[0].stem.partition("_row_")[2]]
    if len(paths) < 2:
        raise UserError(
            f"{run / 'snapshots'}: expected pictures of one volume at two steps, found {len(paths)}"
        )
    first, last = load_snapshot(paths[0]), load_snapshot(paths[-1])
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"overview.png": overview(first, last), "masks.png": bscan_with_masks(last)}
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=110)
    return [folder / name for name in figures]


def main(argv: Sequence[str] | None = None, folder: Path = FOLDER) -> None:
    """Draw the pictures of the documents from a run on the phantom."""
    parser = Parser(
        prog="python -m docs.draw_overview",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--run", type=Path, default=Path("runs/smoke_test"), metavar="DIR", help="a run directory"
    )
    for path in draw_docs(parser.parse_args(argv).run, folder):
        print(path)


if __name__ == "__main__":
    run_cli(main)
