"""Files of weights in: read, imported, as modules, as the start of a run.

First: files that are not whole, or none of the layouts, are refused; training state is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import VJEPA2Config, VJEPA2Model

from data_setup.store.format import NORMALISATION as STORE_NORMALISATION
from models.vit3d import SIZES, Size
from models.vjepa3d import VJEPA3D
from models.weights.__main__ import import_weights, main
from models.weights.files import read_weights
from models.weights.layouts import from_hf, to_hf
from models.weights.load import GRAY_MEAN, GRAY_STD, NORMALISATION, fit, load_encoder, start_from
from models.weights.shape import encoder_size, predictor_shape, require_same
from pretraining.train import main as train
from tests.models.weights.test_vjepa21 import saved as vjepa21_file
from tests.models.weights.weight_files import (
    MAE,
    MEAN,
    METHODS,
    STD,
    config,
    exit_line,
    modules,
    own_checkpoint,
    research_file,
    volume,
)
from tests.support.pipeline_factory import SMOKE, pipeline_overrides
from tests.support.vjepa2_oracle import (
    Plain,
    hf_encode,
    hf_model,
    hf_predict,
    hf_tensors,
    plain_encode,
    research_names,
)
from utils.checkpoint import CheckpointError, CheckpointWriter, load_checkpoint
from utils.config.load import to_yaml
from utils.errors import UserError


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


def test_a_head_is_no_encoder(tmp_path: Path) -> None:
    """Nor to export, to inspect or to start from."""
    writer = CheckpointWriter(str(tmp_path), keep_last=None)
    writer.save({"kind": "head", "config": "", "step": 0}, ["head"])
    writer.close()
    with pytest.raises(CheckpointError, match=r"expected a checkpoint of pretraining\.train, found no model"):
        main(["export", "--checkpoint", str(tmp_path / "head.pt"), "--out", str(tmp_path / "out")])


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
    refused(tmp_path, "expected a .pt file or a folder with config.json, found a folder without it")
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


# ---- import accounts for every key, and takes no encoder or predictor that does not fit


def test_import_accounts_for_every_key(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "imported.pt"
    cfg_file = tmp_path / "tiny.yaml"
    cfg_file.write_text(to_yaml(config()))
    assert main(["import", str(tiny), "--config", str(cfg_file), "--out", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "heads assumed: encoder 2 (64 wide), predictor 2"
    status = {line[10:].split("  ")[0]: line[:9].strip() for line in printed[1:-1]}
    raw = torch.load(tiny, weights_only=True)
    expected = {"opt", "scaler", "epoch", "loss", "lr", "batch_size", "world_size"}
    for part in ("encoder", "target_encoder", "predictor"):
        for name in raw[part]:
            is_legacy = name.endswith("pos_embed")
            expected.add(f"{part}.{name if is_legacy else name.removeprefix('module.backbone.')}")
    assert set(status) == expected
    adapted = {f"{p}.patch_embed.proj.{n}" for p in ("encoder", "target_encoder") for n in ("weight", "bias")}
    assert {name for name, what in status.items() if what == "adapted"} == adapted
    left_out = {name for name, what in status.items() if what == "left out"}
    assert {"opt", "predictor.mask_tokens.1", "predictor.mask_tokens.2"} < left_out
    assert "encoder.module.backbone.pos_embed" in left_out
    state = load_checkpoint(str(out))
    assert state["participants"] == []
    assert state["normalisation"] == NORMALISATION == STORE_NORMALISATION
    model = VJEPA3D(config())
    model.load_state_dict(state["model"])  # complete, and no more
    blocks = raw["target_encoder"]["module.backbone.blocks.2.attn.qkv.weight"]
    assert torch.equal(model.target_encoder.blocks[2].attn.qkv.weight, blocks)
    assert not torch.equal(model.encoder.blocks[2].attn.qkv.weight, blocks)
    with pytest.raises(UserError, match="--out: expected a new file, found"):
        import_weights(str(tiny), config(), str(out))
    with pytest.raises(UserError, match=r"a name that ends with .pt, found .*imported"):
        import_weights(str(tiny), config(), str(tmp_path / "imported"))


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "_orig_mod.module.backbone.",
        "module.module.",
        "_fsdp_wrapped_module.",
        "module._orig_mod.",
    ],
)
def test_the_names_of_wrappers_are_no_part_of_a_name(tiny: Path, tmp_path: Path, prefix: str) -> None:
    """Compiled (torch.compile), sharded and distributed models save them."""
    raw = torch.load(tiny, weights_only=True)
    for part in ("encoder", "target_encoder", "predictor"):
        raw[part] = {prefix + n.removeprefix("module.backbone."): t for n, t in raw[part].items()}
    torch.save(raw, tmp_path / "wrapped.pt")
    read, expected = read_weights(str(tmp_path / "wrapped.pt")).encoder, read_weights(str(tiny)).encoder
    assert read.keys() == expected.keys()


def test_what_an_imported_encoder_is_fed(tiny: Path) -> None:
    """z stands for gray = m + s z: the features of that gray as normalised RGB, planes doubled."""
    cfg = config()
    model = VJEPA3D(cfg)
    model.load_state_dict(fit(read_weights(str(tiny)), cfg).tensors)
    original = load_encoder(str(tiny))
    z = torch.randn(1, 1, 4, 32, 32)
    gray = GRAY_MEAN + GRAY_STD * z
    normalised = (gray - MEAN.view(3, 1, 1, 1)) / STD.view(3, 1, 1, 1)
    doubled = torch.stack((z, z), dim=3).flatten(2, 3)
    with torch.no_grad():
        ours, theirs = model.target_encoder.eval()(doubled), original(normalised)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    # a photograph's mean and spread: the three normalised channels average to 0 and 1
    at_zero = ((GRAY_MEAN - MEAN) / STD).mean()
    assert float(at_zero) == pytest.approx(0, abs=0.01)
    assert float((GRAY_STD / STD).mean()) == pytest.approx(1, abs=0.01)


def test_a_predictor_of_another_shape_is_left_out_whole(tiny: Path) -> None:
    for override, reason in [
        ("method.predictor_depth=3", "another shape, predictor: missing: predictor_blocks.2"),
        (
            "method.predictor_width=96",
            "another shape, predictor: predictor_embed.weight: expected shape [96, 128]",
        ),
    ]:
        result = fit(read_weights(str(tiny)), config(override))
        assert not any(name.startswith("predictor.") for name in result.tensors)
        lines = [line for line in result.lines if line.name.startswith("predictor.")]
        assert {line.status for line in lines} == {"left out", "missing"}
        assert all(reason in line.detail for line in lines if "pos_embed" not in line.name), lines


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.rope=interleaved"],
            r"model.rope: expected interleaved .*, found tiled \(model.rope=tiled fits",
        ),
        (["model.size=s"], "model.size s: expected 12 blocks of width 384 .* found 3 blocks of width 128 "),
        (["spatial.patch_size=[4,16,16]"], r"expected H and W of \[4, 16, 16\] .*, found \[2, 8, 8\]"),
        (["spatial.image_size=[9,32,32]", "spatial.patch_size=[3,8,8]"], r"found \[2, 8, 8\]"),
    ],
)
def test_encoders_that_do_not_fit(tiny: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        fit(read_weights(str(tiny)), config(*overrides))


def test_learned_positions_take_no_rotary_weights(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected learned positions, found rotary positions"):
        fit(read_weights(str(tiny)), config(*METHODS))
    own = own_checkpoint(tmp_path, config(*METHODS))
    assert (
        not fit(read_weights(str(own)), config(*METHODS)).tensors.keys()
        ^ VJEPA3D(config(*METHODS)).state_dict()
    )


def test_channels_without_a_rule(tmp_path: Path) -> None:
    theirs = hf_model(0, in_chans=2)
    with pytest.raises(CheckpointError, match="channels: expected 1 or 3, found 2"):
        fit(read_weights(str(research_file(tmp_path / "a.pt", theirs, theirs))), config())


def test_a_predictor_of_another_recipe_is_not_taken(tmp_path: Path) -> None:
    """Where a patch has as many voxels as the encoder is wide, its shape would fit."""
    patch = ["spatial.patch_size=[2,8,8]"]
    own = read_weights(str(own_checkpoint(tmp_path, config(*MAE, *patch))))
    assert own.predictor["predictor_proj.weight"].shape == (128, 64)
    result = fit(own, config(*patch))
    details = {line.detail for line in result.lines if line.status == "missing"}
    assert details == {"random: predictor of recipe mae"}
    assert set(fit(own, config(*MAE, *patch)).tensors) == set(VJEPA3D(config(*MAE, *patch)).state_dict())


# ---- modules of a file give Hugging Face's numbers, for research files and its own folders


def test_a_research_file_gives_hugging_faces_numbers(
    research: Path, pair: tuple[VJEPA2Model, VJEPA2Model]
) -> None:
    encoder, target_encoder, predictor = modules(research)
    x = volume(2, 3, 4, 12, 12)
    keep, target = torch.tensor([[0, 4, 7, 17], [16, 2, 9, 3]]), torch.tensor([[1, 11], [0, 12]])
    with torch.no_grad():
        torch.testing.assert_close(encoder(x), hf_encode(pair[0], x, None), atol=1e-4, rtol=0)
        torch.testing.assert_close(target_encoder(x), hf_encode(pair[1], x, None), atol=1e-4, rtol=0)
        theirs = hf_encode(pair[0], x, keep)
        ours = encoder(x, keep)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
        expected = hf_predict(pair[0], theirs, keep, target)
        torch.testing.assert_close(predictor(ours, keep, target), expected, atol=1e-4, rtol=0)
    assert not torch.equal(encoder(x), target_encoder(x))
    assert encoder.patch_embed.proj.weight.shape == (128, 3, 2, 4, 4)


def test_positions_follow_the_volume(tmp_path: Path) -> None:
    """One file, volumes of several sizes in turn."""
    small, large = hf_model(0), hf_model(0, crop_size=20, frames_per_clip=6)  # the same weights
    encoder = load_encoder(str(research_file(tmp_path / "a.pt", small, small)))
    keep = torch.tensor([[1, 8, 13]])
    for model in (small, large, small):
        cfg = model.config
        x = volume(1, 3, cfg.frames_per_clip, cfg.crop_size, cfg.crop_size)
        with torch.no_grad():
            torch.testing.assert_close(encoder(x), hf_encode(model, x, None), atol=1e-4, rtol=0)
            context = encoder(volume_BCDHW=x, keep_BK=keep)
            torch.testing.assert_close(context, hf_encode(model, x, keep), atol=1e-4, rtol=0)
    flat = volume(1, 3, 4, 8, 20)  # grid 2 x 2 x 5
    weights = {name: p.detach().double() for name, p in encoder.named_parameters()}
    keep = torch.arange(20).unsqueeze(0)
    expected = plain_encode(weights, 2, Plain((2, 2, 5), (2, 4, 4), "tiled"), flat.double(), keep)
    torch.testing.assert_close(encoder(flat).double(), expected, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match=r"whole patches \(2, 4, 4\), found \(1, 3, 4, 12, 13\)"):
        encoder(volume(1, 3, 4, 12, 13))


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    """Heads from config.json, where the width would tell otherwise; shards; one encoder for both."""
    theirs = hf_model(4, num_attention_heads=4, pred_num_attention_heads=4)
    theirs.save_pretrained(tmp_path / "whole")
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="200KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    x, keep, target = volume(1, 3, 4, 12, 12), torch.tensor([[2, 9]]), torch.tensor([[3]])
    for name in ("whole", "shards"):
        encoder, target_encoder, predictor = modules(tmp_path / name)
        with torch.no_grad():
            context = hf_encode(theirs, x, keep)
            torch.testing.assert_close(encoder(x, keep), context, atol=1e-4, rtol=0)
            torch.testing.assert_close(target_encoder(x, keep), context, atol=1e-4, rtol=0)
            expected = hf_predict(theirs, context, keep, target)
            torch.testing.assert_close(predictor(context, keep, target), expected, atol=1e-4, rtol=0)
    read_weights(str(tmp_path / "whole"), heads=4, predictor_heads=4)
    with pytest.raises(CheckpointError, match="predictor_heads: expected 4, as the file says, found 2"):
        read_weights(str(tmp_path / "whole"), heads=4, predictor_heads=2)


@pytest.mark.parametrize(
    ("name", "shape", "size"),
    [
        ("vitl", {}, SIZES["l"]),
        ("vith", {"hidden_size": 1280, "num_hidden_layers": 32}, SIZES["h"]),
        (
            "vitg",
            {
                "hidden_size": 1408,
                "num_hidden_layers": 40,
                "num_attention_heads": 22,
                "mlp_ratio": 4.363636363636363,
            },
            Size(40, 1408, 22, 48 / 11),
        ),
    ],
)
def test_released_configurations(name: str, shape: dict, size: Size) -> None:
    """Names and shapes of the published models, on the meta device: no weights are needed for that."""
    with torch.device("meta"):
        theirs = VJEPA2Model(VJEPA2Config(**shape))
    tensors = hf_tensors(theirs, lambda p: p.detach())
    encoder, predictor, unknown = from_hf(tensors)
    assert not unknown
    inferred = encoder_size(name, encoder, None)
    assert inferred[:3] == size[:3]
    assert int(inferred.width * inferred.mlp_ratio) == int(size.width * size.mlp_ratio)
    assert predictor_shape(name, predictor, None) == Size(12, 384, 12)
    assert sum(n.startswith("mask_tokens") for n in predictor) == 10
    research_encoder, research_predictor = research_names(tensors)
    require_same(name, research_encoder, encoder)
    require_same(name, research_predictor, predictor)
    assert {n: t.shape for n, t in to_hf(encoder, predictor).items()} == {
        n: t.shape for n, t in tensors.items()
    }


# ---- a run starts from a file of weights, and says what it did not take


def test_a_run_starts_from_them(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = config(f"method.init_from={tiny}")
    model = VJEPA3D(cfg)
    start = start_from(model, cfg, STORE_NORMALISATION)
    assert (start.participants, start.init_weight) == ([], 0.0)
    expected = fit(read_weights(str(tiny)), cfg).tensors
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert not caplog.records or all(record.levelname != "WARNING" for record in caplog.records)

    other = config(f"method.init_from={tiny}", "method.predictor_depth=3")
    model = VJEPA3D(other)
    before = model.predictor.predictor_embed.weight.clone()
    with caplog.at_level("INFO"):
        start_from(model, other, STORE_NORMALISATION)
    for line in fit(read_weights(str(tiny)), other).lines:
        assert (f"{line.status} {line.name}: " in caplog.text) == (line.status != "loaded"), line
    assert torch.equal(model.predictor.predictor_embed.weight, before)
    assert torch.equal(model.encoder.norm.weight, expected["encoder.norm.weight"])
    assert "the predictor starts at random: another shape" in caplog.text

    near = config(f"method.init_from={tiny}", "method.neighbour_weight=1")
    model = VJEPA3D(near)
    assert model.neighbour_head is not None
    before = model.neighbour_head.weight.clone()
    with caplog.at_level("INFO"):
        start_from(model, near, STORE_NORMALISATION)
    assert "missing neighbour_head.weight: random: only pre-training uses it" in caplog.text
    assert torch.equal(model.neighbour_head.weight, before)
    assert torch.equal(model.encoder.norm.weight, expected["encoder.norm.weight"])

    own = own_checkpoint(tmp_path, config())
    cfg = config(f"method.init_from={own}")
    model = VJEPA3D(cfg)
    start = start_from(model, cfg, STORE_NORMALISATION)
    assert (start.participants, start.init_weight) == (["1001", "1002"], 0.25)
    saved = load_checkpoint(str(own))["model"]
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    with pytest.raises(CheckpointError, match="normalisation: expected minmax of the store, found"):
        start_from(model, cfg, "minmax")
    with pytest.raises(CheckpointError, match=r"model\.rope: expected interleaved"):
        start_from(model, config(f"method.init_from={own}", "model.rope=interleaved"), STORE_NORMALISATION)


@pytest.mark.parametrize("rope", ["tiled", "interpolated"])
def test_the_command_starts_from_them(pipeline: Path, tiny: Path, tmp_path: Path, rope: str) -> None:
    """One update on the phantom: but for the moving average, what the checkpoint has is the file's."""
    path = str(tiny) if rope == "tiled" else vjepa21_file(tmp_path / "vitb.pt")
    start = [f"method.init_from={path}", f"model.rope={rope}", "method.neighbour_weight=0"]
    words = ["optim.base_lr=1e-9", "train.max_steps=1", "train.val_every_steps=null"]
    words += [*start, f"run.dir={tmp_path / 'run'}"]
    assert train(["--config", str(SMOKE), *pipeline_overrides(pipeline), *words]) == 0
    (kept,) = (tmp_path / "run/checkpoints").glob("step_*.pt")
    expected = fit(read_weights(path), config(*start)).tensors
    model = load_checkpoint(str(kept))["model"]
    for name in (name for name in expected if not name.startswith("target_encoder.")):
        torch.testing.assert_close(model[name], expected[name], atol=1e-6, rtol=0)
