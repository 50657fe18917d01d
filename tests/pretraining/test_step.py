"""One update: accumulation changes nothing, the norm is the gradients' own, a bad batch leaves no trace."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.losses import TOKEN_LOSSES, Statistics, TokenLoss, VicReg
from models.vjepa3d import VJEPA3D
from pretraining import step as step_module
from pretraining.gauges.skill import SkillGauge
from pretraining.step import Update, build_optimizer, predict, train_step, trial_step
from tests.support.model_factory import nano_model, small_config, uint8_batch
from utils.config import recipes
from utils.config.schema import Config
from utils.runtime.single import Runtime

RECIPES = ("vjepa2", "methods", "mae", "surroundings")
CPU = Runtime(torch.device("cpu"), use_bf16=False)


def split(batch: dict[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    return [
        dict(zip(batch, t, strict=True)) for t in zip(*(v.chunk(parts) for v in batch.values()), strict=True)
    ]


def update(cfg: Config, parts: int, steps: int = 2) -> tuple[VJEPA3D, list[float]]:
    model = nano_model(cfg).train()
    optimizer = build_optimizer(model, cfg)
    losses = []
    for step in range(steps):
        batches = split(uint8_batch(cfg, 16, step), parts)
        result = train_step(model, optimizer, batches, cfg, CPU, Update(step, 1e-3, 0.9))
        losses.append(float(result.loss))
    return model, losses


@pytest.mark.parametrize(
    ("recipe", "regulariser"),
    [
        *(("vjepa2", kind) for kind in ("none", "vicreg")),
        *(("mae", kind) for kind in ("none", "vicreg")),
        ("neighbour", "vicreg"),
    ],
)
def test_accumulation_changes_nothing(recipe: str, regulariser: str) -> None:
    weight = 0 if regulariser == "none" else 0.5
    extra = [f"method.regulariser={regulariser}", f"method.regulariser_weight={weight}", "method.dropout=0.1"]
    cfg = small_config(recipe, *extra, "method.drop_path=0.1")
    whole, losses = update(cfg, 1)
    parts, losses_of_parts = update(cfg, 4)
    assert losses == pytest.approx(losses_of_parts, rel=1e-5)
    for (name, a), b in zip(whole.named_parameters(), parts.parameters(), strict=True):
        # Adam divides by the root of tiny second moments; compare against the size of an update
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("recipe", ["vjepa2", "mae"])
def test_regulariser_reaches_the_gradient(recipe: str) -> None:
    plain, _ = update(small_config(recipe, "method.regulariser=none", "method.regulariser_weight=0"), 1, 1)
    strong, _ = update(small_config(recipe, "method.regulariser=vicreg", "method.regulariser_weight=1"), 1, 1)
    assert not torch.equal(plain.encoder.norm.weight, strong.encoder.norm.weight)


def test_the_weight_of_the_neighbours_reaches_the_gradient() -> None:
    """Weight 0 has no such loss. Under penalty_only neither of the two predictions teaches."""
    plain, light, heavy, controls = (
        update(small_config("vjepa2", *words), 1, 1)[0]
        for words in (
            [],
            ["method.neighbour_weight=1"],
            ["method.neighbour_weight=9"],
            ["method.neighbour_weight=1", "method.control=penalty_only"],
        )
    )
    weights = [model.encoder.patch_embed.proj.weight for model in (plain, light, heavy)]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    began = nano_model(small_config("neighbour"))
    assert torch.equal(controls.neighbour_head.bias, began.neighbour_head.bias)
    assert not torch.equal(light.neighbour_head.bias, began.neighbour_head.bias)


def test_the_penalty_has_the_weight_of_its_covariance(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = "method.regulariser=vicreg", "method.regulariser_weight=1"

    def penalty(weight: float) -> float:
        monkeypatch.setattr(VicReg, "covariance_weight", weight)
        cfg = small_config("vjepa2", *keys)
        model = nano_model(cfg).train()
        batches = [uint8_batch(cfg, 16)]
        value = train_step(model, build_optimizer(model, cfg), batches, cfg, CPU, Update(0, 1e-3, 0.9))
        assert value.regulariser is not None
        assert value.regulariser.dtype == torch.float32
        return float(value.regulariser)

    hinge, whole = penalty(0), penalty(0.1)
    assert whole > hinge + 1e-3
    assert penalty(0.025) == pytest.approx(hinge + 0.25 * (whole - hinge), rel=1e-5)


@pytest.mark.parametrize("parts", [1, 4])
def test_the_balance_is_that_of_two_gradients_taken_apart(parts: int) -> None:
    """Norms at the context tokens, each from a backward pass of its own; accumulation changes nothing."""
    cfg = small_config("vjepa2", "method.regulariser=vicreg", "method.regulariser_weight=0.3")
    batch = uint8_batch(cfg, 16)
    model = nano_model(cfg).train()
    output = predict(model, batch, CPU, stochastic=True)
    reg = VicReg()
    statistics = reg.statistics(output.context_BKE, batch["context_valid"])
    means = tuple(s / 16 for s in statistics)
    norms = [
        torch.autograd.grad(value, output.context_BKE, retain_graph=True)[0].norm()
        for value in (0.3 * reg.penalty(means), output.loss_B.mean())
    ]
    model = nano_model(cfg).train()
    watch = step_module.Watch(measures=lambda: True)
    batches = split(batch, parts)
    result = train_step(model, build_optimizer(model, cfg), batches, cfg, CPU, Update(0, 1e-3, 0.9), watch)
    assert result.penalty_to_prediction is not None
    assert float(result.penalty_to_prediction) == pytest.approx(float(norms[0] / norms[1]), rel=1e-4)


def test_penalty_alone_teaches_the_predictor_nothing() -> None:
    still = "optim.weight_decay=0", "method.regulariser=vicreg", "method.regulariser_weight=1"
    cfg = small_config("vjepa2", *still, "method.control=penalty_only")
    trained, _ = update(cfg, 1, 2)
    begun = nano_model(cfg)
    for name, parameter in trained.predictor.named_parameters():
        assert torch.equal(parameter, begun.predictor.get_parameter(name)), name
    moved = [
        not torch.equal(p, begun.encoder.get_parameter(n)) for n, p in trained.encoder.named_parameters()
    ]
    assert all(moved)


def test_mismatched_targets_are_those_of_another_volume_in_training_alone() -> None:
    cfg = small_config("vjepa2", "method.control=mismatched_targets")
    batch = uint8_batch(cfg, 4)
    control, plain = nano_model(cfg), nano_model(small_config("vjepa2"))
    batch["target"] = batch["target"][:1].expand(4, -1)  # the same places, so that only the volume differs
    outputs = []
    for model, training in ((control, True), (plain, True), (control, False)):
        with torch.no_grad():
            outputs.append(predict(model.train(training), batch, CPU, stochastic=False))
    other, own, evaluated = (out.target_BME for out in outputs)
    for volume in range(4):
        torch.testing.assert_close(other[volume], own[volume - 1])
    torch.testing.assert_close(evaluated, own)


def test_neighbours_are_those_of_another_volume_in_mismatched_training_alone() -> None:
    cfg = small_config("neighbour", "method.control=mismatched_targets")
    control, plain = nano_model(cfg), nano_model(small_config("neighbour"))
    batch = uint8_batch(cfg, 4)
    with torch.no_grad():
        other, own, evaluated = (
            predict(model.train(training), batch, CPU, stochastic=False).neighbour_B
            for model, training in ((control, True), (plain, True), (control, False))
        )
    assert other is not None
    assert own is not None
    assert bool((other - own).abs().min() > 1e-4)
    assert evaluated is None  # not computed there


def test_latents_alone_are_those_of_another_volume_and_the_voxels_stay_its_own() -> None:
    batch = uint8_batch(small_config("neighbour"), 4)
    own, latents, both, evaluated = (
        predict(nano_model(cfg).train(training), batch, CPU, stochastic=False)
        for cfg, training in (
            (small_config("neighbour"), True),
            (small_config("neighbour", "method.control=mismatched_latents"), True),
            (small_config("neighbour", "method.control=mismatched_targets"), True),
            (small_config("neighbour", "method.control=mismatched_latents"), False),
        )
    )
    torch.testing.assert_close(latents.loss_B, both.loss_B)
    assert bool((latents.loss_B - own.loss_B).abs().min() > 1e-4)
    torch.testing.assert_close(evaluated.loss_B, own.loss_B)
    torch.testing.assert_close(latents.neighbour_B, own.neighbour_B)
    assert bool((latents.neighbour_B - both.neighbour_B).abs().min() > 1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_grad_norm_and_clipped_update_by_hand(recipe: str) -> None:
    """The reported norm is that of the whole gradient before clipping, and clipping is applied."""
    cfg = small_config(
        recipe, "optim.clip_grad_norm=0.01", "method.regulariser=none", "method.regulariser_weight=0"
    )
    batch = uint8_batch(cfg, 16)
    model = nano_model(cfg).train()
    predict(model, batch, CPU, stochastic=True).loss_B.mean().backward()
    by_hand = math.sqrt(sum(float(p.grad.double().square().sum()) for _, p in model.trained_parameters()))
    model = nano_model(cfg).train()
    result = train_step(model, build_optimizer(model, cfg), [batch], cfg, CPU, Update(0, 1e-3, 0.9))
    assert float(result.grad_norm) == pytest.approx(by_hand, rel=1e-5)
    assert by_hand > 0.01
    clipped = math.sqrt(sum(float(p.grad.double().square().sum()) for _, p in model.trained_parameters()))
    assert clipped == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_non_finite_batch_leaves_no_trace(recipe: str) -> None:
    cfg = small_config(recipe)
    model = nano_model(cfg).train()
    optimizer = build_optimizer(model, cfg)
    train_step(model, optimizer, [uint8_batch(cfg, 16)], cfg, CPU, Update(0, 1e-3, 0.9))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    moments = [{k: v.clone() for k, v in s.items()} for s in optimizer.state_dict()["state"].values()]
    bad = uint8_batch(cfg, 16, 1)
    bad["mean"][3] = float("nan")
    result = train_step(model, optimizer, [bad], cfg, CPU, Update(1, 1e-3, 0.9))
    assert not bool(result.is_finite)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for old, new in zip(moments, optimizer.state_dict()["state"].values(), strict=True):
        for key in old:
            assert torch.equal(old[key], new[key]), key
    good = train_step(model, optimizer, [uint8_batch(cfg, 16, 2)], cfg, CPU, Update(2, 1e-3, 0.9))
    assert bool(good.is_finite)
    assert not torch.equal(model.encoder.norm.weight, before["encoder.norm.weight"])
    assert not torch.equal(model.target_encoder.norm.weight, before["target_encoder.norm.weight"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_trial_step_leaves_no_trace(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = small_config(recipe)
    model = nano_model(cfg).train()
    optimizer = build_optimizer(model, cfg)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    trial_step(model, optimizer, uint8_batch(cfg, 4), cfg, CPU)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())

    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("planted in the middle")

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        trial_step(model, optimizer, uint8_batch(cfg, 4), cfg, CPU)
    monkeypatch.undo()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    after_trial = train_step(model, optimizer, [uint8_batch(cfg, 16)], cfg, CPU, Update(0, 1e-3, 0.9))
    fresh = nano_model(cfg).train()
    at_once = train_step(
        fresh, build_optimizer(fresh, cfg), [uint8_batch(cfg, 16)], cfg, CPU, Update(0, 1e-3, 0.9)
    )
    assert torch.equal(after_trial.loss, at_once.loss)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


@pytest.mark.parametrize("recipe", [*RECIPES, "neighbour"])
def test_bfloat16_keeps_float32_parameters_and_nearly_the_losses(recipe: str) -> None:
    cfg = small_config(recipe)
    runtime = Runtime(torch.device("cpu"), use_bf16=True)
    losses = []
    for r in (CPU, runtime):
        model = nano_model(cfg).train()
        result = train_step(
            model, build_optimizer(model, cfg), [uint8_batch(cfg, 16)], cfg, r, Update(0, 1e-3, 0.9)
        )
        losses.append([float(loss) for loss in (result.loss, result.neighbour) if loss is not None])
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert all(a != b for a, b in zip(*losses, strict=True)), "one of them was not computed in bfloat16"
    assert len(losses[0]) == 1 + (recipe == "neighbour")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_loss_falls_on_one_batch(recipe: str) -> None:
    cfg = small_config(recipe, "optim.clip_grad_norm=1")
    model = nano_model(cfg).train()
    optimizer = build_optimizer(model, cfg)
    batch = uint8_batch(cfg, 16)
    losses = [
        float(train_step(model, optimizer, [batch], cfg, CPU, Update(s, 2e-3, 0.99)).loss) for s in range(50)
    ]
    assert losses[-1] < 0.9 * losses[0]


def test_padding_reaches_neither_loss_nor_regulariser() -> None:
    """Tokens outside the scan weigh 0: replacing their ids by other padding changes neither."""
    cfg = small_config()
    batch = uint8_batch(cfg, 16)
    padding = (batch["target_valid"] == 0).any(1) & (batch["context_valid"] == 0).any(1)
    assert bool(padding.any())
    model = nano_model(cfg).train()
    out = predict(model, batch, CPU, stochastic=False)
    per_token = (out.prediction_BME - out.target_BME).abs().mean(-1)
    expected = [row[valid > 0].mean() for row, valid in zip(per_token, batch["target_valid"], strict=True)]
    torch.testing.assert_close(out.loss_B, torch.stack(expected))
    seen: list[Tensor] = []

    class Spy(VicReg):
        def statistics(self, tokens_BKE: Tensor, weight_BK: Tensor) -> Statistics:
            seen.append(weight_BK)
            return super().statistics(tokens_BKE, weight_BK)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_module, "VicReg", Spy)
        for parts in (1, 4):
            train_step(
                model, build_optimizer(model, cfg), split(batch, parts), cfg, CPU, Update(0, 1e-3, 0.9)
            )
    assert torch.equal(seen[0], batch["context_valid"])
    assert torch.equal(torch.cat(seen[1:5]), batch["context_valid"])  # the pass that gathers
    assert torch.equal(torch.cat(seen[5:]), batch["context_valid"])  # the pass with gradients


def test_a_new_recipe_is_a_row_and_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the two tables knows of it, and it trains: its loss falls on one batch."""

    def huber(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.huber_loss(prediction, target, reduction="none").mean(-1)

    monkeypatch.setitem(TOKEN_LOSSES, "huber", TokenLoss(huber))
    row = replace(recipes.RECIPES["vjepa2"], loss="huber", target_norm="unit", lr="cosine")
    monkeypatch.setitem(recipes.RECIPES, "new", row)
    cfg = small_config("new")
    model = nano_model(cfg).train()
    assert SkillGauge.of_model(model, CPU.device).distance is huber  # the gauges of a real run know it too
    optimizer, batch = build_optimizer(model, cfg), uint8_batch(cfg, 16)
    losses = [
        float(train_step(model, optimizer, [batch], cfg, CPU, Update(s, 2e-3, 0.99)).loss) for s in range(20)
    ]
    assert losses[-1] < 0.8 * losses[0]


def test_mae_trains_on_what_lies_beside_its_visible_tokens() -> None:
    words = "mae", "method.regulariser=none", "method.regulariser_weight=0"
    near, plain = (
        update(small_config(*words, *more), 1, 1)[0].encoder.patch_embed.proj.weight
        for more in (["method.neighbour_weight=1"], [])
    )
    assert not torch.equal(near, plain)
