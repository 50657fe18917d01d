"""What travels together through a run: its configuration, volumes, model, optimizer and engine.

In: a checked configuration and the runtime. Out: a `Run`, built in the order that random numbers demand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from data_setup.store.reader import PreparedStore
from models.engine_kernels import choose_kernels
from models.vjepa3d import VJEPA3D
from models.weights.load import prefix_of_start
from models.weights.shape import blocks_of
from pretraining.rows import Rows, open_rows
from pretraining.step import build_optimizer
from utils.config.load import accumulation_steps
from utils.config.schema import Config
from utils.run.calendar import total_steps
from utils.runtime.single import Runtime


@dataclass(frozen=True)
class Run:
    """One training run on this process."""

    cfg: Config
    store: PreparedStore
    rows: Rows
    model: VJEPA3D
    optimizer: torch.optim.AdamW
    runtime: Runtime

    @property
    def is_synthetic(self) -> bool:
        """Whether no person's eye is in the store."""
        return bool(self.store.attrs["synthetic"])

    @property
    def total_steps(self) -> int:
        """The updates of the whole run."""
        return total_steps(self.cfg, len(self.rows.train))


def open_run(cfg: Config, runtime: Runtime) -> Run:
    """A run at its random initialisation; raises UserError where store, rows and configuration disagree."""
    accumulation_steps(cfg.train, runtime.num_devices)
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    store.require_geometry(cfg.spatial)
    rows = open_rows(cfg, store)
    # the first process reads for all: weights and checkpoints may be on its disk alone
    num_prefix = runtime.group.broadcast(prefix_of_start(cfg) if runtime.group.is_first else 0)
    torch.manual_seed(cfg.seed)
    model = VJEPA3D(cfg, num_prefix).to(runtime.device).train()
    blocks_of(model.encoder.depth, cfg.model.feature_blocks)  # which the probes read
    choose_kernels(model, cfg, runtime)
    return Run(cfg, store, rows, model, build_optimizer(model, cfg), runtime)
