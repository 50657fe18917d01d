"""Weights fitted to a configuration of ours: its one channel, patch and predictor; a line for every key.

In: `Weights` of any file. Out: tensors by the names of VJEPA3D. An encoder that does not fit is an error; a
predictor of another shape is left out whole.

Three colour channels become one. The public encoders were given (gray_c - mean_c) / std_c with gray in [0, 1]
and ImageNet's mean and std. One channel x, z-scored as our volumes are, with gray = m + s * x gives the same
embedding with

    kernel' = sum_c kernel_c * s / std_c        bias' = bias + sum_c sum(kernel_c) * (m - mean_c) / std_c

where m .449 and s .226 are the channels' means: the first layer gets the mean and spread of an average
photograph.
A patch of 2 planes becomes one of 4 by repeating each plane's kernel and halving it. Image models: image.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from models.predictor import Predictor3D
from models.vit3d import SIZES, Size
from models.vjepa3d import VJEPA3D
from models.weights.image import as_volume_encoder
from models.weights.shape import ROLES, Weights, require_same
from utils.checkpoint import CheckpointError
from utils.config.recipes import recipe_of
from utils.config.schema import Config

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORMALISATION = "zscore_valid"  # of the prepared store, and of an adapted encoder's input
GRAY_MEAN, GRAY_STD = sum(IMAGENET_MEAN) / 3, sum(IMAGENET_STD) / 3  # gray in [0, 1] = mean + std * input


class Line(NamedTuple):
    """What became of one key."""

    status: str  # loaded, adapted, left out, missing
    name: str
    detail: str = ""


@dataclass(frozen=True)
class Fit:
    """Tensors of a VJEPA3D by its own names, and a line for every key of the file and of the model."""

    tensors: dict[str, Tensor]
    lines: list[Line]


def adapt_patches(
    weights: Weights, role: str, patch: tuple[int, int, int]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The role's tensors for one channel and another patch, and how each changed key changed.

    Raises CheckpointError for a change that is not exact: other H or W, planes that do not multiply.
    """
    tensors = weights.role(role)
    names = kernel_name, bias_name = "patch_embed.proj.weight", "patch_embed.proj.bias"
    kernel, bias = (tensors[name].double() for name in names)
    changes: dict[str, str] = {}
    if kernel.shape[1] != 1:
        if kernel.shape[1] != len(IMAGENET_MEAN):
            raise CheckpointError(f"{weights.where}: channels: expected 1 or 3, found {kernel.shape[1]}")
        mean, std = (
            torch.tensor(v, dtype=torch.float64).view(1, -1, 1, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD)
        )
        bias = bias + (kernel * ((GRAY_MEAN - mean) / std)).sum((1, 2, 3, 4))
        kernel = (kernel * (GRAY_STD / std)).sum(1, keepdim=True)
        text = f"ImageNet's mean and std folded, gray = {GRAY_MEAN:.4g} + {GRAY_STD:.4g} x input"
        changes = {kernel_name: f"3 channels summed, {text}", bias_name: text}
    planes = kernel.shape[2]
    if tuple(kernel.shape[3:]) != tuple(patch[1:]) or patch[0] % planes:
        raise CheckpointError(
            f"{weights.where}: patch: expected H and W of {list(patch)} and a divisor of its D, "
            f"found {list(kernel.shape[2:])}"
        )
    if planes != patch[0]:
        times = patch[0] // planes
        kernel = kernel.repeat_interleave(times, dim=2) / times
        more = f"{planes} planes repeated to {patch[0]} and divided by {times}"
        changes[kernel_name] = "; ".join(text for text in (changes.get(kernel_name), more) if text)
    return {**tensors, kernel_name: kernel.float(), bias_name: bias.float()}, changes


def fit(weights: Weights, cfg: Config) -> Fit:
    """The weights for this configuration; raises CheckpointError where an encoder does not fit."""
    with torch.device("meta"):
        model = VJEPA3D(cfg, weights.num_prefix)
    _require_encoder(weights, cfg)
    tensors: dict[str, Tensor] = {}
    lines = [Line("left out", name, why) for name, why in weights.left_out.items()]
    for role, module in (("encoder", model.encoder), ("target_encoder", model.target_encoder)):
        if weights.layout == "image":
            adapted, changes = as_volume_encoder(weights, cfg, module.mask_token is not None)
        else:
            adapted, changes = adapt_patches(weights, role, cfg.spatial.patch_size)
        require_same(f"{weights.where}: {role}", module.state_dict(), adapted)
        tensors |= {f"{role}.{name}": tensor for name, tensor in adapted.items()}
        same = "the file's one encoder" if weights.encoder is weights.target_encoder else ""
        lines += [
            Line("adapted", f"{role}.{name}", changes[name])
            if name in changes
            else Line("loaded", f"{role}.{name}", same)
            for name in adapted
        ]
    ours = model.predictor.state_dict()
    spare = [n for n in weights.predictor if n.startswith("mask_tokens.") and n not in ours]
    theirs = {name: tensor for name, tensor in weights.predictor.items() if name not in spare}
    reason = _predictor_misfit(weights, theirs, cfg, model)
    if reason is None:
        tensors |= {f"predictor.{name}": tensor for name, tensor in theirs.items()}
        lines += [Line("loaded", f"predictor.{name}") for name in theirs]
        lines += [Line("left out", f"predictor.{name}", "mask token of other clip lengths") for name in spare]
    else:
        lines += [Line("left out", f"predictor.{name}", reason) for name in weights.predictor]
        lines += [Line("missing", f"predictor.{name}", f"random: {reason}") for name in ours]
    roles = tuple(f"{role}." for role in ROLES)
    heads = [name for name in model.state_dict() if not name.startswith(roles)]
    lines += [Line("missing", name, "random: only pre-training uses it") for name in heads]
    return Fit(tensors, lines)


def _require_encoder(weights: Weights, cfg: Config) -> None:
    wanted, where = SIZES[cfg.model.size], weights.where
    recipe = recipe_of(cfg.method)
    if weights.positions not in (recipe.positions, "image"):
        raise CheckpointError(
            f"{where}: method.recipe {cfg.method.recipe}: expected {recipe.positions} positions, found "
            f"{weights.positions} positions"
        )
    is_file_of_volumes = weights.layout != "image"
    if is_file_of_volumes and weights.positions != "learned" and weights.rope != cfg.model.rope:
        raise CheckpointError(
            f"{where}: model.rope: expected {cfg.model.rope} of the configuration, found {weights.rope} "
            f"(model.rope={weights.rope} fits these weights)"
        )
    if is_file_of_volumes and recipe.hidden != "targets" and "mask_token" in weights.encoder:
        raise CheckpointError(f"{where}: expected no mask token in the encoder, found one")
    if weights.size != wanted:
        raise CheckpointError(
            f"{where}: model.size {cfg.model.size}: expected {shown(wanted)}, found {shown(weights.size)}"
        )


def shown(size: Size) -> str:
    """A transformer's shape in words."""
    return (
        f"{size.depth} blocks of width {size.width} with {size.heads} heads, MLP ratio {size.mlp_ratio:.3g}"
    )


def _predictor_misfit(weights: Weights, theirs: dict[str, Tensor], cfg: Config, model: VJEPA3D) -> str | None:
    """Why the file's predictor cannot be this model's; None if it can."""
    if weights.layout == "research_2_1":
        return "the file's predictor is V-JEPA 2.1's, of other features"
    if not theirs:
        return "the file has no predictor"
    if weights.recipe != cfg.method.recipe:
        return f"predictor of recipe {weights.recipe}"
    try:
        require_same("predictor", model.predictor.state_dict(), theirs)
    except CheckpointError as error:
        return f"another shape, {error}"
    size = weights.predictor_size
    if size is not None and isinstance(model.predictor, Predictor3D) and size.heads != model.predictor.heads:
        return f"predictor of {size.heads} heads"
    return None


def summary(lines: Sequence[Line]) -> str:
    """Counts by status."""
    counts = Counter(line.status for line in lines)
    return ", ".join(f"{counts[s]} {s}" for s in ("loaded", "adapted", "left out", "missing"))
