"""The report of a run: `python -m utils.report --run DIR` writes report.html and results.json into DIR.

In: files of the run directory only (utils.report.run_files says which). Out: `results.json` for machines, and
one self-contained page for people: pictures inside, nothing fetched. The verdict is the sentence that
finetuning.evaluate derived from the paired interval; where there is none, the page says so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.colors import to_hex

from utils import storage
from utils.report import pictures as visualize
from utils.report import tree_check as check_section
from utils.report.run_files import ARMS, Run, findings, read_run, results, step_shares

# title, metric keys, what it means
CHARTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("Loss", ("train/loss", "val/loss"), "A low loss proves nothing: the target moves with the encoder."),
    (
        "Skill",
        ("train/skill_position", "train/skill_mean"),
        "1 - loss / loss of the best constant. Only skill_position counts as learning: its constant is the "
        "best vector for each token position.",
    ),
    (
        "RankMe",
        ("val/rankme", "train/rankme"),
        "Effective number of feature directions in use, of the target encoder (val) and the context encoder "
        "(train); a fall means collapse.",
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
        "Share of the time since the validation before; train.val_every_steps sets it.",
    ),
    ("Waiting for data", ("perf/data_wait_fraction",), "Share of the time; near zero: the loader keeps up."),
    ("Model FLOPs utilisation", ("perf/mfu",), "Counted operations a second / the device's peak."),
)
GROUPS = ("by_device", "by_protocol")  # of prepare_report.json
GROUP_HEADER = ("", "kept", "rejected", "valid", "lost", "spacing, um", "spacing from", "orientation from")
GROUP_NOTE = (
    "Spacing before resampling, median, D x H x W (B-scan, axial, A-scan). Valid: share of the grid inside "
    "the scan. Lost: share of the scan outside the grid."
)
SYNTHETIC = "on synthetic data: it proves that the machinery runs and says nothing about real retinas"
REAL = "on participants' scans: the terms of the data apply to the pictures in this file"
REASONS_SHOWN = 3  # on the terminal; the page and results.json have all
NO_PROBE = "Not evaluated: this run has no probe.json. finetuning.evaluate writes it."


def summary(out: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(row, text) pairs: the short table for a terminal."""
    data, pre, probe = out["data"], out["pretraining"], out["probe"]
    reasons = sorted(data["rejected"].items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{reason} {n}" for reason, n in reasons[:REASONS_SHOWN]]
    if len(reasons) > REASONS_SHOWN:
        shown.append(f"{len(reasons) - REASONS_SHOWN} more reasons")
    rejected = f"{sum(data['rejected'].values())} rejected" + (f" ({', '.join(shown)})" if shown else "")
    lines = [
        ("data", f"{data['kept']} kept, {rejected}"),
        (
            "pre-training",
            f"loss {_number(pre['loss_first'])} -> {_number(pre['loss_last'])}, "
            f"skill_position {_number(pre['skill_position_last'])}, "
            f"RankMe {_number(pre['rankme_first'])} -> {_number(pre['rankme_last'])}, "
            f"{_number(pre['volumes_per_s'])} volumes/s"
            + ("" if pre["mfu"] is None else f", MFU {_number(pre['mfu'])}"),
        ),
    ]
    alarms = [f"step {alarm['step']}: {alarm['text']}" for alarm in pre["alarms"]]
    lines.append(("alarms", "; ".join(alarms) if alarms else "none"))
    if probe:
        arms = [f"{arm.replace('_', ' ')} {_interval(probe[arm])}" for arm in ARMS]
        lines.append(("probe", f"{', '.join(arms)}; {probe['n_participants']} participants"))
    lines.append(("verdict", probe["verdict"] if probe else NO_PROBE))
    if out["seconds"]:
        lines.append(("seconds", ", ".join(f"{k} {v:.0f}" for k, v in out["seconds"].items())))
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _interval(row: Mapping[str, Any]) -> str:
    return f"{row['balanced_accuracy']:.3f} [{row['ci95'][0]:.3f}, {row['ci95'][1]:.3f}]"


@dataclass(frozen=True)
class Table:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    bold: tuple[int, ...] = ()
    is_text: bool = False  # false: columns after the first hold numbers


def _probe_table(probe: Mapping[str, Any]) -> Table:
    rows = [
        [
            row["label"],
            f"{row['balanced_accuracy']:.3f}",
            f"{row['ci95'][0]:.3f} to {row['ci95'][1]:.3f}",
            "-" if row["macro_auroc"] is None else f"{row['macro_auroc']:.3f}",
            f"{row['val_balanced_accuracy']:.3f}",
            f"{row['chosen_c']:g}",
            str(row["num_features"]),
        ]
        for row in probe["rows"]
    ]
    return Table(
        _probe_size(probe),
        ["features", "balanced accuracy", "95 % interval", "macro AUROC", "on val", "C", "size"],
        rows,
        f"Chance is {1 / len(probe['classes']):.3f}. Same protocol for every row.",
        tuple(i for i, row in enumerate(probe["rows"]) if row["name"] in ARMS),
    )


def _probe_size(probe: Mapping[str, Any]) -> str:
    return (
        f"{probe['label_column']}: {len(probe['classes'])} classes, {probe['n_participants']} participants "
        f"of split {probe['split']}, checkpoint {probe['checkpoint']} (step {probe['step']})"
    )


def data_tables(prepared: Mapping[str, Any]) -> list[Table]:
    """What prepare counted: rejects by reason, groups of volumes, and every single fact last."""
    rejected = sorted(prepared["rejected"].items(), key=lambda item: -item[1])
    tables = [
        Table(
            f"{prepared['kept']} volumes kept, {sum(prepared['rejected'].values())} rejected",
            ["reason of rejection", "volumes"],
            [[reason, str(n)] for reason, n in rejected] or [["none", "0"]],
        )
    ]
    for key in GROUPS:
        rows = [_group_row(name, group) for name, group in prepared[key].items()]
        tables.append(Table(key.replace("_", " "), GROUP_HEADER, rows, GROUP_NOTE, is_text=True))
    facts = [
        [key.replace("_", " "), _cell(value)]
        for key, value in prepared.items()
        if key not in ("kept", "rejected", *GROUPS)
    ]
    return [*tables, Table("the store", ["", ""], facts, is_text=True)]


def _group_row(name: str, group: Mapping[str, Any]) -> list[str]:
    """One device or protocol; fractions and spacing are null where nothing was kept."""
    spacing = group["spacing_before"]
    shares = [group["valid_fraction"], group["lost_fraction"]]
    sources = [group["spacing_source"], group["orientation_source"]]
    return [
        name,
        str(group["kept"]),
        str(sum(group["rejected"].values())),
        *("-" if share is None else f"{share:.0%}" for share in shares),
        "\u00a0x\u00a0".join(f"{1000 * mm:.3g}" for mm in spacing) if spacing else "-",  # never broken
        *(next(iter(counts)) if len(counts) == 1 else _cell(counts) for counts in sources),
    ]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return " x ".join(_cell(v) for v in value)
    if isinstance(value, dict):
        return ", ".join(f"{k} {_cell(v)}" for k, v in value.items()) or "none"
    return str(value)


def render(run: Run, out: Mapping[str, Any]) -> str:
    """The page as HTML text."""
    charts = [
        {
            "title": title,
            "caption": caption,
            "png": visualize.png_data(
                visualize.curves({key: run.series[key] for key in keys if key in run.series})
            ),
        }
        for title, keys, caption in CHARTS
        if any(key in run.series for key in keys)
    ]
    first, last = _snapshots(run.snapshots)
    probe, pre = run.probe, out["pretraining"]
    versions = [[key, _cell(value)] for key, value in run.provenance.items()]
    template = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    ).get_template("template.html.j2")
    return template.render(
        name=run.path.resolve().name,
        headline=SYNTHETIC if run.prepared["synthetic"] else REAL,
        verdict=probe["verdict"] if probe else NO_PROBE,
        probe_size=probe and _probe_size(probe),
        cautions=probe["cautions"] if probe else [],
        numbers=[
            ("volumes kept", str(out["data"]["kept"])),
            ("loss, first to last", f"{_number(pre['loss_first'])} → {_number(pre['loss_last'])}"),
            ("skill by position", _number(pre["skill_position_last"])),
            ("RankMe, first to last", f"{_number(pre['rankme_first'])} → {_number(pre['rankme_last'])}"),
            ("volumes per second", _number(pre["volumes_per_s"])),
            ("model FLOPs utilisation", _number(pre["mfu"])),
            ("alarms", str(len(pre["alarms"])) if pre["alarms"] else "none"),
        ],
        probe=_probe_table(probe) if probe else None,
        probe_notes=probe["notes"] if probe else [],
        no_probe=NO_PROBE,
        findings=findings(run),
        charts=charts,
        masks=[{"title": s.title, "png": visualize.png_data(visualize.bscan_with_masks(s))} for s in last],
        features=[
            {"title": s.title, "png": visualize.png_data(visualize.feature_pca(s))} for s in [*first, *last]
        ],
        context_colour=to_hex(visualize.CONTEXT_RGB),
        target_colour=to_hex(visualize.TARGET_RGB),
        data_tables=data_tables(run.prepared),
        checked=check_section.sentence(run.checked) if run.checked else None,
        check_tables=[Table(*t) for t in check_section.tables(run.checked)] if run.checked else [],
        seconds=Table("seconds per stage", ["", ""], [[k, f"{v:.1f}"] for k, v in run.seconds.items()])
        if run.seconds
        else None,
        step=Table("a training step", ["part", "share of the time, median"], step_shares(run)),
        versions=Table("versions", ["", ""], versions, is_text=True),
        config=run.config,
    )


def _snapshots(paths: list[Path]) -> tuple[list[visualize.Snapshot], list[visualize.Snapshot]]:
    """The first volume as the untrained encoder saw it, and all volumes of the last step that wrote pictures.

    File names sort by step, then row: step_{step}_row_{row}.npz.
    """
    last = [p for p in paths if _step_part(p) == _step_part(paths[-1])]
    first = [p for p in paths[:1] if p not in last]
    return [visualize.load_snapshot(p) for p in first], [visualize.load_snapshot(p) for p in last]


def _step_part(path: Path) -> str:
    return path.stem.partition("_row_")[0]


def main(argv: Sequence[str] | None = None) -> None:
    """Write report.html and results.json of a run; print a short table that ends with the report's path."""
    parser = argparse.ArgumentParser(prog="python -m utils.report", description=main.__doc__)
    parser.add_argument("--run", required=True, metavar="DIR", help="a run directory of pretraining.train")
    run = read_run(parser.parse_args(argv).run)
    out = results(run)
    report = run.path / "report.html"
    storage.write_text(str(run.path / "results.json"), json.dumps(out, indent=2, allow_nan=False) + "\n")
    storage.write_text(str(report), render(run, out))
    for name, text in [*summary(out), ("report", str(report))]:
        print(f"{name:<13} {text}")
