"""Temperature scaling: one number, fitted on validation participants, by which a head's outputs are divided.

In: a head's outputs for volumes of VAL with their targets. Out: a `Calibration`, which the head's file holds:
a temperature, or the reason why there is none. Guo et al. 2017 (arXiv:1706.04599). It moves no volume to
another class. A temperature is kept only where it lowers the loss of validation participants that it was not
fitted on. The head was chosen on the same people, which makes the result a little too confident.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from sklearn.model_selection import GroupKFold
from torch import Tensor

from finetuning.heads.objective import row_losses, row_weights, to_scores

MIN_PEOPLE = 20  # of validation
FOLDS = 5
RANGE = (0.05, 20.0)  # at its ends validation says nothing about how confident to be
NO_RECORD = "the head's file holds no calibration: it was trained before heads were calibrated"
OF_VALUES = "a value in the label's unit is no probability"


@dataclass(frozen=True)
class Calibration:
    """What a head's file says of its confidence."""

    temperature: float | None
    reason: str | None  # why there is no temperature
    people: int = 0  # of validation
    loss_before: float | None = None  # log loss of people that the temperature was not fitted on
    loss_after: float | None = None

    def state(self) -> dict[str, Any]:
        """Plain values for the head's file."""
        return asdict(self)

    def text(self) -> str:
        """One line for people."""
        if self.temperature is None:
            return f"uncalibrated: {self.reason}"
        return (
            f"temperature {self.temperature:.3g}, fitted on {self.people} validation participants; log loss "
            f"of those left out {self.loss_before:.3f} -> {self.loss_after:.3f}"
        )

    def scores(self, kind: str, outputs_BC: Tensor) -> Tensor | None:
        """Calibrated probabilities [B, C]; None without a temperature."""
        return None if self.temperature is None else to_scores(kind, outputs_BC / self.temperature)


def stored_calibration(state: Mapping[str, Any]) -> Calibration:
    """Of a head's file; one that was written before heads were calibrated says so."""
    if "calibration" not in state:
        return Calibration(None, NO_RECORD)
    return Calibration(**state["calibration"])


def calibrate(kind: str, outputs_nC: Tensor, target_nT: np.ndarray, person: np.ndarray) -> Calibration:
    """The temperature from volumes of VAL: outputs [n, C], targets [n, T]; people weigh the same."""
    if kind == "regression":
        return Calibration(None, OF_VALUES)
    people = len(np.unique(person))
    if people < MIN_PEOPLE:
        return Calibration(None, f"expected {MIN_PEOPLE} validation participants, found {people}", people)
    outputs_nC, target = outputs_nC.cpu().double(), torch.from_numpy(np.asarray(target_nT, float))
    weight = torch.from_numpy(row_weights(kind, np.asarray(target_nT), person, "none"))
    every = np.arange(len(person))
    temperature = _fit(kind, outputs_nC, target, weight, every)
    total = float(weight.sum())
    least = _loss(kind, outputs_nC, target, weight, every, temperature) + 1e-6 * total
    ends = [_loss(kind, outputs_nC, target, weight, every, end) for end in RANGE]
    if min(ends) <= least:  # without a mistake on validation, no confidence is too high
        why = f"no temperature between {RANGE[0]} and {RANGE[1]} fits {people} validation participants best"
        return Calibration(None, why, people)
    before = after = 0.0
    for fitted, others in GroupKFold(FOLDS).split(every, groups=person):
        own = _fit(kind, outputs_nC, target, weight, fitted)
        before += _loss(kind, outputs_nC, target, weight, others, 1.0)
        after += _loss(kind, outputs_nC, target, weight, others, own)
    before, after = before / total, after / total
    if after >= before:
        why = f"a temperature does not lower the log loss of people left out ({before:.3f} -> {after:.3f})"
        return Calibration(None, why, people, before, after)
    return Calibration(temperature, None, people, before, after)


def _fit(kind: str, outputs: Tensor, target: Tensor, weight: Tensor, rows: np.ndarray) -> float:
    """The temperature with the least log loss of these rows."""
    ends = (math.log(RANGE[0]), math.log(RANGE[1]))
    result = minimize_scalar(
        lambda log_t: _loss(kind, outputs, target, weight, rows, math.exp(log_t)),
        bounds=ends,
        method="bounded",
        options={"xatol": 1e-6},
    )
    return math.exp(float(result.x))


def _loss(
    kind: str, outputs: Tensor, target: Tensor, weight: Tensor, rows: np.ndarray, temperature: float
) -> float:
    """Weighted sum of log losses; of an ordinal head too, whose own loss is another one."""
    of_kind = "multilabel" if kind == "multilabel" else "classification"
    losses = row_losses(of_kind, outputs[rows] / temperature, target[rows])
    return float((losses * weight[rows]).sum())
