"""The report as one HTML page: scripts, style and pictures inside, nothing fetched.

In: runs (utils.report.run_files). Out: HTML text. The templates hold the layout and all words that do not
depend on the runs; assets/ has the style and the script, the package plotly its plotly.js.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.colors import to_hex
from plotly.offline import get_plotlyjs

from utils.report import pictures
from utils.report.charts import charts_of
from utils.report.health import health
from utils.report.overview import figures_of
from utils.report.run_files import Run, findings, step_shares
from utils.report.tables import (
    cell,
    data_tables,
    differences,
    evaluation_table,
    layers_tables,
    leaderboard_table,
    numbers_table,
    truth_tables,
)
from utils.report.volumes import volume_of_layers, volume_of_snapshot
from utils.tables import Table

HERE = Path(__file__).parent
TEMPLATES = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined)
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def render(runs: Sequence[Run]) -> str:
    """The page as HTML text."""
    names = names_of(runs)
    parts = [part_of(run, name, number) for number, (run, name) in enumerate(zip(runs, names, strict=True))]
    return TEMPLATES.get_template("template.html.j2").render(
        parts=parts,
        title=" and ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more",
        policy=POLICY,
        is_synthetic=all(run.is_synthetic for run in runs),
        is_one_store=all(run.prepared == runs[0].prepared for run in runs),
        numbers=numbers_table(runs, names, [part["health"] for part in parts]),
        differences=differences(runs, names) if len(runs) > 1 else None,
        colours={"context": to_hex(pictures.CONTEXT_RGB), "target": to_hex(pictures.TARGET_RGB)},
        data=script_data(content_of(runs, names)),
        style=asset("report.css"),
        script=asset("report.js"),
        plotly=Markup(get_plotlyjs()),
    )


def names_of(runs: Sequence[Run]) -> list[str]:
    """The names of the folders; with their parents where two are the same."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    return [str(run.path) for run in runs]


def content_of(runs: Sequence[Run], names: Sequence[str]) -> dict[str, Any]:
    """What the script draws: curves and volumes."""
    volumes = []
    for run, name in zip(runs, names, strict=True):
        volumes += [volume_of_snapshot(path, name) for path in _shown(run.snapshots)]
        volumes += [volume_of_layers(path, name) for path in run.layers]
    return {"runs": list(names), "charts": charts_of(runs), "volumes": volumes}


def part_of(run: Run, name: str, number: int) -> dict[str, Any]:
    """What the page says of one run: its texts and tables."""
    return {
        "run": run,
        "name": name,
        "number": number,
        "health": health(run.series, run.alarms, run.not_finite),
        "pictures": [pictures.png_data(figure, 100) for figure in figures_of(run)],
        "findings": findings(run),
        "truth": truth_tables(run.truth) if run.truth else [],
        "evaluated": _evaluated(run),
        "step": Table("a training step", ["part", "share of the time, median"], step_shares(run)),
        "data": data_tables(run.prepared),
        "check": check_sentence(run.checked) if run.checked else "",
        "seconds": Table("seconds per stage", ["", ""], [(k, f"{v:.1f}") for k, v in run.seconds.items()]),
        "versions": Table(
            "versions", ["", ""], [(k, cell(v)) for k, v in run.provenance.items()], is_text=True
        ),
    }


def check_sentence(report: Mapping[str, Any]) -> str:
    """The verdict on a tree (check_report.json) and what it rests on."""
    read = report["bytes"]
    share = "" if read["share"] is None else f" ({read['share']:.2%})"
    verdict = "Nothing wrong was found" if report["is_fine"] else "Something is wrong"
    unread = f" {report['unread']} files could not be read." if report["unread"] else ""
    return (
        f"{verdict} in {report['records']} files, of which {read['fetched']:,} of {read['stored']:,} bytes"
        f"{share} were fetched; {report['ok']} are fine by their headers.{unread} check_report.json has each."
    )


def script_data(content: Mapping[str, Any]) -> Markup:
    """JSON that no text of a run can leave: a script element ends at the next `<`."""
    return Markup(json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"))


def _evaluated(run: Run) -> list[Table]:
    tables = []
    if run.evaluation:
        tables.append(evaluation_table(run.evaluation))
    if run.layers_answer:
        tables += layers_tables(run.layers_answer)
    if run.leaderboard:
        tables.append(leaderboard_table(run.leaderboard))
    return tables


def _shown(paths: list[Path]) -> list[Path]:
    """All volumes of the last step that wrote pictures, then the first one as the untrained encoder saw it.

    File names sort by step, then row: step_{step}_row_{row}.npz.
    """
    last = [p for p in paths if p.stem.partition("_row_")[0] == paths[-1].stem.partition("_row_")[0]]
    return last + [p for p in paths[:1] if p not in last]


@cache
def asset(name: str) -> Markup:
    """A file of assets/, to stand in a page as it is."""
    return Markup((HERE / "assets" / name).read_text(encoding="utf-8"))
