"""The files of an evaluation: evaluation.json, evaluation.md, predictions.parquet and figures/.

In: the content of evaluation.json, and the `Scored` of every row of its table. Out: files in the run's
folder. predictions.parquet has a line for every row of the table (column `row`) and unit; device, laterality
and site are joined with + where the volumes of a unit differ; `fold` is the number of the crossfit fold, 0
with the official splits. Figures: confusion matrix, ROC and precision-recall curves, reliability; of a value
its scatter. A class without a unit has no curve.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.metrics import precision_recall_curve, roc_curve

from finetuning.answers.scorecard import COLUMNS, Answer, Content
from finetuning.cohort.cohort import EVALUATED
from finetuning.cohort.metrics import Predictions, Scored, decided, observed, reliability, tasks_of
from models.probes.intervals import confusion_draws
from utils import storage
from utils.report.pictures import png
from utils.report.tables import TITLES
from utils.tables import Table, estimate, number, page

Scores = Mapping[str, Scored]  # row's name -> scores
FEW = " (too few)"  # beside the people of a subgroup whose intervals are too narrow
COLOURS = ("#1f6fb2", "#d9730d", "#3a8a4f", "#8a4fa3", "#b03a48", "#6b6b6b", "#c2a000", "#2aa5a0")
STYLES = cycler(linestyle=("-", "--", ":")) * cycler(color=COLOURS)  # of curves, one after the other
CHANCE: dict[str, Any] = {"color": "0.75", "linestyle": "-", "linewidth": 1}  # the diagonal
SIDE = 4.6  # inches
FULL = 0.02  # room around 0 to 1
NAME_WIDTH = 24  # letters of a class's name in one line


def write_evaluation(answer: Answer, content: Content, scores: Scores, index: pd.DataFrame) -> Content:
    """Write all files, evaluation.json last; returns its content."""
    folder = answer.folder
    main = scores[content["rows"][0]["name"]].evaluated()
    pictures = figures(main)
    for name, figure in pictures.items():
        storage.write_bytes(storage.join(folder, "figures", f"{name}.png"), png(figure, 120))
    table = predictions_table(scores, index)
    storage.write_bytes(storage.join(folder, "predictions.parquet"), table.to_parquet(index=False))
    return answer.write(content, markdown(content, list(pictures)))


def predictions_table(scores: Scores, index: pd.DataFrame) -> pd.DataFrame:
    """A line for every row of the table and unit."""
    parts = []
    for name, scored in scores.items():
        p = scored.evaluated()
        columns: dict[str, Any] = {"row": name, "unit": p.unit, "person": p.person}
        columns |= {column: _joined(scored, index, source) for column, source in COLUMNS.items()}
        columns["fold"] = scored.cohort_of_units()
        if p.kind == "multilabel":
            columns |= {f"truth_{n}": p.truth[:, i].astype(int) for i, n in enumerate(p.names)}
        elif p.kind == "regression":
            columns["truth"] = p.truth[:, 0]
        else:
            columns["truth"] = np.array(p.names)[p.truth[:, 0].astype(int)]
        score_names = ["score"] if p.kind == "regression" else [f"score_{n}" for n in p.names]
        columns |= {n: p.scores[:, i] for i, n in enumerate(score_names)}
        parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True)


def tables_of(content: Mapping[str, Any]) -> list[Table]:
    """The tables of the page: all rows, the classes of the first, its threshold, its subgroups."""
    main, names = content["rows"][0], list(content["rows"][0]["metrics"])
    titles = [TITLES[name] for name in names]
    rows = [[row["label"], *(estimate(row["metrics"][n]) for n in names)] for row in content["rows"]]
    tables = [Table("Metrics", ["", *titles], rows)]
    if main["by_class"]:
        counts = content["n_per_class"] or [None] * len(content["names"])
        rows = [
            [name, number(counts[c], "d"), *(estimate(part[c]) for part in main["by_class"].values())]
            for c, name in enumerate(content["names"])
        ]
        header = ["class", "units", *(TITLES[name] for name in main["by_class"])]
        tables.append(Table(f"By class: {main['label']}", header, rows))
    if chosen := main.get("threshold"):
        values = ", ".join(map(number, chosen["values"]))
        rows = [[TITLES[n], estimate(chosen["by_class"][n][1])] for n in ("sensitivity", "specificity")]
        rows += [[TITLES[n], estimate(chosen["metrics"][n])] for n in ("balanced_accuracy", "macro_f1")]
        heading = f"{chosen['positive']} from probability {values} on: {chosen['rule']}"
        tables.append(Table(heading, ["", chosen["positive"]], rows))
    for column, groups in content["subgroups"].items():
        rows = [
            [group["group"], f"{group['n_participants']}{FEW if group['few'] else ''}", str(group["n_units"])]
            + [estimate(group["metrics"] and group["metrics"][name]) for name in names]
            for group in groups
        ]
        tables.append(Table(f"By {column}", [column, "participants", "units", *titles], rows))
    return tables


def markdown(content: Mapping[str, Any], pictures: Sequence[str] = ()) -> str:
    """The tables as text; the verdict and what weakens it come first."""
    points = [*(f"**{caution}**" for caution in content["cautions"]), *content["notes"]]
    shown = ["", "## Figures", "", *(f"![{name}](figures/{name}.png)" for name in pictures)]
    text = page(content["title"], [content["verdict"]], points, tables_of(content))
    return text + ("\n".join(shown) + "\n" if pictures else "")


def _joined(scored: Scored, index: pd.DataFrame, column: str) -> np.ndarray:
    """The values of the volumes of every unit, in the order of `evaluated()`; NaN and None stay missing."""
    parts = [
        pd.DataFrame(
            {"unit": c.unit[c.fold == EVALUATED], "value": index.loc[c.rows[c.fold == EVALUATED], column]}
        )
        for c in scored.cohorts
    ]
    groups = pd.concat(parts).groupby("unit", sort=True)["value"]
    if column == "age":
        return groups.first().to_numpy(float)
    return groups.agg(lambda values: "+".join(sorted(set(values.dropna()))) or None).to_numpy(object)


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
