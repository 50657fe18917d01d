"""Figures of predictions: confusion matrix, ROC and precision-recall curves, reliability; of a value its
scatter.

In: `Predictions`. Out: matplotlib figures by the name of their file. A class without a unit has no curve.
"""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.metrics import precision_recall_curve, roc_curve

from finetuning.cohort.metrics import decided, observed, reliability, tasks_of
from finetuning.cohort.predictions import Predictions
from models.probes.intervals import confusion_draws

COLOURS = ("#1f6fb2", "#d9730d", "#3a8a4f", "#8a4fa3", "#b03a48", "#6b6b6b", "#c2a000", "#2aa5a0")
STYLES = cycler(linestyle=("-", "--", ":")) * cycler(color=COLOURS)  # of curves, one after the other
CHANCE: dict[str, Any] = {"color": "0.75", "linestyle": "-", "linewidth": 1}  # the diagonal
SIDE = 4.6  # inches
FULL = 0.02  # room around 0 to 1
NAME_WIDTH = 24  # letters of a class's name in one line


def figures(predictions: Predictions) -> dict[str, Figure]:
    """{file name without its ending: figure}, of the kind."""
    if predictions.kind == "regression":
        return {"scatter": scatter(predictions)}
    curves = {"roc": roc(predictions), "precision_recall": precision_recall(predictions)}
    if predictions.kind != "multilabel":
        curves["confusion"] = confusion(predictions)
    return curves | {"reliability": reliability_plot(predictions)}


def in_lines(name: str) -> str:
    """A class's name as words, in short lines: those of AI-READI have up to 67 letters."""
    return textwrap.fill(name.replace("_", " "), NAME_WIDTH)


def confusion(predictions: Predictions) -> Figure:
    """Units of each class by the class that was given; colour: share of the true class."""
    names, count = [in_lines(name) for name in predictions.names], len(predictions.names)
    once = np.ones((1, len(predictions.unit)))
    units_CC = confusion_draws(predictions.truth[:, 0], decided(predictions.scores), count, once)[0]
    total_C1 = units_CC.sum(axis=1, keepdims=True)
    share_CC = np.divide(units_CC, total_C1, out=np.zeros((count, count)), where=total_C1 > 0)
    side = max(SIDE, 1.2 * count + 0.08 * NAME_WIDTH)
    figure = Figure(figsize=(side * 1.15, side), layout="constrained")
    axes = figure.subplots()
    axes.imshow(share_CC, cmap="Blues", vmin=0, vmax=1)
    for row in range(count):
        for column in range(count):
            text = f"{units_CC[row, column]:.0f}\n{share_CC[row, column]:.0%}" if total_C1[row, 0] else "-"
            colour = "white" if share_CC[row, column] > 0.5 else "black"
            axes.text(column, row, text, ha="center", va="center", color=colour)
    axes.set_xticks(range(count), names, rotation=30, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(count), names)
    axes.set(xlabel="given class", ylabel="true class")
    axes.set_title("Units, and share of the true class", fontsize="medium")
    return figure


def roc(predictions: Predictions) -> Figure:
    """One curve a class (against the rest) or label; of two classes that of the second."""
    figure, axes = _square("1 - specificity", "sensitivity")
    axes.plot([0, 1], [0, 1], **CHANCE)
    for name, truth_U, score_U, area, _ in _rankings(predictions):
        if 0 < truth_U.sum() < len(truth_U):
            axes.plot(*roc_curve(truth_U, score_U)[:2], label=f"{name}: AUROC {area:.3f}")
    axes.legend(loc="lower right", fontsize="small")
    return figure


def precision_recall(predictions: Predictions) -> Figure:
    """One curve a class (against the rest) or label, with its share of the units as a thin line."""
    figure, axes = _square("sensitivity (recall)", "precision")
    for name, truth_U, score_U, _, area in _rankings(predictions):
        if truth_U.any():
            precision, recall, _ = precision_recall_curve(truth_U, score_U)
            label = f"{name}: AUPRC {area:.3f}"
            (line,) = axes.plot(recall, precision, drawstyle="steps-post", label=label)
            axes.axhline(truth_U.mean(), color=line.get_color(), linewidth=0.7, alpha=0.6)
    axes.legend(loc="lower left", fontsize="small")
    return figure


def reliability_plot(predictions: Predictions) -> Figure:
    """Share of right units by their highest probability, and how many units each bin holds."""
    points = reliability(predictions)
    figure = Figure(figsize=(SIDE, SIDE * 1.25), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    above.plot([0, 1], [0, 1], **CHANCE)
    above.plot(points["confidence"], points["accuracy"], marker="o", color=COLOURS[0])
    above.set(xlim=(-FULL, 1 + FULL), ylim=(-FULL, 1 + FULL), ylabel="share of right units")
    above.set_title(f"ECE {observed(predictions).overall['ece'][0]:.3f}", fontsize="medium")
    below.bar(points["confidence"], points["count"], width=0.03, color=COLOURS[0])
    below.set(ylabel="units", xlabel="highest probability, mean of the bin")
    return figure


def scatter(predictions: Predictions) -> Figure:
    """Predicted by true value, on one scale."""
    truth_U, value_U = predictions.truth[:, 0], predictions.scores[:, 0]
    figure = Figure(figsize=(SIDE, SIDE), layout="constrained")
    axes = figure.subplots()
    ends = [min(truth_U.min(), value_U.min()), max(truth_U.max(), value_U.max())]
    axes.plot(ends, ends, **CHANCE)
    axes.scatter(truth_U, value_U, s=12, color=COLOURS[0], alpha=0.7)
    axes.set_aspect("equal", adjustable="datalim")
    axes.set(xlabel=f"{predictions.names[0]}, true", ylabel=f"{predictions.names[0]}, predicted")
    return figure


def _rankings(predictions: Predictions) -> list[tuple[str, np.ndarray, np.ndarray, float, float]]:
    """(name, is positive [U], score [U], AUROC, AUPRC) of every curve."""
    if predictions.kind == "multilabel":
        return [ranking for task in tasks_of(predictions) for ranking in _rankings(task)]
    areas = observed(predictions).by_class
    return [
        (
            in_lines(name),
            predictions.truth[:, 0] == c,
            predictions.scores[:, c],
            *(float(areas[kind][0, c]) for kind in ("auroc", "auprc")),
        )
        for c, name in enumerate(predictions.names)
        if c or len(predictions.names) > 2
    ]


def _square(across: str, up: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(SIDE, SIDE), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(STYLES)
    axes.set(xlim=(-FULL, 1 + FULL), ylim=(-FULL, 1 + FULL), aspect="equal", xlabel=across, ylabel=up)
    return figure, axes
