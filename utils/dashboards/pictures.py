"""Pictures of a training step: both views of a volume, what is predicted of it, and what resembles a token.

In: arrays of one volume, tokens in raster order (d, h, w) of `grid`. Out: matplotlib figures in millimetres.
D is the B-scan axis. utils/report/pictures.py has the pictures that the report shows too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from utils.report.pictures import masked, pca_colours, show_mm

VIEW_RANGE = (-1.5, 4.0)  # standard deviations of a volume that are shown from black to white
DPI = 80
Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Views:
    """One volume as the encoders get it."""

    views: np.ndarray  # [2, D, H, W] in standard deviations: the context's, the target's
    context: np.ndarray  # token numbers [K]
    target: np.ndarray  # token numbers [M]
    grid: Triple
    patch: Triple  # voxels
    spacing: tuple[float, float, float]  # mm
    valid: np.ndarray  # [N], share of each token inside the acquired field


@dataclass(frozen=True)
class Forecast:
    """One volume with targets and predictions of its hidden tokens."""

    volume: np.ndarray  # uint8 [D, H, W]
    target: np.ndarray  # token numbers [M]
    grid: Triple
    patch: Triple  # voxels
    spacing: tuple[float, float, float]  # mm
    targets: np.ndarray  # [N, T], what would be right for every token
    prediction: np.ndarray  # [M, T]
    features: np.ndarray  # [N, E], target encoder
    valid: np.ndarray  # [N]
    title: str

    @property
    def token_mm(self) -> tuple[float, float, float]:
        """Size of a token (D, H, W)."""
        d, h, w = (s * p for s, p in zip(self.spacing, self.patch, strict=True))
        return d, h, w


def pixels(figure: Figure) -> np.ndarray:
    """The figure as uint8 [rows, columns, 3]."""
    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(DPI)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def two_views(seen: Views) -> Figure:
    """The middle B-scan of both views, and the first with context (blue) and target (orange) over it."""
    plane = seen.views.shape[1] // 2
    low, high = VIEW_RANGE
    first, second = np.clip((seen.views[:, plane] - low) / (high - low), 0, 1)
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
    plane, hidden = _plane_with_most(forecast), np.zeros(len(forecast.targets), bool)
    hidden[forecast.target] = True
    hidden &= forecast.valid > 0
    both = np.concatenate([forecast.targets, forecast.targets])
    both[len(forecast.targets) + forecast.target] = forecast.prediction
    fitted = np.concatenate([forecast.valid > 0, np.zeros(len(forecast.targets), bool)])
    colours, shares = pca_colours(both, fitted, grey_outside=False)
    expected, predicted = colours[: len(hidden)].copy(), colours[len(hidden) :].copy()
    expected[forecast.valid <= 0] = 0.5
    error = relative_error(forecast)
    figure = Figure(figsize=(13, 2.6), layout="constrained")
    axes = figure.subplots(1, 4, sharex=True, sharey=True)
    image = forecast.volume[plane * forecast.patch[0] + forecast.patch[0] // 2] / 255.0
    show_mm(axes[0], image, forecast.spacing[1:], "B-scan")
    _show_tokens(axes[1], forecast, expected, plane, "targets of all tokens")
    _show_tokens(axes[2], forecast, np.where(hidden[:, None], predicted, 0.5), plane, "predictions, hidden")
    shown = axes[3].imshow(
        np.where(hidden, error, np.nan).reshape(forecast.grid)[plane],
        "magma",
        vmin=0.0,
        vmax=2.0,
        extent=(0.0, forecast.grid[2] * forecast.token_mm[2], forecast.grid[1] * forecast.token_mm[1], 0.0),
    )
    axes[3].set_title("error / error of the mean target", fontsize="small")
    figure.colorbar(shown, ax=axes[3], shrink=0.7)
    for axis in axes:
        axis.set_xlabel("A-scan direction, mm", fontsize="small")
    axes[0].set_ylabel("axial, mm", fontsize="small")
    of_variance = ", ".join(f"{share:.0%}" for share in shares)
    mean = float(error[hidden].mean()) if hidden.any() else float("nan")
    figure.suptitle(
        f"{forecast.title}: mean error {mean:.2f}; the colours hold {of_variance} of the variance",
        fontsize="medium",
    )
    return figure


def relative_error(forecast: Forecast) -> np.ndarray:
    """[N]: squared distance of prediction and target over that of the mean valid target; NaN where nothing
    was predicted. 1 is no better than the mean.
    """
    error = np.full(len(forecast.targets), np.nan)
    wanted = forecast.targets[forecast.target]
    mean = forecast.targets[forecast.valid > 0].mean(axis=0)
    baseline = np.square(forecast.targets[forecast.valid > 0] - mean).sum(axis=1).mean()
    error[forecast.target] = np.square(forecast.prediction - wanted).sum(axis=1) / max(float(baseline), 1e-12)
    return error


def similarity(forecast: Forecast, token: int) -> np.ndarray:
    """[N]: cosine of every token's feature with one token's, both without the mean of the valid tokens, which
    all tokens share.
    """
    centred = forecast.features - forecast.features[forecast.valid > 0].mean(axis=0)
    unit = centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-12)
    return unit @ unit[token]


def brightest_token(forecast: Forecast) -> int:
    """The valid token of the middle plane of tokens with the highest mean intensity; of all planes where the
    middle one has none.
    """
    (gd, gh, gw), (d, h, w) = forecast.grid, forecast.patch
    mean = forecast.volume.reshape(gd, d, gh, h, gw, w).mean(axis=(1, 3, 5))
    is_valid = (forecast.valid > 0).reshape(forecast.grid)
    middle = np.zeros_like(is_valid)
    middle[gd // 2] = True
    allowed = is_valid & middle if (is_valid & middle).any() else is_valid
    return int(np.where(allowed, mean, -1.0).argmax())


def similarity_map(forecast: Forecast) -> Figure:
    """Cosine of all tokens with the brightest one (a cross), in its B-scan and en face at its axial row."""
    token = brightest_token(forecast)
    d, h, w = np.unravel_index(token, forecast.grid)
    cosine = np.where(forecast.valid > 0, similarity(forecast, token), np.nan).reshape(forecast.grid)
    size_d, size_h, size_w = forecast.token_mm
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    axes = figure.subplots(1, 3)
    image = forecast.volume[d * forecast.patch[0] + forecast.patch[0] // 2] / 255.0
    show_mm(axes[0], image, forecast.spacing[1:], f"B-scan through plane {d + 1} of tokens")
    for axis, values, rows_mm, title in (
        (axes[1], cosine[d], size_h, "cosine with the token at the cross"),
        (axes[2], cosine[:, h], size_d, "the same en face, at its axial row"),
    ):
        extent = (0.0, values.shape[1] * size_w, values.shape[0] * rows_mm, 0.0)
        shown = axis.imshow(values, "RdBu_r", vmin=-1.0, vmax=1.0, extent=extent)
        axis.set_title(title, fontsize="small")
    for axis, row, rows_mm in ((axes[0], h, size_h), (axes[1], h, size_h), (axes[2], d, size_d)):
        axis.plot((w + 0.5) * size_w, (row + 0.5) * rows_mm, "+", color="lime", markersize=12)
        axis.set_xlabel("A-scan direction, mm", fontsize="small")
        axis.set_ylabel("B-scan direction, mm" if axis is axes[2] else "axial, mm", fontsize="small")
    figure.colorbar(shown, ax=axes, shrink=0.7)
    figure.suptitle(f"{forecast.title}: what resembles one token", fontsize="medium")
    return figure


def _plane_with_most(forecast: Forecast) -> int:
    """The plane of tokens with the most valid hidden ones."""
    hidden = np.zeros(len(forecast.targets), bool)
    hidden[forecast.target] = True
    return int((hidden & (forecast.valid > 0)).reshape(forecast.grid).sum(axis=(1, 2)).argmax())


def _show_tokens(axis: Axes, forecast: Forecast, colours_N3: np.ndarray, plane: int, title: str) -> None:
    show_mm(axis, colours_N3.reshape(*forecast.grid, 3)[plane], forecast.token_mm[1:], title)
