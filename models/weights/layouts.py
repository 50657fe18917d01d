"""Parameter names of others and of our modules: Hugging Face's VJEPA2Model, both ways, and a V-JEPA 2.1 file.

VJEPA2Model (facts of transformers' VJEPA2Config and VJEPA2Model) keeps query, key and value apart, stacks the
mask tokens, and calls a block `layer`.

V-JEPA 2.1 differs from 2.0 in what is around the blocks: patches of images have another embedding, both kinds
of patches get a learned vector for their modality, four depths have a norm each, and rotary positions are
interleaved, with rows and columns spread over 16 x 16 whatever the grid (`model.rope=interpolated`). Volumes
go the way of videos: that embedding, its vector added to the bias, and the norm of the last depth. The
predictor predicts features of a larger teacher, or of four depths at once; it is left out.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from models.vit3d import NORM_EPS
from models.weights.shape import num_mask_tokens, some
from utils.checkpoint import CheckpointError

MODEL_TYPE = "vjepa2"
FIXED = {"hidden_act": "gelu", "layer_norm_eps": NORM_EPS}  # of config.json: what our modules compute
# (theirs, ours); the first that matches the beginning of a name is used
ENCODER_NAMES = (
    ("encoder.embeddings.patch_embeddings.", "patch_embed."),
    ("encoder.layer.", "blocks."),
    ("encoder.layernorm.", "norm."),
)
PREDICTOR_NAMES = (
    ("predictor.embeddings.predictor_embeddings.", "predictor_embed."),
    ("predictor.layer.", "predictor_blocks."),
    ("predictor.layernorm.", "predictor_norm."),
    ("predictor.proj.", "predictor_proj."),
)
MASK_TOKENS = "predictor.embeddings.mask_tokens"
PARTS = ("query", "key", "value")


def from_hf(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Encoder and predictor by our names, and the names that VJEPA2Model does not have."""
    encoder: dict[str, Tensor] = {}
    predictor: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in tensors.items():
        if name == MASK_TOKENS:
            predictor.update({f"mask_tokens.{i}": token for i, token in enumerate(tensor)})
            continue
        for names, out in ((ENCODER_NAMES, encoder), (PREDICTOR_NAMES, predictor)):
            ours = _renamed(name, names)
            if ours is not None:
                out[ours.replace(".attention.", ".attn.")] = tensor
                break
        else:
            unknown.append(name)
    return join_parts(encoder), join_parts(predictor), unknown


def to_hf(encoder: dict[str, Tensor], predictor: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors by Hugging Face's names; an empty predictor adds none."""
    out: dict[str, Tensor] = {}
    masks = [predictor[f"mask_tokens.{i}"] for i in range(num_mask_tokens(predictor))]
    if masks:
        out[MASK_TOKENS] = torch.stack(masks)
    for tensors, names in ((encoder, ENCODER_NAMES), (predictor, PREDICTOR_NAMES)):
        for ours, tensor in tensors.items():
            if ours.startswith("mask_tokens."):
                continue
            theirs = _renamed(ours, [(b, a) for a, b in names])
            assert theirs is not None, ours
            theirs = theirs.replace(".attn.", ".attention.")
            if ".qkv." in theirs:
                for part, third in zip(PARTS, tensor.chunk(3), strict=True):
                    out[theirs.replace(".qkv.", f".{part}.")] = third.clone()
            else:
                out[theirs] = tensor
    return out


def _renamed(name: str, names: Any) -> str | None:
    for old, new in names:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return None


def join_parts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """attn.query, key and value joined to attn.qkv; an incomplete triple stays, and is an error later."""
    out = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.attn\.)(query|key|value)(\..*)", name)
        triple = [f"{match[1]}{part}{match[3]}" for part in PARTS] if match else []
        if match is None or not all(part in tensors for part in triple):
            out[name] = tensor
        elif match[2] == "query":
            out[f"{match[1]}qkv{match[3]}"] = torch.cat([tensors[part] for part in triple])
    return out


GRID_2_1 = (32, 24, 24)  # of the released models: 64 frames of 384 x 384, patch 2 x 16 x 16
DEPTHS = 4  # with a norm each, the last one after all blocks
VIDEO, IMAGE = "video_mod_embed", "img_mod_embed"
BIAS = "patch_embed.proj.bias"
IMAGES_ONLY = (IMAGE, "patch_embed_img.proj.weight", "patch_embed_img.proj.bias")
MARKS = ("norms_block.", "patch_embed_img.", VIDEO, IMAGE)  # no 2.0 encoder has a name that begins so
WHY = "V-JEPA 2.1"
PREDICTOR_NAME = re.compile(
    r"predictor_embed(\.0|\.2)?\.(weight|bias)"  # two layers where the features of four depths come in
    r"|mask_tokens\.\d+|(video|img)_mod_embed"
    r"|predictor_blocks\.\d+\.(norm[12]|attn\.(qkv|proj)|mlp\.fc[12])\.(weight|bias)"
    r"|predictor_(norm|proj|proj_context)\.(weight|bias)"
)


def is_vjepa21(encoder: dict[str, Tensor]) -> bool:
    """Whether an encoder has what 2.0 has not."""
    return any(name.startswith(MARKS) for name in encoder)


def encoder_of(url: str, part: str, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The encoder for videos by our names, and why each of the other names is left out.

    Raises CheckpointError for a part of 2.1 that is not there or has another shape.
    """
    norms = [f"norms_block.{depth}.{kind}" for depth in range(DEPTHS) for kind in ("weight", "bias")]
    embed = tensors.get("patch_embed.proj.weight")
    missing = [n for n in (VIDEO, BIAS, *IMAGES_ONLY, *norms) if n not in tensors]
    if embed is None or embed.ndim != 5 or missing:
        raise CheckpointError(
            f"{url}: {part}: expected V-JEPA 2.1's keys, found no "
            f"{some(missing or ['patch_embed.proj.weight [E, C, d, h, w]'])}"
        )
    width, channels, _, *plane = embed.shape
    shapes = {IMAGE: [1, 1, width], VIDEO: [1, 1, width], **{name: [width] for name in (*norms, BIAS)}}
    shapes |= {IMAGES_ONLY[1]: [width, channels, 1, *plane], IMAGES_ONLY[2]: [width]}
    for name, shape in shapes.items():
        if list(tensors[name].shape) != shape:
            raise CheckpointError(
                f"{url}: {part}: {name}: expected shape {shape}, found {list(tensors[name].shape)}"
            )
    ours = {name: tensor for name, tensor in tensors.items() if name not in shapes}
    ours[BIAS] = tensors[BIAS] + tensors[VIDEO].flatten()
    last = f"norms_block.{DEPTHS - 1}"
    ours |= {f"norm.{kind}": tensors[f"{last}.{kind}"] for kind in ("weight", "bias")}
    left_out = dict.fromkeys(IMAGES_ONLY, f"of images, {WHY}")
    left_out |= {name: f"norm of an earlier depth, {WHY}" for name in norms if not name.startswith(last)}
    left_out[VIDEO] = f"added to {BIAS}, {WHY}"
    return ours, {f"{part}.{name}": why for name, why in left_out.items()}


def predictor_left_out(url: str, predictor: dict[str, Tensor]) -> dict[str, str]:
    """Why each name of the predictor is left out; raises CheckpointError for a name that 2.1 has not."""
    unknown = [name for name in predictor if not PREDICTOR_NAME.fullmatch(name)]
    if unknown:
        raise CheckpointError(f"{url}: predictor: expected V-JEPA 2.1's keys, unexpected: {some(unknown)}")
    return {f"predictor.{name}": f"predictor of other features, {WHY}" for name in predictor}
