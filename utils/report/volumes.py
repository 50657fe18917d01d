"""Volumes for the slice viewer: every B-scan in one picture, and what can be laid over it.

In: snapshots of training (utils.report.pictures), and pictures of predicted layers that
finetuning.dense.layers writes with `save_layers`. Out: dictionaries that assets/report.js draws:
`sheet` has all B-scans side by side, `columns` in a row; masks and features are bytes of tokens, surfaces
heights in voxels. D is the B-scan axis.
"""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from utils import storage
from utils.report.pictures import feature_colours, load_snapshot, token_kinds

MAX_PIXELS = 6_000_000  # of a sheet; larger volumes are drawn smaller
JPEG_QUALITY = 88


@dataclass(frozen=True)
class LayersPicture:
    """A volume with surfaces of the retina; heights in voxels from the top, NaN where there is none."""

    volume: np.ndarray  # uint8 [D, H, W]
    spacing: tuple[float, float, float]  # mm
    names: tuple[str, ...]  # of the surfaces [S]
    predicted: np.ndarray  # float32 [S, D, W]
    truth: np.ndarray  # float32 [S, D, W], as labelled
    title: str


def save_layers(url: str, picture: LayersPicture) -> None:
    """Write it whole or not at all; raises ValueError for shapes that do not fit."""
    d, _, w = picture.volume.shape
    expected = (len(picture.names), d, w)
    for name, heights in (("predicted", picture.predicted), ("truth", picture.truth)):
        if heights.shape != expected:
            raise ValueError(f"{url}: {name}: expected heights {expected}, found {heights.shape}")
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        volume=picture.volume,
        spacing=np.array(picture.spacing),
        names=np.array(picture.names),
        predicted=picture.predicted.astype(np.float32),
        truth=picture.truth.astype(np.float32),
        title=np.array(picture.title),
    )
    storage.write_bytes(url, buffer.getvalue())


def load_layers(path: Path) -> LayersPicture:
    """Read what save_layers wrote."""
    with np.load(path, allow_pickle=False) as data:
        d, h, w = map(float, data["spacing"])
        names = tuple(map(str, data["names"]))
        return LayersPicture(
            data["volume"], (d, h, w), names, data["predicted"], data["truth"], str(data["title"])
        )


def volume_of_snapshot(path: Path, run: str) -> dict[str, Any]:
    """A volume as training saw it, with its masks and the components of its features."""
    snapshot = load_snapshot(path)
    colours, enface, shares = feature_colours(snapshot)
    return _scan(snapshot.volume, snapshot.spacing) | {
        "title": f"{run}: {snapshot.title}",
        "grid": list(snapshot.grid),
        "patch": list(snapshot.patch),
        "masks": _bytes(token_kinds(snapshot)),
        "features": _bytes(np.round(255 * colours)),
        "enface_features": _bytes(np.round(255 * enface)),
        "shares": [round(share, 3) for share in shares],
        "surfaces": [],
    }


def volume_of_layers(path: Path, run: str) -> dict[str, Any]:
    """A volume with predicted and labelled surfaces."""
    picture = load_layers(path)
    surfaces = [
        {"name": name, "predicted": _heights(predicted), "truth": _heights(truth)}
        for name, predicted, truth in zip(picture.names, picture.predicted, picture.truth, strict=True)
    ]
    return _scan(picture.volume, picture.spacing) | {"title": f"{run}: {picture.title}", "surfaces": surfaces}


def _scan(volume_DHW: np.ndarray, spacing: tuple[float, float, float]) -> dict[str, Any]:
    """The pictures of a volume: the sheet of B-scans, and en face the mean over the axial axis [D, W]."""
    d, h, w = volume_DHW.shape
    columns = math.ceil(math.sqrt(d * h / w))
    rows = math.ceil(d / columns)
    sheet = np.zeros((rows, columns, h, w), np.uint8)
    sheet.reshape(-1, h, w)[:d] = volume_DHW
    image = Image.fromarray(sheet.transpose(0, 2, 1, 3).reshape(rows * h, columns * w))
    shrink = math.sqrt(min(1.0, MAX_PIXELS / (image.width * image.height)))
    width, height = (max(1, int(n * shrink)) for n in (w, h))
    if shrink < 1:
        image = image.resize((columns * width, rows * height), Image.Resampling.BOX)
    mean_DW = volume_DHW.mean(axis=1)
    low, high = float(mean_DW.min()), float(mean_DW.max())
    enface = np.round(255 * (mean_DW - low) / max(high - low, 1e-6)).astype(np.uint8)
    return {
        "shape": [d, h, w],
        "spacing": list(spacing),
        "sheet": _address(image, "JPEG", quality=JPEG_QUALITY),
        "columns": columns,
        "tile": [height, width],
        "enface": _address(Image.fromarray(enface), "PNG"),
    }


def _address(image: Image.Image, kind: str, **options: int) -> str:
    """The image as a `data:` address."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _bytes(values: np.ndarray) -> str:
    return base64.b64encode(values.astype(np.uint8).tobytes()).decode("ascii")


def _heights(values_DW: np.ndarray) -> str:
    """Heights as 16 bits, little-endian, a sixteenth of a voxel each; 65535 is none."""
    coded = np.where(np.isnan(values_DW), 65535, np.clip(np.round(values_DW * 16), 0, 65534))
    return base64.b64encode(coded.astype("<u2").tobytes()).decode("ascii")
