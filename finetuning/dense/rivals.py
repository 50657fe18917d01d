"""What is beside a head in the folds: an image model in its encoder's place, a plain 2D U-Net, and a
second grader where the manifest names one.

In: the volumes of a fold. Out: arms, a name and what predicts a row, in the form that a `Kind` measures.
Image model and U-Net see the voxels of the store's grid and learn from the same people as the head.

The U-Net is trained from scratch on B-scans for as much processor time as the head: Ronneberger et al. 2015,
with batch norm and the row's place as a second channel; cross-entropy and soft Dice; mirror, shift and gain;
the weights with the best Dice on other B-scans are kept. It learns classes: those of the labels, or what lies
between surfaces, whose heights are then the number of rows above each: on real eyes better than the expected
number, which a little doubt far away moves.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from data_setup.attach.labels import second_graders
from data_setup.loader import EVALUATION_BATCH, StoredSamples, evaluation_batches
from data_setup.normalisation import plain_view
from data_setup.readers.faults import OCTReadError
from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL
from finetuning.cohort.source import Source
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

WIDTHS = (16, 32, 48, 64, 64)
RATE, DECAY, BATCH, SHIFT, GAIN, CHECKS = 4e-3, 1e-2, 8, 24, 0.3, 25
IGNORED = 255
Go = Callable[[], None]
Pair = tuple[Tensor, Tensor]  # B-scans and their classes
log = logging.getLogger(__name__)


def _block(before: int, width: int) -> nn.Sequential:
    first, second = (nn.Conv2d(channels, width, 3, padding=1) for channels in (before, width))
    return nn.Sequential(first, nn.ReLU(), second, nn.BatchNorm2d(width), nn.ReLU())


class UNet(nn.Module):
    """Logits [N, C, H, W] of B-scans [N, H, W] of any size."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(_block(a, b) for a, b in zip((2, *WIDTHS), WIDTHS, strict=False))
        self.up = nn.ModuleList(_block(a + b, b) for a, b in zip(WIDTHS[:0:-1], WIDTHS[-2::-1], strict=True))
        self.last = nn.Conv2d(WIDTHS[0], num_classes, 1)

    def forward(self, x_NHW: Tensor) -> Tensor:
        h, w = x_NHW.shape[1:]
        place = torch.linspace(-1, 1, h, device=x_NHW.device)[:, None].expand_as(x_NHW)
        side, skips = 2 ** (len(WIDTHS) - 1), list[Tensor]()
        x = F.pad(torch.stack([x_NHW, place], dim=1), (0, -w % side, 0, -h % side))
        for number, layer in enumerate(self.down):
            x = layer(F.max_pool2d(x, 2) if number else x)
            skips.append(x)
        for layer, skip in zip(self.up, skips[-2::-1], strict=True):
            x = layer(torch.cat([F.interpolate(x, scale_factor=2.0), skip], dim=1))
        return self.last(x)[..., :h, :w]


def losses_of(logits_NCHW: Tensor, truth_NHW: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy, and 1 - Dice of the classes that are there, over the voxels that are known."""
    known, truth = truth_NHW != IGNORED, torch.where(truth_NHW == IGNORED, 0, truth_NHW).long()
    entropy = F.cross_entropy(logits_NCHW, truth, reduction="none")[known].mean()
    p = logits_NCHW.softmax(dim=1) * known[:, None]
    hot = F.one_hot(truth, p.shape[1]).movedim(-1, 1) * known[:, None]
    both, sizes = (p * hot).sum((0, 2, 3)), (p + hot).sum((0, 2, 3))
    return entropy, 1 - (2 * both / sizes.clamp(min=1))[hot.sum((0, 2, 3)) > 0].mean()


def moved(x_NHW: Tensor, truth_NHW: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each B-scan mirrored or not, shifted along both axes, and brighter or darker."""
    pairs = []
    for x, truth in zip(x_NHW, truth_NHW, strict=True):
        mirror, up, along = torch.randint(-SHIFT, SHIFT + 1, (3,), generator=draw).tolist()
        rows = (torch.arange(len(x)) - up).clamp(0, len(x) - 1)
        columns = (torch.arange(x.shape[1]) - along).clamp(0, x.shape[1] - 1)
        columns = columns.flip(0) if mirror % 2 else columns
        gain, bias = (1 + GAIN * (2 * float(torch.rand(1, generator=draw)) - 1) for _ in range(2))
        pairs.append((x[rows][:, columns] * gain + bias - 1, truth[rows][:, columns]))
    moved_x, moved_truth = zip(*pairs, strict=True)
    return torch.stack(moved_x), torch.stack(moved_truth)


def train_unet(known: Pair, val: Pair, num_classes: int, seconds: float, seed: int, go_on: Go) -> UNet:
    """The network that so many seconds of the processor train; its rate rises, then falls as a cosine."""
    torch.manual_seed(seed)
    draw, net = torch.Generator().manual_seed(seed), UNet(num_classes).to(known[0].device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY, betas=(0.9, 0.99))
    start, best, kept, checked = time.process_time(), math.inf, copy.deepcopy(net), 0
    while (share := (time.process_time() - start) / seconds) < 1:
        go_on()  # raises where somebody wants to stop
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(share / 0.05 + 0.01, 0.5 + 0.5 * math.cos(math.pi * share))
        chosen = torch.randint(0, len(known[0]), (BATCH,), generator=draw)
        x, truth = moved(known[0][chosen], known[1][chosen], draw)
        optimizer.zero_grad()
        torch.stack(losses_of(net.train()(x), truth)).sum().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if (time.process_time() - start) / seconds * CHECKS >= checked + 1:
            checked += 1
            with torch.no_grad():
                pairs = ((net.eval()(x[None]), y[None]) for x, y in zip(*val, strict=True))
                value = sum(losses_of(*pair)[1].item() for pair in pairs)
            best, kept = (value, copy.deepcopy(net)) if value < best else (best, kept)
    return kept.eval()


@dataclass(frozen=True)
class KeptSlices(KeptFeatures):
    """Kept tokens of an image model, each B-scan seen by itself."""

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
        known = (truth != IGNORED).flatten(1).any(dim=1)
        return x[known].to(runtime.device), truth[known].to(runtime.device)

    def go_on() -> None:
        if runtime.stop_requested:
            raise StopRequested

    num_classes = len(volumes.names) + 1
    with torch.random.fork_rng(devices=[runtime.device] if runtime.device.type == "cuda" else []):
        net = train_unet(learnt(TRAIN), learnt(VAL), num_classes, seconds, seed, go_on)

    @torch.no_grad()
    def outputs(row: int) -> Iterator[Tensor]:
        for part in scans(row).to(runtime.device).split(BATCH):
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
    return np.where(fewest == most, fewest, IGNORED).astype(np.uint8)


def heights(p_DCHW: Tensor) -> Tensor:
    """Surfaces float32 [S, D, W] in voxels, in order: the rows above each, less the half of one."""
    above = torch.arange(p_DCHW.shape[1] - 1, device=p_DCHW.device)[:, None, None, None]
    return (p_DCHW.argmax(dim=1) <= above).float().sum(dim=2) - 0.5


Classes = Callable[[DenseVolumes, int], np.ndarray]
CLASSES: dict[str, tuple[Classes, Callable[[Tensor], Tensor]]] = {
    "layers": (between_surfaces, heights),
    "segmentation": (lambda volumes, row: volumes.read(row), likeliest),
}
