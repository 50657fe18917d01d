"""The file of trained decoders: all that a prediction needs but the frozen encoder.

In: decoders of finetuning.dense.training. Out: `head.pt` and its seal (utils.checkpoint); `Kind.open_head`
loads it with its encoders and refuses another one. The file holds tensors and plain values: kind (layers,
segmentation or translation), arms {name: weights of a decoder}, the names of surfaces, classes or slabs,
head_kind, hidden, voxels; encoder {url, checksum} and random_seed; normalisation and geometry of the store;
config (YAML); participants {train, val}; pretraining_participants; validation {arm: ...}; step; and, with
finetune.encoder=trained, encoder_weights {arm: weights}.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from finetuning.cohort.cohort import TRAIN, VAL
from finetuning.cohort.source import Source
from finetuning.dense.decoder import UNETR, UnetrDecoder, build_decoder
from finetuning.dense.folds import DenseVolumes
from finetuning.dense.resume import volumes_checksum
from finetuning.features.kept import pretrained_encoder, random_encoder
from finetuning.features.yardsticks import WIDE, LocalTokens
from finetuning.heads.head_file import checkpoint_of, common_state, head_url, trained_encoder
from models.vit3d import VisionTransformer3D
from utils.checkpoint import load_checkpoint
from utils.config.schema import Config, StorageOptions

PRETRAINED, RANDOM = "pretrained", "random_init"
ALONE = "voxels_alone"
# yardsticks in an encoder's place -> random features
LOCAL = {"27_patches": None, "random_of_27": WIDE, ALONE: 0}
IMAGE, UNET, GRADER = "image_model", "unet", "second_grader"  # of folds, in no head's file
MEAN, PROJECTION = "mean_heights", "structural_projection"  # know no image; know no flow
TRUTHS = DEVICE, DRAWN = "device", "labels"  # who made what all are compared with
LABELS = {
    PRETRAINED: "pre-trained encoder",
    RANDOM: "random initialisation",
    "27_patches": "voxels of 27 tokens, averaged",
    "random_of_27": f"{WIDE:,} random ReLU features of 27 tokens",
    ALONE: "the same decoder on only voxels",
    IMAGE: "the same decoder on an image model",
    UNET: "2D U-Net from scratch, equal processor time",
    GRADER: "second grader",
    MEAN: "mean heights of the training volumes",
    PROJECTION: "projection of the structural scan",
}
KEYS = {"arms", "head_kind", "hidden", "voxels", "encoder", "random_seed", "normalisation", "geometry"}
KEYS |= {"config", "participants", "pretraining_participants", "validation"}


@dataclass(frozen=True)
class Arm:
    """An encoder and the decoder that was trained on its tokens, both in evaluation mode."""

    name: str  # PRETRAINED, RANDOM or one of LOCAL
    encoder: VisionTransformer3D | LocalTokens
    decoder: nn.Module


@dataclass(frozen=True)
class DenseHead:
    """Trained decoders with their encoders."""

    url: str
    checksum: str  # of the head's file
    arms: tuple[Arm, ...]  # the pre-trained one first
    names: tuple[str, ...]  # of the surfaces or classes
    cfg: Config
    state: dict[str, Any]  # the file's content


def encoder_of(
    name: str, cfg: Config, checkpoint: dict[str, Any], url: str, mean: Tensor | None = None
) -> VisionTransformer3D | LocalTokens:
    """An arm's frozen encoder: the checkpoint's, of cfg.seed, or a baseline with the training's mean."""
    if name in LOCAL:
        return LocalTokens(cfg, LOCAL[name], mean).eval()
    return pretrained_encoder(cfg, checkpoint, url) if name == PRETRAINED else random_encoder(cfg, cfg.seed)


def label(arm: str) -> str:
    return LABELS.get(arm, arm.replace("_", " "))


def new_decoder(cfg: Config, width: int, num_outputs: int) -> nn.Module:
    head = cfg.head
    if head.kind == UNETR:
        return UnetrDecoder(cfg, width, num_outputs)
    return build_decoder(head.kind, width, num_outputs, cfg.spatial.patch_size, head.hidden, head.voxels)


def dense_state(
    source: Source,
    volumes: DenseVolumes,
    arms: dict[str, tuple[nn.Module, nn.Module]],
    validation: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """What every such file holds; `arms`: name -> (encoder, decoder)."""
    cfg = source.cfg
    trained = {name: encoder.state_dict() for name, (encoder, _) in arms.items()}
    people = {"train": volumes.people(TRAIN), "val": volumes.people(VAL)}
    return (
        common_state(source, volumes.store, people)
        | {
            "kind": cfg.task.kind,
            "step": validation[PRETRAINED]["step"],
            "arms": {name: decoder.state_dict() for name, (_, decoder) in arms.items()},
            "voxels": cfg.head.voxels,
            "volumes_sha256": volumes_checksum(volumes),
            "random_seed": cfg.seed,
            "local_means": {name: arms[name][0].mean for name in arms if name in LOCAL},
            "validation": validation,
        }
        | ({"encoder_weights": trained} if cfg.finetune.encoder == "trained" else {})
    )


def head_kind(wanted: str, options: StorageOptions | None = None) -> str:
    """What a head's file holds: head (of labels), or one of DENSE_KINDS; raises CheckpointError."""
    return str(load_checkpoint(head_url(wanted), options).get("kind"))


def encoders_of(
    cfg: Config, state: dict[str, Any], url: str, options: StorageOptions, encoder_url: str | None
) -> Mapping[str, VisionTransformer3D | LocalTokens]:
    """Arm -> its encoder, in evaluation mode; raises CheckpointError."""
    if cfg.finetune.encoder == "trained":
        return {
            name: trained_encoder(cfg, weights, f"{url}: encoder of {name}")
            for name, weights in state["encoder_weights"].items()
        }
    checkpoint, source = checkpoint_of(state, url, options, encoder_url)
    means = state.get("local_means", {})  # heads of before have none of these arms
    return {name: encoder_of(name, cfg, checkpoint, source, means.get(name)) for name in state["arms"]}
