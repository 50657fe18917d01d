"""Counted operations against PyTorch's own counter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from models.flops import recomputed_flops, step_flops
from models.vit3d import SelfAttention
from tests.support.model_factory import nano_model, small_config, token_ids, volumes


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Matrix products, which the counter sees one by one."""
    return F.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1) @ v


@pytest.mark.parametrize("recomputing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("recipe", ["vjepa2", "methods", "mae", "neighbour"])
def test_step_flops_are_what_torch_counts(recipe: str, recomputing: bool) -> None:
    cfg = small_config(recipe, f"train.activation_checkpointing={str(recomputing).lower()}")
    model = nano_model(cfg).train()
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.attention = plain_attention
    view = volumes(cfg, 2)
    context, target = token_ids(cfg, 2)
    with FlopCounterMode(display=False) as counter:
        out = model(view, view, context, target, torch.ones(2, model.encoder.num_tokens))
        loss_B = out.loss_B if out.neighbour_B is None else out.loss_B + out.neighbour_B
        loss_B.sum().backward()
    counts = (model, context.shape[1], target.shape[1])
    expected = step_flops(*counts) + (recomputed_flops(*counts) if recomputing else 0)
    assert counter.get_total_flops() == 2 * expected
