"""Files of weights, V-JEPA 2's and ours; the configuration that fits them; one line of an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import VJEPA2Model

from benchmarks.evidence.arms import VJEPA2
from data_setup.resample import NEAREST
from data_setup.store.format import NORMALISATION as STORE_NORMALISATION
from models.predictor import Predictor3D
from models.vit3d import VisionTransformer3D
from models.vjepa3d import VJEPA3D
from models.weights.__main__ import main
from models.weights.files import read_weights
from models.weights.shape import ROLES, new_encoder, new_predictor
from tests.support.pipeline_factory import SMOKE
from tests.support.vjepa2_oracle import hf_tensors, research_names
from utils.checkpoint import CheckpointWriter
from utils.cli import run_cli
from utils.config.load import load_config, to_yaml
from utils.config.schema import Config

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
NO_PENALTY = ["method.regulariser=none", "method.regulariser_weight=0"]
METHODS = ["method.recipe=methods", "method.mask_ratio=0.5", "method.ema_base=0.9", *NO_PENALTY]
MAE = ["method.recipe=mae", *NO_PENALTY]


def research_file(path: Path, context: VJEPA2Model, target: VJEPA2Model, **changes: Any) -> Path:
    """What V-JEPA 2's code saves: wrapped names, legacy tables, training state."""
    encoder, predictor = research_names(hf_tensors(context, lambda p: p.detach().clone()))
    target_encoder, _ = research_names(hf_tensors(target, lambda p: p.detach().clone()))
    encoder["pos_embed"] = target_encoder["pos_embed"] = torch.zeros(1, 18, encoder["norm.weight"].numel())
    predictor["predictor_pos_embed"] = torch.zeros(1, 18, predictor["predictor_norm.weight"].numel())
    parts: dict[str, Any] = {
        name: {f"module.backbone.{k}": v for k, v in tensors.items()}
        for name, tensors in (
            ("encoder", encoder),
            ("predictor", predictor),
            ("target_encoder", target_encoder),
        )
    }
    state = {"opt": {"state": {0: torch.zeros(3)}}, "scaler": None, "epoch": 3, "loss": 0.5, "lr": 1e-4}
    state |= {"batch_size": 24, "world_size": 128}
    content = {k: v for k, v in {**parts, **state, **changes}.items() if v != "absent"}
    torch.save(content, path)
    return path


def modules(path: Path, **heads: int) -> tuple[VisionTransformer3D, VisionTransformer3D, Predictor3D]:
    """(encoder, target_encoder, predictor) of the file's shape, for volumes of 4 x 12 x 12."""
    weights = read_weights(str(path), **heads)
    both = new_encoder(weights), new_encoder(weights), new_predictor(weights)
    for module, tensors in zip(both, (weights.role(role) for role in ROLES), strict=True):
        module.load_state_dict(tensors)
        module.grid = (2, 3, 3)
    for encoder in both[:2]:
        encoder.num_tokens = 18
    return both


def config(*overrides: str, path: Path = SMOKE) -> Config:
    """Grid 2 x 4 x 4 of patches 4 x 8 x 8, which `tiny` fits."""
    base = ["spatial.image_size=[8,32,32]", "spatial.patch_size=[4,8,8]", "model.size=ti"]
    base += [*(VJEPA2 if path == SMOKE else ()), "method.predictor_width=64", "method.predictor_depth=2"]
    base += ["method.neighbour_weight=0"]
    return load_config(path, [*base, *overrides])


def volume(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def own_checkpoint(folder: Path, cfg: Config, num_prefix: int = 0, **changes: Any) -> Path:
    """A run's checkpoint, as pretraining writes it but for what only training reads."""
    torch.manual_seed(5)
    model = VJEPA3D(cfg, num_prefix)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape), alpha=0.05)
    state = {
        "step": 7,
        "model": model.state_dict(),
        "config": to_yaml(cfg),
        "recipe": cfg.method.recipe,
        "normalisation": STORE_NORMALISATION,
        "planes": NEAREST,
        "participants": ["1001", "1002"],
        "progress": {"init_weight": 0.25},
    }
    writer = CheckpointWriter(str(folder), 1)
    writer.save({**state, **changes}, ["best_probe"])
    writer.close()
    return folder / "best_probe.pt"


def exit_line(command: list[str], capsys: pytest.CaptureFixture) -> str:
    """The one line of a command that ends with code 2."""
    capsys.readouterr()  # what was printed before
    with pytest.raises(SystemExit) as stop:
        run_cli(lambda: main(command))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error
