"""Activation checkpointing: the same loss and gradients, with fewer activations kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.vjepa3d import VJEPA3D
from pretraining.step import Update, build_optimizer, predict, train_step
from tests.support.model_factory import nano_model, small_config, uint8_batch
from utils.config.schema import Config
from utils.runtime.single import Runtime

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
@pytest.mark.parametrize("recipe", ["vjepa2", "methods", "mae"])
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
