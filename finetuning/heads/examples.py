"""Training batches of a labelled cohort: the augmented volumes of data_setup.loader, each with its truth.

In: the training volumes of a cohort. Out: for every step this process's micro-batches, each a `Batch` with
`truth` and `weight` [B, T]. The order is that of pre-training, so world size, accumulation and workers change
nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch

from data_setup.loader import Batch, Loader
from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import TRAIN, Cohort
from finetuning.heads.objective import row_weights, target_scale
from utils.config.load import accumulation_steps
from utils.config.schema import Config
from utils.runtime.single import Runtime

# what an update reads of a batch; masks stay behind
FIELDS = (
    *("volume", "matrix", "valid_box", "mean", "std", "intensity", "noise_seed"),
    *("sample_seed", "token_valid"),
)


class Examples:
    """The training volumes, and what a prediction of each should be."""

    def __init__(self, cfg: Config, store: PreparedStore, cohort: Cohort) -> None:
        chosen = cohort.fold == TRAIN
        self.cfg, self.store, self.rows = cfg, store, cohort.rows[chosen]
        self.centre, self.spread = target_scale(cohort)
        truth = (cohort.target[chosen] - self.centre) / self.spread
        self.truth = torch.from_numpy(truth).float()
        weight = row_weights(
            cohort.kind, cohort.target[chosen], cohort.person[chosen], cfg.finetune.class_weights
        )
        self.weight = torch.from_numpy(weight).float()
        self.place_of = {int(row): place for place, row in enumerate(self.rows)}

    def __len__(self) -> int:
        return len(self.rows)

    def with_settings(self, cfg: Config) -> Examples:
        """The same volumes and truth, read as this configuration says."""
        other = copy.copy(self)
        other.cfg = cfg
        return other

    def batches(self, runtime: Runtime, start: int, total: int) -> tuple[Loader, Iterator[list[Batch]]]:
        """The loader of steps start..total, and for each this process's micro-batches on the host."""
        loader = Loader(
            self.cfg,
            self.store,
            self.rows,
            rank=runtime.rank,
            world=runtime.world_size,
            accum=accumulation_steps(self.cfg.train, runtime.num_devices),
            start_step=start,
            num_steps=total - start,
        )
        return loader, ([self.labelled(batch) for batch in step] for step in loader)

    def labelled(self, batch: Batch) -> Batch:
        """What an update reads of a batch, with truth and weight of its volumes."""
        places = [self.place_of[row] for row in batch["row"].tolist()]
        return {name: batch[name] for name in FIELDS} | {
            "truth": self.truth[places],
            "weight": self.weight[places],
        }
