"""Rows without pre-training: a network trained from scratch on the labels that the probes have.

In: the evaluated people's volumes with their truth. Out: scores of the tasks, as benchmarks.evidence.scores
has them, and as both readouts, since nothing is read out. In each fold one network with a head for each task
learns from the training people for a fixed number of epochs; of each task the tenth of it is kept that its
validation people choose. Networks: a small 3D CNN whose strides are those of the patch, and a ViT of the
encoder's size.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.evidence.cohorts import Truth
from benchmarks.evidence.scores import HIDDEN, Part, Scores, join_predictions, masks_of_folds
from data_setup.loader import evaluation_batches
from data_setup.normalisation import plain_view
from data_setup.store.reader import PreparedStore
from models.optimizer import warmup_cosine
from models.probes.features import pool_tokens
from models.probes.participants import Fold, Prediction, balanced_accuracy, pooled_by_person
from models.probes.tokens import Rows, errors_by_participant, join_errors, less_protocol_mean, mean_r2
from models.vit3d import VisionTransformer3D
from models.vjepa3d import build_encoder
from utils.config.schema import Config
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime

EPOCHS, LEAST_STEPS, BATCH, CLIP = 10, 200, 8, 1.0  # few labels have more epochs: an update is one of 8
RATE = 1e-3
FLOOR = 1e-6
CNN_WIDTH = 96
Masks = tuple[np.ndarray, np.ndarray, np.ndarray]
Outputs = tuple[Tensor, Tensor, Tensor]  # of Heads
Moments = tuple[Tensor, Tensor]


class SmallCNN(nn.Module):
    """Convolutions down to the token grid, to be trained: [B, 1, D, H, W] -> tokens [B, N, CNN_WIDTH]."""

    width = CNN_WIDTH

    def __init__(self, patch: tuple[int, int, int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        rest, channels = list(patch), 1
        for out in (24, 48, CNN_WIDTH):
            halved = [2 if size % 2 == 0 else 1 for size in rest]
            rest = [size // by for size, by in zip(rest, halved, strict=True)]
            layers += [nn.Conv3d(channels, out, 3, padding=1), nn.GroupNorm(8, out), nn.GELU()]
            layers.append(nn.AvgPool3d((halved[0], halved[1], halved[2])))
            channels = out
        layers += [
            nn.AvgPool3d((rest[0], rest[1], rest[2])),
            nn.Conv3d(CNN_WIDTH, CNN_WIDTH, 3, padding=1),
            nn.GELU(),
        ]
        self.layers = nn.Sequential(*layers, nn.Conv3d(CNN_WIDTH, CNN_WIDTH, 3, padding=1), nn.GELU())

    def forward(self, view_BCDHW: Tensor) -> Tensor:
        features: Tensor = self.layers(view_BCDHW)
        return features.flatten(2).mT


class Heads(nn.Module):
    """A trunk of tokens with a linear head for each task."""

    def __init__(self, trunk: SmallCNN | VisionTransformer3D, classes: int, values: int, layers: int) -> None:
        super().__init__()
        self.trunk, width = trunk, trunk.width
        self.classes, self.values = nn.Linear(2 * width, classes), nn.Linear(2 * width, max(1, values))
        self.layers = nn.Linear(width, layers)

    def forward(self, view: Tensor, valid_BN: Tensor, tokens_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [B, C], values [B, L] and layers of tokens [B, T, L]."""
        features = self.trunk(view).float()
        pooled = pool_tokens(features, valid_BN)
        index = tokens_BT.clip(min=0).unsqueeze(-1).expand(-1, -1, features.shape[-1])
        return self.classes(pooled), self.values(pooled), self.layers(features.gather(1, index))


def scratch_scores(cfg: Config, store: PreparedStore, truth: Truth, kind: str, seed: int) -> Scores:
    """Scores of a network, `cnn_...` or `vit_...`, over all people."""
    folds = [one_fold(cfg, store, truth, kind, seed, masks) for masks in masks_of_folds(truth)]
    parts: dict[str, Part] = {}
    for task in folds[0]:
        of = [fold[task][1] for fold in folds]
        joined = join_predictions(of) if task == "classes" else join_errors(of)  # type: ignore[arg-type]
        parts |= {task: joined, f"{task}{HIDDEN}": joined}
    val = {task: float(np.mean([fold[task][0] for fold in folds])) for task in folds[0]}
    return Scores(parts, val, {})


def one_fold(
    cfg: Config, store: PreparedStore, truth: Truth, kind: str, seed: int, masks: Masks
) -> dict[str, tuple[float, Part]]:
    """Task -> the best score of an epoch on validation people, and what is then said of those evaluated."""
    train, val, test = masks
    runtime = open_runtime(cfg.train.use_bf16)
    thickness = less_protocol_mean(truth.thickness_um, truth.protocol, train).astype(np.float32)
    truth = replace(truth, thickness_um=thickness)
    scales = [_moments(thickness[train]), _moments(truth.occupancy[train][truth.tokens[train] >= 0])]
    torch.manual_seed(seed)
    trunk = SmallCNN(cfg.spatial.patch_size) if kind.startswith("cnn") else build_encoder(cfg)
    heads = Heads(trunk, len(truth.classes), thickness.shape[1], truth.occupancy.shape[2]).to(runtime.device)
    optim = replace(cfg.optim, base_lr=RATE)
    optimizer = torch.optim.AdamW(heads.parameters(), optim.base_lr, weight_decay=cfg.optim.weight_decay)
    order = np.random.default_rng(seed)
    steps = -(-int(train.sum()) // BATCH)
    best: dict[str, tuple[float, Part]] = {}
    epochs = max(EPOCHS, -(-LEAST_STEPS // steps))
    for step in range(epochs * steps):
        if step % steps == 0:
            batches = iter(np.array_split(order.permutation(np.flatnonzero(train)), steps))
        at = next(batches)
        optimizer.zero_grad(set_to_none=True)
        _loss(truth, at, _outputs(heads.train(), cfg, store, truth, at, runtime), scales).backward()
        nn.utils.clip_grad_norm_(heads.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = warmup_cosine(optim, step, epochs * steps)
        optimizer.step()
        if (step + 1) % (steps * max(1, epochs // EPOCHS)) == 0:
            with torch.no_grad():
                on_val, on_test = (
                    judged(truth, at, _outputs(heads.eval(), cfg, store, truth, at, runtime), scales)
                    for at in map(np.flatnonzero, (val, test))
                )
            for task, part in on_val.items():
                score = balanced_accuracy(part) if isinstance(part, Prediction) else mean_r2(part)
                if task not in best or score > best[task][0]:
                    best[task] = score, on_test[task]
    return best


def judged(truth: Truth, at: np.ndarray, outputs: Outputs, scales: list[Moments]) -> dict[str, Part]:
    """Task -> what these outputs say of the volumes `at`."""
    logits, values, layers = (part.detach().cpu().double() for part in outputs)
    values, layers = (part * s + m for part, (m, s) in zip((values, layers), scales, strict=True))
    person, used, nothing = truth.person[at], truth.tokens[at] >= 0, np.zeros((len(at), 1))
    parts: dict[str, Part] = {}
    if len(truth.classes) > 1:
        fold = Fold(nothing, truth.label[at], person)
        parts["classes"] = pooled_by_person(fold, logits.softmax(1).numpy())
    if truth.thickness_um.shape[1]:
        parts["thickness"] = errors_by_participant(
            Rows(nothing, truth.thickness_um[at], person), values.numpy()
        )
    of_token = np.broadcast_to(person[:, None], used.shape)[used]
    rows = Rows(np.zeros((len(of_token), 1)), truth.occupancy[at][used], of_token)
    return parts | {"occupancy": errors_by_participant(rows, layers.numpy()[used])}


def _outputs(
    heads: Heads, cfg: Config, store: PreparedStore, truth: Truth, at: np.ndarray, runtime: Runtime
) -> Outputs:
    parts, start = [], 0
    for batch in map(runtime.to_device, evaluation_batches(cfg, store, truth.rows[at], BATCH)):
        some = at[start : start + len(batch["row"])]
        start += len(some)
        tokens = torch.from_numpy(truth.tokens[some]).to(runtime.device)
        parts.append(heads(plain_view(batch), batch["context_valid"], tokens))
    logits, values, layers = (torch.cat(part) for part in zip(*parts, strict=True))
    return logits, values, layers


def _loss(truth: Truth, at: np.ndarray, outputs: Outputs, scales: list[Moments]) -> Tensor:
    """Squared errors of standardised values, and the cross-entropy of the class, where there are such."""
    logits, values, layers = (part.cpu() for part in outputs)
    wanted = [
        (torch.from_numpy(y[at]).float() - m) / s
        for y, (m, s) in zip((truth.thickness_um, truth.occupancy), scales, strict=True)
    ]
    used = torch.from_numpy(truth.tokens[at] >= 0)
    loss = (layers - wanted[1]).square().mean(-1)[used].mean()
    if truth.thickness_um.shape[1]:
        loss = loss + (values - wanted[0]).square().mean()
    if len(truth.classes) > 1:
        loss = loss + F.cross_entropy(logits, torch.from_numpy(truth.label[at]))
    return loss


def _moments(values: np.ndarray) -> Moments:
    """Mean and standard deviation of every column, float32."""
    centre, scale = values.mean(axis=0), values.std(axis=0) + FLOOR
    return torch.from_numpy(np.float32(centre)), torch.from_numpy(np.float32(scale))
