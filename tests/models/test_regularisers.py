"""Penalties by hand, and the surrogate's gradient against plain autograd over the whole batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from models.losses import Centres, Regulariser, SigReg, VicReg, surrogate

PLACES = 60


def ids(batch: int, count: int) -> Tensor:
    """int64 [batch, count]: other places in each sample, every place about as often."""
    rng = np.random.default_rng(0)
    return torch.from_numpy(np.stack([rng.permutation(PLACES)[:count] for _ in range(batch)]))


def centres(width: int, value: float = 0.0) -> Centres:
    return Centres(torch.full((PLACES, width), value), torch.full((PLACES,), float(value != 0)))


def regulariser(name: str) -> Regulariser:
    if name == "sigreg":
        return SigReg(torch.randn(5, 16))
    return VicReg(centres=centres(5, 0.3)) if name == "centred" else VicReg()


def test_vicreg_by_hand() -> None:
    tokens = torch.randn(3, 20, 6) * torch.tensor([0.1, 0.5, 1.0, 1.5, 2.0, 0.2])
    weight = torch.ones(3, 20)
    reg = VicReg()
    value = reg.penalty(tuple(s / 3 for s in reg.statistics(tokens, weight, ids(3, 20))))
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
    for reg in (VicReg(), VicReg(centres=centres(4)), SigReg(torch.randn(4, 7))):
        parts = [reg.statistics(t, weight, ids(2, 10)) for t in (tokens, spoilt)]
        for a, b in zip(*parts, strict=True):
            torch.testing.assert_close(a, b)


def test_sigreg_is_zero_for_a_normal_and_large_for_a_point() -> None:
    generator = torch.Generator().manual_seed(0)
    reg = SigReg(torch.randn(8, 64, generator=generator))

    def value(tokens: torch.Tensor) -> float:
        somewhere = torch.zeros(1, len(tokens), dtype=torch.int64)
        return float(reg.penalty(reg.statistics(tokens[None], torch.ones(1, len(tokens)), somewhere)))

    normal = value(torch.randn(20_000, 8, generator=generator))
    assert normal < 1e-3
    assert value(torch.zeros(2000, 8)) > 100 * normal
    assert value(torch.randn(2000, 8, generator=generator) * 3) > 20 * normal


def value(reg: VicReg, tokens: Tensor, weight: Tensor) -> float:
    sums = reg.statistics(tokens, weight, ids(*tokens.shape[:2]))
    return float(reg.penalty(tuple(s / len(tokens) for s in sums)))


def test_the_centred_penalty_is_that_of_tokens_less_the_mean_of_their_place() -> None:
    """The mean by a loop over the places, with padding; places seen before move by a tenth."""
    torch.manual_seed(0)
    where, weight, tokens = ids(8, 40), torch.ones(8, 40), torch.randn(8, 40, 6) * 2 + 1
    weight[:, 36:] = 0
    old = Centres(torch.randn(PLACES, 6), (torch.arange(PLACES) % 2).float())
    mean = old.mean_NE.clone()
    for place in range(PLACES):
        rows = tokens[(where == place) & (weight > 0)]
        if len(rows):
            mean[place] = rows.mean(0) if place % 2 == 0 else 0.9 * mean[place] + 0.1 * rows.mean(0)
    expected = value(VicReg(), tokens - mean[where], weight)
    assert value(VicReg(centres=old), tokens, weight) == pytest.approx(expected, rel=1e-4)
    _, sums_NE, weight_N = VicReg(centres=old).statistics(tokens, weight, where)
    torch.testing.assert_close(old.after(sums_NE, weight_N).mean_NE, mean)


def test_features_that_tell_only_their_place_are_penalised_like_constant_ones() -> None:
    torch.manual_seed(0)
    where, weight = ids(8, 40), torch.ones(8, 40)
    tokens = 3 * torch.randn(PLACES, 6)[where]
    assert value(VicReg(0.0), tokens, weight) < 0.01
    centred = VicReg(0.0, centres(6))
    assert value(centred, tokens, weight) == pytest.approx(0.99, abs=1e-3)
    assert value(centred, tokens + 3 * torch.randn_like(tokens), weight) < 0.01


@pytest.mark.parametrize("name", ["vicreg", "centred", "sigreg"])
def test_accumulated_surrogate_is_the_gradient_of_the_whole_batch(name: str) -> None:
    torch.manual_seed(0)
    reg, where = regulariser(name), ids(4, 9)
    tokens = torch.randn(4, 9, 5, requires_grad=True)
    weight = (torch.rand(4, 9) > 0.3).float()
    direct = reg.penalty(tuple(s / 4 for s in reg.statistics(tokens, weight, where)))
    (expected,) = torch.autograd.grad(direct, tokens)

    with torch.no_grad():
        parts = [reg.statistics(tokens[i : i + 2], weight[i : i + 2], where[i : i + 2]) for i in (0, 2)]
        means = tuple((a + b) / 4 for a, b in zip(*parts, strict=True))
    value, gradient = surrogate(reg, means)
    for i in (0, 2):
        statistics = reg.statistics(tokens[i : i + 2], weight[i : i + 2], where[i : i + 2])
        sum((g * s / 4).sum() for g, s in zip(gradient, statistics, strict=True)).backward()
    torch.testing.assert_close(value, direct.detach())
    torch.testing.assert_close(tokens.grad, expected, atol=1e-7, rtol=1e-4)
