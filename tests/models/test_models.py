"""Encoder, predictors, losses: values by hand, nothing leaks, every parameter is trained exactly once."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from models import attention as attention_module
from models.attention import attention, blockwise_attention
from models.batch_norm import WeightedBatchNorm
from models.flops import recomputed_flops, step_flops
from models.kernels.squared_errors import SquaredErrors
from models.losses import NEIGHBOURS, VicReg, surrogate
from models.optimizer import parameter_groups
from models.stochastic import Stochastic
from models.vit3d import SIZES, SelfAttention, VisionTransformer3D, gather_tokens
from models.vjepa3d import VJEPA3D, Output
from pretraining.gauges.monitor import voxels_of_tokens
from pretraining.step import Update, build_optimizer, predict, train_step
from tests.support.model_factory import VARIANTS, nano_model, small_config, token_ids, uint8_batch, volumes
from utils.config.schema import Config
from utils.runtime.single import Runtime

RECIPES = ("vjepa2", "methods", "mae", *VARIANTS)


def run(
    model: VJEPA3D, cfg: Config, batch: int = 3, seed: int = 0
) -> tuple[Output, torch.Tensor, torch.Tensor, torch.Tensor]:
    context, target = token_ids(cfg, batch, seed)
    view = volumes(cfg, batch, seed)
    return model(view, view, context, target, valid_tokens(model, batch)), view, context, target


def valid_tokens(model: VJEPA3D, batch: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((batch, model.encoder.num_tokens), value)


@pytest.mark.parametrize("recipe", RECIPES)
def test_hidden_voxels_never_reach_the_context(recipe: str) -> None:
    cfg = small_config(recipe)
    model = nano_model(cfg).eval()
    context, target = token_ids(cfg, 2)
    view = volumes(cfg, 2)
    n = model.encoder.num_tokens
    hidden = torch.zeros(2, n, dtype=torch.bool)
    hidden = hidden.scatter(1, target, True) if recipe == "methods" else ~hidden.scatter(1, context, True)
    _, gh, gw = cfg.grid
    d, h, w = cfg.spatial.patch_size
    before = model.encode_context(view, context, target, None)
    changed = view.clone()
    for b in range(2):
        for token in hidden[b].nonzero().flatten().tolist():
            i, j, k = token // (gh * gw), token // gw % gh, token % gw
            changed[b, 0, i * d : (i + 1) * d, j * h : (j + 1) * h, k * w : (k + 1) * w] = 9.0
    assert not torch.equal(changed, view)
    assert torch.equal(model.encode_context(changed, context, target, None), before)
    assert not torch.equal(model.encode_context(view + 1, context, target, None), before)


@torch.no_grad()
def test_the_loss_of_methods_by_hand() -> None:
    """Squared errors of unit vectors; that of vjepa2: test_parity.py."""
    cfg = small_config("methods")
    model = nano_model(cfg).eval()
    out, view, _, target = run(model, cfg)
    h = model.target_encoder(view)
    hidden = torch.zeros(3, model.encoder.num_tokens, dtype=torch.bool).scatter(1, target, True)
    dense = model.encoder(view, masked_BN=hidden)
    z = model.predictor(gather_tokens(dense, target), torch.ones(target.shape))
    for b in range(3):
        total = 0.0
        for m, token in enumerate(target[b].tolist()):
            guess, vector = z[b, m], h[b, token]
            total += float(((guess / guess.norm() - vector / vector.norm()) ** 2).sum()) / len(vector)
        assert float(out.loss_B[b]) == pytest.approx(total / target.shape[1], rel=1e-4)


@torch.no_grad()
def test_features_of_several_blocks_are_their_normalised_outputs() -> None:
    cfg = small_config()
    encoder, outputs = nano_model(cfg).encoder, []
    for block in encoder.blocks:
        block.register_forward_hook(lambda *words: outputs.append(words[-1]))
    x, keep = volumes(cfg, 2), torch.tensor([[5, 0, 7], [1, 2, 23]])
    for ids in (None, keep):
        outputs.clear()
        last = encoder(x, ids)
        expected = torch.cat([encoder.norm(output) for output in outputs], dim=-1)
        assert torch.equal(encoder(x, ids, blocks=(1, 2)), expected)
        assert torch.equal(expected[..., encoder.width :], last)
    outputs.clear()
    assert torch.equal(encoder(x, blocks=[1]), encoder.norm(outputs[0]))
    assert len(outputs) == 1


def test_a_dense_context_is_what_the_blocks_make_of_visible_tokens_among_mask_tokens() -> None:
    """The MLP reads the features of the targets' places."""
    cfg = small_config("methods")
    model = nano_model(cfg).eval()
    out, view, context, target = run(model, cfg)
    encoder = model.encoder
    x = encoder.patch_embed(view, None)
    for b in range(3):
        x[b, target[b]] = encoder.mask_token[0, 0]
    x = x + encoder.pos_embed
    for block in encoder.blocks:
        x = block(x, None)
    features = encoder.norm(x)
    torch.testing.assert_close(out.context_BKE, gather_tokens(features, context))
    guess = model.predictor(gather_tokens(features, target), torch.ones(target.shape))
    torch.testing.assert_close(out.prediction_BME, F.normalize(guess, dim=-1))


def test_padding_targets_weigh_nothing() -> None:
    cfg = small_config()
    model = nano_model(cfg).eval()
    context, target = token_ids(cfg, 2)
    view = volumes(cfg, 2)
    valid = valid_tokens(model, 2).scatter(1, target[:, 3:], 0.0)
    full = model(view, view, context, target, valid).loss_B
    part = model(view, view, context, target, valid_tokens(model, 2)).target_BME[:, :3]
    z = model.predictor(model.encoder(view, context), context, target)[:, :3]
    torch.testing.assert_close(full, (z - part).abs().mean((1, 2)))
    none = model(view, view, context, target, valid_tokens(model, 2, 0.0)).loss_B
    assert torch.equal(none, torch.zeros(2))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_trained_parameter_has_a_gradient_and_is_optimised_once(recipe: str) -> None:
    cfg = small_config(recipe)
    model = nano_model(cfg)
    out, *_ = run(model, cfg)
    neighbours = 0.0 if out.neighbour_B is None else out.neighbour_B.sum()
    (out.loss_B.sum() + neighbours + out.context_BKE.sum()).backward()
    for name, parameter in model.trained_parameters():
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name
        assert float(parameter.grad.abs().sum()) > 0, name
    assert all(p.grad is None and not p.requires_grad for p in model.target_encoder.parameters())
    groups = parameter_groups(model, 0.05)
    optimised = [id(p) for g in groups for p in g["params"]]
    assert sorted(optimised) == sorted(id(p) for _, p in model.trained_parameters())
    assert len(set(optimised)) == len(optimised)
    assert [g["rate_share"] for g in groups] == [1.0, 1.0]
    deep = parameter_groups(model, 0.05, 0.5, model.encoder.depth)
    shares = {id(p): g["rate_share"] for g in deep for p in g["params"]}
    for name, parameter in model.trained_parameters():
        block = re.match(r"encoder\.blocks\.(\d+)\.", name)
        above = 0 if block is None else model.encoder.depth - 1 - int(block[1])
        below_all = name.startswith(("encoder.patch_embed", "encoder.pos_embed"))
        assert shares[id(parameter)] == 0.5 ** (model.encoder.depth if below_all else above), name
    decayed = {id(p) for p in groups[0]["params"]}
    for name, parameter in model.trained_parameters():
        is_matrix = name.endswith(".weight") and parameter.ndim >= 2
        assert (id(parameter) in decayed) == is_matrix, name


@torch.no_grad()
def test_target_starts_as_a_copy_and_follows_the_closed_form() -> None:
    cfg = small_config()
    model = nano_model(cfg)
    start = [p.clone() for p in model.target_encoder.parameters()]
    replay = [p.clone() for p in start]
    closed = [p.clone().double() for p in start]
    momenta = [0.9, 0.99, 0.996, 0.5, 1.0]
    weights = [math.prod(momenta)]
    history = []
    for momentum in momenta:
        for p in model.encoder.parameters():
            p.add_(torch.randn(p.shape) * 0.1)
        history.append([p.clone() for p in model.encoder.parameters()])
        model.update_target(momentum, torch.tensor(True))
        for r, p in zip(replay, model.encoder.parameters(), strict=True):
            r.lerp_(p.detach(), torch.tensor(1 - momentum))
    for i, t in enumerate(model.target_encoder.parameters()):
        # lerp_ rounds once, the product and the sum twice
        torch.testing.assert_close(t.data, replay[i], rtol=1e-5, atol=1e-6)
        closed[i] *= weights[0]
        for s, snapshot in enumerate(history):
            closed[i] += (1 - momenta[s]) * math.prod(momenta[s + 1 :]) * snapshot[i].double()
        assert float((t.double() - closed[i]).abs().max()) < 1e-6
    assert not torch.equal(next(iter(model.target_encoder.parameters())), start[0])
    before = [t.clone() for t in model.target_encoder.parameters()]
    for p in model.encoder.parameters():
        p.add_(torch.randn_like(p))
    model.update_target(0.9, torch.tensor(False))  # disabled: it moves nothing
    assert all(torch.equal(t, b) for t, b in zip(model.target_encoder.parameters(), before, strict=True))


def test_batch_norm_matches_torch_on_the_valid_tokens() -> None:
    ours, reference = WeightedBatchNorm(5), torch.nn.BatchNorm1d(5)
    x, weight = torch.randn(3, 4, 5), (torch.rand(3, 4) > 0.4).float()
    got = ours(x, weight)
    expected = reference(x[weight > 0])
    torch.testing.assert_close(got[weight > 0], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.running_mean, reference.running_mean)
    torch.testing.assert_close(ours.running_var, reference.running_var)
    ours.eval()
    reference.eval()
    torch.testing.assert_close(ours(x, weight)[weight > 0], reference(x[weight > 0]))


def test_stochastic_layers_follow_the_sample_not_the_batch() -> None:
    seeds = torch.tensor([3, 8, 5])
    x = torch.ones(3, 50, 40)
    together = Stochastic(seeds, 0.1, 0.2)
    whole = [together.dropout(x), together.drop_path(x, 0.5), together.dropout(x)]
    for b in range(3):
        alone = Stochastic(seeds[b : b + 1], 0.1, 0.2)
        single = [alone.dropout(x[:1]), alone.drop_path(x[:1], 0.5), alone.dropout(x[:1])]
        for a, c in zip(whole, single, strict=True):
            assert torch.equal(a[b], c[0])
    assert not torch.equal(whole[0], whole[2])
    assert float((whole[0] == 0).float().mean()) == pytest.approx(0.1, abs=0.01)
    assert float(whole[0].mean()) == pytest.approx(1.0, abs=0.02)
    kept = Stochastic(torch.arange(4000), 0.0, 0.3).drop_path(torch.ones(4000, 1), 0.3)
    assert float((kept == 0).float().mean()) == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize(("size", "millions"), [("ti", 5.5), ("s", 21.7), ("b", 86.3), ("l", 303.9)])
def test_true_parameter_counts(size: str, millions: float) -> None:
    """Rotary encoder, patch 4 x 16 x 16, one channel: 12 E^2 per block and little else."""
    with torch.device("meta"):
        encoder = VisionTransformer3D(size, (16, 24, 24), (4, 16, 16))
    depth, width, *_ = SIZES[size]
    by_hand = depth * (12 * width**2 + 13 * width) + (4 * 16 * 16 + 1) * width + 2 * width
    count = sum(p.numel() for p in encoder.parameters())
    assert count == by_hand
    assert count / 1e6 == pytest.approx(millions, rel=0.01)
    with torch.device("meta"):  # of methods: a place for each of 9,216 tokens, and the mask's
        encoder = VisionTransformer3D(
            size, (16, 24, 24), (4, 16, 16), positions="learned", has_mask_token=True
        )
    assert sum(p.numel() for p in encoder.parameters()) == count + (9216 + 1) * width


@pytest.mark.parametrize("depth", [8, 4])
@torch.no_grad()
def test_the_neighbour_loss_is_of_valid_places_and_reads_no_hidden_voxel(depth: int) -> None:
    cfg = small_config("neighbour", f"spatial.image_size=[{depth},24,32]")
    assert len(set(NEIGHBOURS)) == 7
    assert (0, 0, 0) in NEIGHBOURS
    model = nano_model(cfg)
    assert model.neighbour_head is not None
    context, target = token_ids(cfg, 3)
    views = [volumes(cfg, 3, seed) for seed in (0, 1)]
    everywhere = valid_tokens(model, 3)
    assert model.eval()(*views, context, target, everywhere).neighbour_B is None  # validation has none
    model.train()
    guesses: list[torch.Tensor] = []
    model.neighbour_head.register_forward_hook(lambda _module, _inputs, out: guesses.append(out))
    valid = torch.ones(3, model.encoder.num_tokens, dtype=torch.bool)
    valid[:, ::5] = False
    first = model(*views, context, target, valid)
    grid, patch = cfg.grid, cfg.spatial.patch_size
    for b in range(3):
        squares: dict[tuple[int, int, int], list[float]] = {step: [] for step in NEIGHBOURS}
        for k, token in enumerate(context[b].tolist()):
            place = np.unravel_index(token, grid)
            for which, step in enumerate(NEIGHBOURS):
                near = tuple(int(p + s) for p, s in zip(place, step, strict=True))
                inside = all(0 <= p < size for p, size in zip(near, grid, strict=True))
                if not inside or token % 5 == 0 or int(np.ravel_multi_index(near, grid)) % 5 == 0:
                    continue
                cube = tuple(slice(p * size, (p + 1) * size) for p, size in zip(near, patch, strict=True))
                guess = guesses[0][b, k].unflatten(0, (7, -1))[which]
                squares[step].append(float((guess - views[0][b, 0][cube].flatten()).square().mean()))
        assert len({len(of_step) for of_step in squares.values()}) > 1
        if depth == 4:  # a grid of one B-scan: two of the seven places are nowhere
            assert 0 < sum(len(of_step) > 0 for of_step in squares.values()) <= 5
        expected = np.mean([np.mean(of_step) for of_step in squares.values() if of_step])
        assert float(first.neighbour_B[b]) == pytest.approx(expected, rel=1e-4)
    seen = torch.zeros(3, model.encoder.num_tokens, dtype=torch.bool).scatter(1, context, True)
    other = torch.where(voxels_of_tokens(~seen, grid, patch), views[0] + 5, views[0])
    model(other, views[1], context, target, valid)
    torch.testing.assert_close(guesses[1], guesses[0])
    assert "neighbour_head.weight" not in nano_model(small_config()).state_dict()


def test_the_neighbour_loss_keeps_no_float32_copy_of_its_guesses() -> None:
    """At 64 x 384 x 384 a copy is 1.7 GB for 16 volumes. What is kept in float32 are the voxels, once."""
    cfg = small_config("neighbour")
    model, view = nano_model(cfg).train(), volumes(cfg, 4)
    context, _ = token_ids(cfg, 4)
    kept: dict[int, torch.Tensor] = {}
    tokens = torch.randn(*context.shape, model.encoder.width, generator=torch.Generator().manual_seed(0))
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
        ),
    ):
        loss_B = model.neighbour_loss(tokens.requires_grad_(), view, context, valid_tokens(model, 4))
    voxels = math.prod(model.encoder.patch_embed.proj.weight[0].shape)
    guesses = len(NEIGHBOURS) * context.numel() * voxels
    large = [t for t in kept.values() if t.ndim == 3 and t.shape[-1] >= voxels]
    assert sum(t.nbytes for t in large if t.dtype == torch.float32) <= view.nbytes, "more than the voxels"
    assert sum(t.nbytes for t in large) <= view.nbytes + 2 * guesses
    loss_B.sum().backward()
    assert tokens.grad is not None
    assert tokens.grad.abs().sum() > 0


def test_the_squared_errors_have_the_value_and_the_gradient_of_plain_ones() -> None:
    torch.manual_seed(0)
    truth, near = torch.randn(2, 6, 5), torch.randint(0, 6, (3, 2, 4))
    guesses = torch.randn(2, 4, 15, requires_grad=True)
    errors = SquaredErrors.apply(guesses, truth, near, gather_tokens)
    places = zip(guesses.chunk(3, -1), near, strict=True)
    plain = torch.stack([(guess - gather_tokens(truth, ids)).square().mean(-1) for guess, ids in places])
    torch.testing.assert_close(errors, plain)
    weights = torch.rand(errors.shape)
    (fast,), (slow,) = (torch.autograd.grad((of * weights).sum(), guesses) for of in (errors, plain))
    torch.testing.assert_close(fast, slow)


# ---- the blockwise kernel against a slow plain one in double precision, values and gradients


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhtc,bhsc->bhts", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhts,bhsc->bhtc", scores.softmax(-1), v)


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)]
    return [x.requires_grad_() for x in drawn[:3]] + drawn[3:]


def value_and_gradients(function, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    out = function(q, k, v)
    return [out, *torch.autograd.grad(out, (q, k, v), grad)]


# room for all heads and queries at once, for two of six heads, for a part of the queries with a short last
@pytest.mark.parametrize("kept_bytes", [0, 2**30])
@pytest.mark.parametrize("block_bytes", [4 * 2**20, 2 * 37 * 37 * 8, 10 * 37 * 8])
def test_blockwise_attention_equals_plain_attention(
    block_bytes: int, kept_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_module, "KEPT_BYTES", kept_bytes)
    monkeypatch.setattr(attention_module, "BLOCK_BYTES", block_bytes)
    arrays = inputs((2, 3, 37, 8), torch.float64)
    for got, expected in zip(
        value_and_gradients(blockwise_attention, *arrays), value_and_gradients(plain, *arrays), strict=True
    ):
        torch.testing.assert_close(got, expected)


# scores of a standard deviation of scale^2; the bound is what rounding them to bfloat16 costs
@pytest.mark.parametrize(("scale", "bound"), [(1, 0.01), (3, 0.04)])
@pytest.mark.parametrize("block_bytes", [4 * 2**20, 64 * 300 * 2])
def test_bfloat16_stays_near_double_precision(
    block_bytes: int, scale: float, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_module, "BLOCK_BYTES", block_bytes)
    arrays = inputs((1, 2, 300, 32), torch.bfloat16)
    arrays = [(x.detach() * scale).requires_grad_() for x in arrays[:2]] + arrays[2:]
    got = value_and_gradients(attention, *arrays)
    exact = [x.detach().double().requires_grad_() for x in arrays[:3]]
    for one, other in zip(got, value_and_gradients(plain, *exact, arrays[3].double()), strict=True):
        assert (one.double() - other).norm() / other.norm() < bound


@pytest.mark.parametrize("has_amx", [False, True])
def test_blocks_are_for_processors_without_amx(has_amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "HAS_AMX", has_amx)
    q, k, v, _ = inputs((1, 2, 70, 32), torch.bfloat16)
    expected = torch.nn.functional.scaled_dot_product_attention if has_amx else blockwise_attention
    assert torch.equal(attention(q, k, v), expected(q, k, v))


def test_other_layouts_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of a projection are strided views."""
    q, k, v, grad = inputs((2, 37, 3, 8), torch.float64)
    strided = value_and_gradients(blockwise_attention, *(x.transpose(1, 2) for x in (q, k, v, grad)))
    expected = value_and_gradients(plain, *(x.transpose(1, 2) for x in (q, k, v, grad)))
    for one, other in zip(strided, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_keys_of_another_length_go_to_the_general_kernel() -> None:
    q, k = torch.randn(1, 2, 5, 8).bfloat16(), torch.randn(1, 2, 9, 8).bfloat16()
    got, expected = attention(q, k, k), plain(*(x.double() for x in (q, k, k)))
    assert (got.double() - expected).norm() / expected.norm() < 0.01


# ---- penalties by hand, and the surrogate's gradient against plain autograd over the whole batch


def test_vicreg_by_hand() -> None:
    tokens = torch.randn(3, 20, 6) * torch.tensor([0.1, 0.5, 1.0, 1.5, 2.0, 0.2])
    weight = torch.ones(3, 20)
    reg = VicReg()
    value = reg.penalty(tuple(s / 3 for s in reg.statistics(tokens, weight)))
    flat = tokens.reshape(-1, 6).numpy().astype(np.float64)
    covariance = np.cov(flat.T, bias=True)
    hinge = np.maximum(0, 1 - np.sqrt(np.diag(covariance) + 1e-4)).mean()
    off = (covariance**2).sum() - (np.diag(covariance) ** 2).sum()
    assert float(value) == pytest.approx(hinge + 0.1 * off / 6, rel=1e-4)


def test_padding_tokens_do_not_count() -> None:
    tokens, weight = torch.randn(2, 10, 4), torch.ones(2, 10)
    weight[:, 6:] = 0
    spoilt = tokens.clone()
    spoilt[:, 6:] = 1e3
    parts = [VicReg().statistics(t, weight) for t in (tokens, spoilt)]
    for a, b in zip(*parts, strict=True):
        torch.testing.assert_close(a, b)


def test_accumulated_surrogate_is_the_gradient_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    reg = VicReg()
    tokens = torch.randn(4, 9, 5, requires_grad=True)
    weight = (torch.rand(4, 9) > 0.3).float()
    direct = reg.penalty(tuple(s / 4 for s in reg.statistics(tokens, weight)))
    (expected,) = torch.autograd.grad(direct, tokens)

    with torch.no_grad():
        parts = [reg.statistics(tokens[i : i + 2], weight[i : i + 2]) for i in (0, 2)]
        means = tuple((a + b) / 4 for a, b in zip(*parts, strict=True))
    value, gradient = surrogate(reg, means)
    for i in (0, 2):
        statistics = reg.statistics(tokens[i : i + 2], weight[i : i + 2])
        sum((g * s / 4).sum() for g, s in zip(gradient, statistics, strict=True)).backward()
    torch.testing.assert_close(value, direct.detach())
    torch.testing.assert_close(tokens.grad, expected, atol=1e-7, rtol=1e-4)


# ---- activation checkpointing: the same loss and gradients, with fewer activations kept
NOISE = ("method.dropout=0.2", "method.drop_path=0.3")


def config(recipe: str, on: bool) -> Config:
    return small_config(recipe, *NOISE, f"train.activation_checkpointing={str(on).lower()}")


def kept_bytes(model: VJEPA3D, batch: dict[str, Tensor], runtime: Runtime) -> int:
    """Bytes of the distinct tensors that a forward pass leaves for the backward pass."""
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        predict(model, batch, runtime, stochastic=True)
    return sum(kept.values())


@pytest.mark.parametrize("use_bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", ["vjepa2", "methods", "mae", "surroundings"])
def test_loss_and_gradients_are_the_same_bits(recipe: str, use_bf16: bool) -> None:
    runtime = Runtime(torch.device("cpu"), use_bf16)
    results = []
    for on in (False, True):
        cfg = config(recipe, on)
        model = nano_model(cfg).train()
        optimizer = build_optimizer(model, cfg)
        result = train_step(model, optimizer, [uint8_batch(cfg, 16)], cfg, runtime, Update(0, 1e-3, 0.9))
        results.append((result.loss, {n: p.grad for n, p in model.trained_parameters()}))
    (loss, gradients), (loss_again, gradients_again) = results
    assert torch.equal(loss, loss_again)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, gradients_again[name]), name


@pytest.mark.parametrize("recipe", ["vjepa2", "methods"])
def test_fewer_activations_are_kept(recipe: str) -> None:
    runtime = Runtime(torch.device("cpu"), use_bf16=False)
    plain, sparing = (nano_model(config(recipe, on)).train() for on in (False, True))
    batch = uint8_batch(config(recipe, False), 16)
    assert kept_bytes(sparing, batch, runtime) < 0.6 * kept_bytes(plain, batch, runtime)


# ---- counted operations against PyTorch's own counter


@pytest.mark.parametrize("recomputing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("recipe", ["vjepa2", "methods", "mae", "neighbour", "surroundings"])
def test_step_flops_are_what_torch_counts(recipe: str, recomputing: bool) -> None:
    cfg = small_config(recipe, f"train.activation_checkpointing={str(recomputing).lower()}")
    model = nano_model(cfg).train()
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.attention = plain  # matrix products, which the counter sees one by one
    view = volumes(cfg, 2)
    context, target = token_ids(cfg, 2)
    with FlopCounterMode(display=False) as counter:
        out = model(view, view, context, target, torch.ones(2, model.encoder.num_tokens))
        loss_B = out.loss_B if out.neighbour_B is None else out.loss_B + out.neighbour_B
        loss_B.sum().backward()
    counts = (model, context.shape[1], target.shape[1])
    expected = step_flops(*counts) + (recomputed_flops(*counts) if recomputing else 0)
    assert counter.get_total_flops() == 2 * expected
