"""Pictures of a training step: both views of a volume, and what is predicted of it.

In: arrays of one volume, tokens in raster order (d, h, w) of `grid`. Out: matplotlib figures in millimetres.
D is the B-scan axis. utils/report/pictures.py has the pictures that the report shows too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from utils.report.pictures import Snapshot, masked, pca_colours, show_mm

VIEW_RANGE = (-1.5, 4.0)  # standard deviations of a volume that are shown from black to white
DPI = 80


@dataclass(frozen=True)
class Forecast:
    """One volume with targets and predictions of its hidden tokens."""

    seen: Snapshot
    targets: np.ndarray  # [N, T], what would be right for every token
    prediction: np.ndarray  # [M, T]

    @property
    def is_valid(self) -> np.ndarray:
        """Which tokens [N] lie in the scan."""
        return self.seen.valid > 0


def pixels(figure: Figure) -> np.ndarray:
    """The figure as uint8 [rows, columns, 3]."""
    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(DPI)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def two_views(views: np.ndarray, seen: Snapshot) -> Figure:
    """The middle B-scan of both views [2, D, H, W] (standard deviations; the context's, the target's), and
    the first with context (blue) and target (orange) over it.
    """
    plane = views.shape[1] // 2
    low, high = VIEW_RANGE
    first, second = np.clip((views[:, plane] - low) / (high - low), 0, 1)
    figure = Figure(figsize=(11, 2.6), layout="constrained")
    axes = figure.subplots(1, 3, sharex=True, sharey=True)
    covered = masked(seen, plane, first)
    titles = ("view of the context encoder", "view of the target encoder", "context blue, target orange")
    for axis, image, title in zip(axes, (first, second, covered), titles, strict=True):
        show_mm(axis, image, seen.spacing[1:], title)
        axis.set_xlabel("A-scan direction, mm", fontsize="small")
    axes[0].set_ylabel("axial, mm", fontsize="small")
    figure.suptitle(f"B-scan {plane + 1} of the first volume of a training batch", fontsize="medium")
    return figure


def prediction_map(forecast: Forecast) -> Figure:
    """Targets and predictions of the hidden tokens of a B-scan, coloured by the targets' three principal
    components, and the error of each: 1 is that of the mean target.
    """
    seen, valid, num_tokens = forecast.seen, forecast.is_valid, len(forecast.targets)
    hidden = np.zeros(num_tokens, bool)
    hidden[seen.target] = True
    hidden &= valid
    plane = int(hidden.reshape(seen.grid).sum(axis=(1, 2)).argmax())  # with the most of them
    both = np.concatenate([forecast.targets, forecast.targets])
    both[num_tokens + seen.target] = forecast.prediction
    colours, shares = pca_colours(both, np.concatenate([valid, np.zeros_like(valid)]), grey_outside=False)
    expected = np.where(valid[:, None], colours[:num_tokens], 0.5)
    predicted = np.where(hidden[:, None], colours[num_tokens:], 0.5)
    error = relative_error(forecast)
    _, token_h, token_w = (s * p for s, p in zip(seen.spacing, seen.patch, strict=True))
    figure = Figure(figsize=(13, 2.6), layout="constrained")
    axes = figure.subplots(1, 4, sharex=True, sharey=True)
    image = seen.volume[plane * seen.patch[0] + seen.patch[0] // 2] / 255.0
    show_mm(axes[0], image, seen.spacing[1:], "B-scan")
    titles = {"targets of all tokens": expected, "predictions, hidden": predicted}
    for axis, (title, colours_N3) in zip(axes[1:3], titles.items(), strict=True):
        show_mm(axis, colours_N3.reshape(*seen.grid, 3)[plane], (token_h, token_w), title)
    shown = axes[3].imshow(
        np.where(hidden, error, np.nan).reshape(seen.grid)[plane],
        "magma",
        vmin=0.0,
        vmax=2.0,
        extent=(0.0, seen.grid[2] * token_w, seen.grid[1] * token_h, 0.0),
    )
    axes[3].set_title("error / error of the mean target", fontsize="small")
    figure.colorbar(shown, ax=axes[3], shrink=0.7)
    for axis in axes:
        axis.set_xlabel("A-scan direction, mm", fontsize="small")
    axes[0].set_ylabel("axial, mm", fontsize="small")
    of_variance = ", ".join(f"{share:.0%}" for share in shares)
    mean = float(error[hidden].mean()) if hidden.any() else float("nan")
    figure.suptitle(
        f"{seen.title}: mean error {mean:.2f}; the colours hold {of_variance} of the variance",
        fontsize="medium",
    )
    return figure


def relative_error(forecast: Forecast) -> np.ndarray:
    """[N]: squared distance of prediction and target over that of the mean valid target; NaN where nothing
    was predicted. 1 is no better than the mean.
    """
    error, hidden = np.full(len(forecast.targets), np.nan), forecast.seen.target
    known = forecast.targets[forecast.is_valid]
    baseline = np.square(known - known.mean(axis=0)).sum(axis=1).mean()
    distance = np.square(forecast.prediction - forecast.targets[hidden]).sum(axis=1)
    error[hidden] = distance / max(float(baseline), 1e-12)
    return error
