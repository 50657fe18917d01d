"""The blockwise kernel against a slow plain one in double precision, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models import attention as attention_module
from models.attention import attention, blockwise_attention


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
