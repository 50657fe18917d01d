"""Predictions of units, and how good they are: every metric of a task's kind, for all resamples at once.

In: scores of volumes. Out: `Predictions`, a row for every unit (volume, eye or participant): the mean over
its volumes. Of these and counts [S, U], how often each of S resamples holds each unit (`observed` holds each
once): `Measures`, arrays [S] and [S, C]. NaN stands for a metric that does not exist: a class without a unit
has no sensitivity, and the mean over classes of what one of them lacks does not exist either.

The definitions are scikit-learn's, and tests compare with it. What has several definitions:
  balanced accuracy   mean sensitivity of the classes that occur
  macro F1            mean over the classes that occur or were given
  AUROC, AUPRC        one class against the rest, from its score; AUPRC is the average precision
  Brier               two classes: squared error of the second's probability; more: summed over classes
  ECE                 15 bins of equal width of the highest probability; an edge belongs to the lower bin
  multilabel          each label is a task of two classes (yes above .5); the mean over labels, of F1, AUROC
                      and AUPRC that of "yes"
  threshold           of two classes, on validation: the highest sensitivity + specificity (Youden's J),
                      half way from the score that reaches it to the next lower; of several the highest
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from finetuning.cohort.cohort import EVALUATED, Cohort
from models.probes.intervals import confusion_draws, interval95, mean_recall, participant_draws

NUM_BINS = 15  # of ECE and of the reliability plot
PRIMARY = {  # the metric that a table is ordered by and a verdict is about
    "classification": "balanced_accuracy",
    "ordinal": "balanced_accuracy",
    "regression": "r2",
    "multilabel": "macro_auroc",
}
BLOCK = 4_000_000  # resamples x units that are measured at once


@dataclass(frozen=True)
class Predictions:
    """Scores of units, sorted by unit.

    classification, ordinal: probabilities of the classes; multilabel: one probability a label; regression:
    one value in the label's own unit.
    """

    kind: str
    names: tuple[str, ...]
    unit: np.ndarray  # str [U]
    person: np.ndarray  # str [U]
    truth: np.ndarray  # float64 [U, T], as in Cohort.target
    scores: np.ndarray  # float64 [U, C]

    def where(self, chosen_U: np.ndarray) -> Predictions:
        parts = (part[chosen_U] for part in (self.unit, self.person, self.truth, self.scores))
        return Predictions(self.kind, self.names, *parts)


@dataclass(frozen=True)
class Scored:
    """Scores of volumes, in one cohort (official splits) or one a fold (crossfit)."""

    cohorts: tuple[Cohort, ...]
    scores: tuple[np.ndarray, ...]  # [n, C] in the order of each cohort's rows; NaN where nobody asks

    def evaluated(self, volumes: tuple[np.ndarray, ...] | None = None) -> Predictions:
        """The units of all cohorts; `volumes`, bool [n] of each cohort: pooled over these only."""
        return join(self.by_cohort(EVALUATED, volumes))

    def by_cohort(self, fold: int, volumes: tuple[np.ndarray, ...] | None = None) -> list[Predictions]:
        masks = volumes or tuple(np.ones(len(cohort.rows), bool) for cohort in self.cohorts)
        return [
            pool(cohort, fold, scores[(cohort.fold == fold) & mask], mask)
            for cohort, scores, mask in zip(self.cohorts, self.scores, masks, strict=True)
        ]

    def cohort_of_units(self) -> np.ndarray:
        """The number of the cohort that evaluates each unit of `evaluated()` [U]."""
        parts = self.by_cohort(EVALUATED)
        unit = np.concatenate([p.unit for p in parts])
        number = np.repeat(np.arange(len(parts)), [len(p.unit) for p in parts])
        return number[np.argsort(unit)]


def pool(cohort: Cohort, fold: int, scores_nC: np.ndarray, volumes: np.ndarray | None = None) -> Predictions:
    """Mean score of each unit of a fold; `scores_nC` has a row for each volume of that fold, in its order.

    `volumes`, bool over all volumes of the cohort: only these count, and `scores_nC` has rows for these.
    """
    chosen = cohort.fold == fold
    if volumes is not None:
        chosen = chosen & volumes
    if len(scores_nC) != int(chosen.sum()):
        raise ValueError(f"expected {int(chosen.sum())} volumes of the fold, found {len(scores_nC)}")
    unit, first, inverse = np.unique(cohort.unit[chosen], return_index=True, return_inverse=True)
    total = np.zeros((len(unit), scores_nC.shape[1]))
    np.add.at(total, inverse, scores_nC)
    return Predictions(
        cohort.kind,
        cohort.names,
        unit,
        cohort.person[chosen][first],
        cohort.target[chosen][first],
        total / np.bincount(inverse, minlength=len(unit))[:, None],
    )


def join(parts: Sequence[Predictions]) -> Predictions:
    """The predictions of folds that share no person, sorted by unit; ValueError where one is in two."""
    people = np.concatenate([np.unique(p.person) for p in parts])
    if len(np.unique(people)) != len(people):
        raise ValueError("expected every person in one evaluated fold, found some in several")
    order = np.argsort(np.concatenate([p.unit for p in parts]))
    columns = (
        np.concatenate([getattr(p, name) for p in parts])[order]
        for name in ("unit", "person", "truth", "scores")
    )
    return Predictions(parts[0].kind, parts[0].names, *columns)


@dataclass(frozen=True)
class Measures:
    """Metrics of S resamples; NaN: does not exist."""

    overall: Mapping[str, np.ndarray]  # name -> [S]
    by_class: Mapping[str, np.ndarray]  # name -> [S, C]; multilabel: a column a label; regression: none


def observed(predictions: Predictions) -> Measures:
    """The metrics of the predictions themselves, S = 1."""
    return measure(predictions, np.ones((1, len(predictions.unit))))


def measure(predictions: Predictions, counts_SU: np.ndarray) -> Measures:
    counts_SU = counts_SU.astype(np.float64)
    size = max(1, BLOCK // max(1, counts_SU.shape[1]))
    parts = [_measure(predictions, counts_SU[i : i + size]) for i in range(0, len(counts_SU), size)]
    return Measures(
        {name: np.concatenate([p.overall[name] for p in parts]) for name in parts[0].overall},
        {name: np.concatenate([p.by_class[name] for p in parts]) for name in parts[0].by_class},
    )


def bootstrap_counts(predictions: Predictions, samples: int, seed: int) -> np.ndarray:
    """How often each resample holds each unit [samples, U]: people are drawn, within classes."""
    people, of_unit = np.unique(predictions.person, return_inverse=True)
    strata_P = np.zeros(len(people), int)
    if predictions.kind in ("classification", "ordinal"):
        votes_PC = np.zeros((len(people), len(predictions.names)))
        np.add.at(votes_PC, (of_unit, predictions.truth[:, 0].astype(int)), 1)
        strata_P = votes_PC.argmax(axis=1)
    return participant_draws(len(people), samples, seed, strata_P)[:, of_unit]


def interval(values_S: np.ndarray) -> tuple[float, float] | None:
    """The central 95 % of the resamples in which a metric exists; None where it exists in none."""
    known = values_S[~np.isnan(values_S)]
    return interval95(known) if len(known) else None


def decided(scores_UC: np.ndarray) -> np.ndarray:
    """The most probable class of every unit [U]; the lowest of several."""
    return scores_UC.argmax(axis=1)


def youden_threshold(is_positive_U: np.ndarray, score_U: np.ndarray) -> float | None:
    """The score from which on a unit counts as positive; None where a class has no unit."""
    is_positive_U = is_positive_U.astype(bool)
    if is_positive_U.all() or not is_positive_U.any():
        return None
    thresholds_T = np.unique(score_U)
    is_above_TU = score_U[None] >= thresholds_T[:, None]
    sensitivity_T = is_above_TU[:, is_positive_U].mean(axis=1)
    youden_T = sensitivity_T - is_above_TU[:, ~is_positive_U].mean(axis=1)
    best = int(np.flatnonzero(youden_T >= youden_T.max() - 1e-12)[-1])
    return float(thresholds_T[max(0, best - 1) : best + 1].mean())


def at_threshold(predictions: Predictions, threshold_U: np.ndarray, counts_SU: np.ndarray) -> Measures:
    """Of two classes, what depends only on the decision, when it is the second from a threshold on."""
    given_U = (predictions.scores[:, 1] >= threshold_U).astype(int)
    confusion_SCC = confusion_draws(predictions.truth[:, 0], given_U, 2, counts_SU)
    return Measures(*_of_confusion(confusion_SCC))


def reliability(predictions: Predictions) -> dict[str, np.ndarray]:
    """The points of the reliability plot, a number for each bin that holds a unit: mean highest probability
    `confidence`, share of right units `accuracy`, units `count`; of all labels together for multilabel.
    """
    confidence, is_right = (
        np.concatenate(parts)
        for parts in zip(*(_confidence(p.truth[:, 0], p.scores) for p in tasks_of(predictions)), strict=True)
    )
    bin_U = _bins(confidence)
    count = np.bincount(bin_U, minlength=NUM_BINS)
    used = count > 0
    mean = [np.bincount(bin_U, v, minlength=NUM_BINS)[used] / count[used] for v in (confidence, is_right)]
    return {"confidence": mean[0], "accuracy": mean[1], "count": count[used]}


def auroc(is_positive_U: np.ndarray, score_U: np.ndarray, counts_SU: np.ndarray) -> np.ndarray:
    """Area under the ROC curve [S]: positives that lie above negatives; a tie counts half."""
    positive_SG, negative_SG = _by_score(is_positive_U, score_U, counts_SU)
    below_SG = negative_SG.cumsum(axis=1) - negative_SG / 2
    pairs_S = positive_SG.sum(axis=1) * negative_SG.sum(axis=1)
    return _ratio((positive_SG * below_SG).sum(axis=1), pairs_S)


def average_precision(is_positive_U: np.ndarray, score_U: np.ndarray, counts_SU: np.ndarray) -> np.ndarray:
    """Area under the precision-recall curve [S], without interpolation."""
    positive_SG, negative_SG = (part[:, ::-1] for part in _by_score(is_positive_U, score_U, counts_SU))
    hits_SG = positive_SG.cumsum(axis=1)
    chosen_SG = hits_SG + negative_SG.cumsum(axis=1)
    precision_SG = np.divide(hits_SG, chosen_SG, out=np.zeros(hits_SG.shape), where=chosen_SG > 0)
    return _ratio((positive_SG * precision_SG).sum(axis=1), positive_SG.sum(axis=1))


def _measure(predictions: Predictions, counts_SU: np.ndarray) -> Measures:
    if predictions.kind == "regression":
        return Measures(_of_values(predictions.truth[:, 0], predictions.scores[:, 0], counts_SU), {})
    if predictions.kind != "multilabel":
        return _of_classes(predictions, counts_SU)
    parts = [_of_classes(task, counts_SU) for task in tasks_of(predictions)]
    by_label = {  # of "yes"
        name: np.stack([p.by_class[name][:, 1] for p in parts], axis=1) for name in parts[0].by_class
    }
    overall = {name: np.mean([p.overall[name] for p in parts], axis=0) for name in parts[0].overall}
    of_yes = {f"macro_{name}": by_label[name].mean(axis=1) for name in ("f1", "auroc", "auprc")}
    return Measures(overall | of_yes, by_label)


def _of_classes(predictions: Predictions, counts_SU: np.ndarray) -> Measures:
    truth_U, scores_UC = predictions.truth[:, 0].astype(int), predictions.scores
    num_classes = scores_UC.shape[1]
    confusion_SCC = confusion_draws(truth_U, decided(scores_UC), num_classes, counts_SU)
    overall, by_class = _of_confusion(confusion_SCC)
    for name, area in (("auroc", auroc), ("auprc", average_precision)):
        by_class[name] = np.stack(
            [area(truth_U == c, scores_UC[:, c], counts_SU) for c in range(num_classes)], axis=1
        )
    if num_classes == 2:  # one ranking; 1 - p may tie where p does not
        by_class["auroc"][:, 0] = by_class["auroc"][:, 1]
    for name in ("auroc", "auprc"):
        lacks_S = (confusion_SCC.sum(axis=2) == 0).any(axis=1)
        overall[f"macro_{name}"] = np.where(lacks_S, np.nan, by_class[name].mean(axis=1))
    if predictions.kind == "ordinal":
        overall["quadratic_kappa"] = _quadratic_kappa(confusion_SCC)
    overall["brier"] = _brier(truth_U, scores_UC, counts_SU)
    overall["ece"] = _ece(truth_U, scores_UC, counts_SU)
    return Measures(overall, by_class)


def _of_confusion(confusion_SCC: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What depends only on the decisions: overall, by class."""
    total_S = confusion_SCC.sum(axis=(1, 2))
    true_SC, given_SC = confusion_SCC.sum(axis=2), confusion_SCC.sum(axis=1)
    hit_SC = np.diagonal(confusion_SCC, axis1=1, axis2=2)
    either_SC = true_SC + given_SC
    f1_SC = _ratio(2 * hit_SC, either_SC)
    rest_SC = total_S[:, None] - true_SC
    overall = {
        "accuracy": hit_SC.sum(axis=1) / total_S,
        "balanced_accuracy": mean_recall(confusion_SCC),
        "macro_f1": np.nansum(f1_SC, axis=1) / (either_SC > 0).sum(axis=1),
    }
    by_class = {
        "sensitivity": _ratio(hit_SC, true_SC),
        "specificity": _ratio(rest_SC - given_SC + hit_SC, rest_SC),
        "f1": f1_SC,
    }
    return overall, by_class


def _of_values(truth_U: np.ndarray, value_U: np.ndarray, counts_SU: np.ndarray) -> dict[str, np.ndarray]:
    total_S = counts_SU.sum(axis=1)
    centred_U = truth_U - truth_U.mean()  # a variance by squares loses digits far from 0
    mean_S = counts_SU @ centred_U / total_S
    spread_S = counts_SU @ centred_U**2 - total_S * mean_S**2
    spread_S[spread_S <= 1e-12 * (counts_SU @ centred_U**2)] = 0  # one value, drawn again and again
    return {
        "mae": counts_SU @ np.abs(truth_U - value_U) / total_S,
        "r2": 1 - _ratio(counts_SU @ (truth_U - value_U) ** 2, spread_S),
    }


def _quadratic_kappa(confusion_SCC: np.ndarray) -> np.ndarray:
    number = np.arange(confusion_SCC.shape[1])
    cost_CC = (number[:, None] - number[None]) ** 2
    by_chance_SCC = confusion_SCC.sum(axis=2)[:, :, None] * confusion_SCC.sum(axis=1)[:, None, :]
    total_S = confusion_SCC.sum(axis=(1, 2))
    expected_S = (cost_CC * by_chance_SCC).sum(axis=(1, 2)) / total_S
    return 1 - _ratio((cost_CC * confusion_SCC).sum(axis=(1, 2)), expected_S)


def _brier(truth_U: np.ndarray, scores_UC: np.ndarray, counts_SU: np.ndarray) -> np.ndarray:
    error_UC = (scores_UC - np.eye(scores_UC.shape[1])[truth_U]) ** 2
    error_U = error_UC[:, 1] if error_UC.shape[1] == 2 else error_UC.sum(axis=1)
    return counts_SU @ error_U / counts_SU.sum(axis=1)


def _ece(truth_U: np.ndarray, scores_UC: np.ndarray, counts_SU: np.ndarray) -> np.ndarray:
    confidence_U, is_right_U = _confidence(truth_U, scores_UC)
    in_bin_UK = _bins(confidence_U)[:, None] == np.arange(NUM_BINS)
    gap_SK = counts_SU @ (in_bin_UK * (is_right_U - confidence_U)[:, None])
    return np.abs(gap_SK).sum(axis=1) / counts_SU.sum(axis=1)


def _confidence(truth_U: np.ndarray, scores_UC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The highest probability of every unit, and 1 where its class is the true one."""
    return scores_UC.max(axis=1), (decided(scores_UC) == truth_U).astype(np.float64)


def _bins(confidence_U: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.linspace(0, 1, NUM_BINS + 1)[1:-1], confidence_U)


def tasks_of(predictions: Predictions) -> list[Predictions]:
    """The predictions themselves, or each label of multilabel ones as a task of two classes."""
    if predictions.kind != "multilabel":
        return [predictions]
    tasks = []
    for number, name in enumerate(predictions.names):
        yes_U1 = predictions.scores[:, [number]]
        scores_U2 = np.concatenate([1 - yes_U1, yes_U1], axis=1)
        task = replace(predictions, kind="classification", names=(f"no {name}", name))
        tasks.append(replace(task, truth=predictions.truth[:, [number]], scores=scores_U2))
    return tasks


def _by_score(
    is_positive_U: np.ndarray, score_U: np.ndarray, counts_SU: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Positives and negatives of every distinct score, lowest first: [S, G] each."""
    order = np.argsort(score_U, kind="stable")
    starts = np.concatenate([[0], np.flatnonzero(np.diff(score_U[order])) + 1])
    sorted_SU = counts_SU[:, order]
    return (
        np.add.reduceat(sorted_SU * is_positive_U[order], starts, axis=1),
        np.add.reduceat(sorted_SU * ~is_positive_U[order], starts, axis=1),
    )


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole; NaN where the whole is 0."""
    return np.divide(part, whole, out=np.full(np.shape(part), np.nan), where=whole > 0)


def icc(values_ND: np.ndarray, draws_SN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """ICC(2,1), agreement, and ICC(3,1), consistency, each [S], of N eyes on D devices; draws_SN: how often a
    resample has each eye. Shrout and Fleiss 1979, single measurements.
    """
    n, num = draws_SN.sum(axis=1), values_ND.shape[1]
    values_ND = values_ND - values_ND.mean()
    eye_N, whole_S = values_ND.mean(axis=1), draws_SN @ values_ND.mean(axis=1) / n
    device_SD = draws_SN @ values_ND / n[:, None]
    total_S = draws_SN @ (values_ND**2).sum(axis=1) - n * num * whole_S**2
    of_eyes_S = num * (draws_SN @ eye_N**2 - n * whole_S**2)
    of_devices_S = n * ((device_SD - whole_S[:, None]) ** 2).sum(axis=1)
    between_S, judges_S = of_eyes_S / (n - 1), of_devices_S / (num - 1)
    error_S = (total_S - of_eyes_S - of_devices_S) / ((n - 1) * (num - 1))
    consistency = between_S + (num - 1) * error_S
    agreement = consistency + num * (judges_S - error_S) / n
    above = between_S - error_S
    with np.errstate(divide="ignore", invalid="ignore"):
        return above / agreement, above / consistency
