"""The first picture of a run: one eye as the encoder sees it, and bars of the encoder beside other rows.

In: a run (utils.report.run_files). Out: figures, of which the report's first screen has the two parts and
picture.png both. The bars are those of truth.json (which layers lie in a token), else of evaluation.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from matplotlib.figure import Figure, FigureBase

from utils.report.pictures import CONTEXT_RGB, Snapshot, load_snapshot, masked, pca_colours, show_mm
from utils.report.run_files import Run

GAMMA = 0.7  # the vitreous and the choroid of a B-scan are dark on a screen
OTHER_RGB = (0.72, 0.75, 0.79)
EYE_INCHES, BARS_INCHES = (5.6, 6.6), (6.4, 6.6)
METRICS = {"r2": "R2", "balanced_accuracy": "balanced accuracy"}


@dataclass(frozen=True)
class Bars:
    """Rows of one question, the encoder's first: label, score, 95 % interval."""

    title: str
    score: str
    rows: tuple[tuple[str, float, list[float] | None], ...]


def bars_of(run: Run) -> Bars | None:
    """The question that has most to tell; None where nothing was evaluated."""
    if run.truth:
        question, labels = run.truth["questions"][0], run.truth["labels"]
        rows = tuple((labels[row["name"]], row["r2"], row["ci95"]) for row in question["rows"])
        people = run.truth["n_participants"]
        return Bars(f"Which layers lie in a token? {people} people that no training saw", "R2", rows)
    if run.evaluation:
        name = run.evaluation["difference"]["metric"]
        scores = [(row["label"], row["metrics"][name]) for row in run.evaluation["rows"]]
        rows = tuple((label, s["value"], s["ci95"]) for label, s in scores if s["value"] is not None)
        return Bars(run.evaluation["title"].partition(":")[0], METRICS.get(name, name), rows)
    return None


def parts_of(run: Run) -> list[tuple[tuple[float, float], Callable[[FigureBase], None]]]:
    """(inches, how to draw it) of the eye and of the bars, where the run has them."""
    parts: list[tuple[tuple[float, float], Callable[[FigureBase], None]]] = []
    if run.snapshots:
        parts.append((EYE_INCHES, partial(draw_eye, snapshot=load_snapshot(run.snapshots[-1]))))
    if bars := bars_of(run):
        parts.append((BARS_INCHES, partial(draw_bars, bars=bars)))
    return parts


def figures_of(run: Run) -> list[Figure]:
    figures = []
    for inches, draw in parts_of(run):
        figures.append(Figure(inches, layout="constrained"))
        draw(figures[-1])
    return figures


def overview(run: Run) -> Figure | None:
    """All parts side by side; None of a run without any."""
    parts = parts_of(run)
    if not parts:
        return None
    widths, heights = zip(*(inches for inches, _ in parts), strict=True)
    figure = Figure((sum(widths), max(heights)), layout="constrained")
    places = figure.subfigures(1, len(parts), width_ratios=widths, squeeze=False)[0]
    for place, (_, draw) in zip(places, parts, strict=True):
        draw(place)
    return figure


def draw_eye(figure: FigureBase, snapshot: Snapshot) -> None:
    """A B-scan, its context and target tokens, its token features as colours."""
    plane, patch = snapshot.volume.shape[0] // 2, snapshot.patch
    image = (snapshot.volume[plane] / 255.0) ** GAMMA
    features = snapshot.features.reshape(*snapshot.grid, -1)
    colours, _ = pca_colours(features, snapshot.valid.reshape(snapshot.grid) > 0)
    colour = colours[plane // patch[0]].repeat(patch[1], axis=0).repeat(patch[2], axis=1)
    titles = {
        "one B-scan of one eye, as it was prepared": image,
        "blue: the encoder sees it; orange, if any: hidden and predicted": masked(snapshot, plane, image),
        "features of the encoder: similar colours, similar features": 0.7 * colour + 0.3 * image[..., None],
    }
    axes = figure.subplots(len(titles), 1, sharex=True, sharey=True)
    for axis, (title, picture) in zip(axes, titles.items(), strict=True):
        show_mm(axis, picture, snapshot.spacing[1:], title)
    axes[1].set_ylabel("axial, mm", fontsize="small")
    axes[-1].set_xlabel(f"A-scan direction, mm ({snapshot.title})", fontsize="small")


def draw_bars(figure: FigureBase, bars: Bars) -> None:
    """A bar for each row with its interval, the encoder's in blue, and a line at its height."""
    labels, values, ends = zip(*bars.rows, strict=True)
    axis = figure.subplots()
    axis.barh(labels, values, color=[CONTEXT_RGB, *[OTHER_RGB] * (len(labels) - 1)])
    for place, (value, pair) in enumerate(zip(values, ends, strict=True)):
        low, high = pair or (value, value)
        axis.plot([low, high], [place, place], color="black", linewidth=1)
        axis.text(max(high, 0.0), place, f" {value:.3f}", va="center", fontsize="small")
    axis.axvline(values[0], color=CONTEXT_RGB, linewidth=1, linestyle="--", zorder=0)
    axis.margins(x=0.14)  # for the numbers
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(bars.title, fontsize="small")
    axis.set_xlabel(f"{bars.score}, with 95 % intervals; grey: without this training", fontsize="small")
