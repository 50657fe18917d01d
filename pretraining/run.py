"""What travels together through a run: configuration, rows of the store, model, optimizer and engine.

In: a checked configuration and the runtime. Out: a `Run`, built in the order that random numbers demand.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from data_setup.manifest import load_labels, select_wanted, unit_of
from data_setup.store.reader import PreparedStore
from data_setup.store.summary import require_apart
from data_setup.tables.splits import EXACT, VAL_FRACTION, pretraining_split
from models.engine_kernels import choose_kernels
from models.vjepa3d import VJEPA3D
from models.weights.load import prefix_of_start
from models.weights.shape import blocks_of
from pretraining.step import build_optimizer
from utils.config.load import accumulation_steps
from utils.config.schema import Config
from utils.errors import UserError
from utils.report.health import SKILL_PEOPLE, SKILL_VOLUMES, without_skill
from utils.run.calendar import total_steps
from utils.runtime.single import Runtime

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rows:
    """Store rows of one run, and what the probe needs to know about them."""

    train: np.ndarray
    val: np.ndarray
    official_val: np.ndarray
    label_of_row: dict[int, str]  # rows without a label are absent
    person_of_row: dict[int, str]

    @property
    def participants(self) -> set[str]:
        """Everybody whose volumes train or validate."""
        return {self.person_of_row[int(r)] for r in [*self.train, *self.val]}


def open_rows(cfg: Config, store: PreparedStore) -> Rows:
    """Split the kept rows by participant; raises UserError when nothing is left to train on."""
    index = store.index.loc[store.kept]
    index = index[index["listed"]]  # what left the manifest keeps its row, and is not trained on
    require_apart(store.url, store.index)
    # split before filtering: runs on one device and on all of them validate on the same people
    rule = store.attrs.get("splits", EXACT)  # a store from before the hash has no such attribute
    people = list(index.drop_duplicates("person_id", keep="last").itertuples())
    train_ids, val_ids, source = pretraining_split(people, VAL_FRACTION, cfg.seed, rule)
    index = select_wanted(cfg, index)
    person = index["person_id"]
    labels = load_labels(cfg)
    eyes = zip(person.items(), index["laterality"], strict=True)
    units = {int(r): unit_of(cfg, p, eye) for (r, p), eye in eyes}
    rows = Rows(
        train=index.index[person.isin(train_ids)].to_numpy(),
        val=index.index[person.isin(val_ids)].to_numpy(),
        official_val=index.index[index["split"] == "val"].to_numpy(),
        label_of_row={r: labels[unit] for r, unit in units.items() if unit in labels},
        person_of_row={int(r): p for r, p in person.items()},
    )
    for name, side_rows in (("training", rows.train), ("validation", rows.val)):
        if len(side_rows) == 0:
            raise UserError(
                f"{cfg.data.store}: expected {name} volumes, found none among {len(index)} kept rows"
            )
    log.info(
        "%d volumes of %d participants to train on, %d of %d to validate (%s)",
        len(rows.train), len(train_ids), len(rows.val), len(val_ids), source,
    )  # fmt: skip
    if (num_val := min(len(rows.val), cfg.val.max_volumes)) < SKILL_VOLUMES or len(val_ids) < SKILL_PEOPLE:
        log.warning("%s", without_skill(num_val))
    return rows


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
