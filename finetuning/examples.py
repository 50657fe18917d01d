"""Training batches of a labelled cohort: the augmented volumes of data_setup.loader, each with its truth.

In: the training volumes of a cohort. Out: for every step this process's micro-batches, each a `Batch` with
`truth` and `weight` [B, T] and, for mixup (Zhang et al. 2018, arXiv:1710.09412), a partner `Batch` and
`share` [B], the part of the first. The order is that of pre-training, so world size, accumulation and
workers change nothing: a partner is the volume at the same position of another seed's order, and its share
is drawn from (seed, position).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from data_setup.loader import Batch, Loader
from data_setup.store.reader import PreparedStore
from finetuning.cohort import TRAIN, Cohort
from finetuning.objective import row_weights, target_scale
from utils.config.load import accumulation_steps
from utils.config.schema import Config
from utils.runtime.single import Runtime

MIXUP_STREAM = 0x6D6978  # second word of the seeds of mixup: another one than the data order's
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

    def open_loader(self, runtime: Runtime, start: int, total: int, seed: int) -> Loader:
        """Global batches of the steps start..total, this process's share of each."""
        return Loader(
            replace(self.cfg, seed=seed),
            self.store,
            self.rows,
            rank=runtime.rank,
            world=runtime.world_size,
            accum=accumulation_steps(self.cfg.train, runtime.num_devices),
            start_step=start,
            num_steps=total - start,
        )

    def batches(
        self, runtime: Runtime, start: int, total: int
    ) -> tuple[Loader, Iterator[list[tuple[Batch, Batch | None]]]]:
        """The loader, and for every step its micro-batches on the host, with their partners for mixup."""
        loader = self.open_loader(runtime, start, total, self.cfg.seed)
        if self.cfg.finetune.mixup == 0:
            return loader, ([(self.labelled(batch), None) for batch in step] for step in loader)
        seed = int(np.random.SeedSequence([self.cfg.seed, MIXUP_STREAM]).generate_state(1)[0])
        partners = self.open_loader(runtime, start, total, seed)
        return loader, (
            [
                (self.labelled(a) | {"share": self.shares(a)}, self.labelled(b))
                for a, b in zip(*pair, strict=True)
            ]
            for pair in zip(loader, partners, strict=True)
        )

    def labelled(self, batch: Batch) -> Batch:
        """What an update reads of a batch, with truth and weight of its volumes."""
        places = [self.place_of[row] for row in batch["row"].tolist()]
        return {name: batch[name] for name in FIELDS} | {
            "truth": self.truth[places],
            "weight": self.weight[places],
        }

    def shares(self, batch: Batch) -> torch.Tensor:
        """The part of each volume that mixup leaves of it, [B]."""
        alpha = self.cfg.finetune.mixup
        draws = [
            np.random.default_rng([self.cfg.seed, MIXUP_STREAM, position]).beta(alpha, alpha)
            for position in batch["position"].tolist()
        ]
        return torch.tensor(draws, dtype=torch.float32)
