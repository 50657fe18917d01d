"""What stands beside a head in the folds: an image model in its encoder's place, a plain 2D U-Net, and a
second grader where the manifest names one.

In: the volumes of a fold. Out: arms, a name and what predicts a row, in the form that a `Kind` measures. Both
see the voxels of the store's grid and learn from the same people as the head. The U-Net (unet.py) learns
classes: those of the labels, or what lies between surfaces, whose heights are then the number of rows above
each: on real eyes better than the expected number, which a little doubt far away moves.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from data_setup.attach.labels import second_graders
from data_setup.loader import EVALUATION_BATCH, StoredSamples, evaluation_batches
from data_setup.normalisation import plain_view
from data_setup.readers.faults import OCTReadError
from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL
from finetuning.cohort.source import Source
from finetuning.dense import unet
from finetuning.dense.evaluation import Arm
from finetuning.dense.folds import DenseVolumes
from finetuning.dense.head import GRADER, IMAGE, UNET
from finetuning.dense.kind import Kind
from finetuning.dense.segmentation import likeliest
from finetuning.dense.training import Training, train_arm
from finetuning.features.kept import KeptFeatures, features_folder
from finetuning.features.slices import SliceEncoder
from utils import storage
from utils.config.schema import Config
from utils.run.log import log_anew
from utils.runtime.single import Runtime, StopRequested
from utils.terminal import track

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptSlices(KeptFeatures):
    """Kept tokens of an image model, each B-scan seen alone."""

    image: SliceEncoder | None = None

    @cached_property
    def url(self) -> str:
        assert self.image is not None
        about = f"{self.image.digest()} {self.cfg.grid} {self.store.attrs['geometry']}"
        return f"{features_folder(self.cfg)}/{hashlib.sha256(about.encode()).hexdigest()[:32]}"

    @cached_property
    def feature_width(self) -> int:
        return int(self.tokens(self.store.kept[:1]).shape[-1])

    def compute(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, Tensor, Tensor]]:
        assert self.image is not None
        batches = evaluation_batches(self.cfg, self.store, rows, EVALUATION_BATCH)
        for batch in track(batches, math.ceil(len(rows) / EVALUATION_BATCH), "image model", "batches"):
            tokens = self.image.tokens(batch["volume"], self.cfg.grid, self.runtime)
            yield batch["row"].numpy().copy(), tokens.float(), batch["context_valid"]


def on_image_model(
    kind: Kind[Any], source: Source, volumes: DenseVolumes, runtime: Runtime, image: SliceEncoder
) -> Arm:
    """The head's decoder on the image model's tokens, which do not move; trained as that of the head."""
    cfg = replace(source.cfg, finetune=replace(source.cfg.finetune, encoder="frozen"))
    kept = KeptSlices(image.model, cfg, volumes.store, runtime, image)
    training = Training.of(kind, replace(source, cfg=cfg), volumes, runtime)
    with log_anew(cfg, cfg.train.max_steps or 0, synthetic=bool(volumes.store.attrs["synthetic"])) as run_log:
        trained = train_arm(IMAGE, training, run_log, encoder=kept)
    assert trained.best.weights is not None
    kept.keep_tokens(np.unique(volumes.of(EVALUATED)))
    planes = kind.planes(cfg, kept, volumes, runtime.device)
    decoder = trained.best.weights[1]
    return IMAGE, partial(planes.predict, decoder), partial(planes.outputs, decoder)


def plain_unet(kind: Kind[Any], seed: int, volumes: DenseVolumes, runtime: Runtime, seconds: float) -> Arm:
    """A U-Net that had so many seconds of the processor."""
    classes_of, predicted_of = CLASSES[kind.name]
    samples = StoredSamples(volumes.store, np.unique(volumes.rows))

    def scans(row: int) -> Tensor:
        return plain_view(default_collate([samples[row]]))[0, 0]

    def learnt(fold: int) -> tuple[Tensor, Tensor]:
        pairs = [
            (scans(row), torch.from_numpy(classes_of(volumes, row))) for row in map(int, volumes.of(fold))
        ]
        x, truth = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        known = (truth != unet.IGNORED).flatten(1).any(dim=1)
        return x[known].to(runtime.device), truth[known].to(runtime.device)

    def go_on() -> None:
        if runtime.stop_requested:
            raise StopRequested

    num_classes = len(volumes.names) + 1
    with torch.random.fork_rng(devices=[runtime.device] if runtime.device.type == "cuda" else []):
        net = unet.train(learnt(TRAIN), learnt(VAL), num_classes, seconds, seed, go_on)

    @torch.no_grad()
    def outputs(row: int) -> Iterator[Tensor]:
        for part in scans(row).to(runtime.device).split(unet.BATCH):
            yield net(part).cpu().movedim(1, 0)[None]

    def predict(row: int) -> np.ndarray:
        whole = torch.cat(list(outputs(row)), dim=2)[0].movedim(0, 1)
        return np.asarray(predicted_of(whole.softmax(dim=1)))

    return UNET, predict, outputs


def graded_rows(cfg: Config, store: PreparedStore) -> list[int]:
    """The rows that a second grader has drawn on; none where the manifest cannot be read."""
    try:
        return sorted(map(int, second_graders(cfg, store)))
    except storage.StorageError:
        return []


def second_grader(cfg: Config, volumes: DenseVolumes) -> Arm | None:
    """The surfaces of another grader, NaN where there are none; None where no evaluated volume has any."""
    try:
        jobs = second_graders(cfg, volumes.store)
    except storage.StorageError as error:
        log.warning("second grader: left out, since the manifest cannot be read: %s", error)
        return None
    if cfg.task.kind != "layers" or not set(jobs) & set(volumes.of(EVALUATED).tolist()):
        return None
    d, _, w = volumes.store.image_size

    def read(row: int) -> np.ndarray:
        result = np.full((len(volumes.names), d, w), np.nan, np.float32)
        if row in jobs:
            try:
                (values,), facts = jobs[row].lay()
            except (OCTReadError, storage.StorageError) as error:
                log.warning("second grader: left out of a volume: %s", error)
                return result
            for name, heights_DW in zip(str(facts["surfaces"]).split("|"), values, strict=True):
                if name in volumes.names:
                    result[volumes.names.index(name)] = heights_DW
        return result

    return GRADER, read, None


def between_surfaces(volumes: DenseVolumes, row: int) -> np.ndarray:
    """Surfaces above each voxel, counted, uint8 [D, H, W]; IGNORED where an unknown one leaves it open."""
    heights_SDW, size = volumes.read(row), volumes.store.image_size[1]
    rows = np.arange(size)[None, :, None]
    fewest = np.zeros((len(heights_SDW[0]), size, heights_SDW.shape[2]), np.uint8)
    most = np.full_like(fewest, len(heights_SDW))
    for place, height_DW in enumerate(heights_SDW):  # NaN is above nothing and below nothing
        fewest[rows > height_DW[:, None]] = place + 1
        most = np.where(rows <= height_DW[:, None], np.minimum(most, place), most)
    return np.where(fewest == most, fewest, unet.IGNORED).astype(np.uint8)


def heights(p_DCHW: Tensor) -> Tensor:
    """Surfaces float32 [S, D, W] in voxels, in order: the rows above each, less the half of one."""
    above = torch.arange(p_DCHW.shape[1] - 1, device=p_DCHW.device)[:, None, None, None]
    return (p_DCHW.argmax(dim=1) <= above).float().sum(dim=2) - 0.5


Classes = Callable[[DenseVolumes, int], np.ndarray]
CLASSES: dict[str, tuple[Classes, Callable[[Tensor], Tensor]]] = {
    "layers": (between_surfaces, heights),
    "segmentation": (lambda volumes, row: volumes.read(row), likeliest),
}
