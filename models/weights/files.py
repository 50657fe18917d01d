"""Weights files of six layouts, read into one form: the names of models/vit3d.py and models/predictor.py.

research      the `.pt` of V-JEPA 2's code: `encoder`, `predictor` and `target_encoder` (or `ema_encoder`),
              keys `module.backbone.*`
research_2_1  the `.pt` of V-JEPA 2.1 (layouts.py): the same parts, of which the predictor is left out
hugging_face  a folder with config.json and safetensors of VJEPA2Model; its one encoder serves as both of ours
image         the same of a 2D image model (image.py), which encodes one B-scan of three channels
checkpoint    ours, written by pretraining or by `models.weights import`
export        ours as safetensors, only an encoder

No code of a file is run. Every tensor is used, or left out for a recorded reason, or an error.
"""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from models.vit3d import SIZES
from models.weights.image import MODEL_TYPES, REFUSED, image_model
from models.weights.layouts import (
    FIXED,
    GRID_2_1,
    MODEL_TYPE,
    encoder_of,
    from_hf,
    is_vjepa21,
    predictor_left_out,
)
from models.weights.shape import (
    BLENDED,
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
from utils.checkpoint import DAMAGE, CheckpointError, load_checkpoint, require_pretraining, well_formed
from utils.config.load import config_of_yaml
from utils.config.recipes import recipe_name
from utils.config.schema import StorageOptions

PUBLIC_GRID = (8, 16, 16)  # of the public weights' pre-training: 16 frames of 256 x 256, patch 2 x 16 x 16
ROLE_OF = {"encoder": "encoder", "predictor": "predictor"}
ROLE_OF |= dict.fromkeys(("target_encoder", "ema_encoder"), "target_encoder")
# keys of the research code that are not used; their values may be of any kind
TRAINING_STATE = ("opt", "scaler", "epoch", "loss", "batch_size", "world_size", "lr")
WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
LEGACY = dict.fromkeys(("pos_embed", "predictor_pos_embed"), "legacy position table, the model is rotary")


def read_weights(
    url: str,
    options: StorageOptions | None = None,
    *,
    heads: int | None = None,
    predictor_heads: int | None = None,
) -> Weights:
    """Read a file of any layout; raises CheckpointError. A research file does not hold its heads."""
    asked = {"heads": heads, "predictor_heads": predictor_heads}
    for name, number in asked.items():
        if number is not None and number < 1:
            raise CheckpointError(f"{url}: {name}: expected at least 1, found {number}")
    weights = checked(_read_any(url, options, heads, predictor_heads))
    for (name, number), size in zip(asked.items(), (weights.size, weights.predictor_size), strict=True):
        if number is not None and size is not None and number != size.heads:
            raise CheckpointError(f"{url}: {name}: expected {size.heads}, as the file says, found {number}")
    return weights


def _read_any(
    url: str, options: StorageOptions | None, heads: int | None, predictor_heads: int | None
) -> Weights:
    if storage.exists(storage.join(url, "config.json"), options):
        return _read_folder(url, options)
    is_folder = os.path.isdir(url)
    if is_folder or not storage.exists(url, options):
        raise CheckpointError(
            f"{url}: expected a .pt file or a folder with config.json, found "
            f"{'a folder without it' if is_folder else 'no such file'}; name a file of a run's checkpoints/, "
            "or a folder of published weights"
        )
    if storage.exists(url.removesuffix(".pt") + ".json", options):
        return own_weights(url, load_checkpoint(url, options))
    raw = _load(url, options)
    if "format_version" in raw:
        return own_weights(url, load_checkpoint(url, options))  # raises the error that names the missing seal
    return _research(url, raw, heads, predictor_heads)


def _load(url: str, options: StorageOptions | None) -> dict[str, Any]:
    try:
        if storage.is_remote(url):
            data = io.BytesIO(storage.read_bytes(url, options))
            raw = torch.load(data, map_location="cpu", weights_only=True)
        else:
            # A public file is mostly optimizer state, which a mapped file never reads. Files from before
            # torch 1.6 are no zip archives and cannot be mapped.
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
        role = ROLE_OF.get(name)
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
    is_2_1 = is_vjepa21(parts["encoder"])
    if is_2_1:
        for role in ("encoder", "target_encoder"):
            parts[role], dropped = encoder_of(url, role, parts[role])
            left_out |= dropped
        left_out |= predictor_left_out(url, parts["predictor"])
        parts["predictor"] = {}
    return Weights(
        url,
        "research_2_1" if is_2_1 else "research",
        encoder=parts["encoder"],
        target_encoder=parts["target_encoder"],
        predictor=parts["predictor"],
        size=encoder_size(url, parts["encoder"], heads),
        predictor_size=None if is_2_1 else predictor_shape(url, parts["predictor"], predictor_heads),
        grid=GRID_2_1 if is_2_1 else PUBLIC_GRID,
        rope="interpolated" if is_2_1 else "tiled",
        left_out=left_out,
    )


def _stripped(url: str, part: str, value: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors without the wrappers' prefixes, and why the legacy tables are left out."""
    if not isinstance(value, dict) or not all(isinstance(v, Tensor) for v in value.values()):
        raise CheckpointError(f"{url}: {part}: expected tensors by name, found {type(value).__name__}")
    tensors: dict[str, Tensor] = {}
    left_out = {}
    for name, tensor in value.items():
        ours = re.sub(r"^((module|backbone)\.)*", "", WRAPPERS.sub("", name))
        if ours in LEGACY:
            left_out[f"{part}.{name}"] = LEGACY[ours]
        elif ours in tensors:
            raise CheckpointError(f"{url}: {part}: expected {ours} once, found it again as {name}")
        else:
            tensors[ours] = tensor
    return tensors, left_out


def _read_folder(url: str, options: StorageOptions | None) -> Weights:
    config, config_url = read_folder_config(url, options), storage.join(url, "config.json")
    is_export, model_type = config.get("format") == EXPORT_FORMAT, config.get("model_type")
    if not is_export and model_type not in (MODEL_TYPE, *MODEL_TYPES):
        raise CheckpointError(
            f"{config_url}: expected model_type {MODEL_TYPE}, {', '.join(MODEL_TYPES)} or format "
            f"{EXPORT_FORMAT}, found {model_type}{REFUSED.get(str(model_type), '')}"
        )
    names = _shards(url, options)
    tensors = _read_safetensors(url, names, options)
    with well_formed(url, "tensors and a config.json that make a model"):
        try:
            if is_export:
                return _export(url, config, tensors)
            if model_type in MODEL_TYPES:
                return image_model(url, config, tensors, names, options)
            return _hugging_face(url, config, tensors)
        except KeyError as error:
            raise CheckpointError(f"{config_url}: expected the key {error}, found none") from error


def read_folder_config(url: str, options: StorageOptions | None) -> dict[str, Any]:
    """A folder's config.json; raises CheckpointError."""
    config_url = storage.join(url, "config.json")
    config = _read_json(config_url, options)
    if not isinstance(config, dict):
        raise CheckpointError(f"{config_url}: expected a JSON object, found {type(config).__name__}")
    return config


def _read_json(url: str, options: StorageOptions | None) -> Any:
    try:
        return json.loads(storage.read_text(url, options))
    except ValueError as error:
        raise CheckpointError(f"{url}: expected JSON, found damage ({error})") from error


def _shards(url: str, options: StorageOptions | None) -> list[str]:
    """Names of the files that hold a folder's tensors."""
    names = {"model.safetensors"}
    index_url = storage.join(url, "model.safetensors.index.json")
    if storage.exists(index_url, options):
        index = _read_json(index_url, options)
        shards = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise CheckpointError(
                f"{index_url}: expected weight_map, file names by tensor, found {shards}"[:300]
            )
        names = set(shards.values())
    return sorted(names)


def _read_safetensors(url: str, names: list[str], options: StorageOptions | None) -> dict[str, Tensor]:
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
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file_url}: expected safetensors, found damage ({error})") from error
    return tensors


def _hugging_face(url: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> Weights:
    encoder, predictor, unknown = from_hf(tensors)
    if unknown:
        raise CheckpointError(f"{url}: expected only parameters of VJEPA2Model, found {some(unknown)}")
    for key, ours in FIXED.items():
        if config[key] != ours:
            raise CheckpointError(f"{url}/config.json: {key}: expected {ours}, found {config[key]}")
    patch, crop = config["patch_size"], config["crop_size"]
    if not isinstance(patch, int):
        raise CheckpointError(f"{url}: patch_size: expected one number, found {patch}")
    grid = (config["frames_per_clip"] // config["tubelet_size"], crop // patch, crop // patch)
    return Weights(
        url,
        "hugging_face",
        encoder,
        encoder,
        predictor,
        size=encoder_size(url, encoder, config["num_attention_heads"]),
        predictor_size=predictor_shape(url, predictor, config["pred_num_attention_heads"])
        if predictor
        else None,
        grid=grid,
        facts=config.get(FACTS_KEY, {}),  # absent from what others wrote
    )


def own_weights(url: str, state: dict[str, Any]) -> Weights:
    """Of the content of a checkpoint of ours; raises CheckpointError."""
    require_pretraining(state, url)
    cfg = config_of_yaml(state["config"], url)
    parts: dict[str, dict[str, Tensor]] = {role: {} for role in ROLES}
    for name, tensor in state["model"].items():
        role, _, rest = name.partition(".")
        if role in ("neighbour_head", "random_targets"):  # of pre-training only: no export has them
            continue
        if role not in parts:
            raise CheckpointError(f"{url}: expected {', '.join(ROLES)}, found {name}")
        parts[role][rest] = tensor
    predictor = parts["predictor"]
    is_transformer = "predictor_embed.weight" in predictor
    facts = {
        "recipe_name": recipe_name(cfg.method),
        "step": state["step"],
        "normalisation": state["normalisation"],
        "planes": state.get("planes", BLENDED),
        "participants": state["participants"],
        "init_weight": state["progress"]["init_weight"],
        "synthetic": state.get("synthetic"),  # None: an early checkpoint does not hold it
        "imported_from": state.get("imported_from"),
        "sha256": state["checksum"],
    }
    return Weights(
        url,
        "checkpoint",
        **parts,
        size=encoder_size(url, parts["encoder"], SIZES[cfg.model.size].heads),
        predictor_size=predictor_shape(url, predictor, None) if is_transformer else None,
        grid=cfg.grid,
        rope=cfg.model.rope,
        recipe=cfg.method.recipe,
        cfg=cfg,
        facts=facts,
        left_out=dict.fromkeys(sorted(set(state) & {"optimizer", "gauge"}), "training state"),
    )


def _export(url: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> Weights:
    return Weights(
        url,
        "export",
        tensors,
        tensors,
        {},
        size=encoder_size(url, tensors, config["heads"]),
        predictor_size=None,
        grid=tuple(config["grid"]),
        rope=config["rope"],
        recipe=config[FACTS_KEY]["recipe"],
        facts=config[FACTS_KEY],
    )
