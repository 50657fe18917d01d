"""The encoder with everything before it: resampling, normalisation, validity; one module for torch.export.

In: one volume as acquired, uint8 [D, H, W] of any size, its spacing in mm and the direction of its B-scans.
Out: tokens float32 [N, E], their validity bool [N], and mean and standard deviation over valid tokens [2E].
The rules are those of data_setup/resample.py (triangle filter, voxel centres, fields centred on each other;
along D the nearest B-scan where they lie apart) and data_setup/normalisation.py (z-score over the voxels
inside the scan), written in tensors of any size. `to_onnx` writes the same for runtimes without torch: that
needs onnx and onnxscript, and running it onnxruntime (`pip install onnx onnxscript onnxruntime`).
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.vit3d import VisionTransformer3D
from models.weights.shape import BLENDED, NEAREST

CENTRE_TOLERANCE = 1e-6  # of a voxel; a centre on the field's edge is inside
SMALLEST_WEIGHT = 1e-9  # rounding: a sample at the foot of the triangle does not count
VALID_SHARE = 0.5  # of a token inside the scan
NORMALISATION = "zscore_valid"
LARGEST_BYTES = 2**31 - 2**20  # of an ONNX file, one protocol buffer, less what is no weight


@dataclass(frozen=True)
class Preprocess:
    """What happens to a volume before the encoder; mm and voxels in the order D, H, W."""

    image_size: tuple[int, int, int]
    target_spacing_mm: tuple[float, float, float]
    resample: str  # spacing | resize
    patch_size: tuple[int, int, int]
    planes: str = NEAREST  # nearest | blended: what a plane of the grid is

    @classmethod
    def of(cls, values: dict[str, Any]) -> Preprocess:
        """From preprocess.json; raises KeyError for a key that is not there but `planes`, which is newer."""
        triples = {name: tuple(values[name]) for name in ("image_size", "target_spacing_mm", "patch_size")}
        return cls(**triples, resample=values["resample"], planes=values.get("planes", BLENDED))


class PortableEncoder(nn.Module):
    """`forward(volume_DHW, spacing_mm, first_is_superior)`: tokens [N, E], valid [N], pooled [2E]."""

    def __init__(self, encoder: VisionTransformer3D, preprocess: Preprocess) -> None:
        super().__init__()
        self.encoder, self.preprocess = encoder, preprocess

    def forward(
        self, volume_DHW: Tensor, spacing_mm: Tensor, first_is_superior: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        view_BCDHW, valid_N = self.view(volume_DHW, spacing_mm, first_is_superior)
        return self.features(view_BCDHW, valid_N)

    def features(self, view_BCDHW: Tensor, valid_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What comes after the normalisation; the view is float32 [1, 1, D, H, W]."""
        tokens_NE = self.encoder(view_BCDHW)[0].float()
        weight_N1 = valid_N.to(tokens_NE)[:, None]
        total = weight_N1.sum()
        mean_E = (tokens_NE * weight_N1).sum(dim=0) / total
        variance_E = ((tokens_NE - mean_E).square() * weight_N1).sum(dim=0) / total
        return tokens_NE, valid_N, torch.cat([mean_E, variance_E.sqrt()])

    def view(
        self, volume_DHW: Tensor, spacing_mm: Tensor, first_is_superior: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The normalised view [1, 1, D, H, W] and the tokens' validity [N]."""
        grey, inside = self.on_grid(volume_DHW, spacing_mm, first_is_superior)
        in_d, in_h, in_w = inside
        mask = in_d[:, None, None] & in_h[:, None] & in_w
        weight, exact = mask.double(), grey.double()
        mean = (exact * weight).sum() / weight.sum()
        variance = (exact.square() * weight).sum() / weight.sum() - mean.square()
        std = variance.clamp(min=0).sqrt()
        factor = torch.where(std > 0, 1 / std, torch.zeros_like(std))
        view = ((grey - mean.float()) * factor.float()).masked_fill(~mask, 0.0)
        share_d, share_h, share_w = (
            axis.float().unflatten(0, (-1, p)).mean(1)
            for axis, p in zip(inside, self.preprocess.patch_size, strict=True)
        )
        share = share_d[:, None, None] * share_h[:, None] * share_w
        return view[None, None], share.flatten() >= VALID_SHARE

    def on_grid(
        self, volume_DHW: Tensor, spacing_mm: Tensor, first_is_superior: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Grey values of 0..255 on the grid, whole numbers in float32 [D, H, W], and of each axis which
        voxels lie inside the scan.
        """
        volume = torch.where(first_is_superior, volume_DHW, volume_DHW.flip(0)).float()
        (d, in_d), (h, in_h), (w, in_w) = (
            self._axis(axis, size, spacing_mm[axis]) for axis, size in enumerate(volume_DHW.shape)
        )
        volume = torch.einsum("th,dhw->dtw", h, volume)
        volume = torch.einsum("td,dhw->thw", d, volume)
        volume = torch.einsum("tw,dhw->dht", w, volume)
        return volume.round(), (in_d, in_h, in_w)

    def _axis(self, axis: int, size: int, spacing: Tensor) -> tuple[Tensor, Tensor]:
        """Weights float32 [target, source] of an axis, and which target voxels lie inside the scan."""
        count, spacing = self.preprocess.image_size[axis], spacing.double()
        target_spacing = torch.full_like(spacing, self.preprocess.target_spacing_mm[axis])
        if self.preprocess.resample == "resize":
            target_spacing = size * spacing / count
        of_source = torch.arange(size, dtype=torch.float64, device=spacing.device)
        source = (of_source + 0.5 - size / 2) * spacing
        of_target = torch.arange(count, dtype=torch.float64, device=spacing.device)
        target = (of_target + 0.5 - count / 2) * target_spacing
        inside = target.abs() <= size * spacing / 2 + CENTRE_TOLERANCE * target_spacing
        half_width = torch.maximum(spacing, target_spacing)
        weights = (1 - (target[:, None] - source).abs() / half_width).clamp(min=0)
        weights = torch.where((weights >= SMALLEST_WEIGHT) & inside[:, None], weights, 0.0)
        total = weights.sum(dim=1, keepdim=True)
        blended = weights / torch.where(total > 0, total, 1.0)
        if axis or self.preprocess.planes == BLENDED:
            return blended.float(), inside
        nearest, covered = self._nearest(of_source, spacing, of_target, target_spacing)
        is_nearest = spacing > target_spacing * (0.5 + CENTRE_TOLERANCE)
        weights = torch.where(is_nearest, nearest, blended).float()
        return weights, (covered & is_nearest) | (inside & ~is_nearest)  # onnxruntime has no where of these

    def _nearest(
        self, of_source: Tensor, spacing: Tensor, of_target: Tensor, target_spacing: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `_axis`, with the nearest B-scan for a plane, on a grid moved by half a step where that is
        nearer: plane_weights of data_setup/resample.py.
        """
        count, last = len(of_target), of_source.max()
        away = (of_source - last / 2) * spacing / target_spacing - (count - 1) / 2
        is_away = (away - (away + 0.5).floor()).abs().mean() > 0.25 + CENTRE_TOLERANCE
        step = target_spacing / spacing
        holds = count * step >= (last + 1) * (1 - CENTRE_TOLERANCE)
        loses = holds & (last / 2 - (count - 1) / 2 * step > CENTRE_TOLERANCE)
        shift = 0.5 * (is_away & ~loses)
        places = (of_target - (count - 1) / 2 + shift) * target_spacing / spacing + last / 2
        inside = (places - last / 2).abs() <= (last + 1) / 2 * (1 + CENTRE_TOLERANCE)
        source = (places - 0.5 - CENTRE_TOLERANCE).ceil().clamp(min=0).minimum(last)
        return ((source[:, None] == of_source) & inside[:, None]).double(), inside


def why_no_onnx(module: nn.Module) -> str | None:
    """The first reason why this program has no ONNX file; None if it has one."""
    lacking = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if lacking:
        return f"{' and '.join(lacking)} not installed (pip install onnx onnxscript)"
    size = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    if size > LARGEST_BYTES:
        return f"one file holds {LARGEST_BYTES / 1e9:.2g} GB, the weights are {size / 1e9:.2g} GB"
    return None


def to_onnx(exported: torch.export.ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> bytes:
    """The program as one ONNX file."""
    with _quiet():
        program = torch.onnx.export(
            exported, dynamo=True, input_names=inputs, output_names=outputs, verbose=False
        )
    assert program is not None
    return program.model_proto.SerializeToString()


def can_run() -> bool:
    """Whether onnxruntime is installed."""
    return importlib.util.find_spec("onnxruntime") is not None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's notes on torchvision, and torch's own use of what it is about to drop."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
            yield
    finally:
        log.setLevel(level)
