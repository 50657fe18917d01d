"""What a head is trained for: losses, weights of volumes and the score on validation, for each kind of task.

In: outputs of a head [B, C], targets as in finetuning.cohort.cohort.Cohort [B, T]. Out: losses, probabilities
or values, and one number by which heads and epochs are chosen.

* classification: cross-entropy; chosen by balanced accuracy.
* ordinal: the ranked probability score (Epstein 1969; as a loss for networks: Hou et al. 2016,
  arXiv:1611.05916): squared differences of cumulative probabilities, a proper score, so that a class that is
  two off costs more than its neighbour and the outputs stay probabilities; chosen by quadratic kappa.
* multilabel: binary cross-entropy of each label; chosen by the mean AUROC.
* regression: squared error of the value standardised on TRAIN; chosen by minus the squared error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from finetuning.cohort.cohort import TRAIN, VAL, Cohort
from finetuning.cohort.metrics import Predictions, observed, pool
from models.probes.participants import participant_weights
from utils.config.schema import Config
from utils.errors import UserError

METRICS = {
    "classification": "balanced accuracy",
    "ordinal": "quadratic kappa",
    "multilabel": "mean AUROC",
    "regression": "minus the squared error",
}


def metric_name(metric: str) -> str:
    """The name of one of METRICS in the log of a run."""
    return f"val/{metric.replace(' ', '_').lower()}"


def target_scale(cohort: Cohort) -> tuple[float, float]:
    """Mean and deviation of a value on TRAIN, else 0 and 1; UserError where it does not vary."""
    if cohort.kind != "regression":
        return 0.0, 1.0
    train = cohort.fold == TRAIN
    values, weight = cohort.target[train, 0], participant_weights(cohort.person[train])
    centre = float(np.average(values, weights=weight))
    spread = float(np.average((values - centre) ** 2, weights=weight) ** 0.5)
    if spread == 0:
        raise UserError(
            f"{cohort.names[0]}: expected a value that varies on split train, found {centre:g} alone"
        )
    return centre, spread


def row_losses(kind: str, outputs_BC: Tensor, target_BT: Tensor) -> Tensor:
    """Losses [B, T], T = 1 but for multilabel; of several heads [G, B, C] -> [G, B, T]."""
    if kind == "regression":
        return (outputs_BC - target_BT).square()
    if kind == "multilabel":
        return F.binary_cross_entropy_with_logits(
            outputs_BC, target_BT.expand_as(outputs_BC), reduction="none"
        )
    truth_BC = F.one_hot(target_BT[:, 0].long(), outputs_BC.shape[-1]).to(outputs_BC)
    if kind == "classification":
        return -(truth_BC * outputs_BC.log_softmax(dim=-1)).sum(dim=-1, keepdim=True)
    if kind == "ordinal":
        difference_BC = (outputs_BC.softmax(dim=-1) - truth_BC).cumsum(dim=-1)
        return difference_BC.square().sum(dim=-1, keepdim=True)
    raise ValueError(f"task.kind: expected one of {', '.join(METRICS)}, found {kind}")


def to_scores(kind: str, outputs_BC: Tensor) -> Tensor:
    """Probabilities of classes or of labels, or values as they are: what Predictions.scores holds."""
    if kind == "regression":
        return outputs_BC
    return outputs_BC.sigmoid() if kind == "multilabel" else outputs_BC.softmax(dim=-1)


def row_weights(kind: str, target_nT: np.ndarray, person: np.ndarray, class_weights: str) -> np.ndarray:
    """Weights of volumes in the loss [n, T], mean 1 in each column.

    The volumes of every participant add up to the same (models.probes.participants). With class_weights auto
    every class does too, and of each label its two values; a regression has no classes.
    """
    weight_nT = np.repeat(participant_weights(person)[:, None], target_nT.shape[1], axis=1)
    if class_weights == "auto" and kind != "regression":
        for column, values in zip(weight_nT.T, target_nT.T, strict=True):  # views: changed in place
            _, number = np.unique(values, return_inverse=True)
            column /= np.bincount(number, weights=column)[number]
            column /= column.mean()
    return weight_nT


@dataclass(frozen=True)
class Task:
    """What a head is trained for, for every place of a cohort's rows."""

    kind: str
    target: Tensor  # [n, T], a regression's standardised
    weight: Tensor  # [n, T], 0 but for TRAIN
    scale: tuple[float, float]  # mean and standard deviation of a regression's values, else 0 and 1

    @classmethod
    def of(cls, cfg: Config, cohort: Cohort, device: torch.device) -> Task:
        """What a configuration asks for; raises UserError for a value that does not vary."""
        train = cohort.fold == TRAIN
        centre, spread = scale = target_scale(cohort)
        weight = np.zeros_like(cohort.target)
        weight[train] = row_weights(
            cohort.kind, cohort.target[train], cohort.person[train], cfg.finetune.class_weights
        )
        target = torch.from_numpy((cohort.target - centre) / spread).to(device, torch.float32)
        weights = torch.from_numpy(weight).to(device, torch.float32)
        return cls(cohort.kind, target, weights, scale)


def judge(cohort: Cohort, outputs_nC: Tensor, scale: tuple[float, float]) -> tuple[float, float]:
    """The score of VAL's units and mean loss of its volumes, of outputs float64; `scale` as in Task."""
    val, (centre, spread), kind = cohort.fold == VAL, scale, cohort.kind
    target_nT = torch.from_numpy((cohort.target[val] - centre) / spread)
    weight_nT = torch.from_numpy(row_weights(kind, cohort.target[val], cohort.person[val], "none"))
    loss = float((row_losses(kind, outputs_nC, target_nT) * weight_nT).mean())
    scores_nC = to_scores(kind, outputs_nC) * spread + centre
    return validation_score(pool(cohort, VAL, scores_nC.numpy())), loss


def validation_score(predictions: Predictions) -> float:
    """The metric of METRICS, larger is better; a label with one value is left out, 0.5 where all are."""
    if predictions.kind == "regression":
        return -float(np.mean((predictions.scores - predictions.truth) ** 2))
    measured = observed(predictions)
    if predictions.kind == "multilabel":
        areas = measured.by_class["auroc"]
        return 0.5 if np.isnan(areas).all() else float(np.nanmean(areas))
    name = "balanced_accuracy" if predictions.kind == "classification" else "quadratic_kappa"
    # where truth and prediction are one and the same class, kappa is 0 / 0: no agreement beyond chance
    return float(np.nan_to_num(measured.overall[name][0]))
