"""A 2D image model in Hugging Face's layout, by our names, and as an encoder of volumes.

In: config.json and tensors of Dinov2Model, Dinov2WithRegistersModel, ViTModel or ViTMAEModel. Out: `Weights`
of an encoder of single B-scans of three channels, which gives the image model's tokens; and its tensors for
a configuration of ours. LayerScale is folded into the layers before it. A patch's kernel is summed over
colour (all three channels would get the same grey), resized to the token's H and W (FlexiViT, Beyer et al.
2023, arXiv:2212.08013, where the token is larger), set to the greys of a normalised volume (GREY) and spread
over its B-scans; positions are interpolated as the image model does it. So on a grid of one token along D,
filled with one B-scan, tokens are those that the image model gives to GREY's greys of it.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from models.vit3d import NORM_EPS
from models.weights.layouts import join_parts
from models.weights.shape import Weights, encoder_size
from utils import storage
from utils.checkpoint import CheckpointError
from utils.config.schema import Config, StorageOptions

# A voxel z of a normalised volume is seen as factor * z + offset: black lies at about -.7 there and bright
# layers at 3 to 5, in a normalised photograph at -2 and 2.6. Measured on five real eyes: docs/LOG.md
GREY = (0.5, -1.2)
MODEL_TYPES = ("dinov2", "dinov2_with_registers", "vit", "vit_mae")
REFUSED = {  # what a message adds for a model_type that a user may well bring
    "dinov3_vit": ", whose positions are rotary over all channels of a head, so that none is left for D"
}
NUM_REGISTERS = 4  # of dinov2_with_registers, where config.json does not say
REQUIRED = {"hidden_act": "gelu", "qkv_bias": True, "use_swiglu_ffn": False}  # where config.json has the key
PREFIX = re.compile(r"^(vit|dinov2|dinov2_with_registers)\.")  # of a model with a head on top
UNUSED = ("decoder.", "pooler.", "classifier.")
NAMES = (
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.mask_token$", "mask_token"),
    (r"^encoder\.layer\.", "blocks."),
    (r"^layernorm\.", "norm."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.attention\.attention\.", ".attn."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
)
CLASS_TOKEN, REGISTERS = "embeddings.cls_token", "embeddings.register_tokens"
TABLE = "embeddings.position_embeddings"
KERNEL = "patch_embed.proj.weight"
SCALES = {"layer_scale1.lambda1": "attn.proj", "layer_scale2.lambda1": "mlp.fc2"}


def num_prefix_in(config: dict[str, Any]) -> int:
    """How many tokens of no place the model of a config.json has; 0 unless its positions are an image
    model's.
    """
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        return config.get("num_prefix", 0)  # which our exports have
    return 1 + (config.get("num_register_tokens", NUM_REGISTERS) if "registers" in model_type else 0)


def image_model(
    url: str,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    files: Sequence[str],
    options: StorageOptions | None,
) -> Weights:
    """The folder's encoder, for one B-scan of three channels; raises CheckpointError, and KeyError for a key
    that config.json lacks.
    """
    for key, expected in REQUIRED.items():
        if config.get(key, expected) != expected:
            raise CheckpointError(f"{url}/config.json: {key}: expected {expected}, found {config[key]}")
    if not config["layer_norm_eps"] <= NORM_EPS:  # a smaller one acts on tokens without variance alone
        eps = config["layer_norm_eps"]
        raise CheckpointError(f"{url}/config.json: layer_norm_eps: expected {NORM_EPS}, found {eps}")
    model_type = config["model_type"]
    encoder, left_out = _renamed(url, config, {n: tensor.float() for n, tensor in tensors.items()})
    size = encoder_size(url, encoder, config["num_attention_heads"])
    if size.depth != config["num_hidden_layers"] or size.width != config["hidden_size"]:
        raise CheckpointError(
            f"{url}: expected {config['num_hidden_layers']} blocks of width {config['hidden_size']} of its "
            f"config.json, found {size.depth} of {size.width}"
        )
    digest = hashlib.sha256()
    for name in files:
        digest.update(storage.read_bytes(storage.join(url, name), options))
    name, licence = posixpath.basename(url.rstrip("/")), licence_of(url, options)
    return Weights(
        url,
        "image",
        encoder,
        encoder,
        {},
        size=size,
        predictor_size=None,
        grid=(1, *_plane(url, config, encoder)),
        facts={
            "model_type": model_type,
            "imported_from": f"{name} ({model_type}; licence: {licence}; sha256 {digest.hexdigest()})",
        },
        left_out=left_out,
    )


def _renamed(
    url: str, config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors by our names, and why each of the others is left out."""
    left_out = {name: "of its task" for name in tensors if name.startswith(UNUSED)}
    theirs = {PREFIX.sub("", name): t for name, t in tensors.items() if name not in left_out}
    special = [CLASS_TOKEN, TABLE, *([REGISTERS] if "registers" in config["model_type"] else [])]
    missing = [name for name in special if name not in theirs]
    if missing:
        raise CheckpointError(f"{url}: expected {missing[0]} of {config['model_type']}, found none")
    class_token, table, *registers = (theirs.pop(name) for name in special)
    if class_token.shape != table[:, :1].shape or any(r.ndim != 3 for r in registers):
        raise CheckpointError(
            f"{url}: {TABLE}: expected one vector a patch and one of the class token's shape "
            f"{list(class_token.shape)}, found {list(table.shape)}"
        )
    ours: dict[str, Tensor] = {}
    for name, tensor in theirs.items():
        for pattern, replacement in NAMES:
            name = re.sub(pattern, replacement, name)
        ours[name] = tensor
    ours = join_parts(ours)
    scales = [name for name in ours if name.endswith(tuple(SCALES))]
    num_blocks = len({name.split(".")[1] for name in ours if name.startswith("blocks.")})
    if len(scales) != 2 * num_blocks and config["model_type"].startswith("dinov2"):
        raise CheckpointError(f"{url}: expected two LayerScales a block, found {len(scales)} in all")
    for name in scales:
        block, _, scale = name.partition(".layer_scale")
        factor, layer = ours.pop(name), f"{block}.{SCALES['layer_scale' + scale]}"
        for part in (f"{layer}.weight", f"{layer}.bias"):
            if part in ours and len(ours[part]) != factor.numel():
                raise CheckpointError(
                    f"{url}: {name}: expected {len(ours[part])} values, found {list(factor.shape)}"
                )
            if part in ours:
                ours[part] = ours[part] * (factor[:, None] if ours[part].ndim == 2 else factor)
    if "mask_token" in ours:
        ours["mask_token"] = ours["mask_token"].view(1, 1, -1)
    if KERNEL in ours and ours[KERNEL].ndim == 4:
        ours[KERNEL] = ours[KERNEL].unsqueeze(2)
    ours["prefix_tokens"] = torch.cat([class_token + table[:, :1], *registers], dim=1)
    if ours["prefix_tokens"].shape[1] != num_prefix_in(config):
        raise CheckpointError(
            f"{url}: {REGISTERS}: expected {num_prefix_in(config) - 1} of its config.json, "
            f"found {list(registers[0].shape)}"
        )
    ours["pos_embed"] = table[:, 1:]
    return ours, left_out


def _plane(url: str, config: dict[str, Any], encoder: dict[str, Tensor]) -> tuple[int, int]:
    """Rows and columns of the image model's patches."""
    image, patch = (
        value if isinstance(value, list) else [value, value]
        for value in (config["image_size"], config["patch_size"])
    )
    if patch != list(encoder[KERNEL].shape[3:]):
        raise CheckpointError(
            f"{url}: {KERNEL}: expected patches of {patch} of its config.json, "
            f"found {list(encoder[KERNEL].shape[3:])}"
        )
    rows, columns = (size // part for size, part in zip(image, patch, strict=True))
    if rows * columns != encoder["pos_embed"].shape[1]:
        raise CheckpointError(
            f"{url}: {TABLE}: expected {rows} x {columns} patches, found {encoder['pos_embed'].shape[1]}"
        )
    return rows, columns


def licence_of(url: str, options: StorageOptions | None) -> str:
    """What a folder's README.md or licence file says, in its first words."""
    names = sorted(storage.list_names(url, options))
    for name in (name for name in names if name.lower() == "readme.md"):
        text = storage.read_text(storage.join(url, name), options).replace("\r\n", "\n")
        head = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
        licence = re.search(r"^license:\s*(\S.*)$", head[1], re.MULTILINE) if head else None
        if licence:
            return licence[1].strip().strip("'\"")[:80]
    for name in (name for name in names if re.fullmatch(r"licen[cs]e(\.(md|txt))?", name, re.IGNORECASE)):
        lines = [line.strip() for line in storage.read_text(storage.join(url, name), options).splitlines()]
        if any(lines):
            return next(filter(None, lines))[:80]
    return "not stated in the folder"


def as_volume_encoder(
    weights: Weights, cfg: Config, has_mask_token: bool
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """An image model's tensors for the patches and the grid of this configuration, and how each changed."""
    tensors, changes = dict(weights.encoder), {}
    (d, *plane), (_, *grid) = cfg.spatial.patch_size, cfg.grid
    kernel = tensors[KERNEL].double().sum(dim=(1, 2))  # [E, h, w]
    texts = [f"{weights.channels} channels summed"]
    if list(kernel.shape[1:]) != plane:
        texts.append(f"{list(kernel.shape[1:])} resized to {plane}")
        for count in plane:  # an axis at a time: the one that is resized goes to the end
            kernel = torch.tensordot(kernel, resizing(kernel.shape[1], count), dims=([1], [0]))
    factor, offset = GREY
    bias = tensors["patch_embed.proj.bias"].double() + offset * kernel.sum(dim=(1, 2))
    tensors["patch_embed.proj.bias"] = bias.float()
    tensors[KERNEL] = (factor * kernel / d)[:, None, None].repeat(1, 1, d, 1, 1).float()
    changes[KERNEL] = "; ".join([*texts, f"spread over {d} B-scans; reads {factor:g} z {offset:+g}"])
    if weights.grid[1:] != tuple(grid):
        table = rearrange(tensors["pos_embed"], "1 (h w) e -> 1 e h w", h=weights.grid[1])
        # as the image model does it for an image of another size
        antialias = "registers" in weights.facts["model_type"]
        table = F.interpolate(table, size=tuple(grid), mode="bicubic", antialias=antialias)
        tensors["pos_embed"] = rearrange(table, "1 e h w -> 1 (h w) e")
        changes["pos_embed"] = f"{list(weights.grid[1:])} interpolated to {grid}"
    if not has_mask_token:
        tensors.pop("mask_token", None)
    elif "mask_token" not in tensors:
        raise CheckpointError(
            f"{weights.where}: expected a mask token, which method.recipe={cfg.method.recipe} needs, found "
            "an image model without one; take another recipe, or a DINOv2"
        )
    return tensors, changes


def resizing(old: int, new: int) -> Tensor:
    """[old, new]: turns an axis of a kernel into one of `new` values that gives the same number on the same
    content, the smaller of both enlarged to the larger by linear interpolation.

    A larger one is FlexiViT's pseudo-inverse. Of a smaller one that would read few pixels of the patch: with
    8 for 14 the cosine to the tokens of an enlarged B-scan was .75 to .87, and is .995 to .9996 so.
    """
    few, many = sorted((old, new))
    basis = torch.eye(few, dtype=torch.float64).unsqueeze(1)  # one unit vector a row
    enlarge = F.interpolate(basis, size=many, mode="linear")[:, 0].T  # [many, few]
    return torch.linalg.pinv(enlarge) if new > old else enlarge
