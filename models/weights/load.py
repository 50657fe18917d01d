"""Weights of any file as modules, or fitted to a configuration of ours as the start of a run: `load_encoder`,
`start_from`.

In: a file that models/weights/files.py reads. Out: an encoder of the file's own shape, or tensors by the
names of VJEPA3D with a line for every key. An encoder that does not fit is an error; a predictor of another
shape is left out whole.

Three colour channels become one. The public encoders were given (gray_c - mean_c) / std_c with gray in [0, 1]
and ImageNet's mean and std. One channel x, z-scored as our volumes are, with gray = m + s * x gives the same
embedding with

    kernel' = sum_c kernel_c * s / std_c        bias' = bias + sum_c sum(kernel_c) * (m - mean_c) / std_c

where m .449 and s .226 are the channels' means: the first layer gets the mean and spread of an average
photograph. A patch of 2 planes becomes one of 4 by repeating each plane's kernel and halving it. Image
models: image.py.
"""

from __future__ import annotations

import logging
import posixpath
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from models.predictor import Predictor3D
from models.vit3d import SIZES, Size, VisionTransformer3D
from models.vjepa3d import VJEPA3D
from models.weights.files import read_folder_config, read_weights
from models.weights.image import as_volume_encoder, num_prefix_in
from models.weights.shape import ROLES, Weights, new_encoder, num_prefix_of, require_same
from utils import storage
from utils.checkpoint import CheckpointError, load_newest, to_host, well_formed
from utils.config.recipes import recipe_of
from utils.config.schema import Config

log = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class Start:
    """What a run has to know about the weights that it starts from."""

    participants: list[str]
    init_weight: float  # share of random initialisation in the target
    imported_from: str | None  # of weights that others made: which, by whose licence; None: our own


def load_encoder(path: str) -> VisionTransformer3D:
    """The target encoder of any file, in evaluation mode; it takes any volume of whole patches."""
    weights = read_weights(str(path))
    with torch.random.fork_rng(devices=[]):
        encoder = new_encoder(weights)
    encoder.load_state_dict(weights.target_encoder)
    if weights.positions == "rotary":
        _follow_volumes(encoder)
    return encoder.eval().requires_grad_(False)


def _follow_volumes(encoder: VisionTransformer3D) -> None:
    """Before each call, set the token grid of the encoder to the volume's."""

    def set_grid(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        volume = args[0] if args else kwargs["volume_BCDHW"]
        patch, sizes = encoder.patch_embed.patch, tuple(volume.shape[2:])
        if len(sizes) != 3 or any(size % p or size == 0 for size, p in zip(sizes, patch, strict=True)):
            raise ValueError(
                f"expected a volume [B, C, D, H, W] of whole patches {patch}, found {tuple(volume.shape)}"
            )
        d, h, w = (size // p for size, p in zip(sizes, patch, strict=True))
        encoder.num_tokens, encoder.grid = d * h * w, (d, h, w)

    encoder.register_forward_pre_hook(set_grid, with_kwargs=True)


def start_from(model: VJEPA3D, cfg: Config, normalisation: str) -> Start:
    """Put the weights of method.init_from into the model, and log every key that was not simply loaded."""
    url = cfg.method.init_from
    assert url is not None
    weights = read_weights(url, cfg.data.storage_options)
    trained_with = weights.facts.get("normalisation", NORMALISATION)  # public weights are adapted to it
    if trained_with != normalisation:
        raise CheckpointError(
            f"{url}: normalisation: expected {normalisation} of the store, found {trained_with}"
        )
    result, start = fit(weights, cfg), lineage(weights)
    # from the host alone: what XLA copied on the device, the first host would run as programs of its own
    model.load_state_dict({**to_host(model.state_dict()), **result.tensors})
    for line in result.lines:
        if line.status != "loaded":
            log.info("%s %s: %s", line.status, line.name, line.detail)
    missing = [line for line in result.lines if line.status == "missing"]
    if missing:
        log.warning("%s: the predictor starts at %s", url, missing[0].detail)
    log.info("weights start from %s: %s", url, summary(result.lines))
    return start


def lineage(weights: Weights) -> Start:
    """Which participants the weights saw; raises CheckpointError if the file holds only their number."""
    facts = weights.facts
    if "participants" not in facts and facts.get("num_participants"):
        raise CheckpointError(
            f"{weights.where}: expected the participants that these weights saw, found only their number, "
            f"{facts['num_participants']}; start from the checkpoint that was exported"
        )
    imported_from = facts.get("imported_from")
    if imported_from is None and weights.layout not in ("checkpoint", "export"):
        imported_from = f"{posixpath.basename(weights.where.rstrip('/'))} ({weights.layout})"
    return Start(list(facts.get("participants", [])), facts.get("init_weight", 0.0), imported_from)


def prefix_of_start(cfg: Config) -> int:
    """How many tokens of no place the encoder of a run has, by its method.init_from: its model is built
    before any weights are read. Where that is gone, the newest checkpoint of the run says it.
    """
    url, options = cfg.method.init_from, cfg.data.storage_options
    if url is None:
        return 0
    if storage.exists(storage.join(url, "config.json"), options):
        with well_formed(url, "numbers of tokens in config.json"):
            return num_prefix_in(read_folder_config(url, options))
    state = None if cfg.train.ckpt_dir is None else load_newest(cfg.train.ckpt_dir, options)
    if state is not None:
        prefix = "encoder."
        return num_prefix_of({k.removeprefix(prefix): v for k, v in state["model"].items()})
    return read_weights(url, options).num_prefix
