"""The files of an evaluation: evaluation.json, evaluation.md, predictions.parquet and figures/.

In: the content of evaluation.json, and the `Scored` of every row of its table. Out: files in the run's
folder. predictions.parquet has a line for every row of the table (column `row`) and unit; device, laterality
and site are joined with + where the volumes of a unit differ; `fold` is the number of the crossfit fold, 0
with the official splits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from finetuning.answers.answer import Answer, Content
from finetuning.answers.curves import figures
from finetuning.answers.subgroups import COLUMNS
from finetuning.cohort.cohort import EVALUATED
from finetuning.cohort.predictions import Scored
from utils import storage
from utils.report.pictures import png
from utils.report.tables import TITLES
from utils.tables import Table, estimate, number, page

Scores = Mapping[str, Scored]  # row's name -> scores
FEW = " (too few)"  # beside the people of a subgroup whose intervals are too narrow


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
