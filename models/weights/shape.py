"""The shape of a model from only its tensors, and a check that the tensors make that model.

In: tensors by our names. Out: `Weights`, whose modules `new_encoder` and `new_predictor` build. Only the
tensors' shapes are read, so meta tensors work too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from models.attention import RopeForm
from models.predictor import HEAD_DIM as PREDICTOR_HEAD_DIM
from models.predictor import Predictor3D
from models.vit3d import Positions, Size, VisionTransformer3D
from utils.checkpoint import CheckpointError
from utils.config.schema import Config
from utils.errors import ConfigError

EXPORT_FORMAT = "oct_encoder"  # "format" in an export's config.json
FACTS_KEY = "oct_foundation"  # facts of the training, in the config.json of both layouts
NEAREST, BLENDED = "nearest", "blended"  # planes of the stores trained on: data_setup/resample.py
Layout = Literal["research", "research_2_1", "hugging_face", "image", "checkpoint", "export"]
HEAD_DIM = 64  # of every V-JEPA 2 encoder but ViT-H
HEADS = {1280: 16}
ROLES = ("encoder", "target_encoder", "predictor")


def num_prefix_of(tensors: Mapping[str, Tensor]) -> int:
    """How many tokens of no place an encoder of these tensors has; 0 unless its positions are an image
    model's.
    """
    return tensors["prefix_tokens"].shape[1] if "prefix_tokens" in tensors else 0


@dataclass(frozen=True)
class Weights:
    """One file's weights by our names, their shapes, and the facts that the file holds about them."""

    where: str
    layout: Layout
    encoder: dict[str, Tensor]
    target_encoder: dict[str, Tensor]
    predictor: dict[str, Tensor]  # empty: the file has none
    size: Size
    predictor_size: Size | None
    grid: tuple[int, int, int]
    rope: RopeForm = "tiled"
    recipe: str = "vjepa2"
    cfg: Config | None = None  # of ours
    facts: dict[str, Any] = field(default_factory=dict)  # of ours: step, participants, normalisation ...
    left_out: dict[str, str] = field(default_factory=dict)  # the file's name: why

    @property
    def patch(self) -> tuple[int, int, int]:
        d, h, w = self.encoder["patch_embed.proj.weight"].shape[2:]
        return d, h, w

    @property
    def channels(self) -> int:
        return self.encoder["patch_embed.proj.weight"].shape[1]

    @property
    def feature_blocks(self) -> tuple[int, ...]:
        """Numbers of the blocks that the features come from; none: the last."""
        named = self.facts.get("feature_blocks") if self.cfg is None else self.cfg.model.feature_blocks
        return tuple(named or ())

    @property
    def num_prefix(self) -> int:
        return num_prefix_of(self.encoder)

    @property
    def positions(self) -> Positions:
        if self.num_prefix:
            return "image"
        return "learned" if "pos_embed" in self.encoder else "rotary"

    def role(self, name: str) -> dict[str, Tensor]:
        """Tensors of one of ROLES."""
        return {"encoder": self.encoder, "target_encoder": self.target_encoder}.get(name, self.predictor)


def encoder_size(url: str, encoder: dict[str, Tensor], heads: int | None) -> Size:
    """The transformer's shape from its tensors; `heads` None: 64 channels each, as public encoders have."""
    first = "blocks.0.mlp.fc1.weight"
    embed = encoder.get("patch_embed.proj.weight")
    if embed is None or embed.ndim != 5 or first not in encoder:
        raise CheckpointError(
            f"{url}: expected patch_embed.proj.weight [E, C, d, h, w] and {first}, found {some([*encoder])}"
        )
    width, hidden = embed.shape[0], encoder[first].shape[0]
    if heads is None:
        heads = HEADS.get(width, _num_heads(width, HEAD_DIM))
    if heads == 0 or width % heads:
        raise CheckpointError(
            f"{url}: encoder: expected a width of {HEAD_DIM} per head, or heads= with the call, found {width}"
        )
    ratio = hidden / width
    if int(width * ratio) != hidden:  # the division was rounded down
        ratio = (hidden + 0.5) / width
    return Size(_num_blocks(encoder, "blocks"), width, heads, ratio)


def predictor_shape(url: str, predictor: dict[str, Tensor], heads: int | None) -> Size:
    """The same of a predictor; `heads` None: 32 channels each, as public predictors have."""
    first, embed = "predictor_blocks.0.mlp.fc1.weight", predictor.get("predictor_embed.weight")
    if embed is None or first not in predictor:
        raise CheckpointError(
            f"{url}: predictor: expected predictor_embed.weight and {first}, found {some([*predictor])}"
        )
    if num_mask_tokens(predictor) == 0:
        raise CheckpointError(f"{url}: predictor: expected at least one mask token, found none")
    width, hidden = embed.shape[0], predictor[first].shape[0]
    if heads is None:
        heads = _num_heads(width, PREDICTOR_HEAD_DIM)
    if heads == 0 or width % heads or hidden != 4 * width:
        raise CheckpointError(
            f"{url}: predictor: expected {PREDICTOR_HEAD_DIM} channels per head, or predictor_heads= with "
            f"the call, and an MLP of 4 x width, found width {width}, MLP {hidden}"
        )
    return Size(_num_blocks(predictor, "predictor_blocks"), width, heads)


def num_mask_tokens(predictor: dict[str, Tensor]) -> int:
    """How many mask tokens a predictor has, by our names."""
    return sum(name.startswith("mask_tokens.") for name in predictor)


def _num_heads(width: int, head_dim: int) -> int:
    """Heads of `head_dim` channels; 0 if the width is no multiple."""
    return 0 if width % head_dim else width // head_dim


def _num_blocks(tensors: dict[str, Tensor], prefix: str) -> int:
    return len({name.split(".")[1] for name in tensors if name.startswith(f"{prefix}.")})


def new_encoder(weights: Weights) -> VisionTransformer3D:
    """An encoder of the file's shape, random."""
    encoder = VisionTransformer3D(
        weights.size,
        weights.grid,
        weights.patch,
        weights.channels,
        weights.positions,
        weights.rope,
        has_mask_token=weights.positions == "learned" or "mask_token" in weights.encoder,
        num_prefix=weights.num_prefix,
    )
    return with_features(encoder, weights.feature_blocks)


def with_features(encoder: VisionTransformer3D, blocks: Sequence[int] | None) -> VisionTransformer3D:
    """The encoder, whose output are the features of these blocks; ConfigError for one that it lacks."""
    encoder.feature_blocks = blocks_of(encoder.depth, blocks)
    return encoder


def blocks_of(depth: int, blocks: Sequence[int] | None) -> tuple[int, ...]:
    """The numbers of model.feature_blocks; raises ConfigError unless they rise and an encoder has them."""
    rising = list(blocks or ())
    if rising != sorted(set(rising) & set(range(1, depth + 1))):
        raise ConfigError(f"model.feature_blocks: expected rising numbers of 1 to {depth}, found {rising}")
    return tuple(rising)


def new_predictor(weights: Weights) -> Predictor3D:
    """A predictor of the file's shape, random."""
    size = weights.predictor_size
    assert size is not None, f"{weights.where} has no transformer predictor"
    return Predictor3D(
        weights.size.width,
        size.width,
        size.depth,
        weights.grid,
        weights.rope,
        num_mask_tokens(weights.predictor),
        size.heads,
        out_width=weights.predictor["predictor_proj.weight"].shape[0],
    )


def checked(weights: Weights) -> Weights:
    """The weights; raises CheckpointError unless they have exactly the modules' names and shapes."""
    with torch.device("meta"):
        encoder = new_encoder(weights).state_dict()
        require_same(f"{weights.where}: encoder", encoder, weights.encoder)
        require_same(f"{weights.where}: target_encoder", encoder, weights.target_encoder)
        if weights.predictor_size is not None:
            predictor = new_predictor(weights).state_dict()
            require_same(f"{weights.where}: predictor", predictor, weights.predictor)
    return weights


def require_same(where: str, expected: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Raise CheckpointError for missing names, for unexpected names, and for the first other shape."""
    for kind, names in (("missing", expected.keys() - tensors), ("unexpected", tensors.keys() - expected)):
        if names:
            raise CheckpointError(f"{where}: {kind}: {some(sorted(names))}")
    for name, tensor in expected.items():
        if tensor.shape != tensors[name].shape:
            raise CheckpointError(
                f"{where}: {name}: expected shape {list(tensor.shape)}, found {list(tensors[name].shape)}"
            )


def some(names: list[str]) -> str:
    """The first of the names, and how many more."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0] if names else 'nothing'}{more}"
