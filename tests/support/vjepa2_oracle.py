"""V-JEPA 2 as others wrote it: small random Hugging Face models, their weights in the research layout, and a
slow plain model in float64 that knows grids of any shape.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import VJEPA2Config, VJEPA2Model

NORM_EPS = 1e-6


def hf_config(**changes: object) -> VJEPA2Config:
    """Grid 2 x 3 x 3 of patches 2 x 4 x 4, width 128 with 2 heads, predictor 64 with 2 heads."""
    small = {
        "patch_size": 4,
        "crop_size": 12,
        "frames_per_clip": 4,
        "tubelet_size": 2,
        "in_chans": 3,
        "hidden_size": 128,
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "pred_hidden_size": 64,
        "pred_num_attention_heads": 2,
        "pred_num_hidden_layers": 2,
        "pred_num_mask_tokens": 1,
    }
    return VJEPA2Config(**{**small, **changes})


def hf_model(seed: int = 0, **changes: object) -> VJEPA2Model:
    """Every parameter random, mask tokens, biases and norms included."""
    model = VJEPA2Model(hf_config(**changes)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.ndim > 1 and "mask_tokens" not in name:
                parameter.copy_(noise * 1.5 / math.sqrt(parameter[0].numel()))
            else:
                parameter.copy_(0.3 * noise)
    return model


def hf_tensors(model: VJEPA2Model, read: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
    """`read` of every parameter by its Hugging Face name."""
    values = {name: read(parameter) for name, parameter in model.named_parameters()}
    return {name: value for name, value in values.items() if value is not None}


def research_names(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Encoder and predictor tensors under the research code's names, from Hugging Face's."""
    parts: dict[str, dict[str, Tensor]] = {"encoder": {}, "predictor": {}}
    for name, value in tensors.items():
        part, _, rest = name.partition(".")
        out = parts[part]
        if rest == "embeddings.mask_tokens":
            out.update({f"mask_tokens.{i}": token for i, token in enumerate(value)})
            continue
        if ".attention.query." in rest:
            third = [tensors[name.replace(".query.", f".{kind}.")] for kind in ("query", "key", "value")]
            rest, value = rest.replace("attention.query", "attention.qkv"), torch.cat(third)
        elif ".attention.key." in rest or ".attention.value." in rest:
            continue
        rest = rest.replace("attention.", "attn.").replace("embeddings.patch_embeddings.", "patch_embed.")
        rest = rest.replace("embeddings.predictor_embeddings.", "predictor_embed.")
        if part == "encoder":
            rest = rest.replace("layer.", "blocks.", 1) if rest.startswith("layer.") else rest
            rest = rest.replace("layernorm.", "norm.")
        else:
            rest = rest.replace("layer.", "predictor_blocks.", 1) if rest.startswith("layer.") else rest
            rest = rest.replace("layernorm.", "predictor_norm.")
            rest = "predictor_" + rest if rest.startswith("proj.") else rest
        out[rest] = value
    return parts["encoder"], parts["predictor"]


def pick(x_BNE: Tensor, ids_BT: Tensor) -> Tensor:
    """Rows by plain indexing: [B, N, E] and [B, T] -> [B, T, E]."""
    return torch.stack([x[ids] for x, ids in zip(x_BNE, ids_BT, strict=True)])


def hf_encode(model: VJEPA2Model, volume_BCDHW: Tensor, keep_BK: Tensor | None) -> Tensor:
    """Its encoder; with ids, its own layers on the gathered embeddings, which it cannot do by itself."""
    frames = volume_BCDHW.transpose(1, 2)
    if keep_BK is None:
        return model.encoder(frames).last_hidden_state
    x = pick(model.encoder.embeddings(frames), keep_BK)
    for layer in model.encoder.layer:
        x = layer(x, keep_BK)[0]
    return model.encoder.layernorm(x)


def hf_predict(model: VJEPA2Model, ctx_BKE: Tensor, keep_BK: Tensor, target_BM: Tensor) -> Tensor:
    """Its predictor, which gathers by itself: the context is first put back in its places."""
    grid = model.config.crop_size // model.config.patch_size
    tokens = grid * grid * model.config.frames_per_clip // model.config.tubelet_size
    places = keep_BK.unsqueeze(-1).expand_as(ctx_BKE)
    full = torch.zeros(len(ctx_BKE), tokens, ctx_BKE.shape[-1]).scatter(1, places, ctx_BKE)
    return model.predictor(full, [keep_BK], [target_BM]).last_hidden_state


class Plain(NamedTuple):
    """The slow model's geometry; `scale` multiplies the positions of (d, h, w)."""

    grid: tuple[int, int, int]
    patch: tuple[int, int, int]
    form: str
    scale: tuple[float, float, float] = (1.0, 1.0, 1.0)


def plain_encode(
    weights: dict[str, Tensor], heads: int, plain: Plain, volume_BCDHW: Tensor, keep_BK: Tensor
) -> Tensor:
    """The encoder by its definition: a patch at a time, a head at a time, an axis and a pair at a time."""
    kernel, bias = weights["patch_embed.proj.weight"], weights["patch_embed.proj.bias"]
    outputs = []
    for volume, keep in zip(volume_BCDHW, keep_BK.tolist(), strict=True):
        tokens = []
        for token in keep:
            d, h, w = (i * p for i, p in zip(coordinates(token, plain.grid), plain.patch, strict=True))
            pd, ph, pw = plain.patch
            patch = volume[:, d : d + pd, h : h + ph, w : w + pw]
            tokens.append((kernel * patch).sum((1, 2, 3, 4)) + bias)
        outputs.append(plain_blocks(weights, "blocks", heads, plain, torch.stack(tokens), keep))
    return norm(torch.stack(outputs), weights, "norm")


def plain_predict(
    weights: dict[str, Tensor], heads: int, plain: Plain, ctx_BKE: Tensor, keep_BK: Tensor, target_BM: Tensor
) -> Tensor:
    """The predictor by its definition, without sorting."""
    outputs = []
    for ctx, keep, target in zip(ctx_BKE, keep_BK.tolist(), target_BM.tolist(), strict=True):
        seen = linear(ctx, weights, "predictor_embed")
        hidden = torch.stack([weights["mask_tokens.0"].flatten()] * len(target))
        x = plain_blocks(weights, "predictor_blocks", heads, plain, torch.cat((seen, hidden)), keep + target)
        outputs.append(x[len(keep) :])
    return linear(norm(torch.stack(outputs), weights, "predictor_norm"), weights, "predictor_proj")


def coordinates(token: int, grid: tuple[int, int, int]) -> tuple[int, int, int]:
    """(d, h, w) of a raster id, by counting."""
    places = [(d, h, w) for d in range(grid[0]) for h in range(grid[1]) for w in range(grid[2])]
    return places[token]


def plain_blocks(
    weights: dict[str, Tensor], prefix: str, heads: int, plain: Plain, x_TE: Tensor, ids: list[int]
) -> Tensor:
    depth = 1 + max(int(k.split(".")[1]) for k in weights if k.startswith(f"{prefix}."))
    for number in range(depth):
        name = f"{prefix}.{number}"
        q, k, v = linear(norm(x_TE, weights, f"{name}.norm1"), weights, f"{name}.attn.qkv").chunk(3, dim=-1)
        mixed = []
        for head in range(heads):
            size = x_TE.shape[-1] // heads
            own = slice(head * size, (head + 1) * size)
            turned_q = plain_rotary(q[:, own], ids, plain)
            turned_k = plain_rotary(k[:, own], ids, plain)
            shares = torch.softmax(turned_q @ turned_k.T / math.sqrt(size), dim=-1)
            mixed.append(shares @ v[:, own])
        x_TE = x_TE + linear(torch.cat(mixed, dim=-1), weights, f"{name}.attn.proj")
        hidden = linear(norm(x_TE, weights, f"{name}.norm2"), weights, f"{name}.mlp.fc1")
        hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
        x_TE = x_TE + linear(hidden, weights, f"{name}.mlp.fc2")
    return x_TE


def plain_rotary(x_TC: Tensor, ids: list[int], plain: Plain) -> Tensor:
    """Channels come as D pairs, H pairs, W pairs, and a rest that is left alone.

    interleaved: pair i turns by position / 10000^(i/n). tiled: of pair i, its even channel 2i uses the angle
    number 2i mod n and its odd channel the angle number (2i + 1) mod n: no rotation, but what the published
    weights were trained with.
    """
    n = (x_TC.shape[1] // 3) // 2
    places_T3 = torch.tensor([coordinates(token, plain.grid) for token in ids], dtype=x_TC.dtype)
    channels = list(x_TC.unbind(1))
    for axis in range(3):
        position_T = places_T3[:, axis] * plain.scale[axis]
        angles = [position_T * 10000.0 ** (-i / n) for i in range(n)]
        for pair in range(n):
            even, odd = 2 * pair, 2 * pair + 1
            first, second = (pair, pair) if plain.form == "interleaved" else (even % n, odd % n)
            at = 2 * n * axis
            a, b = x_TC[:, at + even], x_TC[:, at + odd]
            channels[at + even] = a * torch.cos(angles[first]) - b * torch.sin(angles[first])
            channels[at + odd] = b * torch.cos(angles[second]) + a * torch.sin(angles[second])
    return torch.stack(channels, dim=1)


def linear(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def norm(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + NORM_EPS)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]
