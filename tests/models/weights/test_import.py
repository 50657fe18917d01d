"""Import accounts for every key, and takes no encoder or predictor that does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data_setup.store.format import NORMALISATION as STORE_NORMALISATION
from models.vjepa3d import VJEPA3D
from models.weights.__main__ import import_weights, main
from models.weights.files import read_weights
from models.weights.load import GRAY_MEAN, GRAY_STD, NORMALISATION, fit, load_encoder
from tests.models.weights.weight_files import MAE, MEAN, METHODS, STD, config, own_checkpoint, research_file
from tests.support.vjepa2_oracle import hf_model
from utils.checkpoint import CheckpointError, load_checkpoint
from utils.config.load import to_yaml
from utils.errors import UserError


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
