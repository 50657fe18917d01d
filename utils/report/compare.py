"""Runs side by side: their numbers, and where their configurations differ.

In: runs (utils.report.run_files). Out: tables with a column for each run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from utils.errors import UserError
from utils.report.health import Health
from utils.report.run_files import Run, results
from utils.report.tables import DIGITS, cell
from utils.tables import Table, number

ABSENT = "not there"
NUMBERS = (  # of results.json's pretraining -> words
    ("loss_first", "loss, first"),
    ("loss_last", "loss, last"),
    ("skill_position_last", "skill by position, in validation"),
    ("rankme_first", "RankMe, first"),
    ("rankme_last", "RankMe, last"),
    ("volumes_per_s", "volumes per second"),
    ("mfu", "model FLOPs utilisation"),
    ("validation_fraction", "time for validation"),
    ("gauges_fraction", "work for gauges"),
)


def numbers_table(runs: Sequence[Run], names: Sequence[str], verdicts: Sequence[Health]) -> Table:
    """A line for each number, a column for each run."""
    outs = [results(run) for run in runs]
    rows = [["health", *(verdict.word for verdict in verdicts)]]
    rows.append(["volumes kept", *(str(out["data"]["kept"]) for out in outs)])
    rows += [[words, *(number(out["pretraining"][key], DIGITS) for out in outs)] for key, words in NUMBERS]
    rows.append(["alarms", *(str(len(out["pretraining"]["alarms"])) for out in outs)])
    return Table("", ["", *names], rows, bold=(0,))


def differences(runs: Sequence[Run], names: Sequence[str]) -> Table:
    """The keys of config.yaml in which the runs differ, and their commits."""
    flat = [dict(_leaves(_read(run))) for run in runs]
    for of_run, run in zip(flat, runs, strict=True):
        of_run["commit"] = run.provenance.get("commit", ABSENT)
    keys = sorted({key for of_run in flat for key in of_run})
    rows = []
    for key in keys:
        values = [cell(of_run[key]) if key in of_run else ABSENT for of_run in flat]
        if len(set(values)) > 1:
            rows.append([key, *values])
    title = f"{len(rows)} of {len(keys)} keys differ"
    return Table(title, ["key", *names], rows or [["none", *("" for _ in runs)]], is_text=True)


def _read(run: Run) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(run.config)
    except yaml.YAMLError as error:
        raise UserError(f"{run.path / 'config.yaml'}: expected YAML, found damage: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{run.path / 'config.yaml'}: expected keys and values, found {content!r}")
    return content


def _leaves(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """(section.key, value) pairs."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
