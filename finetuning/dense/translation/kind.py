"""task.kind=translation: slabs of OCTA flow, how decoders of them are trained and judged.

In: a store with flow. Out: `TRANSLATION`. A head's file has `slabs`, their names. After each epoch the mean
L1 of the validation volumes decides which weights are kept. An evaluation writes translation.json,
translation.md, slabs.parquet (a line for every arm, volume and slab) and translation.png (a volume of the
evaluated ones: the device's images and every arm's). Beside the encoders it has a projection of the
structural scan, which has no encoder.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from monai.metrics.regression import compute_ssim_and_cs
from torch import nn

from finetuning.cohort.cohort import EVALUATED
from finetuning.cohort.source import Source
from finetuning.dense.examined import Examined
from finetuning.dense.head import DEVICE, PROJECTION, DenseHead, label
from finetuning.dense.kind import Content, Kind, Line, Predictions
from finetuning.dense.translation.baseline import StructuralProjection
from finetuning.dense.translation.decoder import OUTPUTS, SlabPlanes, slab_loss
from finetuning.dense.translation.volumes import FlowVolumes, read_volumes
from utils import storage
from utils.runtime.single import Runtime

WINDOW = 7  # pixels of SSIM, where the field is as long
NOTES = (
    "Slabs are what a device's software projected: images of a machine, not truth. Capillaries that the "
    "structural scan does not show cannot be predicted from it.",
    "L1 is of values from 0 to 1; SSIM is of the slab's field. Means are over a participant's volumes, then "
    "over participants; intervals resample participants.",
)


def l1(predicted_DW: np.ndarray, truth_DW: np.ndarray) -> float:
    """Mean absolute difference where the truth is known; NaN where it is nowhere."""
    known = ~np.isnan(truth_DW)
    return float(np.abs(predicted_DW - truth_DW)[known].mean()) if known.any() else float("nan")


def ssim(predicted_DW: np.ndarray, truth_DW: np.ndarray, field: tuple[slice, ...]) -> float:
    """Structural similarity (Wang et al. 2004) as MONAI computes it, by flat windows, in the field; NaN where
    it is not wholly known, or less than 3 pixels wide.
    """
    truth, predicted = truth_DW[field], predicted_DW[field]
    window = min(WINDOW, *(side - 1 + side % 2 for side in truth.shape))
    if window < 3 or np.isnan(truth).any():
        return float("nan")
    first, second = (torch.from_numpy(np.array(part, np.float32))[None, None] for part in (predicted, truth))
    sides, sigmas = (window, window), (1.0, 1.0)  # the latter of a Gaussian window
    value, _ = compute_ssim_and_cs(first, second, 2, sides, sigmas, kernel_type="uniform")
    return float(value.mean())


def validation_l1(volumes: FlowVolumes, predicted: Predictions) -> dict[str, float]:
    """Mean L1 of the validation volumes: over the slabs of a volume, then over volumes."""
    errors = [
        np.nanmean([l1(*pair) for pair in zip(slabs, volumes.read(row), strict=True)])
        for row, slabs in predicted
    ]
    return {"l1": float(np.mean(errors))}


def names(_: nn.Module, source: Source, volumes: FlowVolumes, runtime: Runtime) -> dict[str, Any]:
    """`slabs` of a head's file."""
    return {"slabs": list(volumes.names)}


def baselines(volumes: FlowVolumes, head: DenseHead) -> dict[str, Callable[[int], np.ndarray]]:
    """The device's own images, which are drawn, and a projection."""
    return {DEVICE: volumes.read, PROJECTION: StructuralProjection(volumes).predict}


def measure(volumes: FlowVolumes, row: int, predicted: np.ndarray, arm: str) -> list[Line]:
    """A line for every slab that the volume has; none of the device's own."""
    return [
        {"name": name, "l1": l1(own, truth), "ssim": ssim(own, truth, volumes.field(row))}
        for name, own, truth in zip(volumes.names, predicted, volumes.read(row), strict=True)
        if arm != DEVICE and not np.isnan(truth).all()
    ]


def draw_slabs(shown: Mapping[str, np.ndarray], names: Sequence[str], title: str) -> Figure:
    """A row for every slab, a column for every arm; in a row the grey scale of the first one."""
    figure = Figure(figsize=(3.1 * len(shown) + 0.6, 2.6 * len(names) + 0.8), layout="constrained")
    axes = figure.subplots(len(names), len(shown), squeeze=False)
    for place, (row, name) in enumerate(zip(axes, names, strict=True)):
        first = next(iter(shown.values()))[place]
        known = first[~np.isnan(first)]
        low, high = np.percentile(known, [1, 99]) if len(known) else (0.0, 1.0)
        for axis, (arm, slabs) in zip(row, shown.items(), strict=True):
            axis.imshow(slabs[place], cmap="gray", vmin=low, vmax=max(high, low + 1e-3), aspect="auto")
            axis.set(xticks=[], yticks=[])
            if place == 0:
                axis.set_title(label(arm), fontsize=9)
        row[0].set_ylabel(name.replace("_", " "), fontsize=9)
    figure.suptitle(title, fontsize=10)
    return figure


def write(examined: Examined[FlowVolumes], content: Content) -> None:
    """slabs.parquet and translation.png, the pre-trained arm in its last column."""
    examined.write_lines("slabs.parquet", examined.lines)
    row = content["shown"]
    order = [DEVICE, PROJECTION, *reversed(examined.arms)]
    shown = {arm: examined.volumes.cropped(row, examined.drawn[row][arm]) for arm in order}
    picture = io.BytesIO()
    figure = draw_slabs(shown, examined.volumes.names, f"{content['title']}: volume {row}")
    figure.savefig(picture, format="png", dpi=110)
    storage.write_bytes(storage.join(examined.cfg.run.dir, "translation.png"), picture.getvalue())


TRANSLATION = Kind(
    name="translation",
    names="slabs",
    read_volumes=read_volumes,
    planes=SlabPlanes,
    loss=lambda *_: slab_loss,
    metric="l1",
    sign=-1,
    score=validation_l1,
    shown=("validation L1", "{:.4f}"),
    state=names,
    title="Slabs of flow",
    measure=measure,
    columns={"ssim": ("SSIM", ".3f"), "l1": ("L1", ".4f")},
    gain=(1, "mean SSIM"),
    write=write,
    notes=NOTES,
    baselines=baselines,
    drawn=lambda volumes: [int(volumes.of(EVALUATED)[0])],
    more=lambda examined: {"shown": min(examined.drawn)},
    points=lambda content: [f"translation.png shows volume {content['shown']}, the first evaluated one."],
    per_name=OUTPUTS,
)
