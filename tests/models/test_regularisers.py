"""Penalties by hand, and the surrogate's gradient against plain autograd over the whole batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.losses import Regulariser, SigReg, VicReg, surrogate


def regulariser(name: str) -> Regulariser:
    return SigReg(torch.randn(5, 16)) if name == "sigreg" else VicReg()


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
    for reg in (VicReg(), SigReg(torch.randn(4, 7))):
        parts = [reg.statistics(t, weight) for t in (tokens, spoilt)]
        for a, b in zip(*parts, strict=True):
            torch.testing.assert_close(a, b)


def test_sigreg_is_zero_for_a_normal_and_large_for_a_point() -> None:
    generator = torch.Generator().manual_seed(0)
    reg = SigReg(torch.randn(8, 64, generator=generator))

    def value(tokens: torch.Tensor) -> float:
        return float(reg.penalty(reg.statistics(tokens[None], torch.ones(1, len(tokens)))))

    normal = value(torch.randn(20_000, 8, generator=generator))
    assert normal < 1e-3
    assert value(torch.zeros(2000, 8)) > 100 * normal
    assert value(torch.randn(2000, 8, generator=generator) * 3) > 20 * normal


@pytest.mark.parametrize("name", ["vicreg", "sigreg"])
def test_accumulated_surrogate_is_the_gradient_of_the_whole_batch(name: str) -> None:
    torch.manual_seed(0)
    reg = regulariser(name)
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
