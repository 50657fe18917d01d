"""Recipe mae: targets and loss by hand, what reads which view, and the schedules of vjepa2."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from models.losses import pixel_targets
from models.vit3d import gather_tokens
from pretraining.step import Update, build_optimizer, predict, train_step
from tests.support.model_factory import nano_model, small_config, token_ids, uint8_batch, volumes
from utils.config.schema import Config
from utils.runtime.single import Runtime

CPU = Runtime(torch.device("cpu"), use_bf16=False)


def patch_of(view: Tensor, token: int, cfg: Config) -> Tensor:
    """The voxels [C*d*h*w] of one token of view [C, D, H, W], cut out by slices."""
    _, gh, gw = cfg.grid
    d, h, w = cfg.spatial.patch_size
    i, j, k = token // (gh * gw), token // gw % gh, token % gw
    return view[:, i * d : (i + 1) * d, j * h : (j + 1) * h, k * w : (k + 1) * w].flatten()


@pytest.mark.parametrize("channels", [1, 3])
def test_plain_targets_are_the_voxels_in_the_order_of_the_patch_embedding(channels: int) -> None:
    cfg = small_config("mae")
    view = torch.randn(2, channels, *cfg.spatial.image_size)
    targets = pixel_targets(view, cfg.spatial.patch_size, "plain")
    for b in range(2):
        for token in range(targets.shape[1]):
            assert torch.equal(targets[b, token], patch_of(view[b], token, cfg))
    model = nano_model(cfg)
    if channels == 1:
        proj = model.encoder.patch_embed.proj
        embedded = targets @ proj.weight.flatten(1).T + proj.bias
        torch.testing.assert_close(embedded, model.encoder.patch_embed(view, None), atol=1e-5, rtol=1e-5)


def test_normalised_targets_have_mean_0_and_variance_1_per_patch() -> None:
    cfg = small_config("mae")
    view = 3.0 * volumes(cfg, 2) + 7.0
    targets = pixel_targets(view, cfg.spatial.patch_size, "normalised")
    for token in (0, 5, 23):
        voxels = patch_of(view[1], token, cfg).double()
        by_hand = (voxels - voxels.mean()) / torch.sqrt(voxels.var() + 1e-6)
        torch.testing.assert_close(targets[1, token].double(), by_hand, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(targets.mean(-1), torch.zeros(2, 24), atol=1e-5, rtol=0)
    torch.testing.assert_close(targets.std(-1), torch.ones(2, 24), atol=1e-5, rtol=0)
    flat = pixel_targets(torch.full_like(view, 4.0), cfg.spatial.patch_size, "normalised")
    assert torch.equal(flat, torch.zeros_like(flat))  # the 1e-6 keeps a patch without contrast finite


@torch.no_grad()
@pytest.mark.parametrize("kind", ["normalised", "plain"])
def test_loss_by_hand(kind: str) -> None:
    """Mean over the valid target tokens of the mean squared error over the voxels of the patch."""
    cfg = small_config("mae")
    model = nano_model(cfg).train()
    model.pixel_norm = kind
    view = 2.0 * volumes(cfg, 3) + 1.0
    context, target = token_ids(cfg, 3)
    everywhere = torch.ones(3, model.encoder.num_tokens)
    everywhere[1, target[1, 4:]] = 0
    valid = everywhere.gather(1, target)
    out = model(view, None, context, target, everywhere)
    guess = model.predictor(model.encoder(view, context), context, target)
    assert guess.shape[-1] == model.target_width == math.prod(cfg.spatial.patch_size)
    for b in range(3):
        errors = []
        for m, token in enumerate(target[b].tolist()):
            voxels = patch_of(view[b], token, cfg)
            if kind == "normalised":
                voxels = (voxels - voxels.mean()) / torch.sqrt(voxels.var() + 1e-6)
            if valid[b, m] > 0:
                errors.append(
                    sum((float(p) - float(v)) ** 2 for p, v in zip(guess[b, m], voxels, strict=True))
                )
        by_hand = sum(errors) / len(errors) / model.target_width
        assert float(out.loss_B[b]) == pytest.approx(by_hand, rel=1e-4)


@torch.no_grad()
def test_training_reads_the_context_view_alone() -> None:
    """Targets are the context view's own; the target encoder runs in evaluation only, on the target view."""
    cfg = small_config("mae")
    model = nano_model(cfg)
    context, target = token_ids(cfg, 2)
    one, other = volumes(cfg, 2, 0), volumes(cfg, 2, 1)
    weight = torch.ones(2, model.encoder.num_tokens)

    def refuse(*_: object) -> None:
        raise AssertionError("the target encoder ran")

    handle = model.target_encoder.register_forward_pre_hook(refuse)
    out = model.train()(one, None, context, target, weight)
    assert out.features_all_BNE is None
    handle.remove()
    measured = model.eval()(one, other, context, target, weight)
    assert torch.equal(measured.loss_B, out.loss_B)
    expected = pixel_targets(one, cfg.spatial.patch_size, "normalised")
    for result in (out, measured):
        assert torch.equal(result.target_all_BNE, expected)
        assert torch.equal(result.target_BME, gather_tokens(expected, target))
    raw = model.target_encoder(other)
    normal = (raw - raw.mean(-1, keepdim=True)) / torch.sqrt(raw.var(-1, correction=0, keepdim=True) + 1e-6)
    assert measured.features_all_BNE is not None
    torch.testing.assert_close(measured.features_all_BNE, normal, atol=1e-5, rtol=1e-5)


def test_the_target_encoder_is_the_average_of_the_encoder() -> None:
    cfg = small_config("mae")
    model = nano_model(cfg).train()
    optimizer = build_optimizer(model, cfg)
    held = {k: v.clone() for k, v in model.target_encoder.state_dict().items()}
    for step in range(3):
        train_step(model, optimizer, [uint8_batch(cfg, 16, step)], cfg, CPU, Update(step, 1e-3, 0.75))
        for name, moving in model.encoder.state_dict().items():
            held[name] = 0.75 * held[name] + 0.25 * moving
    for name, value in model.target_encoder.state_dict().items():
        torch.testing.assert_close(value, held[name], atol=1e-6, rtol=1e-5)


def test_targets_stay_float32_under_bfloat16() -> None:
    cfg = small_config("mae")
    batch = uint8_batch(cfg, 4)
    outputs = [
        predict(nano_model(cfg).train(), batch, Runtime(torch.device("cpu"), use_bf16=bf16), stochastic=False)
        for bf16 in (False, True)
    ]
    assert outputs[1].target_all_BNE.dtype == outputs[1].loss_B.dtype == torch.float32
    assert torch.equal(outputs[0].target_all_BNE, outputs[1].target_all_BNE)
    assert not torch.equal(outputs[0].prediction_BME, outputs[1].prediction_BME)


@pytest.mark.parametrize("kind", ["normalised", "plain"])
def test_it_learns_what_the_visible_patches_tell(kind: str) -> None:
    """Every patch of a volume holds the same pattern: new volumes are reconstructed from their context."""
    cfg = small_config("mae")
    model = nano_model(cfg).train()
    model.pixel_norm = kind
    optimizer = build_optimizer(model, cfg)
    d, h, w = cfg.spatial.patch_size
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(2, 1, d, h, w, generator=generator)

    def patterned(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Grey values from two coefficients per volume."""
        share = torch.randn(len(batch["volume"]), 2, generator=generator)
        one = torch.einsum("bp,pcdhw->bdhw", share, basis)
        grey = (127.5 + 40 * one).clamp(0, 255).to(torch.uint8)
        batch["volume"] = grey.repeat(1, *cfg.grid)
        batch["intensity"] = torch.tensor([1.0, 1.0, 0.0]).expand(len(grey), 2, 3)
        return batch

    for step in range(120):
        train_step(
            model, optimizer, [patterned(uint8_batch(cfg, 16, step))], cfg, CPU, Update(step, 3e-3, 0.9)
        )
    with torch.no_grad():
        out = predict(model, patterned(uint8_batch(cfg, 64, 1000)), CPU, stochastic=False)
    valid = uint8_batch(cfg, 64, 1000)["target_valid"] > 0
    variance = out.target_BME[valid].var(0).mean()
    assert float(out.loss_B.mean() / variance) < 0.5
