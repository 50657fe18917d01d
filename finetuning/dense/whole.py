"""A decoder on a whole scan, also where it is larger than the grid, and back to the scan's own voxels.

In: a scan's file, a frozen encoder with its decoder. Out: outputs on the grid of the store, continued beyond
its borders, from windows of its size that overlap (monai.inferers.sliding_window_inference); classes of the
scan's voxels, or surfaces in its rows, in the frame order of its file. Intensities are normalised as those of
the volume that `prepare` would store: the middle of the scan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from einops import rearrange
from monai.inferers import sliding_window_inference
from torch import Tensor, nn

from data_setup.jobs import acquisition
from data_setup.manifest import Record
from data_setup.normalisation import plain_view
from data_setup.readers.dicom import OCTHeader
from data_setup.readers.open_record import open_record
from data_setup.resample import NEAREST, Resampled, is_nearest, output_spacing, resample_frames, scan_weights
from data_setup.store.writer import measure
from data_setup.transforms import identity_matrix
from finetuning.dense.decoder import heights_of
from finetuning.dense.head import Arm
from finetuning.embedding.volumes import Looks
from utils.config.schema import Config, StorageOptions
from utils.runtime.single import Runtime

OVERLAP = 0.25  # of neighbouring windows
AT_ONCE = 8  # planes that go through a decoder together
Size = tuple[int, int, int]
Lengths = tuple[float, float, float]


class Lattice(NamedTuple):
    """Voxels of a scan and of its grid, whose fields are centred on each other; mm."""

    shape: Size
    spacing_mm: Lengths
    grid: Size
    grid_spacing_mm: Lengths
    planes: str  # what a plane of the grid is: data_setup/resample.py


@dataclass(frozen=True)
class WholeScan:
    """A scan on the grid, which grows where the scan is larger."""

    header: OCTHeader
    volume: Resampled
    mean: float  # over the valid voxels of the volume that is stored
    std: float
    fields: dict[str, Any]  # of the stored volume: as Volume's of finetuning.embedding
    planes: str = NEAREST

    @property
    def lattice(self) -> Lattice:
        d, h, w = self.volume.voxels.shape
        return Lattice(
            self.header.shape, self.header.spacing_mm, (d, h, w), self.volume.spacing_mm, self.planes
        )


def read_whole(
    record: Record, cfg: Config, options: StorageOptions, axes: str = "dhw", planes: str = NEAREST
) -> WholeScan:
    """The scan of a record; `axes`: along which the grid may grow, `planes`: the rule of the store that the
    decoder was trained on. Raises OCTReadError, StorageError.
    """
    header, frames = open_record(record, options)
    meter = Looks()
    spatial = cfg.spatial
    grid = (header.shape, header.spacing_mm, spatial.image_size, spatial.target_spacing, spatial.resample)
    spacing = output_spacing(*grid)
    sizes = [
        # a larger scan has the same centres: an even number of voxels more
        size + 2 * max(0, math.ceil((count * own / target - size) / 2 - 1e-6)) if axis in axes else size
        for axis, size, count, own, target in zip(
            "dhw", spatial.image_size, header.shape, header.spacing_mm, spacing, strict=True
        )
    ]
    size = (sizes[0], sizes[1], sizes[2])
    volume = resample_frames(
        meter.watch(frames),
        header.shape,
        header.spacing_mm,
        size,
        spatial.target_spacing,
        spatial.resample,
        header.flip_d,
        planes,
    )
    measured = measure(_middle(volume, spatial.image_size))
    fields = measured | meter.columns(header.spacing_mm) | acquisition(header)
    mean, std = float(measured["intensity_mean"]), float(measured["intensity_std"])
    return WholeScan(header, volume, mean, std, fields, planes)


def _middle(volume: Resampled, size: Size) -> Resampled:
    """The volume of the grid itself, as `prepare` would store it."""
    before = [(whole - own) // 2 for whole, own in zip(volume.voxels.shape, size, strict=True)]
    cut = tuple(slice(b, b + own) for b, own in zip(before, size, strict=True))
    edges = [
        int(np.clip(volume.valid_box[2 * axis + end] - before[axis], 0, size[axis]))
        for axis in range(3)
        for end in (0, 1)
    ]
    box = (edges[0], edges[1], edges[2], edges[3], edges[4], edges[5])
    return Resampled(volume.voxels[cut], box, volume.spacing_mm, volume.lost_fraction)


@torch.no_grad()
def outputs_of(arm: Arm, scan: WholeScan, cfg: Config, runtime: Runtime) -> Tensor:
    """The decoder's outputs on the scan's grid, float32 [S, D, H, W] on the host."""
    batch = {
        "volume": torch.from_numpy(scan.volume.voxels)[None],
        "matrix": torch.from_numpy(identity_matrix())[None],
        "valid_box": torch.tensor([scan.volume.valid_box], dtype=torch.float32),
        "mean": torch.tensor([scan.mean]),
        "std": torch.tensor([scan.std]),
    }
    view = plain_view(runtime.to_device(batch))
    encoder, decoder = arm.encoder.to(runtime.device).eval(), arm.decoder.to(runtime.device).eval()

    def of_window(window_B1DHW: Tensor) -> Tensor:
        with runtime.autocast():
            tokens = encoder(window_B1DHW).float()
        return decode(decoder, tokens, window_B1DHW, cfg)

    whole = sliding_window_inference(
        view, cfg.spatial.image_size, 1, of_window, overlap=OVERLAP, mode="gaussian", device="cpu"
    )
    assert isinstance(whole, Tensor)
    return whole[0]


def decode(decoder: nn.Module, tokens_BNE: Tensor, voxels_B1DHW: Tensor, cfg: Config) -> Tensor:
    """A decoder's outputs [B, S, D, H, W] for whole volumes of the grid."""
    gd, gh, gw = cfg.grid
    tokens = rearrange(tokens_BNE, "b (gd gh gw) e -> (b gd) gh gw e", gd=gd, gh=gh, gw=gw)
    voxels = rearrange(voxels_B1DHW, "b 1 (gd d) h w -> (b gd) d h w", gd=gd)
    parts = [
        decoder(tokens[start : start + AT_ONCE], voxels[start : start + AT_ONCE])
        for start in range(0, len(tokens), AT_ONCE)
    ]
    return rearrange(torch.cat(parts), "(b gd) s d h w -> b s (gd d) h w", gd=gd)


def classes_of_scan(outputs_SDHW: Tensor, scan: WholeScan) -> np.ndarray:
    """As `classes_at`, with the scan's B-scans in the order of its reader's frames."""
    classes = classes_at(outputs_SDHW, scan.lattice)
    return np.ascontiguousarray(classes[::-1]) if scan.header.flip_d else classes


def classes_at(outputs_SDHW: Tensor, lattice: Lattice) -> np.ndarray:
    """The likeliest output of every voxel of a scan, uint8 [D, H, W] in the store's order.

    Probabilities between voxels of the grid are linear.
    """
    probability = outputs_SDHW.softmax(dim=0)
    (low_d, share_d), (low_h, share_h), (low_w, share_w) = _places(lattice)
    result = np.empty(lattice.shape, np.uint8)
    for d in range(lattice.shape[0]):
        plane = torch.lerp(*_neighbours(probability, 1, low_d[d : d + 1]), float(share_d[d]))[:, 0]
        plane = torch.lerp(*_neighbours(plane, 1, low_h), share_h[None, :, None])
        plane = torch.lerp(*_neighbours(plane, 2, low_w), share_w)
        result[d] = plane.argmax(dim=0).to(torch.uint8).numpy()
    return result


def surfaces_of_scan(outputs_SDHW: Tensor, scan: WholeScan) -> np.ndarray:
    """Surfaces in rows of the scan (0: its first), float32 [S, D, W] in the order of its reader's frames."""
    heights = heights_of(outputs_SDHW[None])[0]
    (low_d, share_d), _, (low_w, share_w) = _places(scan.lattice)
    heights = torch.lerp(*_neighbours(heights, 1, low_d), share_d[None, :, None])
    heights = torch.lerp(*_neighbours(heights, 2, low_w), share_w)
    spacing, own = scan.volume.spacing_mm[1], scan.header.spacing_mm[1]
    mm = (heights.double() + 0.5 - scan.volume.voxels.shape[1] / 2) * spacing
    rows = (mm / own + scan.header.shape[1] / 2 - 0.5).float().numpy()
    return np.ascontiguousarray(rows[:, ::-1] if scan.header.flip_d else rows)


def _places(lattice: Lattice) -> list[tuple[Tensor, Tensor]]:
    """For each axis the grid voxel before each of the scan's and the share of the next; own planes."""
    result, axes = [], zip(*lattice[:4], strict=True)
    for axis, (count, own, size, target) in enumerate(axes):
        if axis == 0 and is_nearest(own, target, lattice.planes):
            weights = scan_weights(count, own, size, target, lattice.planes)
            there = np.flatnonzero(weights.any(axis=1))  # what the grid does not reach is as its last plane
            weights = weights[np.arange(count).clip(there[0], there[-1])]
            first = (weights > 0).argmax(axis=1)
            result.append((torch.from_numpy(first), torch.from_numpy(1 - weights[np.arange(count), first])))
            continue
        place = (torch.arange(count, dtype=torch.float64) + 0.5 - count / 2) * own / target + size / 2 - 0.5
        place = place.clamp(0, size - 1)
        low = place.floor().clamp(max=max(size - 2, 0))
        result.append((low.long(), (place - low).float()))
    return result


def _neighbours(values: Tensor, axis: int, low: Tensor) -> tuple[Tensor, Tensor]:
    """The values at `low` and after it along an axis."""
    after = (low + 1).clamp(max=values.shape[axis] - 1)
    return values.index_select(axis, low), values.index_select(axis, after)
