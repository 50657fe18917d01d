"""index.html of a run's folder: where to click first, what the store holds, and what to do next.

In: a run (utils.report.run_files). Out: a page whose links lead to files of the folder that are there.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from utils.report.health import health
from utils.report.page import POLICY, asset
from utils.report.run_files import NO_EVALUATION, Run
from utils.report.tables import data_tables, quality_tables

FILES = (  # from the run's folder, and what they are
    ("report.html", "The report: verdict, curves, scans, evaluation, data, configuration"),
    ("comparison.html", "This run beside others"),
    ("results.json", "The numbers of the report, for programs"),
    ("evaluation.md", "The evaluation: every metric, by class and subgroup"),
    ("layers.md", "The evaluation of predicted layers"),
    ("leaderboard/leaderboard.html", "The leaderboard"),
    ("prepare_report.json", "The store: what was kept, what was rejected and why"),
    ("check_report.json", "The check of the tree by its headers"),
    ("config.yaml", "Every key of the configuration"),
    ("metrics.jsonl", "Every number that was logged, a line each"),
    ("log.txt", "What the terminal showed"),
)


def index_page(run: Run) -> str:
    """The page as HTML text."""
    template = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    ).get_template("index.html.j2")
    rejects, devices, *_ = data_tables(run.prepared)
    return template.render(
        run=run,
        policy=POLICY,
        style=asset("report.css"),
        health=health(run.series, run.alarms, run.not_finite),
        verdict=(run.evaluation or {"verdict": NO_EVALUATION})["verdict"],
        files=[(name, text) for name, text in FILES if (run.path / name).is_file()],
        stores=[devices, *quality_tables(run.prepared), rejects],
        steps=next_steps(run),
    )


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
    steps += [
        ("See this run beside another", f"python -m utils.report {path} OTHER_RUN"),
    ]
    return steps


def _store_of(run: Run) -> str:
    """The prepared store that the run was trained on; STORE where its configuration names none."""
    cfg = yaml.safe_load(run.config) or {}
    return str(cfg.get("data", {}).get("store", "STORE"))
