"""V-JEPA 2.1's weights: its layout, by a made state of the published names and shapes, and its arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.vit3d import SIZES
from models.vjepa3d import VJEPA3D
from models.weights import load_encoder
from models.weights.__main__ import main
from models.weights.files import read_weights
from models.weights.layouts import encoder_of, is_vjepa21, predictor_left_out
from models.weights.load import GRAY_MEAN, GRAY_STD, IMAGENET_MEAN, IMAGENET_STD, start_from
from models.weights.shape import encoder_size, new_encoder, require_same
from tests.models.weights.weight_files import config, volume
from tests.support.pipeline_factory import SMOKE
from tests.support.vjepa2_oracle import Plain, coordinates, norm, plain_blocks
from utils.checkpoint import CheckpointError

HEADS = 2
PATCH = (2, 8, 8)
INTERPOLATED = "model.rope=interpolated"


def block_shapes(prefix: str, width: int, depth: int) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for number in range(depth):
        linear = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
        linear |= {"mlp.fc1": (4 * width, width), "mlp.fc2": (width, 4 * width)}
        for name, (out, into) in linear.items():
            shapes[f"{prefix}.{number}.{name}.weight"] = [out, into]
            shapes[f"{prefix}.{number}.{name}.bias"] = [out]
        for name in ("norm1", "norm2"):
            shapes[f"{prefix}.{number}.{name}.weight"] = shapes[f"{prefix}.{number}.{name}.bias"] = [width]
    return shapes


def encoder_shapes(width: int, depth: int, patch: tuple[int, int, int] = (2, 16, 16)) -> dict[str, list[int]]:
    """The published names of an encoder, without the wrappers' prefixes."""
    shapes = {
        "patch_embed.proj.weight": [width, 3, *patch],
        "patch_embed.proj.bias": [width],
        "patch_embed_img.proj.weight": [width, 3, 1, *patch[1:]],
        "patch_embed_img.proj.bias": [width],
        "img_mod_embed": [1, 1, width],
        "video_mod_embed": [1, 1, width],
    }
    for number in range(4):
        shapes[f"norms_block.{number}.weight"] = shapes[f"norms_block.{number}.bias"] = [width]
    return {**shapes, **block_shapes("blocks", width, depth)}


def predictor_shapes(
    width: int, teacher: int = 1664, own: int = 384, depth: int = 12
) -> dict[str, list[int]]:
    """Those of the predictor of the two distilled encoders."""
    shapes = {"predictor_embed.weight": [own, width], "predictor_embed.bias": [own]}
    shapes |= {f"mask_tokens.{number}": [1, 1, own] for number in range(8)}
    shapes |= {"img_mod_embed": [1, 1, own], "video_mod_embed": [1, 1, own]}
    shapes |= {"predictor_norm.weight": [own], "predictor_norm.bias": [own]}
    for name in ("predictor_proj", "predictor_proj_context"):
        shapes |= {f"{name}.weight": [teacher, own], f"{name}.bias": [teacher]}
    return {**shapes, **block_shapes("predictor_blocks", own, depth)}


def drawn(shapes: dict[str, list[int]], seed: int) -> dict[str, Tensor]:
    """Every tensor random, far from its initialisation."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            tensors[name] = 1 + 0.2 * noise
        elif len(shape) > 1 and "embed" not in name:
            tensors[name] = noise * 1.5 / noise[0].numel() ** 0.5
        else:
            tensors[name] = 0.3 * noise
    return tensors


ENCODER = drawn(encoder_shapes(128, 3, PATCH), 1)
EMA = drawn(encoder_shapes(128, 3, PATCH), 2)
PREDICTOR = drawn(predictor_shapes(128, teacher=96, own=64, depth=2), 3)


def saved(path: Path, **changes: Any) -> str:
    """What the released files of ViT-B and ViT-L hold."""
    parts = {"encoder": ENCODER, "ema_encoder": EMA, "predictor": PREDICTOR} | changes
    wrapped = {
        part: {f"module.backbone.{n}": t for n, t in tensors.items()} for part, tensors in parts.items()
    }
    torch.save({**wrapped, "opt": {}, "scaler": None, "epoch": 9, "loss": 0.4, "lr": 1e-4}, path)
    return str(path)


def reference(
    weights: dict[str, Tensor], patch: tuple[int, int, int], volume_CDHW: Tensor, ids: list[int]
) -> Tensor:
    """The encoder for videos in float64 by its definition: a patch, a head, an axis, a pair at a time."""
    weights = {name: tensor.double() for name, tensor in weights.items()}
    depth, rows, columns = (n // p for n, p in zip(volume_CDHW.shape[1:], patch, strict=True))
    tokens = []
    for token in ids:
        d, h, w = (i * p for i, p in zip(coordinates(token, (depth, rows, columns)), patch, strict=True))
        own = volume_CDHW[:, d : d + patch[0], h : h + patch[1], w : w + patch[2]].double()
        embedded = (weights["patch_embed.proj.weight"] * own).sum((1, 2, 3, 4))
        tokens.append(embedded + weights["patch_embed.proj.bias"] + weights["video_mod_embed"][0, 0])
    # the first row and column stay at 0, the last ones lie at 15; planes are counted
    spread = Plain((depth, rows, columns), patch, "interleaved", (1.0, 15 / (rows - 1), 15 / (columns - 1)))
    return norm(
        plain_blocks(weights, "blocks", HEADS, spread, torch.stack(tokens), ids), weights, "norms_block.3"
    )


def test_a_file_gives_the_features_of_its_definition(tmp_path: Path) -> None:
    """The average is the target; grids of two shapes, whole and of kept tokens."""
    path = saved(tmp_path / "vitb.pt")
    encoder = load_encoder(path)
    weights = read_weights(path)
    context = new_encoder(weights)
    context.load_state_dict(weights.encoder)
    for grid in ((2, 3, 5), (1, 4, 2)):
        x = volume(3, *(n * p for n, p in zip(grid, PATCH, strict=True)))
        everything = list(range(grid[0] * grid[1] * grid[2]))
        ours = encoder(x[None])[0].double()
        torch.testing.assert_close(ours, reference(EMA, PATCH, x, everything), atol=1e-4, rtol=0)
        kept = everything[1::3]
        ours = encoder(x[None], torch.tensor([kept]))[0].double()
        torch.testing.assert_close(ours, reference(EMA, PATCH, x, kept), atol=1e-4, rtol=0)
        context.grid, context.num_tokens = grid, len(everything)
        ours = context(x[None])[0].detach().double()
        torch.testing.assert_close(ours, reference(ENCODER, PATCH, x, everything), atol=1e-4, rtol=0)


def test_a_run_starts_from_it(tmp_path: Path) -> None:
    """method.init_from: features of gray as RGB video, planes twice as long; the predictor is random."""
    path = saved(tmp_path / "vitb.pt")
    torch.manual_seed(0)
    model = VJEPA3D(config(INTERPOLATED))
    random = {name: p.clone() for name, p in model.predictor.named_parameters()}
    start = start_from(model, config(f"method.init_from={path}", INTERPOLATED), "zscore_valid")
    assert (start.participants, start.init_weight) == ([], 0.0)
    x = volume(1, 4, 32, 32) * 4 - 2
    gray = GRAY_MEAN + GRAY_STD * x
    mean, std = (torch.tensor(values).view(3, 1, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    video = (gray - mean) / std
    doubled = x.repeat_interleave(2, dim=1)
    for module, weights in ((model.encoder, ENCODER), (model.target_encoder, EMA)):
        with torch.no_grad():
            ours = module.eval()(doubled[None])[0].double()
        torch.testing.assert_close(ours, reference(weights, PATCH, video, list(range(32))), atol=1e-4, rtol=0)
    assert all(torch.equal(p, random[name]) for name, p in model.predictor.named_parameters())


def test_the_commands_account_for_every_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path / "vitb.pt")
    assert main(["inspect", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "layout      research_2_1, recipe vjepa2"
    assert lines[2] == "patch       [2, 8, 8], 3 channels, rotary positions, rotary form interpolated"
    assert lines[-1] == "heads assumed: encoder 2 (64 wide)"
    left_out = [line for line in lines if line.startswith("left out: ")]
    # of each encoder: 3 of images, 1 added, 6 of earlier depths; the predictor; 5 of the training state
    assert len(left_out) == 2 * 10 + len(PREDICTOR) + 5
    shape = ["spatial.image_size=[8,32,32]", INTERPOLATED]
    out = str(tmp_path / "start.pt")
    assert main(["import", path, "--config", str(SMOKE), "--out", out, *shape]) == 0
    assert load_encoder(out).rope == "interpolated"


@pytest.mark.parametrize("size", ["b", "l"])
def test_released_configurations(size: str) -> None:
    """Names and shapes of the two released files, without numbers."""
    shape = SIZES[size]
    with torch.device("meta"):
        published = {n: torch.zeros(s) for n, s in encoder_shapes(shape.width, shape.depth).items()}
        expected = VJEPA3D(config(f"model.size={size}", INTERPOLATED)).encoder.state_dict()
    assert is_vjepa21(published)
    ours, left_out = encoder_of("file", "encoder", published)
    expected["patch_embed.proj.weight"] = published["patch_embed.proj.weight"]
    require_same("file", expected, ours)
    assert encoder_size("file", ours, None) == shape
    assert len(ours) + len(left_out) == len(published)  # none twice, none lost
    predictor = {n: torch.zeros(0) for n in predictor_shapes(shape.width)}
    assert len(predictor_left_out("file", predictor)) == len(predictor)


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {n: t for n, t in tensors.items() if n != name}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"encoder": without(ENCODER, "norms_block.3.weight")},
            "encoder: expected V-JEPA 2.1's keys, found no norms",
        ),
        ({"encoder": without(ENCODER, "patch_embed_img.proj.bias")}, "found no patch_embed_img.proj.bias"),
        ({"ema_encoder": without(EMA, "video_mod_embed")}, "target_encoder: .* found no video_mod_embed"),
        ({"encoder": without(ENCODER, "blocks.1.attn.qkv.bias")}, "encoder: missing: blocks.1.attn.qkv.bias"),
        ({"encoder": {**ENCODER, "cls_token": torch.zeros(1)}}, "encoder: unexpected: cls_token"),
        (
            {"encoder": {**ENCODER, "video_mod_embed": torch.zeros(1, 1, 64)}},
            r"video_mod_embed: expected shape \[1, 1, 128\], found \[1, 1, 64\]",
        ),
        ({"predictor": {**PREDICTOR, "head": torch.zeros(1)}}, "predictor: .* unexpected: head"),
        ({"target_encoder": EMA}, "expected target_encoder or ema_encoder, found both"),
    ],
)
def test_another_layout_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_weights(saved(tmp_path / "other.pt", **changes))


def test_what_it_cannot_be_used_for(tmp_path: Path) -> None:
    path = saved(tmp_path / "vitb.pt")
    cfg = config(f"method.init_from={path}", "model.rope=tiled")
    with pytest.raises(
        CheckpointError, match=r"expected tiled .* \(model\.rope=interpolated fits these weights\)"
    ):
        start_from(VJEPA3D(cfg), cfg, "zscore_valid")
