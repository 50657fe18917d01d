"""Modules of a file give Hugging Face's numbers, for research files and its own folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import VJEPA2Config, VJEPA2Model

from models.vit3d import SIZES, Size
from models.weights.files import read_weights
from models.weights.layouts import from_hf, to_hf
from models.weights.load import load_encoder
from models.weights.shape import encoder_size, predictor_shape, require_same
from tests.models.weights.weight_files import modules, research_file, volume
from tests.support.vjepa2_oracle import (
    Plain,
    hf_encode,
    hf_model,
    hf_predict,
    hf_tensors,
    plain_encode,
    research_names,
)
from utils.checkpoint import CheckpointError


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
