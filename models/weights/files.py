"""Weights as files hold them, read into one form: names of models/vit3d.py and models/predictor.py.

Four layouts. `research`: the `.pt` of V-JEPA 2's code, a dictionary with `encoder`, `predictor` and
`target_encoder` (or `ema_encoder`), keys `module.backbone.*`. `hugging_face`: a folder with config.json and
safetensors of VJEPA2Model; its one encoder stands for both. `checkpoint`: ours, of pretraining or of
`models.weights import`. `export`: ours as safetensors, an encoder alone. Nothing in a file is run, every
tensor is either used, left out for a reason that is kept, or an error.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import struct
import zipfile
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from models.vit3d import NORM_EPS, SIZES
from models.weights.hf_layout import MODEL_TYPE, from_hf
from models.weights.shape import (
    EXPORT_FORMAT,
    FACTS_KEY,
    ROLES,
    Weights,
    checked,
    encoder_size,
    predictor_shape,
    some,
)
from utils import storage
from utils.checkpoint import CheckpointError, load_checkpoint
from utils.config.load import config_of_yaml
from utils.config.recipes import recipe_name
from utils.config.schema import StorageOptions

PUBLIC_GRID = (8, 16, 16)  # of the public weights' pre-training: 16 frames of 256 x 256, patch 2 x 16 x 16
ROLE_NAMES = {"encoder": "encoder", "predictor": "predictor"} | dict.fromkeys(
    ("target_encoder", "ema_encoder"), "target_encoder"
)
# what torch.load raises for a cut or changed file, by the byte where it ends
DAMAGE = (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, OSError, ValueError, struct.error)
# of the research code, values of any kind, never used
TRAINING_STATE = ("opt", "scaler", "epoch", "loss", "batch_size", "world_size", "lr")
FIXED = {"hidden_act": "gelu", "layer_norm_eps": NORM_EPS}  # of config.json: what our modules compute
LEGACY = {"pos_embed": "legacy position table, the model is rotary"}
LEGACY |= {"predictor_pos_embed": LEGACY["pos_embed"]}


def read_weights(
    url: str,
    options: StorageOptions | None = None,
    *,
    heads: int | None = None,
    predictor_heads: int | None = None,
) -> Weights:
    """Read any of the layouts; raises CheckpointError. Heads are for research files: their widths need not
    tell them.
    """
    for name, number in (("heads", heads), ("predictor_heads", predictor_heads)):
        if number is not None and number < 1:
            raise CheckpointError(f"{url}: {name}: expected at least 1, found {number}")
    weights = _read_any(url, options, heads, predictor_heads)
    told = weights.size, weights.predictor_size
    for name, number, size in zip(("heads", "predictor_heads"), (heads, predictor_heads), told, strict=True):
        if number is not None and size is not None and number != size.heads:
            raise CheckpointError(f"{url}: {name}: expected {size.heads}, as the file says, found {number}")
    return weights


def _read_any(
    url: str, options: StorageOptions | None, heads: int | None, predictor_heads: int | None
) -> Weights:
    config_url = storage.join(url, "config.json")
    if storage.exists(config_url, options):
        return _read_folder(url, config_url, options)
    if not storage.exists(url, options):
        raise CheckpointError(f"{url}: expected a .pt file or a folder with config.json, found no such file")
    if storage.exists(url.removesuffix(".pt") + ".json", options):
        return _own(url, load_checkpoint(url, options))
    raw = _load(url, options)
    if "format_version" in raw:
        return _own(url, load_checkpoint(url, options))  # which names the seal that is missing
    return _research(url, raw, heads, predictor_heads)


def _load(url: str, options: StorageOptions | None) -> dict[str, Any]:
    try:
        if storage.is_remote(url):
            data = io.BytesIO(storage.read_bytes(url, options))
            raw = torch.load(data, map_location="cpu", weights_only=True)
        else:
            # mapped: a public file is mostly optimizer state, which is then never read; before torch 1.6
            # files were no zip archives, and those cannot be mapped
            raw = torch.load(url, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(url))
    except DAMAGE as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{url}: expected a file of torch.save, tensors only ({reason})") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{url}: expected a dictionary of parts, found {type(raw).__name__}")
    return raw


def _research(url: str, raw: dict[str, Any], heads: int | None, predictor_heads: int | None) -> Weights:
    parts: dict[str, dict[str, Tensor]] = {}
    left_out: dict[str, str] = {}
    for name, value in raw.items():
        role = ROLE_NAMES.get(name)
        if role is None:
            if name not in TRAINING_STATE and not isinstance(value, int | float | str | None):
                raise CheckpointError(
                    f"{url}: expected encoder, predictor, target_encoder and training state, found {name!r}"
                )
            left_out[name] = "training state"
        elif role in parts:
            raise CheckpointError(f"{url}: expected target_encoder or ema_encoder, found both")
        else:
            parts[role], dropped = _stripped(url, name, value)
            left_out |= dropped
    missing = [role for role in ROLES if role not in parts]
    if missing:
        raise CheckpointError(f"{url}: expected encoder, predictor and target_encoder, found no {missing[0]}")
    encoder = parts["encoder"]
    size = encoder_size(url, encoder, heads)
    predictor_size = predictor_shape(url, parts["predictor"], predictor_heads)
    return checked(
        Weights(
            url,
            "research",
            encoder,
            parts["target_encoder"],
            parts["predictor"],
            size,
            predictor_size,
            PUBLIC_GRID,
            "tiled",
            "vjepa2",
            left_out=left_out,
        )
    )


def _stripped(url: str, part: str, value: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Without the wrappers' prefixes and the legacy tables."""
    if not isinstance(value, dict) or not all(isinstance(v, Tensor) for v in value.values()):
        raise CheckpointError(f"{url}: {part}: expected tensors by name, found {type(value).__name__}")
    tensors: dict[str, Tensor] = {}
    left_out = {}
    for name, tensor in value.items():
        ours = re.sub(r"^(module\.)?(backbone\.)?", "", name)
        if ours in LEGACY:
            left_out[f"{part}.{name}"] = LEGACY[ours]
        elif ours in tensors:
            raise CheckpointError(f"{url}: {part}: expected {ours} once, found it again as {name}")
        else:
            tensors[ours] = tensor
    return tensors, left_out


def _read_folder(url: str, config_url: str, options: StorageOptions | None) -> Weights:
    try:
        config = json.loads(storage.read_text(config_url, options))
    except ValueError as error:
        raise CheckpointError(f"{config_url}: expected JSON, found damage ({error})") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{config_url}: expected a JSON object, found {type(config).__name__}")
    is_export = config.get("format") == EXPORT_FORMAT
    if not is_export and config.get("model_type") != MODEL_TYPE:
        found = config.get("model_type")
        raise CheckpointError(
            f"{config_url}: expected model_type {MODEL_TYPE} or format {EXPORT_FORMAT}, found {found}"
        )
    tensors = _read_safetensors(url, options)
    try:
        return _export(url, config, tensors) if is_export else _hugging_face(url, config, tensors)
    except KeyError as error:
        raise CheckpointError(f"{config_url}: expected the key {error}, found none") from error


def _read_safetensors(url: str, options: StorageOptions | None) -> dict[str, Tensor]:
    names = ["model.safetensors"]
    index_url = storage.join(url, "model.safetensors.index.json")
    if storage.exists(index_url, options):
        names = _shards(index_url, storage.read_text(index_url, options))
    tensors: dict[str, Tensor] = {}
    for name in names:
        file_url = storage.join(url, name)
        if not storage.exists(file_url, options):
            raise CheckpointError(f"{file_url}: expected safetensors, found no such file")
        try:
            if storage.is_remote(file_url):
                tensors |= safetensors.torch.load(storage.read_bytes(file_url, options))
            else:
                tensors |= safetensors.torch.load_file(file_url)
        except SafetensorError as error:
            raise CheckpointError(f"{file_url}: expected safetensors, found damage ({error})") from error
    return tensors


def _shards(index_url: str, text: str) -> list[str]:
    """File names of an index."""
    try:
        index = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{index_url}: expected JSON, found damage ({error})") from error
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise CheckpointError(f"{index_url}: expected weight_map, file names by tensor, found {shards}"[:300])
    return sorted(set(shards.values()))


def _hugging_face(url: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> Weights:
    encoder, predictor, unknown = from_hf(tensors)
    if unknown:
        raise CheckpointError(f"{url}: expected parameters of VJEPA2Model alone, found {some(unknown)}")
    for key, ours in FIXED.items():
        if config[key] != ours:
            raise CheckpointError(f"{url}/config.json: {key}: expected {ours}, found {config[key]}")
    patch, crop = config["patch_size"], config["crop_size"]
    if not isinstance(patch, int):
        raise CheckpointError(f"{url}: patch_size: expected one number, found {patch}")
    grid = (config["frames_per_clip"] // config["tubelet_size"], crop // patch, crop // patch)
    predictor_size = None
    if predictor:
        predictor_size = predictor_shape(url, predictor, config["pred_num_attention_heads"])
    size = encoder_size(url, encoder, config["num_attention_heads"])
    return checked(
        Weights(
            url,
            "hugging_face",
            encoder,
            encoder,
            predictor,
            size,
            predictor_size,
            grid,
            "tiled",
            "vjepa2",
            facts=config.get(FACTS_KEY, {}),  # absent from what others wrote
        )
    )


def _own(url: str, state: dict[str, Any]) -> Weights:
    config = config_of_yaml(state["config"], url)
    parts: dict[str, dict[str, Tensor]] = {role: {} for role in ROLES}
    for name, tensor in state["model"].items():
        role, _, rest = name.partition(".")
        if role not in parts:
            raise CheckpointError(f"{url}: expected {', '.join(ROLES)}, found {name}")
        parts[role][rest] = tensor
    encoder, predictor = parts["encoder"], parts["predictor"]
    is_transformer = "predictor_embed.weight" in predictor
    facts = {
        "recipe_name": recipe_name(config.method),
        "step": state["step"],
        "normalisation": state["normalisation"],
        "participants": state["participants"],
        "init_weight": state["progress"]["init_weight"],
        "synthetic": state.get("synthetic"),  # None: an early checkpoint, which does not say
        "imported_from": state.get("imported_from"),
        "sha256": state["checksum"],
    }
    return checked(
        Weights(
            url,
            "checkpoint",
            encoder,
            parts["target_encoder"],
            predictor,
            encoder_size(url, encoder, SIZES[config.model.size].heads),
            predictor_shape(url, predictor, None) if is_transformer else None,
            config.grid,
            config.model.rope,
            config.method.recipe,
            config,
            facts,
            dict.fromkeys(sorted(set(state) & {"optimizer", "gauge"}), "training state"),
        )
    )


def _export(url: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> Weights:
    facts = config[FACTS_KEY]
    return checked(
        Weights(
            url,
            "export",
            tensors,
            tensors,
            {},
            encoder_size(url, tensors, config["heads"]),
            None,
            tuple(config["grid"]),
            config["rope"],
            facts["recipe"],
            facts=facts,
        )
    )
