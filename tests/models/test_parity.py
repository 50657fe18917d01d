"""With the same weights and token ids our modules give V-JEPA 2's numbers, gradients included.

Two oracles: Hugging Face's classes (square grids, tiled rotary form), and a slow plain model in float64 for
the rest. The bound on every element is 1e-4, and in proportion to the tensor's largest element 1e-3.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.losses import per_token_l1, weighted_mean
from models.predictor import Predictor3D
from models.vit3d import Size, VisionTransformer3D, gather_tokens
from tests.support.model_factory import nano_model, small_config, volumes
from tests.support.vjepa2_oracle import (
    Plain,
    hf_encode,
    hf_model,
    hf_predict,
    hf_tensors,
    pick,
    plain_encode,
    plain_predict,
    research_names,
)

ABSOLUTE, RELATIVE = 1e-4, 1e-3
BATCH = 2
MASKS = ("full", "partial", "boxes", "shuffled")


def token_sets(kind: str, grid: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Context [B, K] and target [B, M] ids, other ones in every sample but for `full` and `partial`."""
    generator = torch.Generator().manual_seed(1)
    n = grid[0] * grid[1] * grid[2]
    everything = torch.arange(n).expand(BATCH, -1).clone()
    if kind == "full":
        return everything, everything
    if kind == "partial":
        return everything[:, : n // 2], everything[:, n // 2 : n // 2 + n // 4]
    if kind == "shuffled":
        order = torch.stack([torch.randperm(n, generator=generator) for _ in range(BATCH)])
        return order[:, : n // 2], order[:, n // 2 : -1]
    context, target = [], []
    for sample in range(BATCH):
        inside = torch.zeros(grid, dtype=torch.bool)
        inside[:, sample : sample + 2, 1 - sample : 3 - sample] = True  # a tube through all of D
        target.append(inside.flatten().nonzero().flatten())
        context.append((~inside).flatten().nonzero().flatten())
    return torch.stack(context), torch.stack(target)


def assert_near(ours: Tensor, theirs: Tensor, what: str) -> None:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    difference = float((ours - theirs).abs().max())
    largest = float(theirs.abs().max())
    assert largest > 0, f"{what}: expected numbers to compare, found zeros"
    assert difference < ABSOLUTE, f"{what}: max abs difference {difference:.2e}"
    assert difference < RELATIVE * largest, f"{what}: {difference:.2e} of at most {largest:.2e}"


def assert_same_gradients(module: torch.nn.Module, theirs: dict[str, Tensor], what: str) -> None:
    ours = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert set(ours) == set(theirs)
    for name, gradient in ours.items():
        assert gradient is not None, f"{what}.{name}: no gradient"
        assert_near(gradient, theirs[name].reshape(gradient.shape), f"gradient of {what}.{name}")


def our_loss(prediction_BME: Tensor, all_BNE: Tensor, target_BM: Tensor) -> Tensor:
    target = gather_tokens(F.layer_norm(all_BNE, all_BNE.shape[-1:], eps=1e-6), target_BM)
    return weighted_mean(per_token_l1(prediction_BME, target), torch.ones_like(target_BM)).mean()


def their_loss(prediction_BME: Tensor, all_BNE: Tensor, target_BM: Tensor) -> Tensor:
    centred = all_BNE - all_BNE.mean(-1, keepdim=True)
    comparable = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return (prediction_BME - pick(comparable, target_BM)).abs().mean()


def assert_ours_is_near(
    encoder: VisionTransformer3D,
    predictor: Predictor3D,
    volume: Tensor,
    keep_BK: Tensor,
    target_BM: Tensor,
    expected: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Our features, prediction and loss against those of the oracle; leaves our gradients behind."""
    all_BNE = encoder(volume).detach()
    context_BKE = encoder(volume, keep_BK)
    prediction = predictor(context_BKE, keep_BK, target_BM)
    value = our_loss(prediction, all_BNE, target_BM)
    value.backward()
    names = ("features of all tokens", "context features", "predictions", "loss")
    for ours, theirs, name in zip((all_BNE, context_BKE, prediction, value), expected, names, strict=True):
        assert_near(ours, theirs, name)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"hidden_size": 160},  # head_dim 80, as in ViT-H
        {"hidden_size": 88, "num_attention_heads": 2, "mlp_ratio": 48 / 11, "num_hidden_layers": 2},
        {"crop_size": 16, "frames_per_clip": 12, "tubelet_size": 4, "in_chans": 1},
    ],
    ids=["head64", "head80", "mlp48_11", "grid3x4x4"],
)
def test_the_numbers_of_hugging_face(shape: dict, kind: str) -> None:
    theirs = hf_model(**shape)
    cfg = theirs.config
    side = cfg.crop_size // cfg.patch_size
    grid = (cfg.frames_per_clip // cfg.tubelet_size, side, side)
    patch = (cfg.tubelet_size, cfg.patch_size, cfg.patch_size)
    size = Size(cfg.num_hidden_layers, cfg.hidden_size, cfg.num_attention_heads, cfg.mlp_ratio)
    encoder = VisionTransformer3D(size, grid, patch, channels=cfg.in_chans, rope="tiled")
    heads = cfg.pred_num_attention_heads
    predictor = Predictor3D(cfg.hidden_size, cfg.pred_hidden_size, 2, grid, rope="tiled", heads=heads)
    weights = research_names(hf_tensors(theirs, lambda p: p.detach()))
    encoder.load_state_dict(weights[0])
    predictor.load_state_dict(weights[1])

    generator = torch.Generator().manual_seed(2)
    shape_DHW = (cfg.frames_per_clip, cfg.crop_size, cfg.crop_size)
    volume = torch.randn(BATCH, cfg.in_chans, *shape_DHW, generator=generator)
    keep_BK, target_BM = token_sets(kind, grid)

    their_all = hf_encode(theirs, volume, None).detach()
    their_context = hf_encode(theirs, volume, keep_BK)
    their_prediction = hf_predict(theirs, their_context, keep_BK, target_BM)
    their_value = their_loss(their_prediction, their_all, target_BM)
    their_value.backward()

    theirs_told = (their_all, their_context, their_prediction, their_value)
    assert_ours_is_near(encoder, predictor, volume, keep_BK, target_BM, theirs_told)
    encoder_gradients, predictor_gradients = research_names(hf_tensors(theirs, lambda p: p.grad))
    assert_same_gradients(encoder, encoder_gradients, "encoder")
    assert_same_gradients(predictor, predictor_gradients, "predictor")


def test_the_mask_token_of_hugging_faces_bare_predictor() -> None:
    """Of several it takes number 1; ours takes 0 by default."""
    theirs = hf_model(7, pred_num_mask_tokens=3)
    weights = research_names(hf_tensors(theirs, lambda p: p.detach()))[1]
    keep_BK, target_BM = token_sets("shuffled", (2, 3, 3))
    context = torch.randn(*keep_BK.shape, 128, generator=torch.Generator().manual_seed(8))
    predictor = Predictor3D(128, 64, 2, (2, 3, 3), "tiled", 3, 2)
    expected = hf_predict(theirs, context, keep_BK, target_BM)
    for number in (0, 2, 1):
        predictor.load_state_dict({**weights, "mask_tokens.0": weights[f"mask_tokens.{number}"]})
        difference = (predictor(context, keep_BK, target_BM) - expected).abs().max()
        assert (difference > 0.01) == (number != 1)
    assert_near(predictor(context, keep_BK, target_BM), expected, "predictions from mask token 1")


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("form", ["interleaved", "tiled", "interpolated"])
def test_the_numbers_of_the_slow_model_on_a_flat_grid(form: str, kind: str) -> None:
    """Grid 2 x 3 x 5: D, H and W differ, so that no mix-up of the axes goes unseen."""
    grid, patch, heads = (2, 3, 5), (2, 4, 3), (2, 2)
    torch.manual_seed(3)
    encoder = VisionTransformer3D(Size(2, 40, heads[0]), grid, patch, rope=form)
    predictor = Predictor3D(40, 32, 2, grid, rope=form, heads=heads[1])
    for parameter in [*encoder.parameters(), *predictor.parameters()]:
        parameter.data.add_(torch.randn(parameter.shape), alpha=0.15)
    volume = torch.randn(BATCH, 1, *(g * p for g, p in zip(grid, patch, strict=True)))
    keep_BK, target_BM = token_sets(kind, grid)

    is_spread = form == "interpolated"
    scale = (1.0, 15 / (grid[1] - 1), 15 / (grid[2] - 1)) if is_spread else (1.0, 1.0, 1.0)
    plain = Plain(grid, patch, "interleaved" if is_spread else form, scale)
    encoder_weights, predictor_weights = (
        {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
        for module in (encoder, predictor)
    )
    everything = torch.arange(len(encoder(volume)[0])).expand(BATCH, -1)
    their_all = plain_encode(encoder_weights, heads[0], plain, volume.double(), everything).detach()
    their_context = plain_encode(encoder_weights, heads[0], plain, volume.double(), keep_BK)
    their_prediction = plain_predict(predictor_weights, heads[1], plain, their_context, keep_BK, target_BM)
    their_value = their_loss(their_prediction, their_all, target_BM)
    their_value.backward()

    theirs_told = (their_all, their_context, their_prediction, their_value)
    assert_ours_is_near(encoder, predictor, volume, keep_BK, target_BM, theirs_told)
    for module, weights, what in (
        (encoder, encoder_weights, "encoder"),
        (predictor, predictor_weights, "predictor"),
    ):
        gradients = {name: value.grad for name, value in weights.items() if value.grad is not None}
        assert_same_gradients(module, gradients, what)


@pytest.mark.parametrize("kind", MASKS)
def test_the_recipe_vjepa2_has_their_loss(kind: str) -> None:
    """The model as trained, from a configuration: context, predictor, target and loss in one."""
    cfg = small_config("vjepa2", "spatial.image_size=[8,24,24]", "model.rope=tiled")
    shape = {"patch_size": 8, "crop_size": 24, "frames_per_clip": 8, "tubelet_size": 4, "in_chans": 1}
    shape |= {"hidden_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
    context, target = hf_model(5, **shape), hf_model(6, **shape)
    model = nano_model(cfg)
    encoder, predictor = research_names(hf_tensors(context, lambda p: p.detach()))
    model.encoder.load_state_dict(encoder)
    model.predictor.load_state_dict(predictor)
    model.target_encoder.load_state_dict(research_names(hf_tensors(target, lambda p: p.detach()))[0])
    keep_BK, target_BM = token_sets(kind, cfg.grid)
    views = volumes(cfg, BATCH, 0), volumes(cfg, BATCH, 1)

    features = hf_encode(target, views[1], None).detach()
    prediction = hf_predict(context, hf_encode(context, views[0], keep_BK), keep_BK, target_BM)
    theirs = their_loss(prediction, features, target_BM)
    theirs.backward()
    ours = model(*views, keep_BK, target_BM, torch.ones(BATCH, model.encoder.num_tokens)).loss_B.mean()
    ours.backward()

    assert_near(ours, theirs, "loss")
    gradients = research_names(hf_tensors(context, lambda p: p.grad))
    assert_same_gradients(model.encoder, gradients[0], "encoder")
    assert_same_gradients(model.predictor, gradients[1], "predictor")
    assert all(p.grad is None for p in model.target_encoder.parameters())
