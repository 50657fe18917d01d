"""Some planted eyes beside the maps of the head and of its controls: explanations.png.

In: `Measured`, eyes, their volumes. Out: a matplotlib figure, a row an eye: the B-scan with most of the
change, then each map on it. A frame is drawn around planted tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from finetuning.explanations.arms import LABELS
from finetuning.explanations.measure import Key, Measured
from finetuning.prediction.evidence import ATTENTION
from finetuning.prediction.picture import stretched, tint

FRAME = "#39d353"


def draw_eyes(
    measured: Measured,
    truth_nN: np.ndarray,
    volumes: Mapping[int, np.ndarray],
    grid: tuple[int, int, int],
    patch: tuple[int, int, int],
) -> Figure:
    """`volumes`: number of the eye -> uint8 [D, H, W]."""
    keys = list(measured.maps)
    figure = Figure(figsize=(3.1 * (len(keys) + 1), 3.3 * len(volumes)), layout="constrained")
    axes = figure.subplots(len(volumes), len(keys) + 1, squeeze=False)
    for line, (number, volume) in zip(axes, volumes.items(), strict=True):
        truth = truth_nN[number].reshape(grid)
        slab = int(truth.sum(axis=(1, 2)).argmax())
        frame = volume[slab * patch[0] + patch[0] // 2]
        for axis in line:
            axis.imshow(stretched(frame), "gray", vmin=0, vmax=1, aspect="auto")
            axis.set_axis_off()
            _outline(axis, truth[slab], patch)
        line[0].set_title(f"eye {number + 1}: planted tokens framed", fontsize="small")
        for axis, key in zip(line[1:], keys, strict=True):
            _overlay(axis, measured.maps[key][number].reshape(grid), slab, key, frame.shape)
            auprc = measured.auprc[key][number]
            axis.set_title(
                f"{LABELS[key[0]].replace('control: ', '')}\n{key[1]}: {auprc:.2f}", fontsize="small"
            )
    figure.suptitle("AUPRC of each map above it; red: for the planted class, blue: against it")
    return figure


def _overlay(axis: Axes, values: np.ndarray, slab: int, key: Key, shape: tuple[int, ...]) -> None:
    """A map on its B-scan; of a signed one the median token has no tint."""
    is_signed = key[1] != ATTENTION
    centred = values - np.median(values) if is_signed else values
    full = max(float(np.percentile(np.abs(centred), 99.5)), 1e-12)
    extent = (-0.5, shape[1] - 0.5, shape[0] - 0.5, -0.5)
    axis.imshow(tint(centred[slab], is_signed, full), extent=extent, aspect="auto", interpolation="nearest")


def _outline(axis: Axes, planted: np.ndarray, patch: tuple[int, int, int]) -> None:
    """A frame around each planted token [gh, gw]."""
    _, h, w = patch
    for row, column in np.argwhere(planted):
        corner = (column * w - 0.5, row * h - 0.5)
        axis.add_patch(Rectangle(corner, w, h, fill=False, edgecolor=FRAME, linewidth=0.8))
