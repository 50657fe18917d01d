"""A run starts from a file of weights, and says what it did not take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data_setup.store.format import NORMALISATION as STORE_NORMALISATION
from models.vjepa3d import VJEPA3D
from models.weights.files import read_weights
from models.weights.load import fit, start_from
from pretraining.train import main as train
from tests.models.weights.weight_files import config, own_checkpoint
from tests.support.pipeline_factory import SMOKE, pipeline_overrides
from utils.checkpoint import CheckpointError, load_checkpoint


def test_a_run_starts_from_them(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = config(f"method.init_from={tiny}")
    model = VJEPA3D(cfg)
    start = start_from(model, cfg, STORE_NORMALISATION)
    assert (start.participants, start.init_weight) == ([], 0.0)
    expected = fit(read_weights(str(tiny)), cfg).tensors
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert not caplog.records or all(record.levelname != "WARNING" for record in caplog.records)

    other = config(f"method.init_from={tiny}", "method.predictor_depth=3")
    model = VJEPA3D(other)
    before = model.predictor.predictor_embed.weight.clone()
    with caplog.at_level("INFO"):
        start_from(model, other, STORE_NORMALISATION)
    for line in fit(read_weights(str(tiny)), other).lines:
        assert (f"{line.status} {line.name}: " in caplog.text) == (line.status != "loaded"), line
    assert torch.equal(model.predictor.predictor_embed.weight, before)
    assert torch.equal(model.encoder.norm.weight, expected["encoder.norm.weight"])
    assert "the predictor starts at random: another shape" in caplog.text

    near = config(f"method.init_from={tiny}", "method.neighbour_weight=1")
    model = VJEPA3D(near)
    assert model.neighbour_head is not None
    before = model.neighbour_head.weight.clone()
    with caplog.at_level("INFO"):
        start_from(model, near, STORE_NORMALISATION)
    assert "missing neighbour_head.weight: random: only pre-training uses it" in caplog.text
    assert torch.equal(model.neighbour_head.weight, before)
    assert torch.equal(model.encoder.norm.weight, expected["encoder.norm.weight"])

    own = own_checkpoint(tmp_path, config())
    cfg = config(f"method.init_from={own}")
    model = VJEPA3D(cfg)
    start = start_from(model, cfg, STORE_NORMALISATION)
    assert (start.participants, start.init_weight) == (["1001", "1002"], 0.25)
    saved = load_checkpoint(str(own))["model"]
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    with pytest.raises(CheckpointError, match="normalisation: expected minmax of the store, found"):
        start_from(model, cfg, "minmax")
    with pytest.raises(CheckpointError, match=r"model\.rope: expected interleaved"):
        start_from(model, config(f"method.init_from={own}", "model.rope=interleaved"), STORE_NORMALISATION)


def test_the_command_starts_from_them(pipeline: Path, tiny: Path, tmp_path: Path) -> None:
    """One update on the phantom: but for the moving average, what the checkpoint has is the file's."""
    words = [f"method.init_from={tiny}", "model.rope=tiled", "optim.base_lr=1e-9", "train.max_steps=1"]
    words += ["method.neighbour_weight=0"]
    words += [f"run.dir={tmp_path / 'run'}", "train.val_every_steps=null"]
    assert train(["--config", str(SMOKE), *pipeline_overrides(pipeline), *words]) == 0
    (kept,) = (tmp_path / "run/checkpoints").glob("step_*.pt")
    expected = fit(read_weights(str(tiny)), config(f"method.init_from={tiny}")).tensors
    model = load_checkpoint(str(kept))["model"]
    for name in (name for name in model if not name.startswith("target_encoder.")):
        torch.testing.assert_close(model[name], expected[name], atol=1e-6, rtol=0)
