"""Parameter names of Hugging Face's VJEPA2Model and of our modules, each translated into the other.

VJEPA2Model keeps query, key and value apart, stacks the mask tokens, and calls a block `layer`. The facts are
from transformers' VJEPA2Config and VJEPA2Model.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from models.vit3d import NORM_EPS

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


def num_mask_tokens(predictor: dict[str, Tensor]) -> int:
    """How many mask tokens a predictor has, by our names."""
    return sum(name.startswith("mask_tokens.") for name in predictor)


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
