"""What a run directory says: its files as one object, the numbers of results.json, and what they warn of.

In: files of the run directory only: metrics.jsonl, config.yaml, provenance.json, prepare_report.json, and
where they exist check_report.json (`prepare --check-only`), truth.json (benchmarks.phantom_truth),
evaluation.json, evaluation.md and figures/*.png (finetuning.evaluate), snapshots/*.npz
(utils.report.pictures), layers/*.npz (utils.report.volumes), layers.json,
leaderboard/leaderboard.csv (finetuning) and stages.tsv (name, tab, seconds). Out: a `Run`; the dictionary of
results.json; sentences about what the numbers warn of.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from utils.errors import UserError

Points = list[tuple[int, float]]

ARMS = ("pretrained", "random_init")  # the two rows of a checkpoint's classes that results.json compares
# of truth.json, what results.json repeats
TRUTH_KEYS = ("control_step", "n_participants", "n_volumes", "n_tokens", "questions")
STEP_PARTS = ("data_wait", "forward", "backward", "update", "logging", "other")
INIT_WEIGHT_LIMIT = 0.1
# what a fine-tuning logs; pre-training has none of them
TASK_SCORES = tuple(
    f"val/{name}"
    for name in ("balanced_accuracy", "quadratic_kappa", "mean_auroc", "minus_the_squared_error")
)
NO_EVALUATION = "Not evaluated: this run has no evaluation.json. finetuning.evaluate writes it."


@dataclass(frozen=True)
class Run:
    """What a run directory says; evaluation, truth, checked are None, seconds and linked empty where their
    files are absent.
    """

    path: Path
    series: dict[str, Points]  # metric -> (step, value), by step; null left out
    not_finite: dict[str, int]  # metric -> the first step with NaN or an infinity
    alarms: list[tuple[int, str]]  # (step, text), in the order in which they began
    config: str
    provenance: dict[str, Any]
    prepared: dict[str, Any]
    truth: dict[str, Any] | None  # of a phantom
    evaluation: dict[str, Any] | None
    linked: list[str]  # tables and figures of an evaluation, as paths from the run directory
    checked: dict[str, Any] | None  # the tree's check by its headers
    seconds: dict[str, float]
    snapshots: list[Path]
    layers: list[Path]
    layers_answer: dict[str, Any] | None
    leaderboard: list[list[str]]  # lines of its table, the header first; empty without one

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def is_synthetic(self) -> bool:
        return bool(self.prepared["synthetic"])

    @property
    def verdict(self) -> str:
        """Of the evaluation."""
        return (self.evaluation or {"verdict": NO_EVALUATION})["verdict"]

    @property
    def is_finetuning(self) -> bool:
        return any(name in self.series for name in TASK_SCORES)


def read_run(path: str | Path) -> Run:
    """Read a run directory; UserError names the file that is missing or damaged."""
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path}: expected a run directory, found none; pretraining.train makes it")
    series, not_finite, alarms = _series(_text(path / "metrics.jsonl"), path / "metrics.jsonl")
    truth, evaluation = path / "truth.json", path / "evaluation.json"
    files = [path / "evaluation.md", *sorted((path / "figures").glob("*.png"))]
    stages, checked = path / "stages.tsv", path / "check_report.json"
    layers = path / "layers.json"
    board = path / "leaderboard" / "leaderboard.csv"
    return Run(
        path=path,
        series=series,
        not_finite=not_finite,
        alarms=alarms,
        config=_text(path / "config.yaml"),
        provenance=_json(path / "provenance.json"),
        prepared=_json(path / "prepare_report.json"),
        truth=_json(truth) if truth.exists() else None,
        evaluation=_json(evaluation) if evaluation.exists() else None,
        linked=[file.relative_to(path).as_posix() for file in files if evaluation.exists() and file.exists()],
        checked=_json(checked) if checked.exists() else None,
        seconds=_seconds(stages) if stages.exists() else {},
        snapshots=sorted((path / "snapshots").glob("*.npz")),
        layers=sorted((path / "layers").glob("*.npz")),
        layers_answer=_json(layers) if layers.exists() else None,
        leaderboard=[*csv.reader(_text(board).splitlines())] if board.exists() else [],
    )


def _text(path: Path) -> str:
    if not path.is_file():
        raise UserError(
            f"{path}: expected a file that pretraining.train writes, found none; give the run.dir of one"
        )
    return path.read_text(encoding="utf-8", errors="backslashreplace")  # which is no JSON, so damage is named


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: expected JSON, found damage: {error}") from error


def _series(text: str, path: Path) -> tuple[dict[str, Points], dict[str, int], list[tuple[int, str]]]:
    """Metrics by step, the first step of each that is not finite, and alarms; a step that a resumed run
    repeated counts once, as logged last.

    A last line without its newline may be cut, since a run is writing it or was killed in it: it is left out.
    """
    merged: dict[str, dict[int, float]] = {}
    not_finite: dict[str, int] = {}
    alarms: dict[tuple[int, str], str] = {}
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            step = values.pop("step")
            if "alarm" in values:
                alarms[step, values["alarm"]] = str(values["text"])
                continue
        except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise UserError(f'{path}:{number}: expected JSON with "step", found {line[:60]!r}') from error
        for key, value in values.items():
            if isinstance(value, str) or (value is not None and not math.isfinite(value)):
                not_finite[key] = min(step, not_finite.get(key, step))
            elif value is not None:
                merged.setdefault(key, {})[step] = float(value)
    by_step = {key: sorted(points.items()) for key, points in merged.items()}
    return by_step, not_finite, [(step, text) for (step, _), text in sorted(alarms.items())]


def _seconds(path: Path) -> dict[str, float]:
    """Seconds per stage in the order of their first line; several lines of one stage add up."""
    total: dict[str, float] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        name, _tab, value = line.partition("\t")
        try:
            total[name] = total.get(name, 0.0) + float(value)
        except ValueError as error:
            raise UserError(f"{path}:{number}: expected name, tab, seconds, found {line!r}") from error
    return {name: round(value, 1) for name, value in total.items()}


def results(run: Run) -> dict[str, Any]:
    """What results.json holds; a number that was not measured is null."""
    ranks = like_the_last(run.series, "val/rankme")
    return {
        "data": {"kept": run.prepared["kept"], "rejected": run.prepared["rejected"]},
        "pretraining": {
            "loss_first": _end(run, "train/loss", 0),
            "loss_last": _end(run, "train/loss", -1),
            "skill_mean_last": _end(run, "val/skill_mean", -1),
            "skill_position_last": _end(run, "val/skill_position", -1),
            "rankme_first": ranks[0][1] if len(ranks) > 1 else None,
            "rankme_last": _end(run, "val/rankme", -1),
            "alarms": [{"step": step, "text": text} for step, text in run.alarms],
            "volumes_per_s": _median(run, "perf/volumes_per_s"),
            "mfu": _median(run, "perf/mfu"),
            "validation_fraction": _end(run, "perf/validation_fraction", -1),
            "gauges_fraction": _end(run, "perf/gauges_fraction", -1),
        },
        "truth": run.truth and {key: run.truth[key] for key in TRUTH_KEYS},
        "probe": _probe(run.evaluation) if run.evaluation else None,
        "evaluation": run.evaluation
        and {key: run.evaluation[key] for key in ("title", "verdict", "cautions")},
        "seconds": run.seconds,
    }


def _probe(answer: Mapping[str, Any]) -> dict[str, Any] | None:
    """What results.json says of a checkpoint's classes; None of a head, a value, or several labels."""
    metric, difference = answer["difference"]["metric"], answer["difference"]
    if answer["subject"]["name"] != "probe" or metric != "balanced_accuracy":
        return None
    rows = {row["name"]: row["metrics"][metric] for row in answer["rows"]}
    return {
        **{arm: {metric: rows[arm]["value"], "ci95": rows[arm]["ci95"]} for arm in ARMS},
        "paired_difference": {key: difference[key] for key in ("mean", "ci95", "could_have_shown")},
        **{key: answer[key] for key in ("n_participants", "verdict")},
    }


def like_the_last(series: Mapping[str, Sequence[tuple[int, float]]], key: str) -> list[tuple[int, float]]:
    """The values of a gauge of validation that rest on as many volumes as the last one: no others can
    be compared: before step 1 it is fewer. Runs from before val/volumes have those after step 0.
    """
    points, volumes = series.get(key, ()), dict(series.get("val/volumes", ()))
    if not points:
        return []
    last = points[-1][0]
    if last not in volumes:
        return [point for point in points if point[0] > 0 or last == 0]
    return [point for point in points if volumes.get(point[0]) == volumes[last]]


def _end(run: Run, key: str, index: int) -> float | None:
    return run.series[key][index][1] if key in run.series else None


def step_shares(run: Run) -> list[tuple[str, str]]:
    """(part, share of a step's time), medians over the log lines; parts not measured are left out."""
    shares = [(part, _median(run, f"perf/{part}_fraction")) for part in STEP_PARTS]
    return [(part.replace("_", " "), f"{share:.1%}") for part, share in shares if share is not None]


def _median(run: Run, key: str) -> float | None:
    return median(v for _, v in run.series[key]) if key in run.series else None


def findings(run: Run) -> list[str]:
    """Sentences about this run that a reader should not overlook, beside its health."""
    sentences = [f"Alarm at step {step}: {text}." for step, text in run.alarms]
    sentences += [f"{key} was not finite at step {step}." for key, step in run.not_finite.items()]
    weight = _end(run, "ema/init_weight", -1)
    if weight is not None and weight > INIT_WEIGHT_LIMIT:
        sentences.append(
            f"The target encoder still holds {weight:.0%} of its random initialisation: the run is too short "
            "for its momentum."
        )
    return sentences
