"""results.md and table.json: the numbers of benchmarks.evidence as tables and sentences.

In: the folder of runs. Out: the part of the page between its markers. Every sentence follows from the paired
intervals; the page itself explains the words.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.evidence.arms import ABLATIONS, CONTROL, CONTROLS, MAIN, RANDOM, REFERENCE, controls_of_claims
from benchmarks.evidence.confirmation import confirmation, read_confirmations
from benchmarks.evidence.differences import Row, Table, build_table
from benchmarks.evidence.queue import Plan
from benchmarks.evidence.real import SOURCE
from benchmarks.evidence.scores import TASKS
from benchmarks.evidence.words import NOT_SHOWN, TASK_LABELS, number, signed, span, table_head, verdict
from data_setup.store.reader import PreparedStore
from utils.errors import UserError

BEGIN, END = "<!-- evidence: begin -->", "<!-- evidence: end -->"


def score_table(rows: Sequence[Row], against: str) -> list[str]:
    """Score, interval and a paired difference for every task."""
    lines = table_head(["features", *(f"{TASK_LABELS[t]} | minus {against}" for t in TASKS)])
    for row in rows:
        cells = [row.label + (f" ({row.failed} failed)" if row.failed else "")]
        for task in TASKS:
            result = row.tasks.get(task)
            if result is None:
                cells += ["-", "-"]
                continue
            low, high = result.ci95
            cells += [f"{result.score:.3f} ({low:.3f} to {high:.3f})", signed(row.difference(task, against))]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def training_table(rows: Sequence[Row]) -> list[str]:
    """Numbers that the runs logged, means over the seeds, and every task's lowest and highest seed."""
    head = ["features", "seeds", *(f"{TASK_LABELS[t]}, by seed" for t in TASKS), "RankMe", "real eyes"]
    lines = table_head(
        [*head, "skill_position in validation, by seed", "init weight", "s/step", "steps", "alarms"]
    )
    for row in rows:
        cells = [row.label, str(row.num_seeds)]
        cells += [span(row.tasks[task].by_seed) if task in row.tasks else "-" for task in TASKS]
        cells += [number(row.rankme, ".0f"), number(row.real_rankme, ".0f")]
        cells += [span([s for s in row.skill_position_by_seed if s is not None], "+.3f")]
        cells += [number(row.init_weight), number(row.seconds_per_step)]
        cells += [number(row.steps, ".0f"), number(row.alarms, ".1f")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def sentences(rows: Sequence[Row], against: str, versus: str) -> list[str]:
    """Per task: which rows are higher, which are lower, and which show no difference."""
    lines = [f"Compared with {versus}:", ""]
    for task in TASKS:
        groups: dict[str, list[str]] = {"higher": [], "lower": [], NOT_SHOWN: []}
        for row in rows:
            difference = row.difference(task, against)
            if difference is not None:
                groups[verdict(difference)].append(f"{row.label} ({difference[0]:+.3f})")
        parts = [f"{side.capitalize()}: {'; '.join(names)}." for side, names in groups.items() if names]
        lines.append(f"* {TASK_LABELS[task]}. {' '.join(parts) or 'Nothing measured.'}")
    return [*lines, ""]


def claims(rows: Sequence[Row]) -> list[str]:
    """Per task: which rows are above every control, and which controls the others are not above."""
    own = "its own penalty alone, if it has one, and its own with targets of another volume"
    lines = [f"Above all controls (random initialisation, two steps of `{REFERENCE}`, {own}):", ""]
    for task in TASKS:
        shown, rest = [], []
        for row in (r for r in rows if task in r.tasks):
            differences = {name: row.difference(task, name) for name in controls_of_claims(row.name)}
            short = [n for n, d in differences.items() if d is None or verdict(d) != "higher"]
            if short:
                words = (
                    f"{n} {'not run' if differences[n] is None else signed(differences[n])}" for n in short
                )
                rest.append(f"{row.label}: not above {', '.join(words)}")
            else:
                least = min(d[0] for d in differences.values() if d is not None)
                shown.append(f"{row.label} (at least {least:+.3f})")
        if shown or rest:
            lines.append(f"* {TASK_LABELS[task]}. Shown: {'; '.join(shown) or 'none'}. {'. '.join(rest)}.")
    return [*lines, ""]


def conditions(table: Table, plan: Plan) -> list[str]:
    """When, where and how the runs were made."""
    is_real = (plan.root / SOURCE).exists()
    if table.budget_s is None:
        steps = table.steps[REFERENCE]
        asked, given = f"steps {steps}", f"{steps} steps, which take unequal time,"
    else:
        asked, given = f"budget {table.budget_s:g}", f"{table.budget_s:g} s of one core"
    only = [r.name for r in table.rows if r.factor not in ("baseline", "ceiling")]
    only = [name for name in only if name not in (REFERENCE, *CONTROLS)]
    verb = "real --data FOLDER" if is_real else "run"
    run = f"{verb} --{asked} --seeds {table.seeds} --only {','.join(only)}"
    run += "".join(f" --change '{change}'" for change in plan.extra)
    before = "" if is_real else "`python -m benchmarks.evidence data`, `calibrate`, "
    return [
        f"* Date and machine: {table.date}, {table.machine}, torch {table.packages['torch']}.",
        f"* Commits of the training runs: {', '.join(table.commits) or 'none'}.",
        f"* Commands: {before}`{'python -m benchmarks.evidence ' if is_real else ''}{run}`",
        "  (in parts, with enough minutes), `table`.",
        *([eyes_used(plan.root)] if is_real else []),
        f"* Evaluated participants: {table.participants}, none of them in pre-training.",
        f"* Training: {given} for each arm and seed, {table.seeds} seeds.",
    ]


def eyes_used(root: Path) -> str:
    """How many of the listed volumes preparation kept: the others are in neither side of any number."""
    stores = (PreparedStore.open(str(root / f"{name}_store")) for name in ("pretraining", "evaluation"))
    (trained, listed), (scored, labelled) = ((len(store.kept), len(store.index)) for store in stores)
    return f"* Volumes: {trained} of {listed} trained on, {scored} of {labelled} with labels evaluated."


def markdown(table: Table, plan: Plan) -> str:
    """The generated part of results.md."""
    recipes = [r for r in table.rows if r.factor == "recipe"]
    trained = [r for r in recipes if r.name != RANDOM]
    baselines = [r for r in table.rows if r.factor == "baseline"]
    ceiling = [r for r in table.rows if r.factor == "ceiling"]
    ablations = [r for r in table.rows if r.factor not in ("recipe", "baseline", "ceiling")]
    lines = [
        *conditions(table, plan),
        "",
        "### What wins, on the first people",
        "",
        *claims([r for r in (*trained, *ablations) if r.name not in CONTROLS and r.factor != "control"]),
        *sentences([*trained, *baselines], RANDOM, "random initialisation"),
        *sentences([r for r in trained if r.name != CONTROL], CONTROL, "the control of two steps"),
        *sentences([r for r in trained if r.name != REFERENCE], REFERENCE, f"`{REFERENCE}`"),
        "### Recipes",
        "",
        *score_table([*recipes, *baselines, *ceiling], RANDOM),
        "",
        *training_table(recipes),
    ]
    if ablations:
        lines += ["", "### Ablations: one change to `vjepa2` each, or to the arm named below", ""]
        lines += sentences(ablations, REFERENCE, f"`{REFERENCE}`")
        labels = {r.name: r.label for r in table.rows}
        for other in sorted({r.compared_with for r in ablations} - {REFERENCE}):
            changed = [r for r in ablations if r.compared_with == other]
            lines += sentences(changed, other, labels[other])
        lines += [*score_table(ablations, REFERENCE), "", *training_table(ablations)]
    not_run = [arm.label for arm in (*MAIN, *ABLATIONS) if arm.name not in {r.name for r in table.rows}]
    if not_run:
        lines += ["", f"Not run: {', '.join(not_run)}."]
    return "\n".join(lines)


def split_page(out: Path) -> tuple[str, str]:
    """What stands before and after the markers; raises UserError for a page without them."""
    page = out.read_text() if out.exists() else f"# Results\n\n{BEGIN}\n{END}\n"
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise UserError(f"{out}: expected the markers {BEGIN} and {END}, found a page without them")
    return before, after


def write_results(root: Path, out: Path) -> str:
    """Write table.json and the part of `out` between the markers; returns that part."""
    plan = Plan.load(root)
    table = build_table(plan)
    text, content = markdown(table, plan), asdict(table)
    for again in read_confirmations(plan, table):
        content[again.folder.name] = asdict(again.table)["rows"]
        text += "\n\n" + confirmation(table, again)
    (root / "table.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    before, after = split_page(out)
    out.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    return text
