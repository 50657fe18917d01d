"""Maps of what a head reads: hand cases of occlusion and of token contributions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from einops import reduce
from torch import Tensor, nn

from finetuning.prediction.evidence import against_others, block_of, blocks_of, cheap_map, hide, occlusion_map
from models.heads import build_head
from tests.support.finetune_factory import RUNTIME, config


class Means(nn.Module):
    """A token says the mean of its voxels, four times."""

    def forward(self, view_BCDHW: Tensor) -> Tensor:
        means = reduce(view_BCDHW, "b c (gd d) (gh h) (gw w) -> b (gd gh gw) c", "mean", d=4, h=8, w=8)
        return means.expand(-1, -1, 4)


@dataclass(frozen=True)
class Reader:
    module: nn.Module
    standardise: None = None


def reader(weight: Tensor) -> Reader:
    """A linear head of two outputs that reads the mean of the tokens, not their deviation."""
    module = build_head("linear", 4, 2, 0, 0.0).eval().requires_grad_(False)
    assert isinstance(module.last, nn.Linear)
    module.last.weight.zero_()
    module.last.weight[:, :4] = weight
    module.last.bias.copy_(torch.tensor([0.3, -0.2]))
    return Reader(module)


def test_occlusion_and_contributions_agree_where_the_head_is_linear(tmp_path: Path) -> None:
    """Of mean tokens, hiding one takes away its own part: two ways to the same map."""
    cfg = config(tmp_path, tmp_path / "run")
    torch.manual_seed(0)
    view, valid = torch.randn(1, 1, 8, 24, 32), torch.ones(1, 24)
    valid[0, 20:] = 0
    heads = [reader(torch.tensor([[1.0, 0, 2, 0], [0, 3, 0, 0]])), reader(torch.eye(2, 4))]
    heads.append(reader(torch.tensor([[0.0] * 4, [1.0, 0, 0, 0]])))
    weights = against_others(1, 2)
    maps = [occlusion_map(Means(), head, view, valid, weights, cfg, RUNTIME) for head in heads]
    for head, values in zip(heads, maps, strict=True):
        expected = cheap_map(head, Means()(view), valid, weights)[0]
        torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-4)
        assert (values[20:] == 0).all()
    tokens = Means()(view)[0, :20, 0]
    torch.testing.assert_close(maps[0][:20], 0.0 * tokens, atol=1e-5, rtol=0)  # 3 for it, 1 + 2 against
    torch.testing.assert_close(maps[2][:20], tokens / 20, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "mlp", "attentive"])
def test_a_map_of_a_head_that_may_still_be_trained_is_numbers(kind: str) -> None:
    """The control comes out of training: its parameters want gradients, its map has none."""
    control = Reader(build_head(kind, 4, 2, 3, 0.0).eval())
    values = cheap_map(control, torch.randn(1, 24, 4), torch.ones(1, 24), against_others(1, 2))
    assert values.numpy().shape == (1, 24)


def test_hidden_tokens_are_the_mean_and_nothing_else_changes(tmp_path: Path) -> None:
    cfg = config(tmp_path, tmp_path / "run")
    view, hidden = torch.randn(1, 1, 8, 24, 32), torch.zeros(2, 24, dtype=torch.bool)
    hidden[1, 6] = True  # the second of four along w, the second of three along h, the first along d
    changed = hide(view, hidden, cfg)
    assert torch.equal(changed[0], view[0])
    assert (changed[1, 0, :4, 8:16, 16:24] == 0).all()
    assert int((changed[1] != view[0]).sum()) == 4 * 8 * 8


@pytest.mark.parametrize(
    ("grid", "block"), [((2, 3, 4), (1, 1, 1)), ((4, 12, 8), (1, 2, 2)), ((16, 24, 24), (4, 8, 4))]
)
def test_blocks_cover_every_token_once(grid: tuple[int, int, int], block: tuple[int, int, int]) -> None:
    assert block_of(grid) == block
    blocks = blocks_of(grid, block)
    assert len(blocks) <= 128
    assert (blocks.sum(dim=0) == 1).all()
    first = np.flatnonzero(blocks[0].view(grid).any(dim=(1, 2))), blocks[0].view(grid)[0].any(dim=1).sum()
    assert (len(first[0]), int(first[1])) == block[:2]
