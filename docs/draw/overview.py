"""Draw docs/pictures/overview.png and masks.png: `python -m docs.draw.overview [--run DIR] [--row N]`.

In: a run on the phantom, whose snapshots are of two steps at least, with its store and tree. The same eye is
rendered again at the resolution of the device. Out: the pictures of the documents, the second where
tokens are hidden.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from data_setup.phantom.cohort import make_participants
from data_setup.phantom.files import POSITION_STYLES, scan_volume
from utils.cli import run_cli
from utils.config.load import load_config
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
FOLDER = Path(__file__).resolve().parents[1] / "pictures"


def overview(
    full_HW: np.ndarray, full_spacing: tuple[float, float], first: Snapshot, last: Snapshot
) -> Figure:
    """A B-scan as the device gives it, as the encoder sees it, and its token features at two steps.

    full_HW: grey values from 0 to 1; full_spacing: mm along both axes.
    """
    plane, patch = last.volume.shape[0] // 2, last.patch
    image = (last.volume[plane] / 255.0) ** GAMMA
    before_N3, after_N3 = _matched_components(first, last)
    hides = _hides(last)
    figure = Figure(figsize=(11, 5.3), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    show_mm(axes[0, 0], full_HW**GAMMA, full_spacing, None)
    show_mm(axes[0, 1], masked(last, plane, image), last.spacing[1:], None)
    for axis, colour_N3 in ((axes[1, 0], before_N3), (axes[1, 1], after_N3)):
        colour_HW3 = colour_N3.reshape(*last.grid, 3)[plane // patch[0]]
        colour_HW3 = colour_HW3.repeat(patch[1], axis=0).repeat(patch[2], axis=1)
        show_mm(axis, 0.7 * colour_HW3 + 0.3 * np.sqrt(image[..., None]), last.spacing[1:], None)
    titles = (
        "1  A synthetic B-scan at full resolution",
        f"2  What the demo's encoder gets, {image.shape[0]} x {image.shape[1]}{', masked' if hides else ''}",
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
    if hides:
        keys += [Patch(color=TARGET_RGB, label="target: its features are predicted")]
        keys += [Patch(color="#333333", label="neither")]
    keys += [Patch(color="none", label="3 and 4: similar colours, similar features")]
    figure.legend(handles=keys, loc="outside lower center", ncols=4, frameon=False, fontsize="medium")
    return figure


def full_bscan(run: Path, row: int, shown: Snapshot) -> tuple[np.ndarray, tuple[float, float]]:
    """The middle plane of a snapshot of this row of the store, rendered again as the device would scan it.

    Returns grey values [H, W] from 0 to 1, cut to the snapshot's field, and their spacing in mm.
    """
    cfg = load_config(run / "config.yaml")
    line = pd.read_parquet(Path(cfg.data.store) / "index.parquet").set_index("row").loc[row]
    made = json.loads((Path(cfg.data.gcs_root) / "synthetic.json").read_text())["arguments"]
    people = make_participants(made["participants"], made["seed"])
    person = next(person for person in people if person.person_id == line["person_id"])
    scan = next(
        scan
        for scan in person.scans
        if scan.protocol.name == line["protocol"] and scan.laterality == line["laterality"]
    )
    (_, height, width), field_mm = scan.protocol.shape, scan.protocol.field_mm
    num_planes = 2 * round(field_mm[0] / shown.spacing[0]) + 1  # every second one is between two of the store
    volume, spacing = scan_volume(person, scan, made["seed"], "full", (num_planes, height, width))
    inferior_first = POSITION_STYLES[scan.protocol.name].inferior_first
    plane_HW = volume.voxels[:: -1 if inferior_first else 1][num_planes // 2 + 1] / 255.0
    fields_mm = [n * s for n, s in zip(shown.volume.shape[1:], shown.spacing[1:], strict=True)]
    rows, columns = (round(mm / s) for mm, s in zip(fields_mm, spacing[1:], strict=True))
    image_HW = np.zeros((rows, columns))
    (to_h, from_h), (to_w, from_w) = _middle(rows, height), _middle(columns, width)
    image_HW[to_h, to_w] = plane_HW[from_h, from_w]
    return image_HW, (spacing[1], spacing[2])


def _middle(size: int, of: int) -> tuple[slice, slice]:
    """Where `of` pixels lie in `size` pixels with the same middle, and which of them do."""
    kept = min(size, of)
    return slice((size - kept) // 2, (size + kept) // 2), slice((of - kept) // 2, (of + kept) // 2)


def _hides(snapshot: Snapshot) -> bool:
    """Whether the encoder did not see all tokens."""
    return len(snapshot.target) < len(snapshot.valid)


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


def draw_docs(run: Path, folder: Path, row: int | None = None) -> list[Path]:
    """Write the pictures of the documents from the snapshots of a run on the phantom; returns their paths.

    row: of the store; None: the first with snapshots. UserError: it has fewer than two steps with pictures.
    """
    paths = sorted((run / "snapshots").glob("*.npz"))
    rows = [int(path.stem.partition("_row_")[2]) for path in paths]
    row = rows[0] if row is None and rows else row
    paths = [path for path, its_row in zip(paths, rows, strict=True) if its_row == row]
    if row is None or len(paths) < 2:
        raise UserError(
            f"{run / 'snapshots'}: expected pictures of one volume at two steps, found {len(paths)}"
        )
    first, last = load_snapshot(paths[0]), load_snapshot(paths[-1])
    folder.mkdir(parents=True, exist_ok=True)
    full = full_bscan(run, row, last)
    figures = {"overview.png": overview(*full, first, last)}
    if _hides(last):
        figures["masks.png"] = bscan_with_masks(last)
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=110)
    return [folder / name for name in figures]


def main(argv: Sequence[str] | None = None, folder: Path = FOLDER) -> None:
    """Draw the pictures of the documents from a run on the phantom."""
    parser = Parser(
        prog="python -m docs.draw.overview",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--run", type=Path, default=Path("runs/smoke_test"), metavar="DIR", help="a run directory"
    )
    parser.add_argument("--row", type=int, metavar="N", help="row of the store (default: the first pictured)")
    args = parser.parse_args(argv)
    for path in draw_docs(args.run, folder, args.row):
        print(path)


if __name__ == "__main__":
    run_cli(main)
