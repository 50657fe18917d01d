"""docs/evidence/results.md and table.json: the numbers of benchmarks.evidence as tables and sentences.

In: the folder of runs. Out: the part of the page between its markers, where every sentence is made from the
paired intervals.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.arms import ABLATIONS, CONTROL, MAIN, RANDOM_ARM, REFERENCE
from benchmarks.evidence.confirmation import confirmation, read_confirmations
from benchmarks.evidence.differences import build
from benchmarks.evidence.queue import Plan
from benchmarks.evidence.scores import TASKS
from benchmarks.evidence.words import NOT_SHOWN, TASK_LABELS, number, signed, span, verdict
from utils.errors import UserError

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "results.md"
BEGIN, END = "<!-- evidence: begin -->", "<!-- evidence: end -->"


def score_table(rows: Sequence[dict[str, Any]], against: str) -> list[str]:
    """Score, interval and a paired difference for every task."""
    versus = {"against_random": "random", "against_reference": REFERENCE}[against]
    head = ["features"] + [f"{TASK_LABELS[t]} | minus {versus}" for t in TASKS]
    lines = [f"| {' | '.join(head)} |", "|---" * (1 + 2 * len(TASKS)) + "|"]
    for row in rows:
        cells = [row["label"] + (f" ({row['failed']} failed)" if row["failed"] else "")]
        for task in TASKS:
            found = row["tasks"].get(task)
            if found is None:
                cells += ["-", "-"]
                continue
            low, high = found["ci95"]
            cells += [f"{found['score']:.3f} ({low:.3f} to {high:.3f})", signed(found[against])]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def training_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the runs themselves say, means over the seeds, and every task's lowest and highest seed."""
    head = ["features", "seeds", *(f"{TASK_LABELS[t]}, by seed" for t in TASKS), "RankMe", "real eyes"]
    head += ["skill_position, by seed", "init weight", "s/step", "steps", "alarms"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [row["label"], str(row["num_seeds"])]
        cells += [span(row["tasks"].get(task, {}).get("by_seed")) for task in TASKS]
        cells += [number(row["rankme"], ".0f"), number(row["real_rankme"], ".0f")]
        skill = [s for s in row["skill_position_by_seed"] if s is not None]
        cells += [f"{min(skill):+.3f} to {max(skill):+.3f}" if skill else "-"]
        cells += [number(row["init_weight"]), number(row["seconds_per_step"])]
        cells += [number(row["steps"], ".0f"), number(row["alarms"], ".1f")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def sentences(rows: Sequence[dict[str, Any]], against: str, name: str = "") -> list[str]:
    """Per task: what is above, what is below, and where no difference is shown; `name`: against_named's."""
    versus = {
        "against_random": "random initialisation",
        "against_reference": f"`{REFERENCE}`",
        "against_control": "the control",
        "against_named": name,
    }[against]
    told = []
    for task in TASKS:
        groups: dict[str, list[str]] = {"above": [], "below": [], NOT_SHOWN: []}
        for row in rows:
            found = row["tasks"].get(task, {}).get(against)
            if found is not None:
                groups[verdict(found)].append(f"{row['label']} ({found[0]:+.3f})")
        parts = [f"{kind}: {', '.join(names)}" for kind, names in groups.items() if names]
        told.append(f"* {TASK_LABELS[task]}, against {versus}: {'; '.join(parts) or 'nothing measured'}.")
    return told


def markdown(told: dict[str, Any]) -> str:
    """The generated part of docs/evidence/results.md."""
    rows = told["rows"]
    recipes = [r for r in rows if r["factor"] == "recipe"]
    trained = [r for r in recipes if r["name"] != RANDOM_ARM.name]
    baselines = [r for r in rows if r["factor"] == "baseline"]
    ablations = [r for r in rows if r["factor"] not in ("recipe", "baseline")]
    if told["budget_s"] is None:
        steps = told["steps"][REFERENCE]
        asked, given = f"steps {steps}", f"{steps} steps, which take unequal time,"
    else:
        asked, given = f"budget {told['budget_s']:g}", f"{told['budget_s']:g} s of one core"
    only = [r["name"] for r in rows if r["factor"] != "baseline"]
    only = [n for n in only if n not in (REFERENCE, CONTROL, RANDOM_ARM.name)]
    lines = [
        f"{told['date']}, {told['machine']}, torch {told['packages']['torch']}; trained under",
        f"{', '.join(told['commits']) or 'no commit'};",
        f"`python -m benchmarks.evidence data`, `calibrate`, `run --{asked}",
        f"--seeds {told['seeds']} --only {','.join(only)}` (in parts, with enough minutes), `table`.",
        f"{told['participants']} evaluated participants, none of them in pre-training;",
        f"{given} for each arm and seed, {told['seeds']} seeds.",
        "",
        "### What wins, on the first people",
        "",
        *sentences([*trained, *baselines], "against_random"),
        *sentences([r for r in trained if r["name"] != CONTROL], "against_control"),
        *sentences([r for r in trained if r["name"] != REFERENCE], "against_reference"),
        "",
        "### Recipes",
        "",
        *score_table([*recipes, *baselines], "against_random"),
        "",
        *training_table(recipes),
    ]
    if ablations:
        lines += ["", "### Ablations: one change to `vjepa2` each, or to the arm named below", ""]
        lines += [*sentences(ablations, "against_reference")]
        for other in sorted({r["compared_with"] for r in ablations} - {REFERENCE}):
            name = next(r["label"] for r in ablations if r["name"] == other)
            changed = [r for r in ablations if r["compared_with"] == other]
            lines += sentences(changed, "against_named", name)
        lines += ["", *score_table(ablations, "against_reference")]
        lines += ["", *training_table(ablations)]
    left = [arm.label for arm in (*MAIN, *ABLATIONS) if arm.name not in {r["name"] for r in rows}]
    if left:
        lines += ["", f"Not run: {', '.join(left)}."]
    return "\n".join(lines)


INTRODUCTION = """# Results

The recipes, random initialisation and one-factor ablations under one protocol, on phantom cohorts (ViT-Ti,
volume [16, 96, 64], patch 4 x 8 x 8 unless said): what a recipe learns within minutes of one core. The
phantom says nothing about real retinas. `python -m benchmarks.evidence table` writes what is between the
markers.

How to read it. Pre-training and evaluation use different people. Five folds by participant: three train the
probe, one chooses C, one is evaluated. *4 classes*: study group from mean + std of valid tokens, participants
pooled. *Layer thickness*: 10 layers per volume, less the training mean of its acquisition protocol. *Layer
occupancy*: share of each layer in a token, from the token's features and place. A row is the mean over its
seeds, random initialisation too. Intervals resample participants and seeds together (2000 draws, the same for
all rows; seed i of two arms begins with the same encoder weights where their shapes agree), so that a
difference no larger than that between seeds is no claim; three seeds say little about their spread, so read
the column by seed too. The control is the reference arm after two steps: what it gains over random
initialisation is counted as no learning, so only what exceeds the control counts as learnt. *As shipped* is
configs/smoke_test.yaml, which has the masks, penalty, EMA and loss of the large configuration, not its patch,
predictor, batch or learning rate. Steps fill the budget by the seconds per step that `calibrate` measured;
how long a run took beside other work changes nothing. The defaults were chosen on the first people; *On other
people* scores the same runs on people that had no part in it. A claim is a paired interval that excludes
zero, in **bold**; nothing here corrects for the number of comparisons. RankMe is that of valid tokens; `init
weight` the share of the random initialisation left in the target encoder, which is what is scored; `alarms`
their mean number per run. `methods` has learned positions, all others rotary ones: random initialisation is
that of the others. Commits are those of the working copy at the time.

"""


def write_results(root: Path, out: Path) -> str:
    """Write table.json and the part of `out` between the markers; returns that part."""
    plan = Plan.load(root)
    told = build(plan)
    text = markdown(told)
    for folder, seed, count, again in read_confirmations(plan, told):
        told |= {folder.name: again["rows"]}
        text += "\n\n" + confirmation(told, again, seed, count)
    (root / "table.json").write_text(json.dumps(told, indent=1, allow_nan=False) + "\n")
    page = out.read_text() if out.exists() else f"{INTRODUCTION}{BEGIN}\n{END}\n"
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise UserError(f"{out}: expected the markers {BEGIN} and {END}, found a page without them")
    out.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    return text
