"""An encoder of ours for others: safetensors, config.json and a model card, in our layout or Hugging Face's.

In: a checkpoint of ours. Out: a folder. The card and config.json hold the number of participants that the
checkpoint saw, never their ids.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import safetensors.torch
from torch import Tensor

from models.vit3d import Size
from models.weights.layouts import FIXED, MODEL_TYPE, to_hf
from models.weights.shape import EXPORT_FORMAT, FACTS_KEY, Weights, num_mask_tokens
from utils import storage
from utils.config.recipes import RECIPES, recipe_name
from utils.config.schema import Config
from utils.errors import UserError

NO_PREDICTOR = Size(0, 32, 1)  # of a Hugging Face model whose predictor must not be called


def export_encoder(
    weights: Weights, out: str, which: Literal["target", "context"], layout: Literal["ours", "hf"]
) -> list[str]:
    """Write the folder; returns lines to print. Raises UserError if the layout cannot hold the encoder."""
    cfg = weights.cfg
    if cfg is None:
        raise UserError(f"{weights.where}: expected a checkpoint of ours to export, found {weights.layout}")
    if storage.exists(out) and storage.list_names(out):
        raise UserError(f"--out: expected a new or empty folder, found files in {out}")
    if layout == "hf":
        problem = why_not_hf(weights, cfg)
        if problem:
            raise UserError(f"{weights.where}: VJEPA2Model cannot give these features: {problem}")
    encoder = weights.target_encoder if which == "target" else weights.encoder
    recipe = RECIPES[weights.recipe]
    is_vjepa2s = recipe.predictor == "transformer" and recipe.target == "features"
    predictor = weights.predictor if is_vjepa2s else {}
    facts = export_facts(weights, cfg, which)
    if layout == "hf":
        tensors = to_hf(encoder, predictor)
        config = {**_hf_config(weights, cfg, predictor), FACTS_KEY: facts}
    else:
        tensors = encoder
        shape = {
            "patch_size": list(weights.patch),
            "grid": list(weights.grid),
            "channels": weights.channels,
            "positions": weights.positions,
            "rope": weights.rope,
            "num_prefix": weights.num_prefix,
            **weights.size._asdict(),
        }
        config = {"format": EXPORT_FORMAT, "format_version": 1, **shape, FACTS_KEY: facts}
    data = safetensors.torch.save({n: t.contiguous() for n, t in tensors.items()}, metadata={"format": "pt"})
    storage.make_dirs(out)
    storage.write_bytes(storage.join(out, "model.safetensors"), data)
    storage.write_text(storage.join(out, "config.json"), json.dumps(config, indent=1) + "\n")
    card = model_card(weights, cfg, facts, layout, has_predictor=layout == "hf" and bool(predictor))
    storage.write_text(storage.join(out, "README.md"), card)
    count = sum(t.numel() for t in encoder.values())
    return [f"{which} encoder, {count} parameters, {layout} layout, written to {out}"]


def _hf_config(weights: Weights, cfg: Config, predictor: dict[str, Tensor]) -> dict[str, Any]:
    """config.json of VJEPA2Model; H and W are equal, as why_not_hf made sure."""
    encoder, size = weights.size, weights.predictor_size if predictor else NO_PREDICTOR
    assert size is not None
    return {
        "architectures": ["VJEPA2Model"],
        "model_type": MODEL_TYPE,
        "dtype": "float32",
        "patch_size": weights.patch[1],
        "crop_size": cfg.spatial.image_size[1],
        "frames_per_clip": cfg.spatial.image_size[0],
        "tubelet_size": weights.patch[0],
        "in_chans": weights.channels,
        "num_hidden_layers": encoder.depth,
        "hidden_size": encoder.width,
        "num_attention_heads": encoder.heads,
        "mlp_ratio": encoder.mlp_ratio,
        "pred_num_hidden_layers": size.depth,
        "pred_hidden_size": size.width,
        "pred_num_attention_heads": size.heads,
        "pred_mlp_ratio": size.mlp_ratio,
        "pred_num_mask_tokens": num_mask_tokens(predictor) or 1,
        "qkv_bias": True,
        **FIXED,
    }


def why_not_hf(weights: Weights, cfg: Config) -> str | None:
    """The first thing that VJEPA2Model lacks; None if it gives the same features."""
    _, height, width = cfg.spatial.image_size
    if weights.positions != "rotary":
        kind = {"learned": "a learned table", "image": "those of an image model"}[weights.positions]
        return f"its positions are rotary, found {kind} (recipe {weights.recipe})"
    if weights.feature_blocks:
        return f"its features are the last block's, found model.feature_blocks {list(weights.feature_blocks)}"
    if weights.rope != "tiled":
        return f"its rotary form is tiled, found {weights.rope} (train with model.rope=tiled)"
    if weights.patch[1] != weights.patch[2]:
        return f"its patches are square in H and W, found {list(weights.patch)}"
    if height != width:
        return f"its grid is square in H and W, found image_size {list(cfg.spatial.image_size)}"
    return None


def export_facts(weights: Weights, cfg: Config, which: str) -> dict[str, Any]:
    """The facts about the training in config.json and the card."""
    return {
        "encoder": which,
        "recipe": weights.recipe,
        "recipe_name": recipe_name(cfg.method),
        "step": weights.facts["step"],
        "init_weight": weights.facts["init_weight"],
        "feature_blocks": list(weights.feature_blocks) or None,
        "normalisation": weights.facts["normalisation"],
        "num_participants": len(weights.facts["participants"]),
        "synthetic": weights.facts["synthetic"],
        "imported_from": weights.facts["imported_from"],
        "image_size": list(cfg.spatial.image_size),
        "target_spacing_mm": list(cfg.spatial.target_spacing),
        "resample": cfg.spatial.resample,
        "planes": weights.facts["planes"],
        "model_size": cfg.model.size,
        "experiment_name": cfg.experiment_name,
        "checkpoint_sha256": weights.facts["sha256"],
    }


def model_card(
    weights: Weights, cfg: Config, facts: dict[str, Any], layout: str, *, has_predictor: bool
) -> str:
    """README.md of an export."""
    synthetic = {
        True: "yes: a phantom, no patient",
        False: "no",
        None: "unknown, the checkpoint does not say",
    }
    positions = {
        "rotary": f"rotary, {weights.rope}",
        "learned": "learned",
        "image": f"of an image model: learned in H and W, rotary along D, {weights.rope}; class token and "
        f"registers: {weights.num_prefix}",
    }[weights.positions]
    size, d_h_w = weights.size, "D (B-scan), H (axial), W (A-scan)"
    rows = {
        "encoder": f"{facts['encoder']}, {size.depth} blocks of width {size.width}, {size.heads} heads",
        "recipe": f"{facts['recipe_name']}, step {facts['step']}, experiment {facts['experiment_name']}",
        "input": f"[B, {weights.channels}, {', '.join(map(str, cfg.spatial.image_size))}], axes {d_h_w}",
        "voxel": f"{list(cfg.spatial.target_spacing)} mm, resampled by {cfg.spatial.resample}",
        "normalisation": f"{facts['normalisation']} (z-score per volume over the voxels inside the scan)",
        "patch, grid": f"{list(weights.patch)}, {list(weights.grid)} tokens in raster order",
        "positions": positions,
        "features": f"of blocks {blocks}, joined"
        if (blocks := facts["feature_blocks"])
        else "of the last block",
        "participants seen": str(facts["num_participants"]),
        "synthetic data": synthetic[facts["synthetic"]],
        "random initialisation left in the target": "unknown"
        if facts["init_weight"] is None
        else f"{facts['init_weight']:.3g}",
        "weights before training": facts["imported_from"] or cfg.method.init_from or "random",
        "checkpoint": f"sha256 {facts['checkpoint_sha256']}",
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    if layout == "hf":
        use = (
            "from transformers import VJEPA2Model\n\n"
            "model = VJEPA2Model.from_pretrained(FOLDER)\n"
            "frames_BDCHW = volume_BCDHW.transpose(1, 2)\n"
            "tokens_BNE = model(frames_BDCHW, skip_predictor=True).last_hidden_state"
        )
        more = (
            "The predictor is included."
            if has_predictor
            else "It has no predictor: keep skip_predictor=True."
        )
    else:
        use = "from models.weights import load_encoder\n\ntokens_BNE = load_encoder(FOLDER)(volume_BCDHW)"
        more = "Positions are those of the table above." if weights.positions != "rotary" else ""
    return f"""---
tags: [retinal-oct, self-supervised, 3d]
---
# Encoder of 3D retinal OCT volumes

| | |
|---|---|
{table}

```python
{use}
```

{more}

A research model, not a medical device. This card reports how the weights were made, not how good they are.

## Licence

The code is Apache-2.0. The weights were derived from the data above, and the data's licence decides who may
have them and for what: AI-READI's is the consortium's own. Read it before you pass them on. Weights that
were imported bring their own licence too.
"""
