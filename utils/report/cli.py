"""One page about a run, or about several side by side, to be opened in a browser.

    python -m utils.report runs/smoke_test
    python -m utils.report runs/smoke_test runs/smoke_control

In: files of the run directories only (utils.report.run_files says which). Out: `results.json` for machines,
`picture.png` (utils.report.overview), and one self-contained page for people (utils.report.page):
report.html of one run, comparison.html of several, in the folder of the first. The verdict is the sentence
that finetuning.evaluate derived from the paired interval; where there is none, the page says so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from utils import storage
from utils.errors import UserError
from utils.help_pages import PeopleParser
from utils.report.health import health
from utils.report.overview import overview
from utils.report.page import render
from utils.report.pictures import png
from utils.report.run_files import ARMS, Run, read_run, results
from utils.report.tables import DIGITS, file_digest
from utils.tables import number
from utils.terminal import say

PICTURE = "picture.png"
REASONS_SHOWN = 3  # on the terminal; the page and results.json have all
QUESTIONS = {"occupancy": "layers", "thickness": "thickness"}  # of truth.json, on the terminal


def summary(run: Run) -> list[tuple[str, str]]:
    """(row, text) pairs: the short table for a terminal, whose figures are in the report."""
    out = results(run)
    data, pre, probe = out["data"], out["pretraining"], out["probe"]
    reasons = sorted(data["rejected"].items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{reason} {n}" for reason, n in reasons[:REASONS_SHOWN]]
    if len(reasons) > REASONS_SHOWN:
        shown.append(f"{len(reasons) - REASONS_SHOWN} more reasons")
    rejected = f"{sum(data['rejected'].values())} rejected" + (f" ({', '.join(shown)})" if shown else "")
    lines = [
        ("health", health(run.series, run.alarms, run.not_finite).text),
        *(("alarm", f"step {alarm['step']}: {alarm['text']}") for alarm in pre["alarms"]),
        ("data", f"{data['kept']} kept, {rejected}"),
        (
            "pre-training",
            f"loss {number(pre['loss_first'], DIGITS)} -> {number(pre['loss_last'], DIGITS)}, "
            f"RankMe {_change(pre['rankme_first'], pre['rankme_last'])}, "
            f"{number(pre['volumes_per_s'], DIGITS)} volumes/s",
        ),
    ]
    if run.truth:
        lines += [(QUESTIONS[q["name"]], _truth_line(q, run.truth["labels"])) for q in run.truth["questions"]]
    if probe:
        texts = [f"{arm.replace('_', ' ')} {number(probe[arm]['balanced_accuracy'])}" for arm in ARMS]
        lines.append(("classes", f"balanced accuracy: {', '.join(texts)}; {probe['n_participants']} people"))
    lines.append(("verdict", run.verdict.partition(" (")[0]))  # the report has the interval
    if out["seconds"]:
        lines.append(("seconds", ", ".join(f"{k} {v:.0f}" for k, v in out["seconds"].items())))
    return lines


def _change(first: float | None, last: float | None) -> str:
    """`60.2 -> 59.9`, or only the last where nothing can be compared with it."""
    return number(last, DIGITS) if first is None else f"{number(first, DIGITS)} -> {number(last, DIGITS)}"


def _truth_line(question: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """One question: what the encoder scores, the best of the rows that its verdict is about, the verdict."""
    first, *rest = question["rows"]
    # earlier files compare with all of their rows
    named = question["compared"]["linear"] if "compared" in question else [*question["differences"]]
    best = max((row for row in rest if row["name"] in named), key=lambda row: float(row["r2"]))
    gain = "no gain shown" if "no gain shown" in question["verdict"] else "gained by training"
    return f"R2 {first['r2']:.3f}; best of the others {best['r2']:.3f}, {labels[best['name']]}: {gain}"


def _texts(value: Any) -> Iterator[str]:
    """Every text inside a value of a JSON file."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts([*value.values()])
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def main(argv: Sequence[str] | None = None) -> None:
    """Write report.html, picture.png and results.json of a run; print their paths and a short table.

    Of several runs: results.json of each, and one page of all in comparison.html of the first.
    """
    parser = PeopleParser("utils.report", __doc__ or "")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run directory of pretraining.train")
    parser.add_argument(
        "--file", metavar="DIGEST", help="only print which path the page calls by this digest"
    )
    args = parser.parse_args(argv)
    say(f"report: {', '.join(args.runs)}: the files are read and drawn", file=sys.stderr, flush=True)
    runs = [read_run(path) for path in args.runs]
    if args.file is not None:
        say(*_paths_of(runs, args.file))
        return
    report = runs[0].path / ("report.html" if len(runs) == 1 else "comparison.html")
    for run in runs:
        text = json.dumps(results(run), indent=2, allow_nan=False) + "\n"
        storage.write_text(str(run.path / "results.json"), text)
    storage.write_text(str(report), render(runs))
    if len(runs) == 1 and (picture := overview(run)):
        storage.write_bytes(str(run.path / PICTURE), png(picture))
        say(f"{'picture':<13} {run.path / PICTURE}")
    say(f"{'report':<13} {report}")
    for run in runs:
        head = [("run", str(run.path))] if len(runs) > 1 else []
        for name, text in [*head, *summary(run)]:
            say(f"{name:<13} {text}")


def _paths_of(runs: Sequence[Run], digest: str) -> list[str]:
    """The paths that the page calls by a digest; UserError where none is."""
    paths = {text for text in _texts([run.prepared for run in runs]) if digest in file_digest(text)}
    if not paths:
        raise UserError(f"--file: expected a digest of {runs[0].path / 'report.html'}, found {digest}")
    return sorted(paths)
