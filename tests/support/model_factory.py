"""Small models and batches for tests of models and training."""

from pathlib import Path

import torch
from torch import Tensor

from benchmarks.evidence.arms import JEPA
from data_setup.transforms import token_valid
from models import vit3d
from models.vjepa3d import VJEPA3D
from utils.config.load import load_config
from utils.config.recipes import RECIPES
from utils.config.schema import Config

ROOT = Path(__file__).resolve().parents[2]
# a size for tests alone; the configuration cannot name it
vit3d.SIZES.setdefault("nano", vit3d.Size(2, 48, 2))


# `vjepa2` with more to predict
VARIANTS = {"neighbour": ("method.neighbour_weight=1",)}


def small_config(recipe: str = "vjepa2", *overrides: str) -> Config:
    """Grid 2 x 3 x 4, patch 4 x 8 x 8; `recipe` may be one of VARIANTS."""
    base = [*(() if recipe == "surroundings" else JEPA), "method.predictor_width=64"]
    base += ["train.global_batch_size=16", "train.per_core_batch_size=16", "train.max_steps=200"]
    base += ["optim.base_lr=5e-4", "optim.warmup_ratio=0.1", "optim.cooldown_ratio=0.3"]
    base += ["optim.min_lr_ratio=0.01", "method.regulariser=vicreg", "method.regulariser_weight=0.05"]
    # golden losses are older than the shipped rotary form
    base += ["method.neighbour_weight=0", "model.rope=interleaved", "spatial.image_size=[8,24,32]"]
    if recipe in RECIPES:
        base += [f"method.recipe={recipe}"]
    if recipe == "methods":
        base += ["method.mask_ratio=0.5", "method.ema_base=0.9"]
        base += ["method.regulariser=none", "method.regulariser_weight=0"]
    if recipe in ("mae", "surroundings"):
        base += ["method.regulariser=none", "method.regulariser_weight=0"]
    base += VARIANTS.get(recipe, ())
    return load_config(ROOT / "configs" / "smoke_test.yaml", [*base, *overrides])


def nano_model(cfg: Config, seed: int = 0) -> VJEPA3D:
    """A model of width 48 and depth 2."""
    torch.manual_seed(seed)
    object.__setattr__(cfg.model, "size", "nano")
    return VJEPA3D(cfg)


def token_ids(cfg: Config, batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Context [B, K] and target [B, M] ids: disjoint for vjepa2 and mae, all and half for methods, all for
    surroundings.
    """
    generator = torch.Generator().manual_seed(seed)
    n = cfg.grid[0] * cfg.grid[1] * cfg.grid[2]
    order = torch.stack([torch.randperm(n, generator=generator) for _ in range(batch)])
    if cfg.method.recipe == "methods":
        return torch.arange(n).expand(batch, -1).clone(), order[:, : n // 2]
    if cfg.method.recipe == "surroundings":
        return (torch.arange(n).expand(batch, -1).clone(),) * 2
    return order[:, : n * 4 // 10], order[:, n // 2 : n // 2 + n * 3 // 10]


def volumes(cfg: Config, batch: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, 1, *cfg.spatial.image_size, generator=torch.Generator().manual_seed(seed))


def uint8_batch(cfg: Config, batch: int, seed: int = 0) -> dict[str, Tensor]:
    """What the loader gives: volumes whose last A-scans are padding, neutral geometry, drawn intensities."""
    generator = torch.Generator().manual_seed(seed)
    size = cfg.spatial.image_size
    context, target = token_ids(cfg, batch, seed)
    eye = torch.eye(3, 4).expand(batch, -1, -1).clone()
    edge = size[2] - cfg.spatial.patch_size[2]
    box = torch.tensor([0, size[0], 0, size[1], 0, edge]).float().expand(batch, -1).clone()
    valid = token_valid(eye, box, cfg.grid, cfg.spatial.patch_size)
    intensity = torch.tensor([1.0, 1.0, 0.0]).expand(batch, 2, 3).clone()
    intensity[:, :, 2] = 0.1
    return {
        "volume": torch.randint(0, 256, (batch, *size), dtype=torch.uint8, generator=generator),
        "matrix": eye,
        "valid_box": box,
        "mean": torch.full((batch,), 127.5),
        "std": torch.full((batch,), 74.0),
        "intensity": intensity,
        "noise_seed": torch.arange(2 * batch).view(batch, 2) + 1000 * seed,
        "sample_seed": torch.arange(batch) + 17 * seed,
        "context": context,
        "target": target,
        "context_valid": valid.gather(1, context).float(),
        "target_valid": valid.gather(1, target).float(),
        "token_valid": valid,
        "row": torch.arange(batch),
        "position": torch.arange(batch),
    }
