"""The parts of a V-JEPA 2.1 file by our names.

2.1 differs from 2.0 in what is around the blocks: patches of images have another embedding, both
kinds of patches get a learned vector for their modality, four depths have a norm each, and rotary positions
are interleaved, with rows and columns spread over 16 x 16 whatever the grid (`model.rope=interpolated`).
Volumes go the way of videos: that embedding, its vector added to the bias, and the norm of the last depth.
The predictor predicts features of a larger teacher, or of four depths at once; it is none of ours and is
left out.
"""

from __future__ import annotations

import re

from torch import Tensor

from models.weights.shape import some
from utils.checkpoint import CheckpointError

GRID = (32, 24, 24)  # of the released models: 64 frames of 384 x 384, patch 2 x 16 x 16
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
