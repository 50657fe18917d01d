"""The report as one HTML page: pictures inside, nothing fetched.

In: a run's files (utils.report.run_files). Out: HTML text. template.html.j2 holds the layout and all words
that do not depend on the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from utils.report import pictures, tree_check
from utils.report.run_files import NO_PROBE, TASK_SCORES, Run, findings, step_shares
from utils.report.tables import Table, cell, data_tables, number, probe_table, truth_tables

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
        "In pre-training a low loss proves nothing: the target moves with the encoder.",
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
        "(train); a fall means collapse. Before step 1 it is of at most 64 volumes.",
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
        "What the position alone does not tell of the targets; near zero: they hold nothing else.",
    ),
    (
        "Penalty to prediction",
        ("train/penalty_to_prediction",),
        "Norms of the two gradients at the encoder's output; far above 1 the penalty teaches.",
    ),
    ("A-scan loss", ("train/ascan_loss",), "Squared error of the mean A-scans of the target tokens."),
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
        "Share of the time since this start of the run; val.max_volumes, probe.max_volumes and "
        "train.val_every_steps set it.",
    ),
    (
        "Work for gauges",
        ("perf/gauges_fraction",),
        "Counted operations of LiDAR, the check for leaks and the probes, as a share of all.",
    ),
    ("Waiting for data", ("perf/data_wait_fraction",), "Share of the time; near zero: the loader keeps up."),
    ("Model FLOPs utilisation", ("perf/mfu",), "Counted operations a second / the device's peak."),
)


@dataclass(frozen=True)
class Picture:
    """One figure of the page; `png` is a `data:image/png` address."""

    title: str
    png: str
    caption: str = ""


@dataclass(frozen=True)
class Page:
    """What the template shows beside the run's own texts, in the order of the page."""

    verdict: str
    numbers: Sequence[tuple[str, str]]  # (label, value)
    truth: Sequence[Table]  # of a phantom
    probe: Table | None
    findings: Sequence[str]
    charts: Sequence[Picture]
    step: Table  # without rows where no times were logged
    masks: Sequence[Picture]
    features: Sequence[Picture]
    data: Sequence[Table]
    check: str  # the verdict on the tree; empty where it was not checked
    check_tables: Sequence[Table]
    seconds: Table
    versions: Table


def render(run: Run, out: Mapping[str, Any]) -> str:
    """The page as HTML text; `out` is what results.json holds."""
    template = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    ).get_template("template.html.j2")
    colours = {"context": to_hex(pictures.CONTEXT_RGB), "target": to_hex(pictures.TARGET_RGB)}
    return template.render(run=run, page=page_of(run, out), colours=colours)


def page_of(run: Run, out: Mapping[str, Any]) -> Page:
    """The contents of a run's page."""
    first, last = _snapshots(run.snapshots)
    return Page(
        verdict=(run.probe or run.evaluation or {"verdict": NO_PROBE})["verdict"],
        numbers=_numbers(out),
        truth=truth_tables(run.truth) if run.truth else [],
        probe=probe_table(run.probe) if run.probe else None,
        findings=findings(run),
        charts=_charts(run),
        step=Table("a training step", ["part", "share of the time, median"], step_shares(run)),
        masks=[_picture(s.title, pictures.bscan_with_masks(s)) for s in last],
        features=[_picture(s.title, pictures.feature_pca(s)) for s in [*first, *last]],
        data=data_tables(run.prepared),
        check=tree_check.sentence(run.checked) if run.checked else "",
        check_tables=tree_check.tables(run.checked) if run.checked else [],
        seconds=Table("seconds per stage", ["", ""], [(k, f"{v:.1f}") for k, v in run.seconds.items()]),
        versions=Table("versions", ["", ""], [(k, cell(v)) for k, v in run.provenance.items()], is_text=True),
    )


def _numbers(out: Mapping[str, Any]) -> list[tuple[str, str]]:
    training = out["pretraining"]
    return [
        ("volumes kept", str(out["data"]["kept"])),
        ("loss, first to last", f"{number(training['loss_first'])} → {number(training['loss_last'])}"),
        ("skill by position, in validation", number(training["skill_position_last"])),
        ("RankMe, first to last", f"{number(training['rankme_first'])} → {number(training['rankme_last'])}"),
        ("volumes per second", number(training["volumes_per_s"])),
        ("model FLOPs utilisation", number(training["mfu"])),
        ("time for validation", number(training["validation_fraction"])),
        ("work for gauges", number(training["gauges_fraction"])),
        ("alarms", str(len(training["alarms"])) if training["alarms"] else "none"),
    ]


def _charts(run: Run) -> list[Picture]:
    """The charts of which at least one metric was logged."""
    charts = []
    for title, keys, caption in CHARTS:
        series = {key: run.series[key] for key in keys if key in run.series}
        if series:
            charts.append(_picture(title, pictures.curves(series), caption))
    return charts


def _picture(title: str, figure: Figure, caption: str = "") -> Picture:
    return Picture(title, pictures.png_data(figure), caption)


def _snapshots(paths: list[Path]) -> tuple[list[pictures.Snapshot], list[pictures.Snapshot]]:
    """The first volume as the untrained encoder saw it, and all volumes of the last step that wrote pictures.

    File names sort by step, then row: step_{step}_row_{row}.npz.
    """
    last = [p for p in paths if _step_part(p) == _step_part(paths[-1])]
    first = [p for p in paths[:1] if p not in last]
    return [pictures.load_snapshot(p) for p in first], [pictures.load_snapshot(p) for p in last]


def _step_part(path: Path) -> str:
    return path.stem.partition("_row_")[0]
