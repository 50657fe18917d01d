"""Two runs side by side: `python -m docs.draw.collapse HEALTHY_RUN COLLAPSED_RUN [--row N] [--out FOLDER]`.

In: two run directories of one store (docs/guides/checkpoints.md has the commands). Out, in the folder of the
second: collapse_gauges.png, the gauges of both over the optimizer step, and collapse_features.png, three
components of the token features of one B-scan at the end of each. Those of the page: --row 118 --out
docs/pictures.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.decomposition import PCA

from docs.draw.overview import GAMMA
from utils.cli import number_from, run_cli
from utils.errors import UserError
from utils.help_pages import Parser
from utils.report.pictures import Snapshot, load_snapshot, show_mm
from utils.report.run_files import Run, read_run

CURVES = (
    ("train/loss", "train/loss"),
    ("train/rankme", "train/rankme: directions in use"),
    ("train/feature_std", "train/feature_std: spread"),
    ("train/feature_cosine", "train/feature_cosine: volumes alike"),
)
COLOURS = {"healthy": "#1f6fb2", "collapsed": "#c8452f"}
COMPONENTS = 3


def pictured(run: Run) -> dict[int, Path]:
    """Rows of the store whose pictures the run has, each with the newest."""
    return {int(path.stem.partition("_row_")[2]): path for path in run.snapshots}


def common_row(runs: dict[str, Run], row: int | None) -> int:
    """The row to show: this one, else the first that both runs have."""
    common = sorted(set.intersection(*(set(pictured(run)) for run in runs.values())))
    if not common or row not in (None, *common):
        there = ", ".join(map(str, common)) or "none"
        raise UserError(f"--row: expected a row with pictures in both runs, found {row}; there: {there}")
    return common[0] if row is None else row


def gauges(runs: dict[str, Run]) -> Figure:
    """Four gauges of both runs over the step; a dotted line where the alarm began."""
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    axes = figure.subplots(1, len(CURVES))
    for name, run in runs.items():
        for axis, (metric, _) in zip(axes, CURVES, strict=True):
            points = zip(*run.series.get(metric, ()), strict=True)
            axis.plot(*points, color=COLOURS[name], label=name, linewidth=2)
            for step, _ in run.alarms:
                axis.axvline(step, color=COLOURS[name], linestyle=":", linewidth=1.5)
    for axis, (_, title) in zip(axes, CURVES, strict=True):
        axis.set_title(title, fontsize="medium")
        axis.set_xlabel("optimizer step")
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    return figure


def features(runs: dict[str, Run], row_of_store: int) -> Figure:
    """A B-scan, and its token features at the end of each run: a row each, a column for each component."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    axes = figure.subplots(len(runs), 1 + COMPONENTS, sharex=True, sharey=True)
    for row, (name, run) in zip(axes, runs.items(), strict=True):
        snapshot = load_snapshot(pictured(run)[row_of_store])
        plane = snapshot.volume.shape[0] // 2
        show_mm(row[0], (snapshot.volume[plane] / 255.0) ** GAMMA, snapshot.spacing[1:], "the B-scan")
        row[0].set_ylabel(f"{name}\naxial, mm")
        show_components(row[1:], snapshot, plane)
    for axis in axes[-1]:
        axis.set_xlabel("A-scan direction, mm")
    return figure


def show_components(axes: Sequence[Axes], snapshot: Snapshot, plane: int) -> None:
    """The principal components of the volume's token features, all in units of the first one's deviation."""
    keep = snapshot.valid > 0
    pca = PCA(len(axes)).fit(snapshot.features[keep])
    scores = pca.transform(snapshot.features) / pca.explained_variance_[0] ** 0.5
    _, height, width = snapshot.volume.shape
    extent = (0.0, width * snapshot.spacing[2], height * snapshot.spacing[1], 0.0)
    for number, axis in enumerate(axes):
        image = scores[:, number].reshape(snapshot.grid)[plane // snapshot.patch[0]]
        axis.imshow(image, "RdBu_r", vmin=-2, vmax=2, extent=extent, interpolation="nearest")
        share = pca.explained_variance_ratio_[number]
        axis.set_title(f"component {number + 1}: {share:.1%} of the variance", fontsize="small")


def main() -> None:
    """Draw both pictures from the two runs of the command line."""
    parser = Parser(
        prog="python -m docs.draw.collapse",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name in COLOURS:
        parser.add_argument(name, type=Path, metavar=f"{name.upper()}_RUN", help="a run directory")
    parser.add_argument("--row", type=number_from(0), metavar="N", help="of the store; default: the first")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: COLLAPSED_RUN")
    args = parser.parse_args()
    runs = {name: read_run(vars(args)[name]) for name in COLOURS}
    figures = {"gauges": gauges(runs), "features": features(runs, common_row(runs, args.row))}
    folder = args.out or args.collapsed
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        path = folder / f"collapse_{name}.png"
        figure.savefig(path, dpi=90)
        print(path)


if __name__ == "__main__":
    run_cli(main)
