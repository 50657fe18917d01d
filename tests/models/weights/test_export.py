"""What is exported comes back with the same numbers, or is refused; inspect and the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import VJEPA2Model

from data_setup.store.format import NORMALISATION as STORE_NORMALISATION
from models.vjepa3d import VJEPA3D
from models.weights import load_encoder
from models.weights.__main__ import import_weights, main
from models.weights.files import read_weights
from models.weights.load import fit
from models.weights.shape import new_encoder
from tests.models.weights.weight_files import MAE, METHODS, config, exit_line, own_checkpoint, volume
from tests.support.pipeline_factory import ROOT, SMOKE
from utils.checkpoint import CheckpointError, load_checkpoint
from utils.config.load import load_config
from utils.errors import ConfigError, UserError


@pytest.mark.parametrize("which", ["target", "context"])
def test_export_and_back(tmp_path: Path, which: str) -> None:
    path = own_checkpoint(tmp_path / "run", config(), synthetic=True)
    out = tmp_path / "exported"
    assert main(["export", "--checkpoint", str(path), "--out", str(out), "--which", which]) == 0
    assert {p.name for p in out.iterdir()} == {"model.safetensors", "config.json", "README.md"}
    prefix = {"target": "target_encoder", "context": "encoder"}[which]
    saved = load_checkpoint(str(path))
    exported = safetensors.torch.load_file(out / "model.safetensors")
    tensors = {
        k.removeprefix(f"{prefix}."): v for k, v in saved["model"].items() if k.startswith(f"{prefix}.")
    }
    assert set(exported) == set(tensors)
    assert all(torch.equal(exported[k], v) for k, v in tensors.items())
    x = volume(1, 1, 8, 32, 32)
    reference = new_encoder(read_weights(str(path)))
    reference.load_state_dict(tensors)
    with torch.no_grad():
        torch.testing.assert_close(load_encoder(str(out))(x), reference(x), atol=0, rtol=0)
    card = (out / "README.md").read_text()
    for text in (
        "| participants seen | 2 |",
        "yes: a phantom",
        STORE_NORMALISATION,
        "[8, 32, 32]"[1:-1],
        "Licence",
    ):
        assert text in card
    assert saved["checksum"] in card
    for secret in ("1001", "1002"):
        assert secret not in card.replace(saved["checksum"], "")
        assert secret not in (out / "config.json").read_text().replace(saved["checksum"], "")
    with pytest.raises(CheckpointError, match=r"the participants .*, found only their number, 2"):
        import_weights(str(out), config(), str(tmp_path / "again.pt"))
    with pytest.raises(UserError, match="--out: expected a new or empty folder"):
        main(["export", "--checkpoint", str(path), "--out", str(out)])


def test_what_saw_nobody_may_come_back(tiny: Path, tmp_path: Path) -> None:
    """Imported public weights, exported in both layouts, imported again: the same encoder."""
    import_weights(str(tiny), config(), str(tmp_path / "first.pt"))
    first = load_checkpoint(str(tmp_path / "first.pt"))["model"]
    for layout in ("ours", "hf"):
        out = tmp_path / layout
        main(["export", "--checkpoint", str(tmp_path / "first.pt"), "--out", str(out), "--layout", layout])
        import_weights(str(out), config(), str(tmp_path / f"{layout}.pt"))
        second = load_checkpoint(str(tmp_path / f"{layout}.pt"))["model"]
        for name, value in second.items():
            expected = first[
                name.replace("encoder.", "target_encoder.", 1) if name.startswith("encoder.") else name
            ]
            assert torch.equal(value, expected), name
        assert ("predictor.predictor_embed.weight" in second) == (layout == "hf")


SHIPPED = sorted((ROOT / "configs").glob("pretrain*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_configuration_has_hugging_faces_rotary_form(path: Path) -> None:
    cfg = load_config(path)
    assert cfg.model.rope == "tiled"
    assert cfg.spatial.image_size[1] == cfg.spatial.image_size[2]
    assert cfg.spatial.patch_size[1] == cfg.spatial.patch_size[2]


@pytest.mark.parametrize("recipe", ["vjepa2", "mae", "near", "shipped"])
def test_hugging_face_reads_the_export(tmp_path: Path, recipe: str) -> None:
    changes = {"mae": MAE, "near": ["method.neighbour_weight=1"]}
    path = ROOT / "configs" / "pretrain_oct_vjepa2.yaml" if recipe == "shipped" else SMOKE
    cfg = config(*changes.get(recipe, []), path=path)
    path, out = own_checkpoint(tmp_path / "run", cfg), tmp_path / "exported"
    main(["export", "--checkpoint", str(path), "--out", str(out), "--layout", "hf"])
    theirs = VJEPA2Model.from_pretrained(out).eval()
    ours = VJEPA3D(cfg).eval()
    ours.load_state_dict(load_checkpoint(str(path))["model"])
    x = volume(2, 1, 8, 32, 32)
    keep, target = torch.arange(16).expand(2, -1), torch.arange(20, 28).expand(2, -1)
    with torch.no_grad():
        features = ours.target_encoder(x)
        output = theirs(x.transpose(1, 2), skip_predictor=True).last_hidden_state
        torch.testing.assert_close(output, features, atol=1e-4, rtol=0)
        if recipe in ("vjepa2", "near", "shipped"):
            expected = ours.predictor(features[:, :16], keep, target)
            output = theirs(x.transpose(1, 2), context_mask=[keep], target_mask=[target]).predictor_output
            torch.testing.assert_close(output.last_hidden_state, expected, atol=1e-4, rtol=0)
    card = (out / "README.md").read_text()
    assert ("The predictor is included" in card) == (recipe != "mae")
    assert "unknown, the checkpoint does not say" in card


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.rope=interleaved"], "its rotary form is tiled, found interleaved"),
        (["spatial.image_size=[8,32,40]"], r"its grid is square in H and W, found image_size \[8, 32, 40\]"),
        (["spatial.patch_size=[4,8,16]"], r"its patches are square in H and W, found \[4, 8, 16\]"),
        (METHODS, "its positions are rotary, found a learned table"),
        (
            ["model.feature_blocks=[1,3]"],
            r"its features are the last block's, found model.feature_blocks \[1",
        ),
    ],
)
def test_what_hugging_face_cannot_hold(tmp_path: Path, overrides: list[str], message: str) -> None:
    path = own_checkpoint(tmp_path / "run", config(*overrides))
    with pytest.raises(UserError, match=f"VJEPA2Model cannot give these features: {message}"):
        main(["export", "--checkpoint", str(path), "--out", str(tmp_path / "out"), "--layout", "hf"])
    assert not (tmp_path / "out").exists()


def test_an_export_has_the_features_of_its_blocks(tmp_path: Path) -> None:
    path = str(own_checkpoint(tmp_path / "run", config("model.feature_blocks=[1,3]")))
    main(["export", "--checkpoint", path, "--out", str(tmp_path / "out")])
    assert "| features | of blocks [1, 3], joined |" in (tmp_path / "out/README.md").read_text()
    both, last = load_encoder(str(tmp_path / "out")), load_encoder(path)
    last.feature_blocks = ()
    x = volume(1, 1, 8, 32, 32)
    assert torch.equal(both(x)[..., both.width :], last(x))
    with pytest.raises(
        UserError, match=r"model.feature_blocks: expected rising numbers of 1 to 3, found \[2, 4"
    ):
        read_weights(str(own_checkpoint(tmp_path / "bad", config("model.feature_blocks=[2,4]"))))


def test_an_export_names_what_the_recipe_had_beside_its_own(tmp_path: Path) -> None:
    more = "method.neighbour_weight=0.5", "method.control=penalty_only"
    path = str(own_checkpoint(tmp_path / "run", config(*more)))
    out = tmp_path / "out"
    main(["export", "--checkpoint", path, "--out", str(out)])
    name = "vjepa2 (neighbour_weight 0.5, control penalty_only)"
    assert name in (out / "README.md").read_text()
    assert read_weights(path).facts["recipe_name"] == name


def test_an_encoder_with_a_mask_token_is_not_taken_for_one_of_visible_tokens(tmp_path: Path) -> None:
    """As older versions could train with `vjepa2`."""
    cfg = config()
    path = own_checkpoint(tmp_path / "run", cfg)
    out = tmp_path / "out"
    main(["export", "--checkpoint", str(path), "--out", str(out)])
    tensors = safetensors.torch.load_file(out / "model.safetensors")
    width = len(tensors["norm.weight"])
    with_token = {**tensors, "mask_token": torch.zeros(1, 1, width)}
    safetensors.torch.save_file(with_token, out / "model.safetensors")
    with pytest.raises(CheckpointError, match="expected no mask token in the encoder, found one"):
        fit(read_weights(str(out)), cfg)


def test_only_ours_are_exported(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a checkpoint of ours to export, found research"):
        main(["export", "--checkpoint", str(tiny), "--out", str(tmp_path / "out")])


# ---- inspect lists every key; an error is one line and exit code 2


def test_inspect_lists_every_key(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", str(tiny)]) == 0
    text = capsys.readouterr().out
    assert "layout      research, recipe vjepa2" in text
    assert "3 blocks of width 128 with 2 heads, MLP ratio 4" in text
    assert "patch       [2, 8, 8], 3 channels, rotary positions, rotary form tiled" in text
    assert "left out: encoder.module.backbone.pos_embed (legacy position table" in text
    for role in ("encoder", "target_encoder", "predictor"):
        for name, tensor in read_weights(str(tiny)).role(role).items():
            assert f"  {name} {list(tensor.shape)}" in text
    assert "heads assumed: encoder 2 (64 wide), predictor 2" in text
    assert main(["inspect", str(tiny), "--heads", "4", "--predictor-heads", "8"]) == 0
    text = capsys.readouterr().out
    assert "3 blocks of width 128 with 4 heads" in text
    assert "2 blocks of width 64 with 8 heads" in text
    assert "heads assumed" not in text
    assert "heads: expected at least 1, found 0" in exit_line(["inspect", str(tiny), "--heads", "0"], capsys)
    assert main(["inspect", str(own_checkpoint(tmp_path, config()))]) == 0
    assert "saw         2 participants" in capsys.readouterr().out


def test_an_error_is_one_line_and_exit_code_2(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    command = ["import", str(tiny), "--config", str(SMOKE), "model.size=s"]
    error = exit_line([*command, "--out", str(tmp_path / "x.pt"), "model.rope=tiled"], capsys)
    assert "model.size s: expected" in error
    assert not (tmp_path / "x.pt").exists()
    for damage, message in [("model.sise=s", "model.sise: unknown key"), ("model.rope=round", "model.rope")]:
        with pytest.raises(ConfigError, match=message):
            main([*command, "--out", str(tmp_path / "x.pt"), damage])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--portable", "x"], "--checkpoint: expected a checkpoint, or a head by --head, found neither"),
        (["--head", "h", "--out", "x"], "--head: expected it with --portable and --which target"),
        (["--head", "h", "--portable", "x", "--which", "context"], "--head: expected it with --portable"),
    ],
)
def test_words_of_export_that_do_not_go_together(
    words: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["export", *words])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
