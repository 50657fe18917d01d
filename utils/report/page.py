"""The report as one HTML page: scripts, style and pictures inside, nothing fetched.

In: runs (utils.report.run_files). Out: HTML text. The templates hold the layout and all words that do not
depend on the runs; assets/ has the style and the script, the package plotly its plotly.js. The curves are
data for it: each chart once, every run in it; MAIN charts stand open in the page, others behind a fold.
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
from utils.report.health import health
from utils.report.overview import figures_of
from utils.report.run_files import TASK_SCORES, Points, Run, findings, step_shares
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

MAX_POINTS = 1500  # of a curve; longer ones are thinned, first and last point kept
# title, metric keys, what it means
CHARTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "Score of the task, on validation",
        TASK_SCORES,
        "Of participants, eyes or volumes as task.unit says; the best epoch is the one that is kept.",
    ),
    (
        "Loss",
        ("train/loss", "val/loss"),
        "In pre-training a low loss proves nothing: a target that the encoder makes moves with it.",
    ),
    (
        "Skill",
        ("val/skill_position", "val/skill_mean"),
        "1 - loss / loss of the best constant, in validation: one target encoder for all, fitted on half of "
        "the participants, scored on the others. Only skill_position counts as learning: its constant is the "
        "best vector for each token position.",
    ),
    (
        "Skill in training, a moving estimate",
        ("train/skill_position", "train/skill_mean"),
        "The same of single batches, against targets of the steps before: too good while the target moves "
        "fast. It decides nothing.",
    ),
    (
        "Leak",
        ("val/leak",),
        "How far a prediction moves when nothing but the voxels of its targets changes; above 0 by more than "
        "rounding, the prediction sees its targets.",
    ),
    (
        "RankMe",
        ("val/rankme", "train/rankme"),
        "Effective number of feature directions in use, of the target encoder (val) and the context encoder "
        "(train); a fall means collapse. Before step 1 val/rankme is of fewer volumes.",
    ),
    (
        "LiDAR",
        ("val/lidar",),
        "Effective number of directions in which volumes differ by more than their masks make them differ.",
    ),
    (
        "Validation probe",
        ("val/probe", "val/ridge"),
        "Balanced accuracy of kNN and of a ridge classifier, from training to official val participants; kNN "
        "selects best_probe.pt.",
    ),
    (
        "Shortcuts",
        ("val/knn_device", "val/ridge_device", "val/knn_laterality", "val/ridge_laterality"),
        "The same probes on the scanner and on the eye: what features tell that nobody asked for.",
    ),
    ("Feature std", ("train/feature_std",), "Spread of the context features; near zero is collapse."),
    (
        "Share of the volume",
        ("train/volume_share",),
        "What the position does not tell of the targets; near zero: they hold nothing else.",
    ),
    (
        "Penalty to prediction",
        ("train/penalty_to_prediction",),
        "Norms of the two gradients at the encoder's output; far above 1 the penalty teaches.",
    ),
    ("Neighbour loss", ("train/neighbour_loss",), "Of the voxels at and beside each token that is seen."),
    ("Size of an update", ("train/update_ratio",), "Norm of the last update / norm of the weights."),
    ("Lag of the target", ("ema/drift",), "Norm of encoder - target / norm of the target."),
    ("Learning rate", ("train/lr",), "A function of the optimizer step; it never restarts."),
    ("Gradient norm", ("train/grad_norm",), "Before clipping."),
    ("Target momentum", ("train/ema_momentum",), "Share of the target encoder that each step keeps."),
    ("Initial weights in the target", ("ema/init_weight",), "Product of the momenta so far."),
    ("Volumes per second", ("perf/volumes_per_s",), "Of the whole step, data included."),
    (
        "Time for validation",
        ("perf/validation_fraction",),
        "Share of the time since this start of the run; val.max_volumes and train.val_every_steps set it.",
    ),
    (
        "Work for gauges",
        ("perf/gauges_fraction",),
        "Counted operations of LiDAR, the check for leaks and the probes, as a share of all.",
    ),
    ("Waiting for data", ("perf/data_wait_fraction",), "Share of the time; near zero: the loader keeps up."),
    ("Model FLOPs utilisation", ("perf/mfu",), "Counted operations a second / the device's peak."),
)
MAIN = 10  # the first of CHARTS, which tell learning from collapse


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


def charts_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The charts of which some run logged a metric: title, caption, is_main, and a curve for each run and
    metric (run: its number, x: optimizer steps, y: values).
    """
    charts = []
    for number, (title, keys, caption) in enumerate(CHARTS):
        curves = [
            {"run": place, "name": key, **_columns(run.series[key])}
            for place, run in enumerate(runs)
            for key in keys
            if key in run.series
        ]
        if curves:
            charts.append({"title": title, "caption": caption, "is_main": number < MAIN, "curves": curves})
    return charts


def _columns(points: Points) -> dict[str, list[float]]:
    """Steps and values with six digits; every n-th point of a long curve, and its last."""
    stride = -(-len(points) // MAX_POINTS)
    kept = points[::stride] + ([points[-1]] if (len(points) - 1) % stride else [])
    return {"x": [step for step, _ in kept], "y": [float(f"{value:.6g}") for _, value in kept]}


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
