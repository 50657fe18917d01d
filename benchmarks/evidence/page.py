"""results.md and table.json: the numbers of benchmarks.evidence as tables and sentences.

In: the folder of runs. Out: the page. Every sentence follows from the paired intervals.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.evidence.arms import ARMS, CONTROLS, RANDOM, REFERENCE, controls_of_claims
from benchmarks.evidence.differences import FACTS, Results, Row, build_table
from benchmarks.evidence.queue import Plan
from benchmarks.evidence.real import SOURCE
from benchmarks.evidence.scores import LINEAR_TASKS, TASKS
from benchmarks.evidence.words import TASK_LABELS, signed, verdict
from data_setup.store.reader import PreparedStore
from utils.tables import NONE, Table, markdown, number, with_interval


def score_tables(rows: Sequence[Row], against: str) -> list[str]:
    """Score, interval and a paired difference for every task, a table for each readout."""
    halves = (LINEAR_TASKS, TASKS[len(LINEAR_TASKS) :])
    return [line for tasks in halves for line in (score_table(rows, against, tasks), "")]


def score_table(rows: Sequence[Row], against: str, tasks: Sequence[str]) -> str:
    """Score, interval and a paired difference for those of these tasks that a row has, of rows with any."""
    tasks, lines = tasks_of(rows, tasks), []
    for row in (row for row in rows if row.failed or tasks_of([row], tasks)):
        lines.append([row.label + (f" ({row.failed} failed)" if row.failed else "")])
        for task in tasks:
            result = row.tasks.get(task)
            score = with_interval(result.score, result.ci95) if result else NONE
            lines[-1] += [score, signed(row.difference(task, against))]
    header = [cell for task in tasks for cell in (TASK_LABELS[task], f"minus {against}")]
    return markdown(Table("", ["features", *header], lines, is_text=True))


def tasks_of(rows: Sequence[Row], tasks: Sequence[str] = TASKS) -> list[str]:
    """Those that are scored: layer masks ask for no classes."""
    return [task for task in tasks if any(task in row.tasks for row in rows)]


def training_table(rows: Sequence[Row]) -> str:
    """What the runs logged, means over the seeds, and every task's score by seed."""
    tasks, lines = tasks_of(rows), []
    for row in rows:
        seeds = (row.tasks[task].by_seed if task in row.tasks else [] for task in tasks)
        scores = (", ".join(map(number, values)) or NONE for values in seeds)
        lines.append([row.label, *scores, *(number(row.facts[name], ".3g") for name in FACTS)])
    header = ["features", *(f"{TASK_LABELS[task]}, by seed" for task in tasks), *FACTS]
    return markdown(Table("", header, lines, is_text=True))


def claims(rows: Sequence[Row], best_free: Mapping[str, str]) -> list[str]:
    """Per task: which rows are above every control and the best row without an encoder, and what the others
    are not above.
    """
    own = "only its own penalty, if it has one, and its own with latents or targets of another volume"
    lines = [
        f"Above the best row without an encoder and all controls (random initialisation, two steps of "
        f"`{REFERENCE}`, {own}):",
        "",
    ]
    for task in TASKS:
        shown, rest = [], []
        for row in (r for r in rows if task in r.tasks):
            names = *controls_of_claims(row.name), *([best_free[task]] if task in best_free else [])
            differences = {name: row.difference(task, name) for name in names}
            short = [n for n, d in differences.items() if d is None or verdict(d) != "higher"]
            if short:
                words = (
                    f"{n} {'not run' if (d := differences[n]) is None else signed(d, why=True)}"
                    for n in short
                )
                rest.append(f"{row.label}: not above {', '.join(words)}")
            else:
                least = min(d[0] for d in differences.values() if d is not None)
                shown.append(f"{row.label} (at least {least:+.3f})")
        if shown or rest:
            lines.append(f"* {TASK_LABELS[task]}. Shown: {'; '.join(shown) or 'none'}. {'. '.join(rest)}.")
    return [*lines, ""]


def conditions(table: Results, plan: Plan) -> list[str]:
    """When, where and how the runs were made."""
    is_real = (plan.root / SOURCE).exists()
    if table.budget_s is None:
        steps = table.steps[REFERENCE]
        asked, given = f"steps {steps}", f"{steps} steps, which take unequal time,"
    else:
        asked, given = f"budget {table.budget_s:g}", f"{table.budget_s:g} s of one core"
    known = REFERENCE, *CONTROLS
    only = [r.name for r in table.rows if r.factor != "baseline" and r.name not in known]
    verb = "real --data FOLDER" if is_real else "run"
    run = f"{verb} --{asked} --seeds {table.seeds} --only {','.join(only) or REFERENCE}"
    run += "".join(f" --change '{change}'" for change in plan.extra)
    if plan.image:
        folder, size, blocks = plan.image
        run += f" --image-encoder {Path(folder).name}" + (f" --image-size {size}" if size else "")
        run += f" --image-blocks {','.join(map(str, blocks))}" if blocks else ""
    before = "" if is_real else "`python -m benchmarks.evidence data`, `calibrate`, "
    return [
        f"* Date and machine: {table.date}, {table.machine}, torch {table.packages['torch']}.",
        f"* Commits of the training runs: {', '.join(table.commits) or 'none'}.",
        f"* Commands: {before}`{'python -m benchmarks.evidence ' if is_real else ''}{run}`, `table`.",
        *([eyes_used(plan.root)] if is_real else []),
        f"* Evaluated participants: {table.participants}, none of them in pre-training.",
        f"* Training: {given} for each arm and seed, {table.seeds} seeds.",
    ]


def eyes_used(root: Path) -> str:
    """How many of the listed volumes preparation kept: the others are in neither side of any number."""
    stores = (PreparedStore.open(str(root / f"{name}_store")) for name in ("pretraining", "evaluation"))
    (trained, listed), (scored, labelled) = ((len(store.kept), len(store.index)) for store in stores)
    return f"* Volumes: {trained} of {listed} trained on, {scored} of {labelled} with labels evaluated."


def page_of(table: Results, plan: Plan) -> str:
    """The page."""
    trained = [r for r in table.rows if r.factor not in ("baseline", "labels") and r.name != RANDOM]
    claiming = [r for r in trained if r.name not in CONTROLS and r.factor != "control"]
    not_run = [arm.label for arm in ARMS if arm.name not in {r.name for r in table.rows}]
    lines = ["# Results", "", *conditions(table, plan), "", *claims(claiming, table.best_free)]
    lines += score_tables(table.rows, RANDOM)
    for name in dict.fromkeys((REFERENCE, *(r.compared_with for r in trained))):
        compared = [r for r in trained if name in (REFERENCE, r.compared_with) and r.name != name]
        lines += score_tables(compared, name)
    ending = ["", f"Not run: {', '.join(not_run)}."] if not_run else []
    return "\n".join([*lines, training_table(trained), *ending])


def write_results(root: Path, out: Path) -> str:
    """Write table.json below `root` and the page; returns the page."""
    plan = Plan.load(root)
    table = build_table(plan)
    text = page_of(table, plan)
    (root / "table.json").write_text(json.dumps(asdict(table), indent=1, allow_nan=False) + "\n")
    out.write_text(text + "\n")
    return text
