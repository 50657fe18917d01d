"""One volume onto the common grid, frame by frame: separable, anti-aliased linear resampling.

In: uint8 frames [H, W] in file order, as they are decoded, and the spacing of the voxels (D, H, W) in mm.
Out: uint8 [D, H, W] of `image_size`, the box of valid voxels, the spacing, the share of the field cut off.

Voxel i of an axis covers [i, i + 1] x spacing, with its centre in the middle; the source field and the
target field are centred on each other. Each target voxel is a weighted mean of the source voxels under a
triangle whose half-width is the larger of the two spacings: linear interpolation where an axis grows, a
low-pass filter where it shrinks (plain trilinear sampling aliases). Only samples inside the field count.
A target voxel whose centre lies outside the acquired field is padding: 0, and outside the valid box.

B-scans are never mixed where they lie further apart than half a step of the grid along D: a plane is then the
nearest B-scan (`plane_weights`), and all that is laid on the grid or read back goes by the same B-scans. The
grid is moved by half a step along D where that brings it nearer to the B-scans. A store says by which rule it
was made: `planes` of its geometry, NEAREST; without it BLENDED, the triangle along D too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from utils.errors import UserError

Triple = tuple[float, float, float]
_BLOCK = 16  # output lines per matrix product: narrow enough to skip most of the zeros of a banded matrix
VALID_SHARE = 0.5  # a token is valid when at least this share of it is inside the acquired field
_CENTRE_TOLERANCE = 1e-6  # of a voxel; a centre on the field's edge is inside, whatever the rounding
NEAREST, BLENDED = "nearest", "blended"  # what a plane is: rules of today, and of stores that name none


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


def rule_of(named: Mapping[str, Any]) -> str:
    """NEAREST or BLENDED, of a store's geometry or a checkpoint; raises UserError for another rule."""
    planes = named.get("planes", BLENDED)
    if planes not in (NEAREST, BLENDED):
        raise UserError(f"planes: expected {NEAREST} or {BLENDED}, found {planes}; another version wrote it")
    return str(planes)


def is_nearest(spacing: float, target_spacing: float, planes: str) -> bool:
    """Whether each plane is one B-scan, for B-scans `spacing` apart on a grid of `target_spacing`."""
    return planes == NEAREST and spacing > target_spacing * (0.5 + _CENTRE_TOLERANCE)


def _places(size: int, spacing: float, target_size: int, target_spacing: float) -> np.ndarray:
    """The centres of all planes of the grid, counted in B-scans [target_size]."""
    step = target_spacing / spacing
    # the grid moves by half a step where B-scans are over a quarter of one away from it
    away = (np.arange(size) - (size - 1) / 2) / step - (target_size - 1) / 2
    is_away = np.abs(away - np.floor(away + 0.5)).mean() > 0.25 + _CENTRE_TOLERANCE
    # unless a grid that holds the whole scan would then lose its first B-scan
    first = (size - 1) / 2 - (target_size - 1) / 2 * step
    loses = target_size * step >= size * (1 - _CENTRE_TOLERANCE) and first > _CENTRE_TOLERANCE
    shift = 0.5 * (is_away and not loses)
    return (np.arange(target_size) - (target_size - 1) / 2 + shift) * step + (size - 1) / 2


def plane_weights(
    size: int, spacing: float, target_size: int, target_spacing: float, planes: str = NEAREST
) -> AxisWeights:
    """As `axis_weights`, along D: where `is_nearest`, a plane's one weight is that of the nearest B-scan."""
    if not is_nearest(spacing, target_spacing, planes):
        return axis_weights(size, spacing, target_size, target_spacing)
    places, edge = _places(size, spacing, target_size, target_spacing), size / 2
    inside = np.flatnonzero(np.abs(places - (size - 1) / 2) <= edge * (1 + _CENTRE_TOLERANCE))
    # half-way between two B-scans it is the first, whatever the rounding
    source = np.ceil(places - 0.5 - _CENTRE_TOLERANCE).clip(0, size - 1).astype(int)
    weights = np.zeros((target_size, size), np.float32)
    weights[inside, source[inside]] = 1.0
    return AxisWeights(weights, (int(inside[0]), int(inside[-1]) + 1))


def scan_weights(
    size: int, spacing: float, target_size: int, target_spacing: float, planes: str = NEAREST
) -> np.ndarray:
    """The way back of `plane_weights`, float32 [B-scans, planes]. A B-scan is the nearest of the planes that
    repeat it; one without a plane lies between those beside it. 0 outside the grid.
    """
    if not is_nearest(spacing, target_spacing, planes):
        return axis_weights(target_size, target_spacing, size, spacing).weights
    laid = plane_weights(size, spacing, target_size, target_spacing, planes).weights
    places, reach = _places(size, spacing, target_size, target_spacing), target_spacing / spacing / 2
    away = np.where(laid > 0, np.abs(places[:, None] - np.arange(size)), np.inf)
    with_plane, plane = np.flatnonzero(laid.any(axis=0)), away.argmin(axis=0)
    own = np.arange(size)
    first, last = min(with_plane[0], places[0] - reach), max(with_plane[-1], places[-1] + reach)
    own = own[(own >= first) & (own <= last)]
    between = np.interp(own, with_plane, np.arange(len(with_plane)))
    low = between.astype(int)
    high = np.minimum(low + 1, len(with_plane) - 1)
    weights = np.zeros((size, target_size), np.float32)
    np.add.at(weights, (own, plane[with_plane[low]]), 1 - (between - low))
    np.add.at(weights, (own, plane[with_plane[high]]), between - low)
    return weights


def left_out(size: int, spacing: float, target_size: int, target_spacing: float, planes: str) -> np.ndarray:
    """The B-scans that the grid reaches and no plane is: some of those that lie closer than planes."""
    own = size, spacing, target_size, target_spacing
    if not is_nearest(spacing, target_spacing, planes):
        return np.zeros(0, int)
    return np.flatnonzero(scan_weights(*own).any(axis=1) & ~plane_weights(*own).weights.any(axis=0))


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
    planes: str | AxisWeights = NEAREST,
) -> Resampled:
    """Resample uint8 frames [H, W] given in file order; flip_d: the file's last frame becomes d = 0.

    `planes`: the rule along D, NEAREST or BLENDED, or its weights.

    Memory: the output, and the few frames that one target plane needs, resampled in H and cropped in W.
    Raises ValueError for a field too small for the grid.
    """
    spacing = output_spacing(shape, spacing_mm, image_size, target_spacing, mode)
    of_d, *of_hw = zip(shape, spacing_mm, image_size, spacing, strict=True)
    along_d = planes if isinstance(planes, AxisWeights) else plane_weights(*of_d, planes)
    axes = along_d, along_h, along_w = (along_d, *(axis_weights(*a) for a in of_hw))
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
