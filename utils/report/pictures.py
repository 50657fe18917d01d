"""Pictures of a run: B-scans with their masks, components of patch features, and for the dashboards both
views of a volume and what is predicted of it.

In: a snapshot, one `.npz` per picture written during training by `save_snapshot` and read by `load_snapshot`;
for a dashboard the arrays themselves, tokens in raster order (d, h, w) of `grid`. Out: matplotlib figures,
scans in true physical proportion (millimetres on both axes); PNG text for a page. D is the B-scan axis.
"""

from __future__ import annotations

import base64
import io
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

CONTEXT_RGB = (0.16, 0.55, 0.95)
TARGET_RGB = (0.96, 0.55, 0.12)
OUTSIDE, CONTEXT, TARGET, NEITHER = range(4)  # of a token
ENFACE_CELLS = ("enface", "enface features")
VIEW_RANGE = (-1.5, 4.0)  # standard deviations of a volume that a dashboard shows from black to white
DASHBOARD_DPI = 80


@dataclass(frozen=True)
class Snapshot:
    """One volume as training saw it; tokens are in raster order (d, h, w) of `grid`."""

    volume: np.ndarray  # uint8 [D, H, W]
    context: np.ndarray  # token numbers [K]
    target: np.ndarray  # token numbers [M]
    grid: tuple[int, int, int]
    patch: tuple[int, int, int]  # voxels
    spacing: tuple[float, float, float]  # mm
    features: np.ndarray  # [N, E], target encoder
    valid: np.ndarray  # [N], share of each token inside the acquired field
    title: str


def save_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write a snapshot whole or not at all; OSError for what the disk refuses, which costs a run no more than
    the picture; ValueError where a shape contradicts volume, grid and patch.
    """
    data = {name: np.asarray(value) for name, value in vars(snapshot).items()}
    data["features"] = data["features"].astype(np.float16)
    data["valid"] = data["valid"].astype(np.float32)
    grid, patch, num_tokens = data["grid"], data["patch"], int(np.prod(data["grid"]))
    if data["volume"].dtype != np.uint8 or data["volume"].shape != tuple(grid * patch):
        raise ValueError(
            f"{path}: volume: expected uint8 {tuple((grid * patch).tolist())} (grid x patch), "
            f"found {data['volume'].dtype} {data['volume'].shape}"
        )
    for name in ("features", "valid"):
        if len(data[name]) != num_tokens:
            raise ValueError(f"{path}: {name}: expected {num_tokens} tokens, found {len(data[name])}")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        np.savez_compressed(file, allow_pickle=True, **data)
    os.replace(part, path)


def load_snapshot(path: str | Path) -> Snapshot:
    """Read what save_snapshot wrote."""
    with np.load(path, allow_pickle=False) as data:
        return Snapshot(
            volume=data["volume"],
            context=data["context"],
            target=data["target"],
            grid=_triple(data["grid"], int),
            patch=_triple(data["patch"], int),
            spacing=_triple(data["spacing"], float),
            features=data["features"].astype(np.float32),
            valid=data["valid"],
            title=str(data["title"]),
        )


def _triple(values: np.ndarray, kind: type) -> tuple:
    d, h, w = (kind(v) for v in values)
    return d, h, w


def bscan_with_masks(snapshot: Snapshot, num_planes: int = 3) -> Figure:
    """B-scans spread over the volume: as read above, with context (blue) and target (orange) below."""
    planes = _spread(snapshot.volume.shape[0], num_planes)
    figure = Figure(figsize=(3.4 * len(planes), 3.4), layout="constrained")
    axes = figure.subplots(2, len(planes), sharex=True, sharey=True, squeeze=False)
    for column, plane in enumerate(planes):
        image = snapshot.volume[plane] / 255.0
        where = f"B-scan {plane + 1} of {snapshot.volume.shape[0]}"
        show_mm(axes[0, column], image, snapshot.spacing[1:], where)
        show_mm(axes[1, column], masked(snapshot, plane, image), snapshot.spacing[1:], None)
    axes[0, 0].set_ylabel("axial, mm")
    axes[1, 0].set_ylabel("axial, mm")
    for axis in axes[1]:
        axis.set_xlabel("A-scan direction, mm")
    return figure


def feature_pca(snapshot: Snapshot) -> Figure:
    """Three principal components of patch features as colours: a B-scan and en face, beside the scan."""
    plane = snapshot.volume.shape[0] // 2
    spacing, patch = snapshot.spacing, snapshot.patch
    token_mm = tuple(s * p for s, p in zip(spacing, patch, strict=True))
    colour_DHW3, enface_DW3, shares = feature_colours(snapshot)
    enface_scan = snapshot.volume.mean(axis=1)
    enface_scan = (enface_scan - enface_scan.min()) / max(float(np.ptp(enface_scan)), 1e-6)
    figure = Figure(figsize=(10.4, 3.9), layout="constrained")
    axes = figure.subplot_mosaic([["scan", "enface", "enface features"], ["features", *ENFACE_CELLS]])
    show_mm(axes["scan"], snapshot.volume[plane] / 255.0, spacing[1:], f"B-scan {plane + 1}")
    show_mm(axes["features"], colour_DHW3[plane // patch[0]], token_mm[1:], "its patch features")
    show_mm(axes["enface"], enface_scan, spacing[::2], "en face, axial mean")
    show_mm(axes["enface features"], enface_DW3, token_mm[::2], "patch features en face")
    for name, axis in axes.items():
        axis.set_ylabel("B-scan direction, mm" if name in ENFACE_CELLS else "axial, mm", fontsize="small")
        if name != "scan":
            axis.set_xlabel("A-scan direction, mm", fontsize="small")
    shown = ", ".join(f"{share:.0%}" for share in shares)
    figure.suptitle(f"{snapshot.title}: the components hold {shown} of the variance", fontsize="medium")
    return figure


def png_data(figure: Figure, dpi: int = 110) -> str:
    """The figure as a `data:image/png;base64,...` address, to stand inside a page."""
    return "data:image/png;base64," + base64.b64encode(png(figure, dpi)).decode("ascii")


def png(figure: Figure, dpi: int = 110) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def _spread(size: int, count: int) -> list[int]:
    """`count` plane numbers in the middle of equal parts of the axis."""
    count = min(count, size)
    return [int((i + 0.5) * size / count) for i in range(count)]


def show_mm(axis: Axes, image: np.ndarray, pixel_mm: tuple[float, ...], title: str | None) -> None:
    """Draw an image [rows, columns(, 3)] in millimetres, so that its proportions are those of the eye."""
    height, width = (n * mm for n, mm in zip(image.shape[:2], pixel_mm, strict=True))
    extent, white = (0.0, width, height, 0.0), max(float(image.max()), 1e-6)  # matplotlib scales no colours
    axis.imshow(image, "gray", aspect="equal", interpolation="nearest", vmin=0.0, vmax=white, extent=extent)
    if title:
        axis.set_title(title, fontsize="small")
    axis.tick_params(labelsize="small")


def masked(snapshot: Snapshot, plane: int, image: np.ndarray) -> np.ndarray:
    """The B-scan [H, W, 3]: context patches blue, target patches orange, padding and the rest darkened."""
    kind_HW = token_kinds(snapshot).reshape(snapshot.grid)[plane // snapshot.patch[0]]
    kind_HW = kind_HW.repeat(snapshot.patch[1], axis=0).repeat(snapshot.patch[2], axis=1)
    tint = np.array([(0.0, 0.0, 0.0), CONTEXT_RGB, TARGET_RGB, (0.0, 0.0, 0.0)])[kind_HW]
    strength = np.array([0.55, 0.35, 0.45, 0.55])[kind_HW][..., None]
    return (1 - strength) * image[..., None] + strength * tint


def token_kinds(snapshot: Snapshot) -> np.ndarray:
    """OUTSIDE the scan, CONTEXT, TARGET or NEITHER of a token [N]; where all are targets, none is hidden."""
    kinds = np.full(len(snapshot.valid), NEITHER)
    kinds[snapshot.context] = CONTEXT
    kinds[snapshot.target] = TARGET if len(snapshot.target) < len(kinds) else CONTEXT
    kinds[snapshot.valid == 0] = OUTSIDE  # padding fills slots of both sets
    return kinds


def feature_colours(snapshot: Snapshot) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Components of the patch features as colours [D, H, W, 3], those of the axial means [D, W, 3], and the
    variance shares of the first. Components and colour range come from valid tokens, others are grey.
    """
    features_DHWE = snapshot.features.reshape(*snapshot.grid, -1)
    valid_DHW = (snapshot.valid > 0).reshape(snapshot.grid)
    count_DW = valid_DHW.sum(axis=1)
    columns_DWE = (features_DHWE * valid_DHW[..., None]).sum(axis=1) / np.maximum(count_DW, 1)[..., None]
    colour_DHW3, shares = pca_colours(features_DHWE, valid_DHW)
    enface_DW3, _ = pca_colours(columns_DWE, count_DW > 0)
    return colour_DHW3, enface_DW3, shares


def pca_colours(
    features: np.ndarray, valid: np.ndarray, *, grey_outside: bool = True
) -> tuple[np.ndarray, list[float]]:
    """[..., E] -> colours [..., 3] in 0..1 and the variance share of each of the first three components, of
    the valid ones; the others are grey, or without `grey_outside` take their place on the same scale.
    """
    rows, keep = features.reshape(-1, features.shape[-1]), valid.ravel()
    centred = rows - rows[keep].mean(axis=0)
    _, values, axes = np.linalg.svd(centred[keep], full_matrices=False)
    axes = axes[:3]
    # a component's sign is arbitrary: the largest weight is made positive, so that pictures can be compared
    axes = axes * np.sign(np.take_along_axis(axes, np.abs(axes).argmax(axis=1)[:, None], axis=1))
    scores = centred @ axes.T
    low, high = np.quantile(scores[keep], [0.02, 0.98], axis=0)
    colours = np.full((len(scores), 3), 0.5)
    colours[:, : len(axes)] = np.clip((scores - low) / np.maximum(high - low, 1e-6), 0, 1)
    if grey_outside:
        colours[~keep] = 0.5
    total = max(float((values**2).sum()), 1e-12)
    return colours.reshape(*features.shape[:-1], 3), [float(v) ** 2 / total for v in values[:3]]


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
    figure.set_dpi(DASHBOARD_DPI)
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
    titles = {"targets of all tokens": expected, "predictions": predicted}
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
