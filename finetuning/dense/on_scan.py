"""Labels and predictions on the scan's own voxels: what is measured when a head is evaluated.

In: volumes with labels on the grid of a store, predictions on that grid. Out: `OnScan`: the same volumes,
whose labels are those of the files, over the scan's B-scans, rows and A-scans, in the store's order; and
predictions brought there. Where the grid does not reach, the labels are as if unknown. Files that cannot be
reached, or have changed since they were laid on the volumes, are named by UserError: then the grid is what
can be measured on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from data_setup.attach import flow, heights, labels
from data_setup.attach.grid import at_scan, lay_on_scan, means_on_scan
from data_setup.attach.jobs import Job
from data_setup.attach.stored import OF_LABELS, Stored, StoredFlow, StoredHeights, StoredLabels
from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import EVALUATED
from finetuning.dense.folds import DenseVolumes
from finetuning.dense.whole import Lattice, classes_at
from utils import storage
from utils.config.schema import Config
from utils.errors import UserError

Volumes = TypeVar("Volumes", bound=DenseVolumes)


def _jobs(cfg: Config, store: PreparedStore, stored: Stored) -> Sequence[Job]:
    """The files of a kind of labels, as their manifest names them; raises UserError, StorageError."""
    if isinstance(stored, StoredFlow):
        return flow.read_jobs(cfg, store)[0]
    if isinstance(stored, StoredHeights) and stored.source != OF_LABELS:
        return heights.read_jobs(cfg, store)[0]
    kind = labels.VolumeJob if isinstance(stored, StoredLabels) else labels.SurfaceJob
    return [job for job in labels.read_jobs(cfg, store)[0] if isinstance(job, kind)]


@dataclass(frozen=True)
class OnScan(Generic[Volumes]):
    """Evaluated volumes with the labels of their files."""

    on_grid: Volumes
    jobs: Mapping[int, Job]
    laid: Stored

    @classmethod
    def open(cls, cfg: Config, volumes: Volumes) -> OnScan[Volumes]:
        """Raises UserError naming the first file that is not as it was when it was laid on its volume."""
        stored = next(part for part in vars(volumes).values() if isinstance(part, Stored))
        try:
            jobs = {job.row: job for job in _jobs(cfg, volumes.store, stored)}
        except storage.StorageError as error:
            raise UserError(str(error)) from error
        for row in map(int, volumes.of(EVALUATED)):
            path = stored.index.path[row]
            if row not in jobs:
                raise UserError(f"{path}: expected a line of the manifest that names it, found none")
            if not jobs[row].is_done(stored.index.loc[row].to_dict()):
                expected = f"the file as data_setup.prepare --{stored.KIND.name} laid it on its volume"
                raise UserError(f"{path}: expected {expected}, found none or another")
        return cls(volumes, jobs, stored)

    @property
    def volumes(self) -> Volumes:
        """With the labels of the files."""
        return replace(self.on_grid, read_original=self.read)

    def read(self, row: int) -> tuple[np.ndarray, tuple[str, ...]]:
        """Labels at the scan's voxels, and their names; raises OCTReadError, StorageError."""
        values, names = self.jobs[row].of_scan(self.laid.index.loc[row].to_dict())
        is_map = self.on_grid.axes == "dw"
        return at_scan(values, self.on_grid.store.index.loc[row]) if is_map else values, names

    def bring(
        self, row: int, predicted: np.ndarray, outputs: Callable[[int], Iterator[Tensor]] | None
    ) -> np.ndarray:
        """What is predicted on a row's grid, at the scan's voxels; classes from a decoder's `outputs`."""
        store, box = self.on_grid.store, self.on_grid.field(row)
        geometry, record = store.attrs["geometry"], store.index.loc[row].to_dict() | {"flipped_d": False}
        if isinstance(self.laid, StoredHeights):
            return lay_on_scan(_extended(predicted, box), record, geometry)
        if isinstance(self.laid, StoredFlow):
            return means_on_scan(_extended(predicted, box), record, geometry).astype(np.float32)
        if outputs is not None:
            parts = [rearrange(part, "b s d h w -> s (b d) h w").cpu() for part in outputs(row)]
            whole = torch.cat(parts, dim=1)
        else:
            whole = F.one_hot(torch.from_numpy(predicted).long()).movedim(-1, 0).float().log()
        whole = torch.from_numpy(_extended(whole.numpy(), box))
        (d, h, w), spacing, target = (
            tuple(record[f"{name}_{axis}"] for axis in "dhw")
            for name in ("shape_before", "spacing_before", "spacing_after")
        )
        return classes_at(
            whole, Lattice((int(d), int(h), int(w)), spacing, store.image_size, target, store.planes)
        )


def _extended(values: np.ndarray, box: tuple[slice, ...]) -> np.ndarray:
    """Values [S, *axes of the grid] whose last ones in the field go on outside it, where no scan was seen."""
    axes = values.shape[1:]
    around = [(part.start, size - part.stop) for part, size in zip(box, axes, strict=True)]
    return np.pad(values[(slice(None), *box)], [(0, 0), *around], mode="edge")
