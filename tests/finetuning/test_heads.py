"""Heads: what they read, what they never look at, and losses and weights against other people's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss
from sklearn.utils.class_weight import compute_sample_weight
from torch import nn

from finetuning.heads.objective import row_losses, row_weights, to_scores, validation_score
from models.heads import AttentiveHead, build_head, rescale_output
from models.probes.features import pool_tokens
from tests.support.finetune_factory import predictions

WIDTH, TOKENS = 128, 10
KINDS = ("linear", "mlp", "attentive")


def attentive() -> AttentiveHead:
    torch.manual_seed(0)
    head = build_head("attentive", WIDTH, 3, 16).eval()
    assert isinstance(head, AttentiveHead)
    return head


def applied(head: nn.Module, tokens: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    return head(tokens, valid) if isinstance(head, AttentiveHead) else head(pool_tokens(tokens, valid))


@pytest.mark.parametrize("kind", KINDS)
def test_every_head_reads_the_tokens_of_an_encoder_and_trains_all_its_weights(kind: str) -> None:
    torch.manual_seed(0)
    head = build_head(kind, WIDTH, 3, 16)
    tokens, valid = torch.randn(4, TOKENS, WIDTH), torch.ones(4, TOKENS)
    out = applied(head, tokens, valid)
    assert out.shape == (4, 3)
    (out * torch.randn(4, 3)).sum().backward()
    assert [name for name, p in head.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_a_linear_head_begins_without_an_opinion() -> None:
    head = build_head("linear", WIDTH, 3, 16)
    assert head(torch.randn(50, 2 * WIDTH)).abs().max() < 0.01


def test_an_unknown_head_is_named() -> None:
    with pytest.raises(ValueError, match="expected linear, mlp or attentive, found conv"):
        build_head("conv", WIDTH, 3, 16)


def test_padding_is_not_attended() -> None:
    head = attentive()
    tokens = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    valid = torch.ones(2, TOKENS, dtype=torch.bool)
    valid[0, 6:] = False
    out = head(tokens, valid)
    out.sum().backward()
    assert tokens.grad is not None
    assert not tokens.grad[0, 6:].any()
    assert (tokens.grad[0, :6].abs().sum(dim=1) > 0).all()
    other = tokens.detach().clone()
    other[0, 6:] = 1e3 * torch.randn(4, WIDTH)
    torch.testing.assert_close(head(other, valid), out)
    torch.testing.assert_close(head(tokens[:1, :6], valid[:1, :6]), out[:1])  # as if it were not there
    assert not torch.allclose(head(other, torch.ones_like(valid))[0], out[0])


def test_attentive_head_is_torchs_cross_attention() -> None:
    """The same weights in nn.MultiheadAttention, whose key_padding_mask names what is left out."""
    head = attentive()
    with torch.no_grad():
        for p in head.parameters():
            p.add_(0.1 * torch.randn_like(p))
    reference = nn.MultiheadAttention(WIDTH, head.heads, batch_first=True).eval()
    reference.load_state_dict(
        {
            "in_proj_weight": torch.cat([head.q.weight, head.kv.weight]),
            "in_proj_bias": torch.cat([head.q.bias, head.kv.bias]),
            "out_proj.weight": head.proj.weight,
            "out_proj.bias": head.proj.bias,
        }
    )
    tokens, valid = torch.randn(3, TOKENS, WIDTH), torch.rand(3, TOKENS) > 0.4
    normed, query = head.norm1(tokens), head.query.expand(3, -1, -1)
    x = query + reference(query, normed, normed, key_padding_mask=~valid, need_weights=False)[0]
    x = x + head.mlp(head.norm2(x))
    torch.testing.assert_close(head(tokens, valid), head.last(x[:, 0]), atol=1e-5, rtol=1e-5)
    assert head.heads == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_rescaled_head_predicts_in_the_labels_unit(kind: str) -> None:
    torch.manual_seed(0)
    head = build_head(kind, WIDTH, 1, 16).eval()
    nn.init.normal_(head.last.bias)
    tokens, valid = torch.randn(4, TOKENS, WIDTH), torch.ones(4, TOKENS)
    standardised = applied(head, tokens, valid)
    rescale_output(head, 250.0, 30.0)
    torch.testing.assert_close(applied(head, tokens, valid), standardised * 30 + 250)


def test_losses_are_scikit_learns_and_torchs() -> None:
    torch.manual_seed(0)
    outputs, labels = torch.randn(50, 4, dtype=torch.float64), torch.arange(50) % 4
    loss = row_losses("classification", outputs, labels[:, None])
    probabilities = to_scores("classification", outputs)
    assert loss.mean().item() == pytest.approx(log_loss(labels, probabilities, labels=range(4)))
    reference = nn.functional.cross_entropy(outputs, labels, reduction="none")
    torch.testing.assert_close(loss[:, 0], reference)
    yes = (torch.rand(50, 4) > 0.5).double()
    several = row_losses("multilabel", outputs, yes)
    for label in range(4):
        expected = log_loss(yes[:, label], to_scores("multilabel", outputs)[:, label])
        assert several[:, label].mean().item() == pytest.approx(expected)
    heads = torch.stack([outputs, 2 * outputs])
    for kind, target in (
        ("classification", labels[:, None]),
        ("ordinal", labels[:, None]),
        ("multilabel", yes),
    ):
        each = torch.stack([row_losses(kind, outputs, target), row_losses(kind, 2 * outputs, target)])
        torch.testing.assert_close(row_losses(kind, heads, target), each)


def test_ordinal_loss_by_hand() -> None:
    """Probabilities .5 .3 .2: cumulative .5 .8 1. Truth 0 is 1 1 1, truth 2 is 0 0 1."""
    outputs = torch.tensor([[0.5, 0.3, 0.2]]).log()
    for truth, expected in ((0, 0.25 + 0.04), (1, 0.25 + 0.04), (2, 0.25 + 0.64)):
        loss = row_losses("ordinal", outputs, torch.tensor([[float(truth)]]))
        assert loss.item() == pytest.approx(expected)


def test_weights_give_people_and_classes_the_same_say() -> None:
    person = np.array(["a", "a", "a", "b", "c", "d", "d"])
    target = np.array([0, 0, 0, 0, 0, 1, 1])[:, None]
    alone = row_weights("classification", target, person, "none")
    by_person = {p: alone[person == p].sum() for p in "abcd"}
    assert list(by_person.values()) == pytest.approx([7 / 4] * 4)
    balanced = row_weights("classification", target, person, "auto")[:, 0]
    assert balanced[:5].sum() == pytest.approx(balanced[5:].sum())
    assert balanced[0] * 3 == pytest.approx(balanced[3])
    assert balanced.mean() == pytest.approx(1)
    one_volume_each = np.array([f"p{i}" for i in range(7)])
    expected = compute_sample_weight("balanced", target[:, 0])
    np.testing.assert_allclose(row_weights("ordinal", target, one_volume_each, "auto")[:, 0], expected)
    labels = np.concatenate([target, 1 - target[::-1]], axis=1)
    several = row_weights("multilabel", labels, one_volume_each, "auto")
    for number in range(2):
        expected = compute_sample_weight("balanced", labels[:, number])
        np.testing.assert_allclose(several[:, number], expected)
    values = row_weights("regression", target.astype(float), person, "auto")
    np.testing.assert_array_equal(values, alone)


def test_scores_on_validation_by_hand() -> None:
    right, wrong = [0.1, 0.8, 0.1], [0.8, 0.1, 0.1]
    two_of_four = predictions("classification", [[0], [1], [1], [1]], [wrong, right, wrong, wrong])
    assert validation_score(two_of_four) == pytest.approx((1 + 1 / 3) / 2)
    near = predictions("ordinal", [[0], [1], [2]], [[1, 0, 0], [1, 0, 0], [0, 0, 1]])
    far = predictions("ordinal", [[0], [1], [2]], [[1, 0, 0], [0, 1, 0], [1, 0, 0]])
    assert validation_score(near) > validation_score(far)
    constant = predictions("ordinal", [[1], [1]], [right, right])
    assert validation_score(constant) == 0  # no agreement beyond chance
    values = predictions("regression", [[1.0], [2.0]], [[1.0], [4.0]])
    assert validation_score(values) == -2.0
    labels = [[0, 1], [1, 1], [1, 1]]
    several = predictions("multilabel", labels, [[0.3, 0.1], [0.2, 0.5], [0.9, 0.2]])
    assert validation_score(several) == 0.5  # of the first label; the second has one value
    none = predictions("multilabel", [[1], [1]], [[0.1], [0.9]])
    assert validation_score(none) == 0.5
