"""Batches for measurements: noise volumes and tokens, in the form that the loader gives."""

from __future__ import annotations

import math

import numpy as np
import torch

from data_setup.loader import Batch
from data_setup.masks import MaskPlan
from utils.config.schema import Config


def synthetic_batch(cfg: Config, seed: int) -> Batch:
    """Noise volumes without padding and random tokens, in the form that the loader gives."""
    rng = np.random.RandomState(seed)
    batch, size = cfg.train.global_batch_size, cfg.spatial.image_size
    tokens = math.prod(cfg.grid)
    order = torch.from_numpy(np.stack([rng.permutation(tokens) for _ in range(batch)]))
    plan = MaskPlan.from_config(cfg)
    if plan.families is None:  # methods: all tokens are read
        context, target = order.sort(dim=1).values, order[:, : plan.num_target]
    else:
        context, target, _ = order.tensor_split((plan.num_context, plan.num_context + plan.num_target), dim=1)
    box = torch.tensor([0, size[0], 0, size[1], 0, size[2]]).float()
    return {
        "volume": torch.from_numpy(rng.randint(0, 256, (batch, *size), dtype=np.uint8)),
        "matrix": torch.eye(3, 4).expand(batch, -1, -1),
        "valid_box": box.expand(batch, -1),
        "mean": torch.full((batch,), 127.5),
        "std": torch.full((batch,), 74.0),
        "intensity": torch.tensor([1.1, 0.9, 0.05]).expand(batch, 2, 3),
        "noise_seed": torch.arange(2 * batch).view(batch, 2),
        "sample_seed": torch.arange(batch),
        "context": context,
        "target": target,
        "context_valid": torch.ones(context.shape),
        "target_valid": torch.ones(target.shape),
        "token_valid": torch.ones(batch, tokens, dtype=torch.bool),
        "row": torch.arange(batch),
        "position": torch.arange(batch),
    }
