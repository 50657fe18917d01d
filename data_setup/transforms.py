"""What happens to a prepared volume on its way into a model: geometry, drawn intensities, masks.

Host side: MONAI dictionary transforms, each drawing from its own stream of (seed, step, global position).
In: a sample dict with `volume` uint8 [D,H,W], `spacing` mm (3), `valid_box` voxels (6). They add:
  RandGeometryd         `matrix` [3,4], output voxel index -> stored voxel index; the volume resampled once.
                        Drawn once per sample: both views share it, so token i is the same place in both.
  RandIntensityParamsd  `intensity` [2,3] (gain, gamma, noise_std; view 0 context, 1 target), `noise_seed` [2]
  JEPAMaskd             `context`, `target` token ids and `context_valid`, `target_valid` weights
Plain tensors leave, never MetaTensor. What follows on the device: data_setup/normalisation.py.

The acquired field on the model's grid, for both: from `matrix` [B,3,4] and `valid_box` [B,6], half-open in
stored indices, masks and shares over voxels [B,D,H,W] or tokens [B,N].
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data_setup.masks import MaskPlan, draw_mask
from data_setup.resample import VALID_SHARE
from utils.config.schema import Config

# Where transformers is installed, MONAI imports all of it, for one of its networks: two seconds of every
# start of a process.
sys.modules.setdefault("transformers", None)  # type: ignore[arg-type]  # to import it is an error
from monai.transforms import MapTransform, Randomizable  # noqa: E402

if sys.modules["transformers"] is None:
    del sys.modules["transformers"]

# Streams of one global position; their numbers are part of every result, so they are never renumbered.
STREAM_GEOMETRY, STREAM_INTENSITY, STREAM_MASK, STREAM_MODEL = range(4)
NEUTRAL_INTENSITY = ((1.0, 1.0, 0.0), (1.0, 1.0, 0.0))  # gain, gamma, noise_std; per view
SEED_LIMIT = 2**62
# A processor works on blocks that its cache holds: at 64 x 384 x 384 memory is what costs. A voxel's result
# does not depend on its block.
BLOCK_VOXELS = 2**19
# Resampled coordinates carry float32 rounding: a voxel this close to the field's edge still counts as inside.
EDGE_TOLERANCE = 1e-3


def random_stream(seed: int, step: int, position: int, stream: int) -> np.random.RandomState:
    """The random state of one use (STREAM_*) of one global position; independent of rank and worker."""
    sequence = np.random.SeedSequence([seed, step, position, stream])
    return np.random.RandomState(np.random.MT19937(sequence))


def identity_matrix() -> np.ndarray:
    """float32 [3,4]: every output voxel is the stored voxel of the same index."""
    return np.eye(3, 4, dtype=np.float32)


def geometry_matrix(
    image_size: tuple[int, int, int],
    spacing_mm: tuple[float, float, float] | np.ndarray,
    *,
    flip_w: bool,
    rotate_dw_deg: float,
    rotate_hw_deg: float,
    scale: float,
    shift_fraction: tuple[float, float, float] | np.ndarray,
) -> np.ndarray:
    """float32 [3,4], output voxel index -> stored voxel index, of a motion about the grid's centre in mm.

    The tilt in H-W is a shear: it displaces whole A-scans axially, in proportion to W. That is what a beam
    entering the pupil off-centre does (A-scans stay parallel to the beam); at 3 degrees it differs from a
    rotation by under 0.2 %. So D and W of the result never depend on H, which `resample` exploits.
    """
    angle, slope = math.radians(rotate_dw_deg), math.tan(math.radians(rotate_hw_deg))
    cosine, sine = math.cos(angle), math.sin(angle)
    motion = np.array([[cosine, 0.0, sine], [0.0, 1.0, slope], [-sine, 0.0, cosine]]) / scale
    if flip_w:
        motion[:, 2] *= -1.0
    spacing, size = np.asarray(spacing_mm, np.float64), np.asarray(image_size, np.float64)
    linear = motion * spacing[None, :] / spacing[:, None]
    centre = (size - 1) / 2
    offset = centre - linear @ centre + np.asarray(shift_fraction) * size
    return np.concatenate([linear, offset[:, None]], axis=1).astype(np.float32)


def resample(volume: Tensor, matrix: np.ndarray) -> Tensor:
    """uint8 [D,H,W] -> uint8 [D,H,W]: one trilinear sampling at matrix (d,h,w,1), 0 outside; identity exact.

    D and W of the source do not depend on H, so the eight trilinear weights factor into four over (D,W), the
    same for all H, and two over H, the same for all D. Each factor is a 2-D grid_sample with the remaining
    axis as channels, whose weights are computed once per plane: 4 to 10 times as fast as the 3-D grid_sample.
    Blocks of channels keep the floats in the cache; they change no number.
    """
    assert matrix[0, 1] == matrix[2, 1] == matrix[1, 0] == 0, f"H must not mix with D, W: {matrix.tolist()}"
    if np.array_equal(matrix, identity_matrix()):
        return volume
    size_d, size_h, size_w = volume.shape
    m = matrix.astype(np.float64)
    d, h, w = (np.arange(n, dtype=np.float64) for n in volume.shape)
    places_dw = _places(
        m[0, 0] * d[:, None] + m[0, 2] * w + m[0, 3], m[2, 0] * d[:, None] + m[2, 2] * w + m[2, 3]
    )
    source_h = m[1, 1] * h[:, None] + m[1, 2] * w + m[1, 3]
    places_hw = _places(source_h, np.broadcast_to(w, (size_h, size_w)))
    between = torch.empty(size_d, size_h, size_w)
    result = torch.empty(size_d, size_h, size_w, dtype=torch.uint8)
    for rows in blocks(size_h, size_d * size_w):  # [H, D, W]
        block = volume[:, rows].permute(1, 0, 2).to(torch.float32, memory_format=torch.contiguous_format)
        between[:, rows] = _sample_plane(block, places_dw).permute(1, 0, 2)
    for planes in blocks(size_d, size_h * size_w):  # [D, H, W]
        result[planes] = _sample_plane(between[planes], places_hw).add_(0.5).to(torch.uint8)
    return result


def blocks(lines: int, line_voxels: int) -> Iterator[slice]:
    """Runs of neighbouring lines of about BLOCK_VOXELS together."""
    step = max(1, BLOCK_VOXELS // line_voxels)
    return (slice(start, min(start + step, lines)) for start in range(0, lines, step))


def _places(rows: np.ndarray, columns: np.ndarray) -> Tensor:
    """float32 [1,R,S,2]: positions [R,S] in grid_sample's units without align_corners, also of length 1."""
    size_r, size_s = rows.shape
    grid = np.stack([(2 * columns + 1) / size_s - 1, (2 * rows + 1) / size_r - 1], axis=-1)
    return torch.from_numpy(grid.astype(np.float32))[None]


def _sample_plane(x: Tensor, places: Tensor) -> Tensor:
    """float32 [C,R,S] bilinear at `places` [1,R,S,2], the same for every channel."""
    return F.grid_sample(x[None], places, mode="bilinear", padding_mode="zeros", align_corners=False)[0]


@dataclass(frozen=True)
class Augmentation:
    """How far a sample is moved, and its grey values changed."""

    flip_w_prob: float = 0.5  # of a left-right flip, shared by both views
    rotate_dw_deg: float = 10.0  # en face rotation, uniform in +-
    rotate_hw_deg: float = 3.0  # tilt of the B-scan, uniform in +-
    scale_range: tuple[float, float] = (0.9, 1.1)  # zoom, uniform between the two
    shift_fraction: float = 0.05  # of each axis, uniform in +-
    intensity_prob: float = 0.8  # per view: gain, gamma and noise
    gain: float = 0.2  # log-uniform in 1 / (1 + gain) .. 1 + gain
    gamma: float = 0.3  # likewise
    noise_std: float = 0.1  # upper end of a uniform draw, in standard deviations of the volume

    def times(self, strength: float) -> Augmentation:
        """The same with all ranges narrower: 0 changes nothing, 1 is this one."""
        low, high = self.scale_range
        narrow = {f.name: strength * getattr(self, f.name) for f in fields(self) if f.name != "scale_range"}
        return Augmentation(scale_range=(1 - strength * (1 - low), 1 + strength * (high - 1)), **narrow)


class RandGeometryd(Randomizable, MapTransform):
    """Draw one affine of `augment` per sample, resample `volume` with it, and add `matrix`."""

    def __init__(self, augment: Augmentation) -> None:
        MapTransform.__init__(self, ("volume",))
        self.augment = augment

    def randomize(self, data: Any = None) -> None:
        """Draw this sample's motion; the same number of draws whatever the settings are."""
        a, draw = self.augment, self.R.uniform
        self.motion: dict[str, Any] = {
            "flip_w": bool(draw() < a.flip_w_prob),
            "rotate_dw_deg": draw(-1, 1) * a.rotate_dw_deg,
            "rotate_hw_deg": draw(-1, 1) * a.rotate_hw_deg,
            "scale": draw(*a.scale_range),
            "shift_fraction": draw(-1, 1, 3) * a.shift_fraction,
        }

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """The sample with `volume` resampled and `matrix` float32 [3,4]."""
        self.randomize()
        sample = dict(data)
        sample["matrix"] = geometry_matrix(sample["volume"].shape, sample["spacing"], **self.motion)
        for key in self.key_iterator(sample):
            sample[key] = resample(sample[key], sample["matrix"])
        return sample


class RandIntensityParamsd(Randomizable, MapTransform):
    """Draw gain, gamma and noise of each view: `intensity` float32 [2,3]; the device applies them."""

    def __init__(self, augment: Augmentation) -> None:
        MapTransform.__init__(self, ("intensity",))
        self.augment = augment

    def randomize(self, data: Any = None) -> None:
        """Draw both views' parameters and noise seeds."""
        a, draw = self.augment, self.R.uniform
        self.intensity = np.array(NEUTRAL_INTENSITY, np.float32)
        for view in range(2):
            chosen = draw() < a.intensity_prob
            gain = (1 + a.gain) ** draw(-1, 1)
            gamma = (1 + a.gamma) ** draw(-1, 1)
            noise_std = draw(0, 1) * a.noise_std
            if chosen:
                self.intensity[view] = gain, gamma, noise_std
        self.noise_seed = self.R.randint(0, SEED_LIMIT, size=2, dtype=np.int64)

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """The sample with `intensity` and `noise_seed`."""
        self.randomize()
        return {**data, "intensity": self.intensity, "noise_seed": self.noise_seed}


class JEPAMaskd(Randomizable, MapTransform):
    """Draw the context and target tokens of a sample whose `matrix` and `valid_box` say what is valid."""

    def __init__(self, plan: MaskPlan, patch_size: tuple[int, int, int]) -> None:
        MapTransform.__init__(self, ("context", "target"))
        self.plan, self.patch_size = plan, patch_size

    def randomize(self, data: Any = None) -> None:
        """Draw from `data`, the validity of every token (bool [N])."""
        self.drawn = draw_mask(self.R, self.plan, data)

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """The sample with context, target int64, context_valid, target_valid float32 and token_valid bool."""
        sample = dict(data)
        matrix, box = (torch.tensor(sample[key])[None] for key in ("matrix", "valid_box"))
        valid = token_valid(matrix, box, self.plan.grid, self.patch_size)[0].numpy()
        self.randomize(valid)
        for key, ids in zip(self.keys, self.drawn, strict=True):
            sample[key] = ids
            sample[f"{key}_valid"] = valid[ids].astype(np.float32)
        sample["token_valid"] = valid
        return sample


def training_transforms(
    cfg: Config,
) -> tuple[tuple[int, RandGeometryd | RandIntensityParamsd | JEPAMaskd], ...]:
    """(stream, transform) in the order in which a training sample passes through them."""
    augment = Augmentation().times(cfg.augment.strength)
    return (
        (STREAM_GEOMETRY, RandGeometryd(augment)),
        (STREAM_INTENSITY, RandIntensityParamsd(augment)),
        (STREAM_MASK, JEPAMaskd(MaskPlan.from_config(cfg), cfg.spatial.patch_size)),
    )


def valid_planes(matrix: Tensor, valid_box: Tensor, size: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """bool [B,D,1,W] and [B,1,H,W], whose conjunction is `voxel_valid`."""
    d, h, w = (torch.arange(n, dtype=torch.float32, device=matrix.device) for n in size)
    m = matrix[:, :, :, None, None, None]
    low = valid_box[:, 0::2, None, None, None] - EDGE_TOLERANCE
    high = valid_box[:, 1::2, None, None, None] - 1 + EDGE_TOLERANCE
    source_d = m[:, 0, 0] * d[:, None, None] + (m[:, 0, 2] * w + m[:, 0, 3])
    source_h = m[:, 1, 1] * h[:, None] + (m[:, 1, 2] * w + m[:, 1, 3])
    source_w = m[:, 2, 0] * d[:, None, None] + (m[:, 2, 2] * w + m[:, 2, 3])
    in_d = (source_d >= low[:, 0]) & (source_d <= high[:, 0])
    in_h = (source_h >= low[:, 1]) & (source_h <= high[:, 1])
    in_w = (source_w >= low[:, 2]) & (source_w <= high[:, 2])
    return in_d & in_w, in_h


def voxel_valid(matrix: Tensor, valid_box: Tensor, size: tuple[int, int, int]) -> Tensor:
    """bool [B,D,H,W]: every stored voxel that this voxel was interpolated from is in the acquired field.

    matrix [B,3,4] as `geometry_matrix` makes it (H never mixes into D and W, nor D into H): output voxel
    index -> stored voxel index; valid_box [B,6]: half-open, in stored indices.
    """
    in_dw, in_hw = valid_planes(matrix, valid_box, size)
    return in_dw & in_hw


def token_share(
    matrix: Tensor, valid_box: Tensor, grid: tuple[int, int, int], patch: tuple[int, int, int]
) -> Tensor:
    """float32 [B,N]: share of each token that `voxel_valid` calls valid; matrix [B,3,4], valid_box [B,6]."""
    size = (grid[0] * patch[0], grid[1] * patch[1], grid[2] * patch[2])
    in_dw, in_hw = valid_planes(matrix, valid_box, size)
    (d, h, w), patch_w = grid, patch[2]
    share_dw = in_dw.view(-1, d, patch[0], w, patch_w).to(torch.float32).mean(2)
    share_hw = in_hw.view(-1, h, patch[1], w, patch_w).to(torch.float32).mean(2)
    # Within one column of the token the share is a product, since the two planes only have W in common.
    return torch.einsum("bdwp,bhwp->bdhw", share_dw, share_hw).flatten(1) / patch_w


def token_valid(
    matrix: Tensor, valid_box: Tensor, grid: tuple[int, int, int], patch: tuple[int, int, int]
) -> Tensor:
    """bool [B,N]: at least half of the token is inside the acquired field."""
    return token_share(matrix, valid_box, grid, patch) >= VALID_SHARE
