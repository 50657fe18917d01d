"""Targets of random features: which voxels they see, over what they are standardised, and what teaches."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.surroundings import FEATURES, PLACES, SurroundingTargets
from pretraining.step import Update, build_optimizer, train_step
from tests.support.model_factory import nano_model, small_config, uint8_batch
from utils.runtime.single import Runtime

PATCH = (2, 4, 4)
GRID = (2, 9, 5)
VIEW = tuple(n * p for n, p in zip(GRID, PATCH, strict=True))


def seen_by_hand(view: Tensor, module: SurroundingTargets) -> Tensor:
    """What the filters see of each token [D, H, W, FEATURES], a token at a time and without a convolution."""
    padded, seen = F.pad(view, (4, 4, 4, 4)), torch.empty(*GRID, FEATURES)
    for d, h, w in torch.cartesian_prod(*map(torch.arange, GRID)).tolist():
        around = padded[2 * d : 2 * d + 2, 4 * h : 4 * h + 12, 4 * w : 4 * w + 12]
        seen[d, h, w] = ((module.weight[:, 0] * around).sum((1, 2, 3)) + module.bias).relu()
    return seen


def test_a_place_has_what_the_filters_see_there() -> None:
    """Beyond the grid the nearest; tokens outside the scan move no statistic."""
    module, view = SurroundingTargets(PATCH), torch.randn(VIEW, generator=torch.Generator().manual_seed(1))
    valid = torch.rand(GRID, generator=torch.Generator().manual_seed(2)) > 0.3
    targets = module(view[None, None], valid.float().view(1, -1)).view(*GRID, len(PLACES), FEATURES)
    seen = seen_by_hand(view, module)
    for number, (dh, dw) in enumerate(PLACES):
        rows, columns = (torch.arange(9) + dh).clamp(0, 8), (torch.arange(5) + dw).clamp(0, 4)
        there = seen[:, rows][:, :, columns]
        std, mean = torch.std_mean(there[valid], 0, correction=0)
        expected = (there - mean) / (std.square() + 1e-5).sqrt()
        torch.testing.assert_close(targets[:, :, :, number], expected, rtol=1e-3, atol=1e-3)


def test_every_run_has_the_same_filters_whatever_its_seed() -> None:
    torch.manual_seed(1)
    first = SurroundingTargets(PATCH).weight
    torch.manual_seed(2)
    assert torch.equal(first, SurroundingTargets(PATCH).weight)


@pytest.mark.parametrize("control", ["null", "mismatched_targets"])
def test_training_tells_the_surroundings(control: str) -> None:
    """One batch again and again; also those of another volume, which this one's tokens can name."""
    cfg = small_config("surroundings", f"method.control={control}")
    model, runtime = nano_model(cfg).train(), Runtime(torch.device("cpu"), use_bf16=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer, batch = build_optimizer(model, cfg), uint8_batch(cfg, 16)
    losses = [
        float(train_step(model, optimizer, [batch], cfg, runtime, Update(step, 3e-3, 0.9)).loss)
        for step in range(40)
    ]
    assert losses[0] == pytest.approx(1.0, abs=0.1)  # the mean of standardised targets
    assert losses[-1] < 0.8 * losses[0]
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert {"predictor.fc.weight", "predictor.norm.running_mean", "encoder.norm.weight"} <= moved
    assert not [name for name in moved if name.startswith("random_targets.")]
