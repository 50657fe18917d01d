"""The same runs scored on people that chose nothing, beside their first scores.

In: the folders `people_SEED_COUNT` of `evidence confirm` and the first table. Out: the part "On other people"
of results.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.evidence.arms import CONTROLS, RANDOM, REFERENCE
from benchmarks.evidence.cohorts import PEOPLE
from benchmarks.evidence.differences import Row, Table, build_table
from benchmarks.evidence.queue import Plan, confirmation_jobs
from benchmarks.evidence.scores import TASKS
from benchmarks.evidence.words import NOT_SHOWN, TASK_LABELS, signed, table_head, verdict
from utils.errors import UserError

# numbers of a row that come from its runs' own logs, not from the people
FACTS_OF_A_RUN = ("num_seeds", "steps", "init_weight", "alarms", "skill_position_by_seed")


@dataclass(frozen=True)
class Confirmation:
    """The table of the people in one folder."""

    folder: Path
    seed: int
    count: int
    table: Table


def confirmation(first: Table, again: Confirmation) -> str:
    """Every difference of the first table beside the same one on other people."""
    rows = {r.name: r for r in again.table.rows}
    scored = [r for r in first.rows if r.num_seeds and r.name != RANDOM]
    recipes = [r for r in scored if r.factor in ("recipe", "baseline")]
    trained = [r for r in recipes if r.factor == "recipe"]
    ablations = [r for r in scored if r not in recipes and r.factor != "ceiling"]
    others = sorted({r.compared_with for r in ablations} & rows.keys() - {REFERENCE})
    comparisons = [
        (RANDOM, "random initialisation", recipes),
        *(
            (control, rows[control].label, [r for r in (*trained, *ablations) if r.name not in CONTROLS])
            for control in CONTROLS
            if control != RANDOM and control in rows
        ),
        (REFERENCE, f"`{REFERENCE}`", [r for r in (*trained, *ablations) if r.name != REFERENCE]),
        *((other, rows[other].label, [r for r in ablations if r.compared_with == other]) for other in others),
    ]
    lines = [
        f"### On other people (phantom of seed {again.seed}, {again.count} participants)",
        "",
        f"`python -m benchmarks.evidence confirm --people-seed {again.seed} --count {again.count}` scored",
        f"the same runs on {again.table.participants} participants that had no part in pre-training or in",
        "choosing a recipe. *First*: the difference in the tables above. *Again*: on these participants.",
    ]
    for against, versus, firsts in comparisons:
        lines += comparison([(r, rows[r.name]) for r in firsts], against, versus)
    return "\n".join(lines)


def comparison(pairs: Sequence[tuple[Row, Row]], against: str, versus: str) -> list[str]:
    """A table of one difference, first and again, and how many claims are shown both times, or only again."""
    lines = ["", *table_head([f"minus {versus}", *(f"{TASK_LABELS[t]}, first | again" for t in TASKS)])]
    claims, kept, new = 0, 0, 0
    for pair in pairs:
        cells = [pair[0].label]
        for task in TASKS:
            first, again = (row.difference(task, against) for row in pair)
            cells += [signed(first), signed(again)]
            if first is None or again is None:
                continue
            sides = verdict(first), verdict(again)
            claims += sides[0] != NOT_SHOWN
            kept += sides[0] == sides[1] != NOT_SHOWN
            new += sides[0] == NOT_SHOWN != sides[1]
        lines.append(f"| {' | '.join(cells)} |")
    return [
        *lines,
        "",
        f"Shown first: {claims}; shown again with the same sign: {kept}; shown only here: {new}.",
    ]


def read_confirmations(plan: Plan, first: Table) -> list[Confirmation]:
    """Every confirmation; raises UserError for one that is incomplete, or of other runs than `first`."""
    confirmations = []
    for folder in sorted(plan.root.iterdir()):
        match = re.fullmatch(rf"{PEOPLE}(\d+)_(\d+)", folder.name)
        if match is None:
            continue
        seed, count = int(match[1]), int(match[2])
        command = f"`evidence confirm --people-seed {seed} --count {count}`"
        jobs = confirmation_jobs(plan, folder)
        missing = [job.name for job in jobs if not job.is_done]
        if missing:
            raise UserError(
                f"{folder}: expected {len(jobs)} scores, found none of {'; '.join(missing)}; "
                f"{command} goes on, or remove the folder"
            )
        table = build_table(plan, folder)
        rows = {r.name: r for r in table.rows}
        for row in (r for r in first.rows if r.num_seeds):
            for fact in FACTS_OF_A_RUN:
                expected, value = getattr(row, fact), getattr(rows[row.name], fact)
                if value != expected:
                    raise UserError(
                        f"{folder / 'runs' / row.name}: {fact}: expected {expected} of the run as it is, "
                        f"found {value}; remove it, and {command} scores the run again"
                    )
        confirmations.append(Confirmation(folder, seed, count, table))
    return confirmations
