"""Weights of any file as modules, or as the start of a run: `load_encoder`, `load_vjepa2`, `start_from`.

In: a file that models/weights/files.py reads. Out: modules of the file's own shape, or a model of this
project with the weights that fit its configuration (models/weights/fit.py).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from models.predictor import Predictor3D
from models.vit3d import VisionTransformer3D
from models.vjepa3d import VJEPA3D
from models.weights.files import read_weights
from models.weights.fit import ADAPTED_PLANES, GRAY, NORMALISATION, adapt_patches, fit, summary
from models.weights.shape import Weights, new_encoder, new_predictor
from utils.checkpoint import CheckpointError, to_host
from utils.config.schema import Config

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """What a run has to know about the weights that it starts from."""

    participants: list[str]
    init_weight: float  # share of random initialisation in the target


def load_vjepa2(
    path: str,
    adapt: bool = False,
    *,
    heads: int | None = None,
    predictor_heads: int | None = None,
    mask_token: int = 0,
) -> tuple[VisionTransformer3D, VisionTransformer3D, Predictor3D]:
    """(encoder, target_encoder, predictor) of the file's own shape, in evaluation mode.

    The encoders take any volume [B, C, D, H, W] of whole patches. The predictor uses the grid of the volume
    that either encoder saw last (at first the file's grid; 8 x 16 x 16 for a research file).
    `adapt`: change the encoders to one channel of gray in [0, 1] and patches of 4 planes.
    `heads`, `predictor_heads`: needed for a research file whose heads are not 64 and 32 channels wide.
    `mask_token`: which of the predictor's tokens to use. The published recipe trains token 0 when all clips
    have one length; Hugging Face's bare predictor uses token 1.
    """
    weights = read_weights(str(path), heads=heads, predictor_heads=predictor_heads)
    if weights.predictor_size is None:
        theirs = "V-JEPA 2.1's, which predicts other features" if weights.layout == "research_2_1" else "none"
        raise CheckpointError(f"{path}: expected a transformer predictor, found {theirs}")
    if adapt:
        patch = (ADAPTED_PLANES, *weights.patch[1:])
        weights = replace(
            weights,
            encoder=adapt_patches(weights, "encoder", patch, 1, GRAY)[0],
            target_encoder=adapt_patches(weights, "target_encoder", patch, 1, GRAY)[0],
        )
    with torch.random.fork_rng(devices=[]):
        encoder, target_encoder = new_encoder(weights), new_encoder(weights)
        predictor = new_predictor(weights, mask_token)
    encoder.load_state_dict(weights.encoder)
    target_encoder.load_state_dict(weights.target_encoder)
    predictor.load_state_dict(weights.predictor)
    if weights.positions == "rotary":
        for module in (encoder, target_encoder):
            _follow_volumes(module, predictor)
    return encoder.eval(), target_encoder.eval().requires_grad_(False), predictor.eval()


def load_encoder(path: str) -> VisionTransformer3D:
    """The target encoder of any file, in evaluation mode; it takes any volume of whole patches."""
    weights = read_weights(str(path))
    with torch.random.fork_rng(devices=[]):
        encoder = new_encoder(weights)
    encoder.load_state_dict(weights.target_encoder)
    if weights.positions == "rotary":
        _follow_volumes(encoder)
    return encoder.eval().requires_grad_(False)


def _follow_volumes(encoder: VisionTransformer3D, *others: Predictor3D) -> None:
    """Before each call, set the token grid of the encoder and the others to the volume's."""
    modules: tuple[VisionTransformer3D | Predictor3D, ...] = (encoder, *others)

    def set_grid(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        volume = args[0] if args else kwargs["volume_BCDHW"]
        patch, sizes = encoder.patch_embed.patch, tuple(volume.shape[2:])
        if len(sizes) != 3 or any(size % p or size == 0 for size, p in zip(sizes, patch, strict=True)):
            raise ValueError(
                f"expected a volume [B, C, D, H, W] of whole patches {patch}, found {tuple(volume.shape)}"
            )
        d, h, w = (size // p for size, p in zip(sizes, patch, strict=True))
        encoder.num_tokens = d * h * w
        for module in modules:
            module.grid = (d, h, w)

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
    return Start(list(facts.get("participants", [])), facts.get("init_weight", 0.0))
