"""The files of an evaluation: evaluation.json, evaluation.md, predictions.parquet and figures/.

In: the content of evaluation.json, and the `Scored` of every row of its table. Out: files in the run's
folder. predictions.parquet has a line for every row of the table (column `row`) and unit; device, laterality
and site are joined with + where the volumes of a unit differ; `fold` is the number of the crossfit fold, 0
with the official splits.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from finetuning.answers.curves import figures
from finetuning.answers.subgroups import COLUMNS
from finetuning.cohort.cohort import EVALUATED
from finetuning.cohort.predictions import Scored
from utils import storage

TITLES = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro F1",
    "macro_auroc": "macro AUROC",
    "macro_auprc": "macro AUPRC",
    "quadratic_kappa": "quadratic kappa",
    "brier": "Brier",
    "ece": "ECE",
    "mae": "MAE",
    "r2": "R2",
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "f1": "F1",
    "auroc": "AUROC",
    "auprc": "AUPRC",
}
Scores = Mapping[str, Scored]  # row's name -> scores


def write_evaluation(folder: str, content: Mapping[str, Any], scores: Scores, index: pd.DataFrame) -> None:
    """Write all files; evaluation.json last, so that where it is the others are."""
    main = scores[content["rows"][0]["name"]].evaluated()
    pictures = figures(main)
    for name, figure in pictures.items():
        storage.write_bytes(storage.join(folder, "figures", f"{name}.png"), _png(figure))
    table = predictions_table(scores, index)
    storage.write_bytes(storage.join(folder, "predictions.parquet"), _parquet(table))
    storage.write_text(storage.join(folder, "evaluation.md"), markdown(content, list(pictures)))
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    storage.write_text(storage.join(folder, "evaluation.json"), text)


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


def markdown(content: Mapping[str, Any], pictures: Sequence[str] = ()) -> str:
    """The tables as text; the verdict and what weakens it come first."""
    lines = [f"# {content['title']}", "", content["verdict"], ""]
    lines += [f"- **{caution}**" for caution in content["cautions"]] + [f"- {n}" for n in content["notes"]]
    lines += ["", "## Metrics", ""]
    names = list(content["rows"][0]["metrics"])
    rows = [[r["label"], *(_cell(r["metrics"][n]) for n in names)] for r in content["rows"]]
    lines += _table(["", *(TITLES[n] for n in names)], rows)
    main = content["rows"][0]
    if main["by_class"]:
        lines += ["", f"## By class: {main['label']}", ""]
        counts = content["n_per_class"] or [None] * len(content["names"])
        rows = [
            [name, _count(counts[c]), *(_cell(part[c]) for part in main["by_class"].values())]
            for c, name in enumerate(content["names"])
        ]
        lines += _table(["class", "units", *(TITLES[n] for n in main["by_class"])], rows)
    lines += _threshold(main)
    for column, groups in content["subgroups"].items():
        lines += ["", f"## By {column}", ""]
        rows = [
            [g["group"], str(g["n_participants"]), str(g["n_units"])]
            + [_cell(g["metrics"] and g["metrics"][name]) for name in names]
            for g in groups
        ]
        lines += _table([column, "participants", "units", *(TITLES[n] for n in names)], rows)
        if column == "device":
            lines += ["", content["device_sentence"]]
    if pictures:
        lines += ["", "## Figures", "", *(f"![{name}](figures/{name}.png)" for name in pictures)]
    return "\n".join(lines) + "\n"


def _threshold(main: Mapping[str, Any]) -> list[str]:
    chosen = main.get("threshold")
    if not chosen:
        return []
    values = ", ".join(f"{value:.3f}" for value in chosen["values"])
    rows = [[TITLES[name], _cell(chosen["by_class"][name][1])] for name in ("sensitivity", "specificity")]
    rows += [[TITLES[name], _cell(chosen["metrics"][name])] for name in ("balanced_accuracy", "macro_f1")]
    title = f"## {chosen['positive']} from probability {values} on: {chosen['rule']}"
    return ["", title, "", *_table(["", chosen["positive"]], rows)]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines]


def _cell(entry: Mapping[str, Any] | None) -> str:
    """A value with its interval; a dash for what does not exist."""
    if entry is None or entry["value"] is None:
        return "-"
    if entry["ci95"] is None:
        return f"{entry['value']:.3f}"
    return f"{entry['value']:.3f} ({entry['ci95'][0]:.3f} to {entry['ci95'][1]:.3f})"


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)


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


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return file.getvalue()


def _parquet(table: pd.DataFrame) -> bytes:
    file = io.BytesIO()
    table.to_parquet(file, index=False)
    return file.getvalue()
