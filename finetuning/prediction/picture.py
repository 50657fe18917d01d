"""One page a volume: what was predicted, the scan, and where the evidence lies.

In: a volume on the grid, lines of text, and tokens' evidence or surfaces. Out: a matplotlib figure in
millimetres; a flat B-scan is stretched in depth and says by how much. B-scans run superior to inferior as in
the store, A-scans as in the file.
"""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from finetuning.prediction.lines import NO_ANSWER

FOR_RGB, AGAINST_RGB, LOOK_RGB = (0.90, 0.22, 0.12), (0.15, 0.45, 0.95), (0.98, 0.75, 0.10)
LEAST_HEIGHT = 0.34  # of a drawn B-scan, as a share of its width: a flatter one is stretched, and says so
CLIP_PERCENTILE = 99.5  # of |evidence|: full colour from here on
STRONGEST_ALPHA = 0.65
NUM_PLANES = 3
WRAP = 42  # letters in a line of the text column
LINE_INCH = 8.5 * 1.2 / 72
TEXT_SHARE, TEXT_SHARE_ALONE = 0.5, 0.84  # of the page's height, below bars and without them
NO_ANSWER_COLOUR = "#c53030"
NOTICE = "A research model, not a medical device. Not for diagnosis."


@contextmanager
def plain_text() -> Iterator[None]:
    """Around what draws and saves: names of files and classes are text, whatever letters they hold."""
    with rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        yield


@dataclass(frozen=True)
class Page:
    """What a picture shows; `values` or `surfaces`, not both."""

    title: str
    lines: Sequence[str]  # what was predicted and how sure that is
    bars: Mapping[str, float]  # probabilities by name, in the order of the head; empty: none
    bars_title: str
    warnings: Sequence[str]
    footer: str  # what the map is, and what it is not
    volume: np.ndarray  # uint8 [D, H, W]
    spacing_mm: tuple[float, float, float]
    valid_box: Sequence[int]  # half-open, d0, d1, h0, h1, w0, w1
    patch: tuple[int, int, int] = (1, 1, 1)  # voxels of a token
    values: np.ndarray | None = None  # evidence of tokens [gd, gh, gw], 0: as most of the scan
    is_signed: bool = True
    surfaces: Mapping[str, np.ndarray] = field(default_factory=dict)  # name -> voxels along h [D, W]
    thickness_um: np.ndarray | None = None  # en face [D, W]
    has_answer: bool = True  # False: the head has none for this scan, and the page says so first


def draw(page: Page) -> Figure:
    texts = _texts(page)
    height = len(texts) * LINE_INCH / (TEXT_SHARE if page.bars else TEXT_SHARE_ALONE)
    figure = Figure(figsize=(15.5, max(7.4, height)))
    planes = chosen_planes(page)
    _write(_areas(figure, (2, 1), (0.085, 0.205), hspace=0.14, heights=(2, 3))[:, 0], page, texts)
    _enface(_areas(figure, (2, 1), (0.265, 0.455), hspace=0.28)[:, 0], page, planes)
    axes = _areas(figure, (len(planes), 2), (0.505, 0.985), hspace=0.32)
    for number, (plane, pair) in enumerate(zip(planes, axes, strict=True), 1):
        _bscan(pair[0], page, plane, is_overlaid=False)
        _bscan(pair[1], page, plane, is_overlaid=True)
        d0, d1 = page.valid_box[:2]
        place_mm = (plane + 0.5 - d0) * page.spacing_mm[0]
        pair[0].set_title(
            f"{number}   {place_mm:.1f} mm below the upper edge of {(d1 - d0) * page.spacing_mm[0]:.1f} mm",
            loc="left",
            fontsize="medium",
        )
        scale = "" if (stretch := stretch_of(page)) == 1 else f", drawn x {stretch:g}"
        pair[0].set_ylabel(f"depth, mm{scale}", fontsize="small")
    of_map = "with the predicted surfaces"
    if page.values is not None:
        of_map = "with the evidence" if page.is_signed else "with what the head looks at"
    axes[0, 1].set_title(of_map, loc="left", fontsize="medium", fontweight="bold")
    for axis in axes[-1]:
        axis.set_xlabel("along the B-scan, mm", fontsize="small")
    figure.legend(handles=_keys(page), loc="lower right", ncols=6, frameon=False, fontsize="medium")
    title, colour = page.title, "black"
    if not page.has_answer:
        title, colour = f"{NO_ANSWER}   {page.title}", NO_ANSWER_COLOUR
    figure.suptitle(title, x=0.015, y=0.98, ha="left", fontsize="large", fontweight="bold", color=colour)
    figure.text(0.015, 0.012, NOTICE, va="bottom", fontsize=8.5, fontweight="bold")
    return figure


def _areas(
    figure: Figure,
    shape: tuple[int, int],
    across: tuple[float, float],
    hspace: float,
    heights: Sequence[float] | None = None,
) -> np.ndarray:
    """Axes [rows, columns] between two shares of the figure's width."""
    first, last = across
    grid = figure.add_gridspec(
        *shape,
        left=first,
        right=last,
        top=0.91,
        bottom=0.11,
        hspace=hspace,
        wspace=0.12,
        height_ratios=heights,
    )
    return grid.subplots(squeeze=False)


def chosen_planes(page: Page) -> list[int]:
    """Three B-scans, ascending: the middle and the two of strongest evidence apart; of surfaces of thirds."""
    d0, d1 = int(page.valid_box[0]), int(page.valid_box[1])
    middle = (d0 + d1 - 1) // 2
    if page.values is None:
        return sorted({d0 + int((i + 0.5) * (d1 - d0) / NUM_PLANES) for i in range(NUM_PLANES)})
    depth = page.patch[0]
    strength = np.abs(page.values).sum(axis=(1, 2)).repeat(depth)[: page.volume.shape[0]]
    planes = [middle]
    for place in np.argsort(-strength, kind="stable").tolist():
        centre = min(max((place // depth) * depth + depth // 2, d0), d1 - 1)
        if len(planes) < NUM_PLANES and all(abs(centre - p) >= max(1, (d1 - d0) // 8) for p in planes):
            planes.append(centre)
    return sorted(planes)


def _texts(page: Page) -> list[str]:
    texts: list[str] = []
    for line in page.lines:
        texts += [part for row in line.splitlines() for part in textwrap.wrap(row, WRAP)] + [""]
    texts.append("WARNINGS" if page.warnings else "No warning applies.")
    for line in page.warnings:
        texts += textwrap.wrap(line, WRAP, initial_indent="! ", subsequent_indent="  ")
    return [*texts, "", *textwrap.wrap(page.footer, WRAP)]


def _write(axes: np.ndarray, page: Page, texts: Sequence[str]) -> None:
    """Prediction, warnings and what the map is: the text column."""
    top, bottom = axes
    if page.bars:
        names, values = list(page.bars), list(page.bars.values())
        best = int(np.argmax(values))
        chosen = "#2b6cb0" if page.has_answer else "#b8c4d0"
        colours = [chosen if i == best else "#b8c4d0" for i in range(len(values))]
        top.barh(range(len(values)), values, color=colours, height=0.62)
        top.set_yticks(range(len(values)), [textwrap.fill(name, 14) for name in names], fontsize="medium")
        top.set_xlim(0, 1.18)
        top.set_xticks([0, 0.5, 1.0])
        top.invert_yaxis()
        for place, value in enumerate(values):
            top.text(value + 0.02, place, f"{value:.0%}", va="center", fontsize="medium")
        top.spines[["top", "right"]].set_visible(False)
        top.set_title(page.bars_title, loc="left", fontsize="medium", fontweight="bold")
    else:
        top.axis("off")
    bottom.axis("off")
    place = bottom if page.bars else top
    place.text(-0.58, 1, "\n".join(texts), va="top", fontsize=8.5, transform=place.transAxes, linespacing=1.2)


def _enface(axes: np.ndarray, page: Page, planes: Sequence[int]) -> None:
    """The scan from above, and the map from above; lines say where the B-scans are."""
    first, second = axes
    d_mm, _, w_mm = page.spacing_mm
    d0, d1, h0, h1, w0, w1 = page.valid_box
    mean = page.volume[:, h0:h1].mean(axis=1)
    extent = _extent(mean.shape, (d_mm, w_mm), (d0, w0))
    for axis in axes:
        axis.imshow(stretched(mean), "gray", extent=extent, aspect="equal", vmin=0, vmax=1)
        axis.tick_params(labelsize="small")
        axis.set_ylabel("across B-scans, mm", fontsize="small")
        axis.set_xlim(0, (w1 - w0) * w_mm)
        axis.set_ylim((d1 - d0) * d_mm, 0)
    for number, plane in enumerate(planes, 1):
        y = (plane + 0.5 - d0) * d_mm
        for axis in axes:
            axis.axhline(y, color="#39d353", linewidth=0.9, alpha=0.9)
        below = y < 0.1 * (d1 - d0) * d_mm
        first.text(
            0.02 * (w1 - w0) * w_mm,
            y,
            str(number),
            va="top" if below else "bottom",
            fontweight="bold",
            color="#39d353",
            bbox={"facecolor": "black", "alpha": 0.5, "pad": 1.5, "linewidth": 0},
        )
    first.set_title("From above (mean over depth)", loc="left", fontsize="medium")
    if page.values is not None:
        second.imshow(tint(page.values.sum(axis=1), page.is_signed), extent=extent, aspect="equal")
        second.set_title("The map from above", loc="left", fontsize="medium", fontweight="bold")
    elif page.thickness_um is not None:
        image = second.imshow(page.thickness_um, "viridis", extent=extent, aspect="equal")
        second.figure.colorbar(image, ax=second, shrink=0.8, label="um")
        second.set_title("Thickness of the retina", loc="left", fontsize="medium", fontweight="bold")
    second.set_xlabel("along the B-scan, mm", fontsize="small")


def _extent(
    shape: tuple[int, ...], pixel_mm: tuple[float, float], origin: Sequence[int]
) -> tuple[float, float, float, float]:
    """Of an image in millimetres from the corner of the acquired field, (left, right, bottom, top)."""
    (rows, columns), (down, right), (first_row, first_column) = shape, pixel_mm, origin
    return (
        -first_column * right,
        (columns - first_column) * right,
        (rows - first_row) * down,
        -first_row * down,
    )


def _bscan(axis: Axes, page: Page, plane: int, is_overlaid: bool) -> None:
    """A B-scan in millimetres, the acquired part of it, and on it evidence or surfaces."""
    _, h_mm, w_mm = page.spacing_mm
    _, _, h0, h1, w0, w1 = page.valid_box
    extent, stretch = _extent(page.volume.shape[1:], (h_mm, w_mm), (h0, w0)), stretch_of(page)
    axis.imshow(stretched(page.volume[plane]), "gray", extent=extent, aspect=stretch, vmin=0, vmax=1)
    if is_overlaid and page.values is not None:
        of_plane = page.values[min(plane // page.patch[0], len(page.values) - 1)]
        tinted = tint(of_plane, page.is_signed, _full_colour(page.values))
        axis.imshow(tinted, extent=extent, aspect=stretch, interpolation="nearest")
    for number, heights in enumerate(page.surfaces.values() if is_overlaid else ()):
        across = (np.arange(heights.shape[1]) + 0.5 - w0) * w_mm
        colour = _line_colour(number, len(page.surfaces))
        axis.plot(across, (heights[plane] + 0.5 - h0) * h_mm, color=colour, linewidth=1.0)
    axis.set_xlim(0, (w1 - w0) * w_mm)
    axis.set_ylim((h1 - h0) * h_mm, 0)
    axis.tick_params(labelsize="small")


def _full_colour(values: np.ndarray) -> float:
    return max(float(np.percentile(np.abs(values), CLIP_PERCENTILE)), 1e-12)


def tint(values: np.ndarray, is_signed: bool, full: float | None = None) -> np.ndarray:
    """RGBA of a map: the colour says the sign, the opacity how much."""
    share = np.clip(np.abs(values) / (full or _full_colour(values)), 0, 1)
    positive = np.array(FOR_RGB if is_signed else LOOK_RGB)
    colour = np.where((values > 0)[..., None], positive, np.array(AGAINST_RGB))
    return np.concatenate([colour, STRONGEST_ALPHA * share[..., None]], axis=-1)


def stretched(image: np.ndarray) -> np.ndarray:
    """Grey values 0..1 for print: from the 1st to the 99.7th percentile, the dark parts lifted."""
    inside = image[image > 0] if (image > 0).any() else image
    low, high = np.percentile(inside, [1, 99.7])
    return np.clip((image - low) / max(float(high - low), 1e-6), 0, 1) ** 0.7


def _line_colour(number: int, count: int) -> tuple[float, float, float]:
    """Of a surface, from blue at the vitreous to red at the choroid."""
    red, green, blue, _ = colormaps["turbo"](0.08 + 0.84 * number / max(1, count - 1))
    return red, green, blue


def stretch_of(page: Page) -> float:
    """How much deeper than true a B-scan is drawn, 1 or more."""
    _, _, h0, h1, w0, w1 = page.valid_box
    _, h_mm, w_mm = page.spacing_mm
    needed = LEAST_HEIGHT * (w1 - w0) * w_mm / ((h1 - h0) * h_mm)
    return 1.0 if needed < 1.2 else round(needed, 1)


def _keys(page: Page) -> list[Patch | Line2D]:
    if page.values is None:
        names = enumerate(page.surfaces)
        count = len(page.surfaces)
        return [Line2D([], [], color=_line_colour(i, count), label=name) for i, name in names]
    if not page.is_signed:
        return [Patch(color=LOOK_RGB, label="looked at")]
    return [
        Patch(color=FOR_RGB, label="speaks for the prediction"),
        Patch(color=AGAINST_RGB, label="speaks against it"),
        Patch(color="#888888", label="no tint: as most of the scan"),
    ]
