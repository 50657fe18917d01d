"""A 2D image model as an encoder of volumes: its own tokens where a volume is one B-scan repeated."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from data_setup.store.format import NORMALISATION as STORE_NORMALISATION
from finetuning.features.kept import pretrained_encoder
from models.vjepa3d import VJEPA3D
from models.weights.__main__ import main
from models.weights.files import read_weights
from models.weights.image import GREY
from models.weights.load import load_encoder, start_from
from pretraining.train import main as train
from tests.models.weights.weight_files import METHODS, config, exit_line, volume
from tests.support.pipeline_factory import SMOKE, pipeline_overrides
from utils.checkpoint import CheckpointError, load_checkpoint
from utils.config.load import config_of_yaml
from utils.config.schema import Config

KINDS = {
    "dinov2": (transformers.Dinov2Config, transformers.Dinov2Model, {}),
    "dinov2_with_registers": (
        transformers.Dinov2WithRegistersConfig,
        transformers.Dinov2WithRegistersModel,
        {"num_register_tokens": 3},
    ),
    "vit": (transformers.ViTConfig, transformers.ViTForImageClassification, {"intermediate_size": 512}),
    "vit_mae": (
        transformers.ViTMAEConfig,
        transformers.ViTMAEForPreTraining,
        {"intermediate_size": 512, "mask_ratio": 0.0, "decoder_hidden_size": 32}
        | {"decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2, "decoder_intermediate_size": 32},
    ),
}


def image_folder(folder: Path, kind: str = "dinov2", **changes: Any) -> torch.nn.Module:
    """A model of width 128 with 3 blocks, weights far from any initialisation, saved in the folder."""
    config_class, model_class, more = KINDS[kind]
    shape = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 32}
    torch.manual_seed(3)
    model = model_class(config_class(**{**shape, "patch_size": 8, **more, **changes})).eval()
    for name, parameter in model.named_parameters():
        if "decoder" not in name:
            parameter.data = torch.randn(parameter.shape) * (0.5 if parameter.ndim < 3 else 0.3)
        if parameter.ndim == 2:
            parameter.data /= 6
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def image_tokens(model: torch.nn.Module, images_BHW: Tensor) -> Tensor:
    """Patch tokens [B, N, E] of grey images, by Hugging Face's classes."""
    inner = getattr(model, "vit", model)
    words = {"interpolate_pos_encoding": True} if hasattr(model, "vit") else {}
    if "Mae" in type(model).__name__ or "MAE" in type(model).__name__:
        num = (images_BHW.shape[1] // 8) * (images_BHW.shape[2] // 8)
        words["noise"] = torch.arange(num).expand(len(images_BHW), -1).float()  # keep all, in order
    hidden = inner(images_BHW[:, None].expand(-1, 3, -1, -1), **words).last_hidden_state
    num_prefix = 1 + getattr(model.config, "num_register_tokens", 0)
    return hidden[:, num_prefix:]


def started(folder: Path, *overrides: str) -> tuple[Config, VJEPA3D]:
    cfg = config(f"method.init_from={folder}", *overrides)
    model = VJEPA3D(cfg, read_weights(str(folder)).num_prefix)
    start_from(model, cfg, STORE_NORMALISATION)
    return cfg, model.eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plane", [(32, 32), (16, 48)])
@pytest.mark.parametrize("d", [1, 4])
def test_one_b_scan_has_the_tokens_of_the_image_model(
    tmp_path: Path, kind: str, plane: tuple[int, int], d: int
) -> None:
    theirs = image_folder(tmp_path, kind)
    b_scans_BHW = volume(2, *plane) * 4 - 2
    words = [f"spatial.image_size=[{d},{plane[0]},{plane[1]}]", f"spatial.patch_size=[{d},8,8]"]
    _, ours = started(tmp_path, *words)
    factor, offset = GREY
    repeated = b_scans_BHW[:, None, None].expand(-1, 1, d, -1, -1)
    expected = image_tokens(theirs, factor * b_scans_BHW + offset)
    with torch.no_grad():
        for encoder in (ours.encoder, ours.target_encoder):
            torch.testing.assert_close(encoder(repeated), expected, atol=1e-5, rtol=1e-5)
    if plane == (32, 32) and d == 1:  # the folder as it is: an encoder of one B-scan
        with torch.no_grad():
            as_it_is = factor * repeated + offset
            tokens = load_encoder(str(tmp_path))(as_it_is.expand(-1, 3, -1, -1, -1))
        torch.testing.assert_close(tokens, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("token", [(16, 12), (6, 5), (16, 6)])
def test_tokens_of_another_size_get_the_resized_patches(tmp_path: Path, token: tuple[int, int]) -> None:
    """The picture and the B-scan have the same content in each patch, the smaller of both enlarged."""
    theirs = image_folder(tmp_path)
    content = volume(16, 1, *(min(8, size) for size in token))

    def tiled(h: int, w: int) -> Tensor:
        patches = torch.nn.functional.interpolate(content, size=(h, w), mode="bilinear")
        return patches.view(1, 4, 4, h, w).transpose(2, 3).reshape(1, 4 * h, 4 * w)

    h, w = token
    _, ours = started(tmp_path, f"spatial.image_size=[4,{4 * h},{4 * w}]", f"spatial.patch_size=[4,{h},{w}]")
    with torch.no_grad():
        tokens = ours.encoder(tiled(h, w)[:, None, None].expand(-1, -1, 4, -1, -1))
    pictures = GREY[0] * tiled(8, 8) + GREY[1]
    torch.testing.assert_close(tokens, image_tokens(theirs, pictures), atol=1e-3, rtol=1e-3)


def test_positions_go_by_id_and_the_prefix_sees_all(tmp_path: Path) -> None:
    """Ids in another order give all tokens; what is left out is away only; rotary tells D apart."""
    image_folder(tmp_path, "dinov2_with_registers")
    _, model = started(tmp_path)
    encoder = model.encoder
    assert encoder.num_prefix == 4
    x = volume(2, 1, 8, 32, 32)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0)).expand(2, -1)
    with torch.no_grad():
        whole = encoder(x)
        torch.testing.assert_close(encoder(x, order), whole.gather(1, order[..., None].expand_as(whole)))
        few = encoder(x, order[:, :9])
        hidden = x.unflatten(3, (4, 8)).unflatten(5, (4, 8)).clone()
        assert few.shape == (2, 9, 128)
        d, h, w = order[0, 9] // 16, order[0, 9] // 4 % 4, order[0, 9] % 4
        hidden[:, :, 4 * d : 4 * d + 4, h, :, w] += 9
        assert torch.equal(encoder(hidden.flatten(5).flatten(3, 4), order[:, :9]), few)
        same = encoder(x[:, :, :4].repeat(1, 1, 2, 1, 1)).unflatten(1, (2, 16))
        assert (same[:, 0] - same[:, 1]).abs().max() > 1e-4
    model.train()
    output = model(x, x, order[:, :12], order[:, 20:26], torch.ones(2, 32, dtype=torch.bool))
    output.loss_B.mean().backward()
    for name in ("pos_embed", "prefix_tokens"):
        assert getattr(encoder, name).grad.abs().sum() > 0
        assert getattr(model.target_encoder, name).grad is None


def test_a_mask_token_is_that_of_the_image_model(tmp_path: Path) -> None:
    """Methods' encoder has a mask token: DINOv2 has one, ViT has none."""
    theirs = image_folder(tmp_path / "a")
    _, model = started(tmp_path / "a", *METHODS)
    assert torch.equal(model.encoder.mask_token[0], theirs.embeddings.mask_token)
    image_folder(tmp_path / "b", "vit")
    with pytest.raises(CheckpointError, match="recipe=methods needs, found an image model without"):
        started(tmp_path / "b", *METHODS)


def test_licence_and_digest_go_into_the_checkpoint_and_the_card(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """By way of `import`; every tensor of the file is used or listed."""
    folder = tmp_path / "vit_small"
    image_folder(folder, "vit_mae")
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    for licence, name, text in (
        ("not stated in the folder", "notes.txt", "license: mine"),
        ("Apache License", "LICENSE", "\n  Apache License\nVersion 2.0"),
        ("cc-by-nc-4.0", "README.md", "---\ntags: [x]\nlicense: cc-by-nc-4.0\n---\nlicense: none"),
    ):
        (folder / name).write_text(text)
        facts = read_weights(str(folder)).facts
        assert facts["imported_from"] == f"vit_small (vit_mae; licence: {licence}; sha256 {digest})"
    capsys.readouterr()
    assert main(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "patch       [1, 8, 8], 3 channels, image positions" in text
    assert "left out: decoder.decoder_norm.bias (of its task)" in text
    words = ["--config", "configs/smoke_test.yaml", "--out", str(tmp_path / "start.pt")]
    assert main(["import", str(folder), *words, "spatial.image_size=[8,32,32]"]) == 0
    assert load_checkpoint(str(tmp_path / "start.pt"))["imported_from"] == facts["imported_from"]
    out = tmp_path / "out"
    assert main(["export", "--checkpoint", str(tmp_path / "start.pt"), "--out", str(out)]) == 0
    card = (out / "README.md").read_text()
    assert facts["imported_from"] in card
    assert "learned in H and W, rotary along D" in card
    assert json.loads((out / "config.json").read_text())["num_prefix"] == 1
    torch.testing.assert_close(
        load_encoder(str(out)).state_dict(), load_encoder(str(tmp_path / "start.pt")).state_dict()
    )
    layout = ["export", "--checkpoint", str(tmp_path / "start.pt"), "--out", str(tmp_path / "hf")]
    assert "found those of an image model" in exit_line([*layout, "--layout", "hf"], capsys)


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


LAYER = "encoder.layer.2.layer_scale1.lambda1"
CLASS = "embeddings.cls_token"
TABLE = "embeddings.position_embeddings"


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        (
            {"model_type": "dinov3_vit"},
            None,
            "found dinov3_vit, whose positions are rotary over all channels",
        ),
        ({"use_swiglu_ffn": True}, None, "config.json: use_swiglu_ffn: expected False, found True"),
        ({"hidden_act": "quick_gelu"}, None, "hidden_act: expected gelu, found quick_gelu"),
        ({"qkv_bias": False}, None, "qkv_bias: expected True, found False"),
        ({"layer_norm_eps": 1e-5}, None, "layer_norm_eps: expected 1e-06, found 1e-05"),
        ({"num_hidden_layers": 4}, None, "expected 4 blocks of width 128 of its config.json, found 3 of 128"),
        ({"image_size": 40}, None, f"{TABLE}: expected 5 x 5 patches, found 16"),
        ({"patch_size": 4}, None, "expected patches of \\[4, 4\\] of its config.json, found \\[8, 8\\]"),
        ({"num_attention_heads": None}, None, "expected the key 'num_attention_heads', found none"),
        ({}, without(CLASS), f"expected {CLASS} of dinov2, found none"),
        ({}, without("encoder.layer.1.mlp.fc2.bias"), "missing: blocks.1.mlp.fc2.bias"),
        ({}, lambda t: {**t, "head.x": torch.zeros(2)}, "unexpected: head.x"),
        ({}, lambda t: {**t, CLASS: torch.zeros(1, 1, 64)}, f"{TABLE}: expected one vector"),
        (
            {},
            lambda t: {**t, LAYER: torch.zeros(64)},
            "blocks.2.layer_scale1.lambda1: expected 128 values, found \\[64\\]",
        ),
        ({}, without(LAYER), "expected two LayerScales a block, found 5 in all"),
        ({"model_type": "dinov2_with_registers"}, None, "expected embeddings.register_tokens of dinov2_with"),
    ],
)
def test_a_wrong_folder_is_one_line(
    tmp_path: Path,
    changes: dict[str, Any],
    tensors: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None,
    message: str,
    capsys: pytest.CaptureFixture,
) -> None:
    image_folder(tmp_path)
    path, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    facts = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in facts.items() if value is not None}))
    if tensors is not None:
        safetensors.torch.save_file(tensors(safetensors.torch.load_file(weights)), weights)
    with pytest.raises(CheckpointError, match=message):
        read_weights(str(tmp_path))
    exit_line(["inspect", str(tmp_path)], capsys)


def test_an_image_model_of_another_size_is_refused(tmp_path: Path) -> None:
    image_folder(tmp_path, hidden_size=64, num_attention_heads=1)
    with pytest.raises(CheckpointError, match=r"model.size ti: expected 3 blocks of width 128"):
        started(tmp_path)


def test_a_run_from_an_image_model_goes_on_where_it_stopped(pipeline: Path, tmp_path: Path) -> None:
    """Its model is built with and without the folder; a resumed run is the unbroken one's."""
    folder = tmp_path / "vit"
    image_folder(folder, "dinov2_with_registers")
    words = [f"method.init_from={folder}", "train.max_steps=4", "train.ckpt_every_steps=2"]

    def run(name: str, *more: str) -> dict[str, Any]:
        overrides = [*pipeline_overrides(pipeline), *words, *more, f"run.dir={tmp_path / name}"]
        train(["--config", str(SMOKE), *overrides])
        (newest,) = sorted((tmp_path / name / "checkpoints").glob("step_*.pt"))[-1:]
        return load_checkpoint(str(newest))

    whole = run("whole")
    steps = tmp_path / "whole/checkpoints"
    for file in ("step_00000002.pt", "step_00000002.json"):
        (tmp_path / "cut/checkpoints").mkdir(parents=True, exist_ok=True)
        shutil.copy(steps / file, tmp_path / "cut/checkpoints")
    shutil.rmtree(folder)
    resumed = run("cut")
    assert whole["step"] == resumed["step"] == 4
    assert whole["model"].keys() == resumed["model"].keys()
    assert all(torch.equal(value, resumed["model"][name]) for name, value in whole["model"].items())
    assert whole["model"]["encoder.prefix_tokens"].shape == (1, 4, 128)
    assert resumed["imported_from"].startswith("vit (dinov2_with_registers; licence: not stated")
    cfg = config_of_yaml(resumed["config"], "")
    encoder = pretrained_encoder(cfg, resumed, "")
    assert (encoder.num_prefix, encoder.rotary_axes) == (4, 1)
