"""Parameter sharding (`train.shard_parameters`): every device holds its part of what an update moves.

In: a model with its optimizer, and the runtime. Out: the same, with its matrices, those of the target encoder
and their moments spread over the devices. Same numbers and same checkpoints; less memory on each device for
more traffic between them. Only PyTorch/XLA with several devices has anything to spread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.vjepa3d import VJEPA3D
from pretraining.optimizer import MOMENTS
from utils.config.schema import Config
from utils.runtime.single import Runtime


def shard_state(model: VJEPA3D, optimizer: torch.optim.AdamW, cfg: Config, runtime: Runtime) -> None:
    """Spread weights, target and moments where the configuration asks for it; once more after a load."""
    if not cfg.train.shard_parameters:
        return
    values: list[Tensor] = list(model.parameters())
    values += [state[name] for state in optimizer.state.values() for name in MOMENTS[1:]]
    runtime.shard(values)
