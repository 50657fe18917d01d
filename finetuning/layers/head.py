"""The file of trained surfaces' decoders: all that a prediction needs but the frozen encoder.

In: decoders of finetuning.layers.train. Out: `head.pt` and its seal (utils.checkpoint); `open_layers_head`
loads it with its encoders and refuses another one. The file holds tensors and plain values: kind (layers),
arms {name: weights of a decoder}, surfaces, head_kind, hidden, voxels, mean_heights; encoder {url, checksum}
and random_seed; normalisation and geometry of the store; config (YAML); participants {train, val};
pretraining_participants; validation {arm: ...}; step; familiarity (finetuning/familiarity.py) or None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from data_setup.store.reader import PreparedStore
from finetuning.cohort import TRAIN, VAL
from finetuning.familiarity import Familiarity
from finetuning.head_file import NAME
from finetuning.layers.decoder import build_decoder
from finetuning.layers.volumes import LayerVolumes
from finetuning.pooled import load_strictly, pretrained_encoder, random_encoder
from finetuning.source import Source, find_checkpoint
from models.vit3d import VisionTransformer3D
from utils import storage
from utils.checkpoint import CheckpointError, load_checkpoint
from utils.config.load import config_of_yaml, to_yaml
from utils.config.schema import Config, StorageOptions

KIND = "layers"
PRETRAINED, RANDOM = "pretrained", "random_init"
KEYS = {"arms", "surfaces", "head_kind", "hidden", "voxels", "mean_heights", "encoder", "random_seed"}
KEYS |= {"normalisation", "geometry", "config", "participants", "pretraining_participants", "validation"}


@dataclass(frozen=True)
class Arm:
    """A frozen encoder and the decoder that was trained on its tokens, both in evaluation mode."""

    name: str  # PRETRAINED or RANDOM
    encoder: VisionTransformer3D
    decoder: nn.Module


@dataclass(frozen=True)
class LayersHead:
    """Trained decoders with their encoders."""

    url: str
    checksum: str  # of the head's file
    arms: tuple[Arm, ...]  # the pre-trained one first
    names: tuple[str, ...]  # of the surfaces
    cfg: Config
    state: dict[str, Any]  # the file's content


def encoder_of(name: str, cfg: Config, checkpoint: dict[str, Any], url: str) -> VisionTransformer3D:
    """The frozen encoder of an arm: the checkpoint's, or the one that cfg.seed initialises."""
    return pretrained_encoder(cfg, checkpoint, url) if name == PRETRAINED else random_encoder(cfg, cfg.seed)


def new_decoder(cfg: Config, width: int, num_surfaces: int) -> nn.Module:
    """The untrained decoder of a configuration."""
    head = cfg.head
    return build_decoder(head.kind, width, num_surfaces, cfg.spatial.patch_size, head.hidden, head.voxels)


def layers_state(
    source: Source,
    store: PreparedStore,
    volumes: LayerVolumes,
    decoders: dict[str, nn.Module],
    validation: dict[str, dict[str, Any]],
    mean_heights: dict[str, list[float | None]],
    familiarity: Familiarity | None,
) -> dict[str, Any]:
    """The content of a head's file. `mean_heights`: protocol -> mean height of each surface in voxels;
    `familiarity`: of the pre-trained arm's features.
    """
    cfg = source.cfg
    return {
        "kind": KIND,
        "step": validation[PRETRAINED]["step"],
        "arms": {name: decoder.state_dict() for name, decoder in decoders.items()},
        "surfaces": list(volumes.names),
        "head_kind": cfg.head.kind,
        "hidden": cfg.head.hidden,
        "voxels": cfg.head.voxels,
        "mean_heights": mean_heights,
        "encoder": {"url": storage.absolute(source.url), "checksum": source.state["checksum"]},
        "random_seed": cfg.seed,
        "normalisation": store.attrs["normalisation"],
        "geometry": store.attrs["geometry"],
        "config": to_yaml(cfg),
        "participants": {"train": volumes.people(TRAIN), "val": volumes.people(VAL)},
        "pretraining_participants": sorted(source.state["participants"]),
        "validation": validation,
        "familiarity": None if familiarity is None else familiarity.state(),
    }


def head_url(wanted: str) -> str:
    """The file of a head that is named by itself or by its run's folder."""
    return wanted if wanted.endswith(".pt") else storage.join(wanted, "checkpoints", f"{NAME}.pt")


def is_layers_head(wanted: str, options: StorageOptions | None = None) -> bool:
    """Whether a head's file holds decoders of surfaces; raises CheckpointError for a damaged one."""
    return bool(load_checkpoint(head_url(wanted), options).get("kind") == KIND)


def open_layers_head(wanted: str, options: StorageOptions, encoder_url: str | None = None) -> LayersHead:
    """A head from its file or its run's folder, with its encoders; the checkpoint may have moved to
    `encoder_url`. Raises CheckpointError for a damaged file or another encoder's checkpoint.
    """
    url = head_url(wanted)
    state = load_checkpoint(url, options)
    if lost := sorted(KEYS - set(state)):
        raise CheckpointError(f"{url}: expected the file of a layers head, found no {', '.join(lost[:3])}")
    cfg = config_of_yaml(state["config"], url)
    source = find_checkpoint(encoder_url or state["encoder"]["url"], options)
    checkpoint = load_checkpoint(source, options)
    if checkpoint["checksum"] != state["encoder"]["checksum"]:
        raise CheckpointError(
            f"{source}: expected the encoder of {url}, sha256 {state['encoder']['checksum'][:12]}, found "
            f"{checkpoint['checksum'][:12]}: the head was trained on another checkpoint"
        )
    arms = []
    for name, weights in state["arms"].items():
        encoder = encoder_of(name, cfg, checkpoint, source)
        decoder = new_decoder(cfg, encoder.width, len(state["surfaces"]))
        load_strictly(decoder, weights, f"{url}: decoder of {name}")
        arms.append(Arm(name, encoder, decoder.eval().requires_grad_(False)))
    return LayersHead(url, state["checksum"], tuple(arms), tuple(state["surfaces"]), cfg, state)
