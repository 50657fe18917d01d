"""The second readout: one hidden layer, beside the linear one of models.probes.participants and tokens.

In: features, what they shall say, and participants, in folds that share no participant. Out: the same
predictions as the linear probes. A linear readout hides much of what features hold, of an encoder's and of
voxels' alike; so a row has both.

Features are standardised on the training fold, participants weigh the same, and the validation people choose
the step whose weights are kept. Seeded: the same folds give the same prediction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import log_loss
from torch import Tensor, nn

from models.probes.participants import (
    Fitted,
    Fold,
    Prediction,
    all_classes,
    balanced_accuracy,
    class_weights,
    num_classes_of,
    participant_weights,
    pooled_by_person,
    require_disjoint,
    require_two_classes,
)
from models.probes.tokens import DensePrediction, Rows, errors_by_participant, mean_r2

WIDTH = 192
BATCH = 256
MOST_STEPS, CHECK_STEPS, PATIENCE = 900, 15, 8  # of updates; of updates; of checks without a better one
RATE, WARMUP_STEPS, DECAY, SEED = 2e-3, 30, 0.05, 0
FLOOR = 1e-6  # what varies less is not rescaled
Rank = tuple[float, ...]


def fit_hidden(
    train_x: np.ndarray,
    train_y: np.ndarray,
    weight_n: np.ndarray,
    val_x: np.ndarray,
    rank: Callable[[np.ndarray], Rank],
) -> tuple[Callable[[np.ndarray], np.ndarray], Rank]:
    """One hidden layer, AdamW: features [n, F] -> outputs [n, C] of the step that `rank` finds best, and its
    rank. `rank` is given the outputs of `val_x`; train_y: values float [n, L] (squared error), or class
    numbers int [n] (cross-entropy; the outputs are logits).
    """
    x, y = _tensor(train_x), torch.from_numpy(np.ascontiguousarray(train_y))
    centre, scale = _moments(x)
    is_class = not y.is_floating_point()
    middle, spread = (torch.zeros(1), torch.ones(1)) if is_class else _moments(y.float())
    wanted = y.long() if is_class else (y.float() - middle) / spread
    x, val, weight = (x - centre) / scale, (_tensor(val_x) - centre) / scale, _tensor(weight_n)
    generator = torch.Generator().manual_seed(SEED)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        outputs = int(y.max()) + 1 if is_class else y.shape[1]
        last = nn.Linear(WIDTH, outputs)
        layers = nn.Sequential(nn.Linear(x.shape[1], WIDTH), nn.GELU(), last)
        nn.init.zeros_(last.weight)  # it begins with what is usual, and few volumes may end there
        nn.init.zeros_(last.bias)
    optimizer = torch.optim.AdamW(layers.parameters(), RATE, weight_decay=DECAY)
    best: tuple[Rank, dict[str, Tensor], int] | None = None
    order = torch.randperm(len(x), generator=generator)
    for step in range(MOST_STEPS + 1):
        if step % CHECK_STEPS == 0:
            with torch.no_grad():
                now = rank(_numbers(layers(val) * spread + middle))
            if best is None or now > best[0]:
                best = now, {name: value.clone() for name, value in layers.state_dict().items()}, step
            elif step - best[2] >= PATIENCE * CHECK_STEPS:
                break
        if len(order) < min(BATCH, len(x)):
            order = torch.cat([order, torch.randperm(len(x), generator=generator)])
        chosen, order = order[:BATCH], order[BATCH:]
        out = layers(x[chosen])
        if is_class:
            loss_n = F.cross_entropy(out, wanted[chosen], reduction="none")
        else:
            loss_n = (out - wanted[chosen]).square().mean(dim=1)
        optimizer.zero_grad(set_to_none=True)
        (loss_n * weight[chosen]).mean().backward()
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / WARMUP_STEPS)
        optimizer.step()
    assert best is not None
    layers.load_state_dict(best[1])

    @torch.no_grad()
    def score(features_nF: np.ndarray) -> np.ndarray:
        return _numbers(layers((_tensor(features_nF) - centre) / scale) * spread + middle)

    return score, best[0]


def hidden_rows(train: Rows, val: Rows, test: Rows) -> DensePrediction:
    """All values at once, as `ridge_rows`; the step with the highest R2 on val. Raises ValueError when the
    training fold shares a participant with another.
    """
    require_disjoint(train.participants, val.participants, test.participants)
    score, (val_score,) = fit_hidden(
        train.features,
        train.targets.astype(np.float64),
        participant_weights(train.participants),
        val.features,
        lambda outputs: (mean_r2(errors_by_participant(val, outputs)),),
    )
    predicted = score(test.features)
    return DensePrediction(predicted, errors_by_participant(test, predicted), None, val_score)


def hidden_probe(train: Fold, val: Fold, test: Fold) -> Prediction:
    """Class probabilities of participants, as `logistic_probe`, and with its errors."""
    require_disjoint(train.participants, val.participants, test.participants)
    fitted = fit_hidden_classes(train, val)
    return replace(pooled_by_person(test, fitted.score(test.features)), val_score=fitted.val_score)


def fit_hidden_classes(train: Fold, val: Fold) -> Fitted:
    """As `fit_logistic`: the step with the best balanced accuracy on val, then the lowest log loss."""
    require_two_classes(train)
    known, number = np.unique(train.labels, return_inverse=True)
    count = max(num_classes_of(train), num_classes_of(val))

    def probabilities(logits: np.ndarray) -> np.ndarray:
        shares = torch.from_numpy(logits).softmax(dim=1).numpy()
        return all_classes(shares, known, count)

    def rank(logits: np.ndarray) -> Rank:
        on_val = pooled_by_person(val, probabilities(logits))
        loss = float(log_loss(on_val.labels, on_val.scores, labels=np.arange(count)))
        return balanced_accuracy(on_val), -loss

    score, ranked = fit_hidden(train.features, number, class_weights(train), val.features, rank)
    return Fitted(lambda features: probabilities(score(features)), None, ranked[0])


def fit_hidden_value(train: Fold, val: Fold) -> Fitted:
    """As `fit_ridge`: the step with the lowest squared error over the participants of `val`."""

    def rank(outputs: np.ndarray) -> Rank:
        on_val = pooled_by_person(val, outputs)
        return (-float(np.mean((on_val.scores[:, 0] - on_val.labels) ** 2)),)

    weight = participant_weights(train.participants)
    targets = train.labels.astype(np.float64)[:, None]
    score, ranked = fit_hidden(train.features, targets, weight, val.features, rank)
    return Fitted(score, None, ranked[0])


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every column; 1 where nothing varies."""
    scale = values.std(dim=0, correction=0)
    return values.mean(dim=0), torch.where(scale > FLOOR, scale, 1.0)


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(values, np.float32))


def _numbers(values: Tensor) -> np.ndarray:
    return np.asarray(values.double().numpy())
