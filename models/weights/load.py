"""Weights of any file as modules, or as the start of a run: `load_encoder`, `start_from`.

In: a file that models/weights/files.py reads. Out: an encoder of the file's own shape, or a model of this
project with the weights that fit its configuration (models/weights/fit.py).
"""

from __future__ import annotations

import logging
import posixpath
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from models.vit3d import VisionTransformer3D
from models.vjepa3d import VJEPA3D
from models.weights.files import read_folder_config, read_weights
from models.weights.fit import NORMALISATION, fit, summary
from models.weights.image import num_prefix_in
from models.weights.shape import Weights, new_encoder, num_prefix_of
from utils import storage
from utils.checkpoint import CheckpointError, load_newest, to_host, well_formed
from utils.config.schema import Config

log = logging.getLogger(__name__)


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
