"""One volume onto the common grid, frame by frame: separable, anti-aliased linear resampling.

In: uint8 frames [H, W] in file order, as they are decoded, and the spacing of the voxels (D, H, W) in mm.
Out: uint8 [D, H, W] of `image_size`, the box of valid voxels, the spacing, the share of the field cut off.

Voxel i of an axis covers [i, i + 1] x spacing, with its centre in the middle; the source field and the
target field are centred on each other. Each target voxel is a weighted mean of the source voxels under a
triangle whose half-width is the larger of the two spacings: linear interpolation where an axis grows, a
low-pass filter where it shrinks (plain trilinear sampling aliases). Only samples inside the field count.
A target voxel whose centre lies outside the acquired field is padding: 0, and outside the valid box.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

Triple = tuple[float, float, float]
_BLOCK = 16  # output lines per matrix product: narrow enough to skip most of the zeros of a banded matrix
VALID_SHARE = 0.5  # a token is valid when at least this share of it is inside the acquired field
_CENTRE_TOLERANCE = 1e-6  # of a voxel; a centre on the field's edge is inside, whatever the rounding


@dataclass(frozen=True)
class Resampled:
    """A volume on the common grid."""

    voxels: np.ndarray  # uint8 [D, H, W]; 0 outside the valid box
    valid_box: tuple[int, int, int, int, int, int]  # d0, d1, h0, h1, w0, w1, half-open
    spacing_mm: Triple
    lost_fraction: float  # share of the acquired field outside the grid

    @property
    def valid_fraction(self) -> float:
        """Share of the grid inside the acquired field."""
        d0, d1, h0, h1, w0, w1 = self.valid_box
        return (d1 - d0) * (h1 - h0) * (w1 - w0) / self.voxels.size


@dataclass(frozen=True)
class AxisWeights:
    """How one axis is resampled: target line = weights [target, source] @ source lines."""

    weights: np.ndarray  # float32; rows outside the valid range are 0
    valid: tuple[int, int]  # half-open range of target indices inside the acquired field

    @cached_property
    def used(self) -> slice:
        """The source lines that target lines need; a wide field has more."""
        used = np.flatnonzero(self.weights.any(axis=0))
        return slice(int(used[0]), int(used[-1]) + 1)

    @cached_property
    def bands(self) -> list[tuple[slice, slice, np.ndarray]]:
        """Blocks of the valid target lines: (place among them, their source lines within `used`, weights)."""
        start, stop = self.valid
        bands = []
        for i in range(start, stop, _BLOCK):
            rows = self.weights[i : min(i + _BLOCK, stop)]
            used = np.flatnonzero(rows.any(axis=0))
            columns = slice(int(used[0]), int(used[-1]) + 1)
            within = slice(columns.start - self.used.start, columns.stop - self.used.start)
            target = slice(i - start, i - start + len(rows))
            bands.append((target, within, np.ascontiguousarray(rows[:, columns])))
        return bands

    def of_rows(self, image: np.ndarray, out: np.ndarray) -> None:
        """float32 [used source lines, n] -> out [valid target lines, n]."""
        for target, source, weights in self.bands:
            np.matmul(weights, image[source], out=out[target])

    def of_columns(self, image: np.ndarray) -> np.ndarray:
        """float32 [n, used source lines] -> [n, valid target lines]."""
        out = np.empty((len(image), self.valid[1] - self.valid[0]), np.float32)
        for target, source, weights in self.bands:
            out[:, target] = image[:, source] @ weights.T
        return out


def valid_tokens(
    box: tuple[int, int, int, int, int, int], size: tuple[int, int, int], patch: tuple[int, int, int]
) -> int:
    """How many tokens of the grid have VALID_SHARE of their voxels in a valid box."""
    shares = []
    for start, stop, length, step in zip(box[::2], box[1::2], size, patch, strict=True):
        first = np.arange(0, length, step)
        shares.append((np.minimum(stop, first + step) - np.maximum(start, first)).clip(0) / step)
    d, h, w = shares
    return int(np.count_nonzero(d[:, None, None] * h[:, None] * w >= VALID_SHARE))


def axis_weights(size: int, spacing: float, target_size: int, target_spacing: float) -> AxisWeights:
    """Weights from `size` voxels of `spacing` to `target_size` of `target_spacing`, centred on each other."""
    source = (np.arange(size) + 0.5 - size / 2) * spacing
    target = (np.arange(target_size) + 0.5 - target_size / 2) * target_spacing
    inside = np.abs(target) <= size * spacing / 2 + _CENTRE_TOLERANCE * target_spacing
    half_width = max(spacing, target_spacing)
    weights = np.maximum(0.0, 1.0 - np.abs(target[:, None] - source[None, :]) / half_width)
    weights[weights < 1e-9] = 0.0  # rounding: a sample at the foot of the triangle does not count
    weights[~inside] = 0.0
    weights[inside] /= weights[inside].sum(axis=1, keepdims=True)
    used = np.flatnonzero(inside)
    if not len(used):  # an even grid has no voxel centre in its middle
        raise ValueError(
            f"field of {size} x {spacing} mm: expected more than one voxel of the grid, {target_spacing} mm, "
            "found no centre of one inside"
        )
    return AxisWeights(weights.astype(np.float32), (int(used[0]), int(used[-1]) + 1))


def output_spacing(
    shape: tuple[int, int, int],
    spacing_mm: Triple,
    image_size: tuple[int, int, int],
    target_spacing: Triple,
    mode: Literal["spacing", "resize"],
) -> Triple:
    """Spacing (D, H, W) in mm after resampling: the target's, or with `resize` the field over the size."""
    if mode == "spacing":
        d, h, w = target_spacing
    else:
        d, h, w = (n * s / m for n, s, m in zip(shape, spacing_mm, image_size, strict=True))
    return (d, h, w)


def resample_frames(
    frames: Iterable[np.ndarray],
    shape: tuple[int, int, int],
    spacing_mm: Triple,
    image_size: tuple[int, int, int],
    target_spacing: Triple,
    mode: Literal["spacing", "resize"] = "spacing",
    flip_d: bool = False,
) -> Resampled:
    """Resample uint8 frames [H, W] given in file order; flip_d: the file's last frame becomes d = 0.

    Memory: the output, and the few frames that one target plane needs, resampled in H and cropped in W.
    Raises ValueError for a field too small for the grid.
    """
    spacing = output_spacing(shape, spacing_mm, image_size, target_spacing, mode)
    axes = [axis_weights(*a) for a in zip(shape, spacing_mm, image_size, spacing, strict=True)]
    along_d, along_h, along_w = axes
    d0, d1, h0, h1, w0, w1 = (edge for axis in axes for edge in axis.valid)
    sources = [np.flatnonzero(along_d.weights[d]) for d in range(d0, d1)]
    # source plane -> the target planes that are complete with it
    completed_by: dict[int, list[int]] = {}
    for d, needed in enumerate(sources, start=d0):
        completed_by.setdefault(int(needed[0 if flip_d else -1]), []).append(d)
    # The latest source planes: enough slots that no plane is overwritten while a target plane needs it.
    slots = max(int(np.ptp(needed)) + 1 for needed in sources)
    num_h, num_w = h1 - h0, along_w.used.stop - along_w.used.start
    latest = np.zeros((slots, num_h, num_w), np.float32)

    voxels = np.zeros(image_size, np.uint8)
    f = -1
    for f, frame in enumerate(frames):
        assert f < shape[0], f"frame {f} of a volume of {shape[0]}"
        assert frame.shape == shape[1:], f"frame {f}: expected {shape[1:]}, found {frame.shape}"
        source = shape[0] - 1 - f if flip_d else f
        if not along_d.used.start <= source < along_d.used.stop:
            continue
        values = frame[along_h.used, along_w.used].astype(np.float32)
        along_h.of_rows(values, out=latest[source % slots])
        for d in completed_by.get(source, ()):
            weights = np.zeros(slots, np.float32)
            weights[sources[d - d0] % slots] = along_d.weights[d, sources[d - d0]]
            plane = (weights @ latest.reshape(slots, -1)).reshape(num_h, num_w)
            plane = along_w.of_columns(plane)
            # A weighted mean of 0..255, so the cast cannot wrap.
            voxels[d, h0:h1, w0:w1] = np.rint(plane, out=plane)
    assert f == shape[0] - 1, f"{f + 1} frames of a volume of {shape[0]}"

    kept = [
        min(1.0, m * t / (n * s)) for n, s, m, t in zip(shape, spacing_mm, image_size, spacing, strict=True)
    ]
    return Resampled(voxels, (d0, d1, h0, h1, w0, w1), spacing, 1.0 - float(np.prod(kept)))
