"""task.kind=translation: slabs of OCTA flow from the structural scan, how decoders are trained and judged.

In: a store with flow (data_setup.prepare --flow). Out: `TRANSLATION`. A head's file has `slabs`, their names.
A row's slabs are numbers from 0 to 1, NaN outside the acquired field and of a slab that the row lacks. Of
outputs [B, 2S, d, H, W] each slab has a weight over the H voxels of an A-scan (softmax) and a value at each:
an en-face image is a projection, and which rows are projected is learnt. After each epoch the mean L1 of the
validation volumes decides which weights are kept. An evaluation writes translation.json, translation.md,
slabs.parquet (a line for every arm, volume and slab) and translation.png (a volume of the evaluated ones: the
device's images and every arm's). Beside the encoders it has `StructuralProjection`, which has no encoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from monai.metrics.regression import compute_ssim_and_cs
from scipy.ndimage import gaussian_filter, gaussian_filter1d
from sklearn.linear_model import Ridge
from torch import Tensor

from data_setup.attach.stored import StoredFlow
from data_setup.readers.octa import SLABS
from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import EVALUATED, TRAIN
from finetuning.dense.folds import DenseVolumes, chosen_names, in_folds, with_labels
from finetuning.dense.head import DEVICE, PROJECTION, label
from finetuning.dense.kind import Content, Examined, Kind, Line, Predictions
from finetuning.dense.planes import Moves, Planes
from utils import storage
from utils.config.schema import Config
from utils.errors import UserError
from utils.report.pictures import png

OUTPUTS = 2  # of a slab: value and weight
NUM_BINS = 16
BIN_MM = 0.035
ABOVE_MM = 0.035  # where the first bin begins, above the first bright row
NEAR_MM = 0.3
MOST_ASCANS = 2000  # of a volume, evenly spaced
WINDOW = 7  # pixels of SSIM, where the field is as long
NOTES = (
    "Slabs are what a device's software projected: images of a machine, not truth. Capillaries that the "
    "structural scan does not show cannot be predicted from it.",
    "L1 is of values from 0 to 1; SSIM is of the slab's field. Means are over a participant's volumes, then "
    "over participants; intervals resample participants.",
)


@dataclass(frozen=True)
class FlowVolumes(DenseVolumes):
    """Volumes with en-face slabs; `names` are those of the slabs from the vitreous down [S]."""

    flow: StoredFlow

    def facts(self) -> pd.DataFrame:
        return self.flow.index[["row", "enface_checksum", "volume", "slabs"]]

    def read(self, row: int) -> np.ndarray:
        """float32 [S, D, W] in 0..1, NaN where nothing is known."""
        if self.read_original is None:
            stored = self.flow.read_slabs(row)
        else:
            values, own = self.read_original(row)
            stored = dict(zip(own, values, strict=True))
        result = np.full((len(self.names), *next(iter(stored.values())).shape), np.nan, np.float32)
        box = self.field(row)
        for place, name in enumerate(self.names):
            if name in stored:
                result[place][box] = stored[name][box].astype(np.float32) / 255
        return result


def read_volumes(cfg: Config, store: PreparedStore) -> FlowVolumes:
    """The volumes with flow in the splits train, val and eval.split; raises UserError."""
    flow = StoredFlow.open(store.url, store.options)
    index = with_labels(cfg, store, flow.index, "flow")
    of_rows = {int(row): set(flow.names(row)) for row in index["row"]}
    known = [slab for slab in SLABS if any(slab in own for own in of_rows.values())]
    names = chosen_names(cfg.task.names, known, store, "an en-face image")
    index = index.loc[[row for row, own in of_rows.items() if own & set(names)]]
    folds = in_folds(cfg, index, store.url, f"the slabs {', '.join(names)}")
    volumes = FlowVolumes(store=store, names=names, flow=flow, **folds)
    learnt = set().union(*(of_rows[int(row)] for row in volumes.of(TRAIN)))
    if unseen := [name for name in names if name not in learnt]:
        raise UserError(f"task.names: expected slabs of training volumes, found none of {', '.join(unseen)}")
    return volumes


def slabs_of(outputs_BSdHW: Tensor) -> Tensor:
    """Slabs [B, S, d, W] of outputs [B, 2S, d, H, W]."""
    value, weight = outputs_BSdHW.float().chunk(OUTPUTS, dim=1)
    return (value * weight.softmax(dim=3)).sum(dim=3)


def slab_loss(outputs_BSdHW: Tensor, truth_BSdW: Tensor) -> Tensor:
    """Mean absolute difference over the places that are known."""
    known = ~truth_BSdW.isnan()
    difference = (slabs_of(outputs_BSdHW) - torch.where(known, truth_BSdW, 0.0)).abs()
    return torch.where(known, difference, 0.0).sum() / known.sum().clamp(min=1)


class SlabPlanes(Planes):
    """As `Planes`; the labels are slabs [B, S, d, W], as its heights are."""

    predicted_of = staticmethod(lambda outputs_BSdHW: slabs_of(outputs_BSdHW).clamp(0, 1))

    def moved(self, truth: Tensor, moves: Moves) -> Tensor:
        """Moved along W: a slab has no rows."""
        return moves.columns(truth)


class StructuralProjection:
    """A linear projection of the structural scan: ridge regression (scikit-learn) of each slab on
    structural_features, fitted on the training volumes.
    """

    def __init__(self, volumes: FlowVolumes) -> None:
        self.volumes = volumes
        parts: list[list[np.ndarray]] = [[] for _ in volumes.names]
        targets: list[list[np.ndarray]] = [[] for _ in volumes.names]
        for row in map(int, volumes.of(TRAIN)):
            features, truth = structural_features(volumes, row), volumes.read(row)
            for place, image in enumerate(truth):
                known = np.flatnonzero(~np.isnan(image).ravel())
                known = known[:: max(1, len(known) // MOST_ASCANS)]
                parts[place].append(features.reshape(-1, features.shape[-1])[known])
                targets[place].append(image.ravel()[known])
        self.models = [
            Ridge(alpha=1.0).fit(np.concatenate(x), np.concatenate(y))
            for x, y in zip(parts, targets, strict=True)
        ]

    def predict(self, row: int) -> np.ndarray:
        """Slabs of a volume, float32 [S, D, W] in 0..1."""
        features = structural_features(self.volumes, row)
        flat = features.reshape(-1, features.shape[-1])
        images = [model.predict(flat).reshape(features.shape[:2]) for model in self.models]
        return np.clip(np.stack(images), 0, 1).astype(np.float32)


def structural_features(volumes: FlowVolumes, row: int) -> np.ndarray:
    """float64 [D, W, 2 * NUM_BINS] of a stored volume, in its own standard deviations: the mean brightness of
    an A-scan in bins below the first bright row, and the same less their mean nearby (contrast: vessels are
    bright above and cast shadows below).
    """
    record = volumes.store.index.loc[row]
    volume = volumes.store.read(row).astype(np.float64)
    volume = (volume - record.intensity_mean) / max(float(record.intensity_std), 1e-6)
    d_mm, h_mm, w_mm = volumes.spacing_mm(row)
    top = first_bright_row(volume, h_mm)
    edges = top[:, None, :] + (np.arange(NUM_BINS + 1)[None, :, None] * BIN_MM - ABOVE_MM) / h_mm
    total = np.concatenate([np.zeros_like(volume[:, :1]), volume.cumsum(axis=1)], axis=1)
    edges = edges.clip(0, volume.shape[1])
    low = np.minimum(edges.astype(int), volume.shape[1] - 1)
    at = np.take_along_axis(total, low, axis=1)
    at = at + (edges - low) * (np.take_along_axis(total, low + 1, axis=1) - at)
    bins = np.diff(at, axis=1) / (BIN_MM / h_mm)
    nearby = gaussian_filter(bins, (NEAR_MM / d_mm, 0, NEAR_MM / w_mm), mode="nearest")
    return np.moveaxis(np.concatenate([bins, bins - nearby], axis=1), 1, 2)


def first_bright_row(volume_DHW: np.ndarray, h_mm: float) -> np.ndarray:
    """The first row of each A-scan half way from its median to its brightest, float64 [D, W]."""
    smooth = gaussian_filter1d(volume_DHW, max(0.01 / h_mm, 0.5), axis=1, mode="nearest")
    floor = np.median(smooth, axis=1, keepdims=True)
    half = floor + 0.5 * (smooth.max(axis=1, keepdims=True) - floor)
    return (smooth >= half).argmax(axis=1).astype(np.float64)


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
    figure = draw_slabs(shown, examined.volumes.names, f"{content['title']}: volume {row}")
    storage.write_bytes(storage.join(examined.cfg.run.dir, "translation.png"), png(figure))


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
    state=lambda _encoder, _source, volumes, _runtime: {"slabs": list(volumes.names)},
    title="Slabs of flow",
    measure=measure,
    columns={"ssim": ("SSIM", ".3f"), "l1": ("L1", ".4f")},
    gain=(1, "mean SSIM"),
    write=write,
    notes=NOTES,
    # the device's own images, which are drawn, and a projection
    baselines=lambda volumes, _: {DEVICE: volumes.read, PROJECTION: StructuralProjection(volumes).predict},
    drawn=lambda volumes: [int(volumes.of(EVALUATED)[0])],
    more=lambda examined: {"shown": min(examined.drawn)},
    points=lambda content: [f"translation.png shows volume {content['shown']}, the first evaluated one."],
    per_name=OUTPUTS,
)
