"""The step benchmark: the reference computes our loss, numbers have names, an unfair one is reported."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.train_step import cli as train_step
from benchmarks.train_step.reference_vjepa2 import ReferenceVJEPA2
from data_setup.normalisation import view
from models.vit3d import SIZES, Size
from pretraining.step import Update
from utils.config.schema import Config
from utils.runtime.single import Runtime

KEYS = {"ours_s", "reference_s", "ratio", "loss_diff", "flops", "matmul_flops_per_s", "utilisation"}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same benchmark at a size that takes no time."""
    real = train_step.configure
    monkeypatch.setitem(SIZES, "ti", Size(2, 48, 2))

    def configure(*overrides: str) -> Config:
        return real(
            *overrides, "model.size=ti", "spatial.image_size=[8,32,32]", "spatial.patch_size=[4,8,8]",
            "method.predictor_width=64", "method.predictor_depth=2",
        )  # fmt: skip

    monkeypatch.setattr(train_step, "configure", configure)


@pytest.mark.usefixtures("small")
def test_the_reference_has_our_loss_and_our_gradients() -> None:
    cfg = train_step.small_volume(use_bf16=False)
    model, _, batch = train_step.build(cfg)
    model.encoder.rope = model.target_encoder.rope = model.predictor.rope = "tiled"
    reference = ReferenceVJEPA2(model)
    context_view, target_view = view(batch, 0), view(batch, 1)
    ours = model(context_view, target_view, batch["context"], batch["target"], batch["token_valid"])
    theirs = reference(context_view, target_view, batch["context"], batch["target"])
    ours.loss_B.mean().backward()
    theirs.backward()
    torch.testing.assert_close(ours.loss_B.mean(), theirs)
    for name in ("encoder.blocks.0.mlp.fc1.weight", "predictor.predictor_blocks.1.attn.proj.weight"):
        other = (
            name.replace("predictor_blocks", "layer").replace("blocks", "layer").replace("attn", "attention")
        )
        torch.testing.assert_close(model.get_parameter(name).grad, reference.get_parameter(other).grad)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("floor", "code"), [(0.0, 0), (1e9, 1)])
def test_numbers_are_written_and_an_unfair_reference_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, floor: float, code: int
) -> None:
    monkeypatch.setattr(train_step, "FAIR_REFERENCE", {"bf16": floor, "float32": floor})
    monkeypatch.setattr(train_step, "matmul_peak", lambda dtype, shapes: 1e11)
    path = tmp_path / "numbers.json"
    assert train_step.main(["--rows", "bf16,float32", "--json", str(path)]) == code
    result = json.loads(path.read_text())
    assert set(result) == {"bf16", "float32"}
    for row in result.values():
        assert KEYS | {"reference_utilisation"} <= set(row)
        assert row["ratio"] == pytest.approx(row["ours_s"] / row["reference_s"])
        rate = row["flops"] / row["ours_s"]
        assert row["utilisation"] == pytest.approx(rate / row["matmul_flops_per_s"])
    assert result["float32"]["loss_diff"] < 1e-5


@pytest.mark.usefixtures("small")
def test_the_encoder_is_timed_inside_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward plus backward of the context encoder alone: less than the step, and with more tokens dearer."""
    real = train_step.large_volume

    def large_volume(recipe: str) -> Config:
        return replace(real(recipe), train=replace(real(recipe).train, use_bf16=False))

    monkeypatch.setattr(train_step, "large_volume", large_volume)
    monkeypatch.setattr(train_step.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="4\n"))
    row = train_step.visible_against_dense(5)
    assert 0 < row["encoder_visible_s"] < row["vjepa2_s"]
    assert 0 < row["encoder_all_s"] < row["dense_s"]
    assert 0.2 < row["encoder_flop_ratio"] < 0.5
    assert row["memory_ratio"] == 1


@pytest.mark.usefixtures("small")
def test_the_encoder_clock_excludes_everything_else() -> None:
    cfg = train_step.small_volume(use_bf16=False)
    model, optimizer, batch = train_step.build(cfg)
    clock = train_step.EncoderClock(model)
    slow = 0.3
    model.predictor.register_forward_pre_hook(lambda *_: time.sleep(slow))
    model.target_encoder.register_forward_pre_hook(lambda *_: time.sleep(slow))
    runtime = Runtime(torch.device("cpu"), use_bf16=False)
    train_step.train_step(model, optimizer, [batch], cfg, runtime, Update(0, 1e-4, 0.999))
    clock.close_step()
    assert 0 < clock.seconds[0] < slow
    model.encoder.blocks[0].register_forward_pre_hook(lambda *_: time.sleep(slow))
    train_step.train_step(model, optimizer, [batch], cfg, runtime, Update(1, 1e-4, 0.999))
    clock.close_step()
    assert clock.seconds[1] > slow
