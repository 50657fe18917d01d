"""A frozen encoder from a checkpoint, and features of prepared volumes: the encoder's and the baselines'.

In: a configuration, a checkpoint of pretraining.train, rows of the prepared store. Out: an encoder in
evaluation mode; float32 `[n, F]` features, one row per volume. Normalisation and pooling
(models.probes.features) are those of pre-training.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_setup.loader import EVALUATION_BATCH, evaluation_batches
from data_setup.normalisation import plain_view
from data_setup.store.reader import PreparedStore
from data_setup.transforms import voxel_valid
from finetuning.cohort.source import require_pretraining
from models.vit3d import VisionTransformer3D
from models.vjepa3d import build_encoder
from models.weights.shape import num_prefix_of, with_features
from utils.checkpoint import CheckpointError
from utils.config.schema import Config
from utils.runtime.single import Runtime
from utils.terminal import track

BASELINE_VOXELS = (16, 48, 32)  # raw volumes are averaged down to at most this before their PCA
NAMED_KEYS = 3  # of each kind, in the error about weights that do not fit


def pretrained_encoder(cfg: Config, state: dict[str, Any], url: str) -> VisionTransformer3D:
    """The target (EMA) encoder of a loaded checkpoint; raises CheckpointError for weights that do not fit."""
    require_pretraining(state, url)
    prefix = "target_encoder."
    weights = {k.removeprefix(prefix): v for k, v in state["model"].items() if k.startswith(prefix)}
    encoder = build_encoder(cfg, num_prefix_of(weights))
    load_strictly(encoder, weights, f"{url}: weights of model.size {cfg.model.size}")
    return with_features(encoder, cfg.model.feature_blocks).eval().requires_grad_(False)


def load_strictly(module: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Load all weights; raises CheckpointError that names the first keys that differ, and how."""
    own = module.state_dict()
    differences = {
        "lacks": [key for key in own if key not in weights],
        "has in excess": [key for key in weights if key not in own],
        "has in another shape": [
            f"{key} ({list(weights[key].shape)} for {list(value.shape)})"
            for key, value in own.items()
            if key in weights and weights[key].shape != value.shape
        ],
    }
    texts = [
        f"{verb} {len(keys)}: {', '.join(keys[:NAMED_KEYS])}{', ...' if len(keys) > NAMED_KEYS else ''}"
        for verb, keys in differences.items()
        if keys
    ]
    if texts:
        raise CheckpointError(
            f"{where}: expected the {len(own)} tensors of the model; the file {'; '.join(texts)}"
        )
    module.load_state_dict(weights, strict=True)


def random_encoder(cfg: Config, seed: int) -> VisionTransformer3D:
    """A randomly initialised encoder; cfg.seed gives the one that pre-training starts from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return with_features(build_encoder(cfg), cfg.model.feature_blocks).eval().requires_grad_(False)


def raw_features(
    cfg: Config, store: PreparedStore, rows: np.ndarray, runtime: Runtime
) -> tuple[np.ndarray, np.ndarray]:
    """Baselines without an encoder: averaged voxels [n, V], mean A-scan over valid voxels [n, H]."""
    d, h, w = (min(a, b) for a, b in zip(cfg.spatial.image_size, BASELINE_VOXELS, strict=True))
    voxels, profiles = [], []
    batches = evaluation_batches(cfg, store, rows, EVALUATION_BATCH)
    total = math.ceil(len(rows) / EVALUATION_BATCH)
    for batch in map(runtime.to_device, track(batches, total, "raw voxels", "batches")):
        view = plain_view(batch)
        inside = voxel_valid(batch["matrix"], batch["valid_box"], cfg.spatial.image_size)
        voxels.append(F.adaptive_avg_pool3d(view, (d, h, w)).flatten(1).cpu())
        count_BH = inside.sum(dim=(1, 3)).clamp(min=1)
        profiles.append((view[:, 0].sum(dim=(1, 3)) / count_BH).cpu())
    return torch.cat(voxels).numpy(), torch.cat(profiles).numpy()


def device_features(store: PreparedStore, rows: np.ndarray, known_rows: np.ndarray) -> np.ndarray:
    """One-hot device of every row [n, devices]; a device that is not among `known_rows` is all zeros."""
    device = store.index["device"].fillna("unknown")
    known = sorted(set(device.loc[known_rows]))
    return (device.loc[rows].to_numpy()[:, None] == np.array(known)[None]).astype(np.float32)
