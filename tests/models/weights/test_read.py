"""Files that are not whole, or none of the layouts, are refused; training state is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import VJEPA2Model

from models.weights.files import read_weights
from models.weights.load import load_encoder
from tests.models.weights.weight_files import exit_line, modules, research_file, volume
from tests.support.vjepa2_oracle import hf_encode, hf_model, hf_predict, hf_tensors, research_names
from utils.checkpoint import CheckpointError


def test_research_files_that_are_not_whole(pair: tuple[VJEPA2Model, VJEPA2Model], tmp_path: Path) -> None:
    encoder, predictor = research_names(hf_tensors(pair[0], lambda p: p.detach().clone()))
    short = {k: v for k, v in encoder.items() if k != "blocks.1.norm1.bias"}
    strange = {**encoder, "modality_embed": torch.zeros(3)}
    reshaped = {**encoder, "norm.weight": torch.zeros(3)}
    twice = {**encoder, "module.norm.weight": encoder["norm.weight"]}
    thin = {**predictor, "predictor_embed.weight": torch.zeros(40, 128)}
    maskless = {k: v for k, v in predictor.items() if k != "mask_tokens.0"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"predictor": "absent"}, "expected encoder, predictor and target_encoder, found no predictor"),
        ({"encoder": short}, "encoder: missing: blocks.1.norm1.bias"),
        ({"target_encoder": strange}, "target_encoder: unexpected: modality_embed"),
        ({"encoder": reshaped}, r"norm.weight: expected shape \[128\], found \[3\]"),
        ({"encoder": twice}, "expected norm.weight once, found it again as module.norm.weight"),
        ({"encoder": {"a": 3}}, "encoder: expected tensors by name"),
        ({"encoder": {"a": torch.zeros(1)}}, "expected patch_embed.proj.weight .*, found a"),
        ({"predictor": thin}, "predictor: expected 32 channels per head, .*, found width 40"),
        ({"predictor": maskless}, "predictor: expected at least one mask token, found none"),
        ({"predictor": {"a": torch.zeros(1)}}, "predictor: expected predictor_embed.weight .*, found a"),
        ({"ema_encoder": encoder}, "expected target_encoder or ema_encoder, found both"),
        ({"head": {"weight": torch.zeros(3)}}, "expected encoder, .* found 'head'"),
    ]
    for number, (changes, message) in enumerate(cases):
        path = research_file(tmp_path / f"{number}.pt", *pair, **changes)
        with pytest.raises(CheckpointError, match=message):
            read_weights(str(path))


def test_training_state_of_any_kind_is_left_out(
    pair: tuple[VJEPA2Model, VJEPA2Model], tmp_path: Path
) -> None:
    state = {"loss": torch.tensor(0.5), "lr": torch.full((2,), 1e-4), "epoch": torch.tensor(3)}
    state |= {"batch_size": torch.tensor(24), "world_size": [8, 16], "scaler": {"scale": torch.ones(1)}}
    weights = read_weights(str(research_file(tmp_path / "a.pt", *pair, **state)))
    assert {name for name, why in weights.left_out.items() if why == "training state"} == {*state, "opt"}


def test_files_of_old_torch_are_read(research: Path, tmp_path: Path) -> None:
    """No zip archive, as torch.save wrote before 1.6."""
    path = tmp_path / "old.pt"
    torch.save(torch.load(research, weights_only=True), path, _use_new_zipfile_serialization=False)
    old, new = read_weights(str(path)), read_weights(str(research))
    for role in ("encoder", "target_encoder", "predictor"):
        assert old.role(role).keys() == new.role(role).keys()
        assert all(torch.equal(value, new.role(role)[name]) for name, value in old.role(role).items())
    whole = path.read_bytes()
    for size in range(7000, 9000, 13):  # its end falls on bytes of every kind
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"old\.pt: expected a file of torch.save, tensors only"):
            read_weights(str(path))
    path.write_bytes(research.read_bytes()[:9000])
    with pytest.raises(CheckpointError, match=r"old\.pt: expected a file of torch.save, tensors only"):
        read_weights(str(path))


def test_the_ema_encoder_of_other_files_is_the_target(
    pair: tuple[VJEPA2Model, VJEPA2Model], tmp_path: Path
) -> None:
    encoder, _ = research_names(hf_tensors(pair[1], lambda p: p.detach().clone()))
    path = research_file(tmp_path / "ema.pt", *pair, target_encoder="absent", ema_encoder=encoder)
    assert torch.equal(load_encoder(str(path)).norm.weight, encoder["norm.weight"])


def test_widths_that_do_not_tell_the_heads(tmp_path: Path) -> None:
    theirs = hf_model(
        0, hidden_size=48, num_attention_heads=3, pred_hidden_size=72, pred_num_attention_heads=6
    )
    path = research_file(tmp_path / "a.pt", theirs, theirs)
    with pytest.raises(CheckpointError, match=r"a width of 64 per head, or heads= .*, found 48"):
        modules(path)
    with pytest.raises(CheckpointError, match=r"32 channels per head, or predictor_heads= .* found width 72"):
        modules(path, heads=3)
    encoder, _, predictor = modules(path, heads=3, predictor_heads=6)
    x, keep, target = volume(1, 3, 4, 12, 12), torch.tensor([[0, 7]]), torch.tensor([[5]])
    with torch.no_grad():
        theirs_context = hf_encode(theirs, x, keep)
        torch.testing.assert_close(encoder(x, keep), theirs_context, atol=1e-4, rtol=0)
        expected = hf_predict(theirs, theirs_context, keep, target)
        torch.testing.assert_close(predictor(theirs_context, keep, target), expected, atol=1e-4, rtol=0)


class Planted:
    """What a hostile file would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("ran",))


def test_files_that_are_none_of_the_layouts(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def refused(path: Path, message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            read_weights(str(path))

    refused(tmp_path / "nowhere.pt", "expected a .pt file or a folder with config.json, found no such file")
    (tmp_path / "text.pt").write_text("not a checkpoint")
    refused(tmp_path / "text.pt", "text.pt: expected a file of torch.save, tensors only")
    torch.save({"encoder": Planted()}, tmp_path / "hostile.pt")
    refused(tmp_path / "hostile.pt", "hostile.pt: expected a file of torch.save, tensors only")
    assert capsys.readouterr().out == ""
    torch.save([1], tmp_path / "list.pt")
    refused(tmp_path / "list.pt", "expected a dictionary of parts, found list")
    torch.save({"format_version": 1}, tmp_path / "bare.pt")
    refused(tmp_path / "bare.pt", "expected its seal")
    folder = tmp_path / "folder"
    hf_model(0).save_pretrained(folder)
    config_path = folder / "config.json"
    config_text = config_path.read_text()
    changes = [
        ("{", "expected JSON, found damage"),
        ("[]", "expected a JSON object, found list"),
        (
            config_text.replace('"vjepa2"', '"swin"'),
            "expected model_type vjepa2, dinov2, .*, vit_mae or format oct_encoder, found swin",
        ),
        (config_text.replace('"crop_size"', '"crops"'), "expected the key 'crop_size', found none"),
        (config_text.replace('"patch_size": 4', '"patch_size": [4, 4]'), "patch_size: expected one number"),
        (config_text.replace('"gelu"', '"relu"'), "config.json: hidden_act: expected gelu, found relu"),
        (config_text.replace("1e-06", "1e-05"), "layer_norm_eps: expected 1e-06, found 1e-05"),
    ]
    for text, message in changes:
        config_path.write_text(text)
        refused(folder, message)
        assert exit_line(["inspect", str(folder)], capsys)
    config_path.write_text(config_text)
    index = folder / "model.safetensors.index.json"
    for text, message in [
        ('{"weight_map": {', "index.json: expected JSON, found damage"),
        ("{}", "index.json: expected weight_map, .*, found None"),
        ("[]", "index.json: expected weight_map, .*, found None"),
        ('{"weight_map": {"a": 3}}', "index.json: expected weight_map, .*, found {'a': 3}"),
    ]:
        index.write_text(text)
        refused(folder, message)
        assert exit_line(["inspect", str(folder)], capsys)
    index.unlink()
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    lost = {k: v for k, v in tensors.items() if k != "encoder.layer.0.attention.key.bias"}
    safetensors.torch.save_file(lost, folder / "model.safetensors")
    refused(folder, "encoder: missing: blocks.0.attn.qkv.bias")
    safetensors.torch.save_file({**tensors, "pooler.a": torch.zeros(1)}, folder / "model.safetensors")
    refused(folder, "expected only parameters of VJEPA2Model, found pooler.a")
    (folder / "model.safetensors").write_bytes(b"damage")
    refused(folder, "expected safetensors, found damage")
    (folder / "model.safetensors").unlink()
    refused(folder, "model.safetensors: expected safetensors, found no such file")
