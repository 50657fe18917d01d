"""The one normalisation of every stage, so that training and evaluation read the same numbers.

In: uint8 volumes [B,D,H,W] on any device, where their voxels came from, the acquired field, the stored
statistics and the drawn intensities (data_setup.transforms). Out: float32 [B,1,D,H,W] for an encoder.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from data_setup.transforms import blocks, valid_planes
from utils.counter_rng import counter_normal


def normalise(
    volume: Tensor,
    matrix: Tensor,
    valid_box: Tensor,
    mean: Tensor,
    std: Tensor,
    intensity: Tensor | None = None,
    noise_seed: Tensor | None = None,
) -> Tensor:
    """uint8 [B,D,H,W] -> float32 [B,1,D,H,W]: gamma, z-score over valid voxels, gain, noise, 0 outside.

    In this order: grey = (volume / 255) ** gamma * 255, so black and white stay; z = (grey - mean) / std with
    the stored statistics of the volume (mean, std [B], in 0..255); z * gain + noise_std * normal(noise_seed,
    voxel index). intensity [B,3] is (gain, gamma, noise_std), None is neutral. Static shapes, no generator
    state.
    """
    size = (volume.shape[1], volume.shape[2], volume.shape[3])
    in_dw, in_hw = valid_planes(matrix, valid_box, size)
    if volume.device.type != "cpu":
        x = _standardise(volume, mean, std, intensity)
        if intensity is not None and noise_seed is not None:
            x.add_(_noise(intensity[:, 2], noise_seed, size, 0))
        return x.masked_fill_(~(in_dw & in_hw), 0.0)[:, None]
    with _one_thread():
        return _normalise_on_cpu(volume, (in_dw, in_hw), mean, std, intensity, noise_seed)[:, None]


@contextmanager
def _one_thread() -> Iterator[None]:
    """A processor's cores belong to the loader's workers: many short operations of several threads, each with
    a meeting at its end, wait for a core every time and take twice as long (docs/evidence/benchmarks.md).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _normalise_on_cpu(
    volume: Tensor,
    valid_planes: tuple[Tensor, Tensor],
    mean: Tensor,
    std: Tensor,
    intensity: Tensor | None,
    noise_seed: Tensor | None,
) -> Tensor:
    """`normalise` [B,D,H,W] in blocks: the 256 greys of a sample are computed once, every voxel looks up."""
    in_dw, in_hw = valid_planes
    greys = torch.arange(256, dtype=torch.uint8).view(1, 1, 1, 256)
    result = torch.empty(volume.shape, dtype=torch.float32)
    for sample in range(len(volume)):
        one = slice(sample, sample + 1)
        drawn = None if intensity is None else intensity[one]
        table = _standardise(greys, mean[one], std[one], drawn).flatten()
        for planes in blocks(volume.shape[1], volume.shape[2] * volume.shape[3]):
            part = volume[one, planes]
            x = table.index_select(0, part.flatten().to(torch.int32)).view(part.shape)
            if drawn is not None and noise_seed is not None and bool(drawn[0, 2] > 0):
                x.add_(_noise(drawn[:, 2], noise_seed[one], part.shape[1:], planes.start))
            result[one, planes] = x.masked_fill_(~(in_dw[one, planes] & in_hw[one]), 0.0)
    return result


def _standardise(volume: Tensor, mean: Tensor, std: Tensor, intensity: Tensor | None) -> Tensor:
    """`normalise` of uint8 [B,D,H,W], noise not yet added and padding not yet blanked."""
    per_sample = (slice(None), None, None, None)
    shift, factor = mean, 1.0 / std
    x = volume.to(torch.float32)  # in place from here on: allocation is the cost
    if intensity is not None:
        gain, gamma = intensity[:, 0], intensity[:, 1]
        x.mul_(1.0 / 255.0).pow_(gamma[per_sample])
        shift, factor = mean / 255.0, 255.0 * gain / std
    return x.sub_(shift[per_sample]).mul_(factor[per_sample])


def _noise(noise_std: Tensor, seed: Tensor, size: Sequence[int], first_plane: int) -> Tensor:
    """float32 [B,*size] of noise_std, seed [B], for the planes from `first_plane` of their volumes on."""
    per_sample = (slice(None), None, None, None)
    planes, plane = size[0], math.prod(size[1:])
    # voxel index as a sum of two short counters: XLA writes each arange into the program
    first = torch.arange(first_plane, first_plane + planes, dtype=torch.int32, device=seed.device)
    within = torch.arange(plane, dtype=torch.int32, device=seed.device).view(1, *size[1:])
    counter = (first * plane).view(-1, 1, 1) + within
    return counter_normal(seed[per_sample], counter).mul_(noise_std[per_sample])


def view(batch: dict[str, Tensor], number: int) -> Tensor:
    """The context (0) or target view (1) of a batch, [B, 1, D, H, W]: one geometry, separate intensities."""
    common = (batch["volume"], batch["matrix"], batch["valid_box"], batch["mean"], batch["std"])
    return normalise(*common, batch["intensity"][:, number], batch["noise_seed"][:, number])


def plain_view(batch: dict[str, Tensor]) -> Tensor:
    """The normalised volume [B, 1, D, H, W] without augmentation."""
    return normalise(batch["volume"], batch["matrix"], batch["valid_box"], batch["mean"], batch["std"])
