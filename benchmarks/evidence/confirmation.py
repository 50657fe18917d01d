"""What benchmarks.evidence says of people that chose nothing, beside what it said first.

In: the folders `people_SEED_COUNT` of `evidence confirm` and the numbers of the first comparison. Out: the
part "On other people" of docs/evidence/results.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.arms import CONTROL, RANDOM_ARM, REFERENCE
from benchmarks.evidence.cohorts import PEOPLE
from benchmarks.evidence.differences import build
from benchmarks.evidence.queue import Plan, confirmation_jobs
from benchmarks.evidence.scores import TASKS
from benchmarks.evidence.words import NOT_SHOWN, TASK_LABELS, signed, verdict
from utils.errors import UserError

# what a row takes from its runs' own logs, not from the people
FACTS_OF_A_RUN = ("num_seeds", "steps", "init_weight", "alarms", "skill_position_by_seed")


def confirmation(first: dict[str, Any], again: dict[str, Any], seed: int, count: int) -> str:
    """The differences that `markdown` tells of, each beside the same one on other people."""
    rows = {r["name"]: r for r in again["rows"]}
    scored = [r for r in first["rows"] if r["num_seeds"] and r["name"] != RANDOM_ARM.name]
    recipes = [r for r in scored if r["factor"] in ("recipe", "baseline")]
    trained = [r for r in recipes if r["factor"] == "recipe"]
    ablations = [r for r in scored if r not in recipes]
    others = sorted({r["compared_with"] for r in ablations} & rows.keys() - {REFERENCE})
    told = [
        ("against_random", "random initialisation", recipes),
        ("against_control", "the control", [r for r in trained if r["name"] != CONTROL]),
        (
            "against_reference",
            f"`{REFERENCE}`",
            [r for r in (*trained, *ablations) if r["name"] != REFERENCE],
        ),
        *(
            ("against_named", rows[other]["label"], [r for r in ablations if r["compared_with"] == other])
            for other in others
        ),
    ]
    lines = [
        f"### On other people (phantom of seed {seed}, {count} participants)",
        "",
        f"`python -m benchmarks.evidence confirm --people-seed {seed} --count {count}`: the same runs,",
        f"scored on {again['participants']} participants that had no part in pre-training or in choosing a",
        "recipe. First what the tables above say, then what these people say.",
    ]
    for against, versus, firsts in told:
        lines += comparison([(r, rows[r["name"]]) for r in firsts], against, versus)
    return "\n".join(lines)


def comparison(
    pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], against: str, versus: str
) -> list[str]:
    """A table of one difference, first and again, and how many claims are there both times, or only again."""
    columns = " | ".join(f"{TASK_LABELS[task]}, first | again" for task in TASKS)
    lines = ["", f"| minus {versus} | {columns} |", "|---" * (1 + 2 * len(TASKS)) + "|"]
    claims, kept, new = 0, 0, 0
    for pair in pairs:
        cells = [pair[0]["label"]]
        for task in TASKS:
            found = [row["tasks"].get(task, {}).get(against) for row in pair]
            cells += map(signed, found)
            if None in found:
                continue
            first, again = map(verdict, found)
            claims += first != NOT_SHOWN
            kept += first == again != NOT_SHOWN
            new += first == NOT_SHOWN != again
        lines.append(f"| {' | '.join(cells)} |")
    told = f"Shown first: {claims}; again, on the same side of zero: {kept}. Here alone: {new}."
    return [*lines, "", told]


def read_confirmations(plan: Plan, first: dict[str, Any]) -> list[tuple[Path, int, int, dict[str, Any]]]:
    """(folder, seed, people, numbers) of every confirmation; raises UserError for one that is not whole, or
    whose runs are not those of `first`.
    """
    found = []
    for folder in sorted(plan.root.iterdir()):
        named = re.fullmatch(rf"{PEOPLE}(\d+)_(\d+)", folder.name)
        if named is None:
            continue
        seed, count = int(named[1]), int(named[2])
        command = f"`evidence confirm --people-seed {seed} --count {count}`"
        jobs = confirmation_jobs(plan, folder)
        missing = [job.name for job in jobs if not job.is_done]
        if missing:
            raise UserError(
                f"{folder}: expected {len(jobs)} scores, found none of {'; '.join(missing)}; "
                f"{command} goes on, or remove the folder"
            )
        again = build(plan, folder)
        rows = {r["name"]: r for r in again["rows"]}
        for row in (r for r in first["rows"] if r["num_seeds"]):
            for fact in FACTS_OF_A_RUN:
                if row[fact] != rows[row["name"]][fact]:
                    raise UserError(
                        f"{folder / 'runs' / row['name']}: {fact}: expected {row[fact]} of the run as it is, "
                        f"found {rows[row['name']][fact]}; remove it, and {command} scores the run again"
                    )
        found.append((folder, seed, count, again))
    return found
