"""Pictures of a run: B-scans with their masks and the principal components of patch features.

In: a snapshot, one `.npz` per picture written during training by `save_snapshot` and read by `load_snapshot`.
Out: matplotlib figures, scans in true physical proportion (millimetres on both axes); PNG text for a page.
D is the B-scan axis.
"""

from __future__ import annotations

import base64
import io
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

CONTEXT_RGB = (0.16, 0.55, 0.95)
TARGET_RGB = (0.96, 0.55, 0.12)
ENFACE_CELLS = ("enface", "enface features")


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
    """Write a snapshot whole or not at all; ValueError where a shape contradicts volume, grid and patch."""
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
    """Three principal components of patch features as colours: a B-scan and en face, beside the scan.

    En face, features are averaged over the axial direction first and have separate components. Components
    and colour range come from valid tokens; places without any are grey.
    """
    plane = snapshot.volume.shape[0] // 2
    spacing, patch = snapshot.spacing, snapshot.patch
    token_mm = tuple(s * p for s, p in zip(spacing, patch, strict=True))
    features_DHWE = snapshot.features.reshape(*snapshot.grid, -1)
    weight_DHW1 = (snapshot.valid > 0).reshape(*snapshot.grid, 1)
    count_DW1 = weight_DHW1.sum(axis=1)
    columns_DWE = (features_DHWE * weight_DHW1).sum(axis=1) / np.maximum(count_DW1, 1)
    colour_DHW3, shares = pca_colours(features_DHWE, weight_DHW1[..., 0])
    enface_DW3, _ = pca_colours(columns_DWE, count_DW1[..., 0] > 0)
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
    """The figure as the bytes of a file."""
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
    kind = np.zeros(int(np.prod(snapshot.grid)), int)
    kind[snapshot.context] = 1
    kind[snapshot.target] = 2
    kind[snapshot.valid == 0] = 0  # padding fills slots of both sets and weighs nothing
    kind_HW = kind.reshape(snapshot.grid)[plane // snapshot.patch[0]]
    kind_HW = kind_HW.repeat(snapshot.patch[1], axis=0).repeat(snapshot.patch[2], axis=1)
    tint = np.array([(0.0, 0.0, 0.0), CONTEXT_RGB, TARGET_RGB])[kind_HW]
    strength = np.array([0.55, 0.35, 0.45])[kind_HW][..., None]
    return (1 - strength) * image[..., None] + strength * tint


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
