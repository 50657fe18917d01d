"""The report as one HTML page: scripts, style and pictures inside, nothing fetched; and the first page of a
run's folder: where to click first, what the store holds, and what to do next.

In: runs (utils.report.run_files). Out: HTML text. The templates hold the layout and all words that do not
depend on the runs; assets/ has the style and the script, the package plotly its plotly.js.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.colors import to_hex
from plotly.offline import get_plotlyjs

from utils.report import pictures
from utils.report.charts import charts_of
from utils.report.health import Health, health
from utils.report.overview import figures_of
from utils.report.run_files import NO_EVALUATION, Run, findings, step_shares
from utils.report.tables import (
    cell,
    data_tables,
    differences,
    evaluation_table,
    layers_tables,
    leaderboard_table,
    numbers_table,
    quality_tables,
    truth_tables,
)
from utils.report.volumes import volume_of_layers, volume_of_snapshot
from utils.tables import Table

HERE = Path(__file__).parent
TEMPLATES = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined)
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

FILES = (  # from the run's folder, and what they are
    ("report.html", "The report: verdict, curves, scans, evaluation, data, configuration"),
    ("picture.png", "One eye as the encoder sees it, and the encoder beside other rows"),
    ("comparison.html", "This run beside others"),
    ("results.json", "The numbers of the report, for programs"),
    ("evaluation.md", "The evaluation: every metric, by class and subgroup"),
    ("leaderboard/leaderboard.md", "The leaderboard"),
    ("layers.md", "The evaluation of predicted layers"),
    ("prepare_report.json", "The store: what was kept, what was rejected and why"),
    ("check_report.json", "The check of the tree by its headers"),
    ("config.yaml", "Every key of the configuration"),
    ("metrics.jsonl", "Every number that was logged, a line each"),
    ("log.txt", "What the terminal showed"),
)


@dataclass(frozen=True)
class Part:
    """What the page says of one run."""

    run: Run
    name: str
    number: int
    health: Health
    pictures: Sequence[str]  # of utils.report.overview
    findings: Sequence[str]
    verdict: str  # of the evaluation
    truth: Sequence[Table]  # of a phantom
    evaluated: Sequence[Table]  # an evaluation, leaderboard, layers
    step: Table  # without rows where no times were logged
    data: Sequence[Table]
    check: str  # the verdict on the tree; empty where it was not checked
    seconds: Table
    versions: Table


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
        numbers=numbers_table(runs, names, [part.health for part in parts]),
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


def part_of(run: Run, name: str, number: int) -> Part:
    """The texts and tables of one run."""
    return Part(
        run=run,
        name=name,
        number=number,
        health=health(run.series, run.alarms, run.not_finite),
        pictures=[pictures.png_data(figure, 100) for figure in figures_of(run)],
        findings=findings(run),
        verdict=_verdict(run),
        truth=truth_tables(run.truth) if run.truth else [],
        evaluated=_evaluated(run),
        step=Table("a training step", ["part", "share of the time, median"], step_shares(run)),
        data=data_tables(run.prepared),
        check=check_sentence(run.checked) if run.checked else "",
        seconds=Table("seconds per stage", ["", ""], [(k, f"{v:.1f}") for k, v in run.seconds.items()]),
        versions=Table("versions", ["", ""], [(k, cell(v)) for k, v in run.provenance.items()], is_text=True),
    )


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
    last = [p for p in paths if _step_part(p) == _step_part(paths[-1])]
    return last + [p for p in paths[:1] if p not in last]


def _step_part(path: Path) -> str:
    return path.stem.partition("_row_")[0]


@cache
def asset(name: str) -> Markup:
    """A file of assets/, to stand in a page as it is."""
    return Markup((HERE / "assets" / name).read_text(encoding="utf-8"))


def index_page(run: Run) -> str:
    """The first page of a run's folder as HTML text; its links lead to files that are there."""
    rejects, devices, *_ = data_tables(run.prepared)
    return TEMPLATES.get_template("index.html.j2").render(
        run=run,
        policy=POLICY,
        style=asset("report.css"),
        health=health(run.series, run.alarms, run.not_finite),
        verdict=_verdict(run),
        files=[(name, text) for name, text in FILES if (run.path / name).is_file()],
        stores=[devices, *quality_tables(run.prepared), rejects],
        steps=next_steps(run),
    )


def _verdict(run: Run) -> str:
    return (run.evaluation or {"verdict": NO_EVALUATION})["verdict"]


def next_steps(run: Run) -> list[tuple[str, str]]:
    """(what for, command) pairs; an evaluation only where there was none."""
    path, config = shlex.quote(str(run.path)), shlex.quote(str(run.path / "config.yaml"))
    steps = []
    has_probe = bool(run.series.get("val/probe"))  # else there is no best checkpoint to evaluate
    if run.evaluation is None and not run.is_finetuning and has_probe:
        steps.append(("Say what the encoder is worth", f"python -m finetuning.evaluate --config {config}"))
    if not run.is_finetuning:
        store, out = shlex.quote(_store_of(run)), shlex.quote(str(run.path / "embedding"))
        steps += [
            ("Train a head for your labels on this encoder",
             f"python -m finetuning.train --config configs/cls_linear_probe.yaml model.checkpoint={path}"),
            ("Have the features of its store as a table",
             f"python -m finetuning.embed --checkpoint {path} --store {store} --out {out}"),
        ]  # fmt: skip
    return [*steps, ("See this run beside another", f"python -m utils.report {path} OTHER_RUN")]


def _store_of(run: Run) -> str:
    """The prepared store that the run was trained on; STORE where its configuration names none."""
    cfg = yaml.safe_load(run.config) or {}
    return str(cfg.get("data", {}).get("store", "STORE"))
