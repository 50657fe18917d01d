"""Tables of the report: what prepare counted, what the probes scored, and runs side by side.

In: dictionaries that other stages wrote (prepare_report.json, truth.json, evaluation.json), runs. Out: tables
of texts for the page; finetuning.evaluate and benchmarks.phantom_truth print the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from utils.errors import UserError
from utils.report.health import Health
from utils.report.run_files import Run, results
from utils.tables import Table, bracketed, estimate, number, two_cells, with_interval

TITLES = {  # of metrics
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro F1",
    "macro_auroc": "macro AUROC",
    "macro_auprc": "macro AUPRC",
    "quadratic_kappa": "quadratic kappa",
    "brier": "Brier",
    "ece": "ECE",
    "mae": "MAE",
    "r2": "R2",
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "f1": "F1",
    "auroc": "AUROC",
    "auprc": "AUPRC",
}
CLASSES = ("classification", "ordinal")  # the kinds whose truth is one class
DIGITS = ".3g"  # of numbers that were measured in training
GROUPS = ("by_device", "by_protocol")  # of prepare_report.json
GROUP_HEADER = ("", "kept", "rejected", "valid", "lost", "spacing, um", "spacing from", "orientation from")
GROUP_NOTE = (
    "Spacing before resampling, median, D x H x W (B-scan, axial, A-scan). Valid: share of the grid inside "
    "the scan. Lost: share of the scan outside the grid."
)
QUALITY_NOTE = (
    "Median and lowest tenth: 0 is bad, 1 good. Then means of the five numbers, and how often each was the "
    "worst. The limits are conventions; docs/guides/prepare.md has them."
)

ABSENT = "not there"
NUMBERS = (  # of results.json's pretraining -> words
    ("loss_first", "loss, first"),
    ("loss_last", "loss, last"),
    ("skill_position_last", "skill by position, in validation"),
    ("rankme_first", "RankMe, first"),
    ("rankme_last", "RankMe, last"),
    ("volumes_per_s", "volumes per second"),
    ("mfu", "model FLOPs utilisation"),
    ("validation_fraction", "share of time: validation"),
    ("gauges_fraction", "share of work: gauges"),
)


def evaluation_table(answer: Mapping[str, Any]) -> Table:
    """All rows of evaluation.json by the metric that the verdict is about; the compared ones in bold."""
    metric, is_class = answer["difference"]["metric"], answer["kind"] in CLASSES
    rows = [
        [
            row["label"],
            *two_cells(row["metrics"][metric]),
            *([number(row["metrics"]["macro_auroc"]["value"])] if is_class else []),
            number(row.get("val_score")),
            number(row.get("chosen_c"), "g"),
            number(row.get("num_features"), "d"),
        ]
        for row in answer["rows"]
    ]
    header = ["features", TITLES.get(metric, metric), "95 % interval", *(["macro AUROC"] if is_class else [])]
    chance = f"Chance is {1 / len(answer['names']):.3f}. " if is_class else ""
    return Table(
        f"{answer['title']}; {answer['subject']['url'].rpartition('/')[2]}",
        [*header, "on val", "C", "size"],
        rows,
        f"{chance}Same protocol for every row. A difference of "
        f"{number(answer['difference']['could_have_shown'])} could have been shown, with 80 % power at 5 %, "
        "two-sided; finetuning.power says how many participants show less.",
        tuple(i for i, row in enumerate(answer["rows"]) if row["name"] in answer["difference"]["rows"]),
    )


def leaderboard_table(lines: Sequence[Sequence[str]]) -> Table:
    """leaderboard.csv with a line for each row and a column for each cell that any row has."""
    header, *body = lines
    place = {name: number for number, name in enumerate(header)}
    cells = list(dict.fromkeys(line[place["cell"]] for line in body))
    values: dict[str, dict[str, str]] = {}
    for line in body:
        value, low, high = (line[place[name]] for name in ("value", "low", "high"))
        ends = [float(low), float(high)] if low else None
        text = with_interval(float(value) if value else None, ends)
        values.setdefault(line[place["row"]], {})[line[place["cell"]]] = text
    rows = [[name, *(of_row.get(key, "-") for key in cells)] for name, of_row in values.items()]
    note = "With 95 % intervals; more is in leaderboard/leaderboard.md."
    return Table("leaderboard", ["", *cells], rows, note)


def layers_tables(answer: Mapping[str, Any]) -> list[Table]:
    """layers.json: the mean boundary error of every arm, and that of each surface."""
    arms = list(answer["overall"])
    rows = [["all surfaces", *(estimate(answer["overall"][arm], ".2f") for arm in arms)]]
    for name in answer["names"]:
        found_by = [(answer.get("by_name") or answer["surfaces"]).get(arm, {}).get(name) for arm in arms]
        rows.append([name, *(estimate(part and part["error_um"], ".2f") for part in found_by)])
    title = f"{answer['title']}: mean boundary error, um, {answer['n_volumes']} volumes"
    header = ["surface", *(arm.replace("_", " ") for arm in arms)]
    note = " ".join([*(answer.get("verdicts") or [answer["verdict"]]), *answer.get("cautions", [])])
    return [Table(title, header, rows, note, bold=(0,))]


def truth_tables(truth: Mapping[str, Any]) -> list[Table]:
    """A table for each question of truth.json: R2 of every row by both readouts, and by how much pre-training
    is above it. Files without baselines have one readout.
    """
    asked = f"{truth['n_volumes']} volumes of {truth['n_participants']} participants of split test"
    titles = {
        "occupancy": f"layer occupancy of {truth['n_tokens']} tokens, {asked}",
        "thickness": f"layer thickness of {asked}",
    }
    readouts = ["linear", *(["hidden layer"] if "hidden" in truth["questions"][0] else [])]
    columns = [f"{readout}: {text}" for readout in readouts for text in ("R2", "pre-training is above it by")]
    return [
        Table(
            f"{titles[question['name']]}, mean over {len(truth['layers'])} layers",
            ["features", *columns, "C"],
            [_truth_row(row, truth["labels"], question) for row in question["rows"]],
            question["verdict"],
            bold=(0,),
        )
        for question in truth["questions"]
    ]


def _truth_row(row: Mapping[str, Any], labels: Mapping[str, str], question: Mapping[str, Any]) -> list[str]:
    """One row of one question; pre-training has no difference to itself."""
    cells = []
    for of, differences in ((row, question), (row.get("hidden"), question.get("hidden"))):
        if of is not None and differences is not None:
            apart = differences["differences"].get(row["name"])
            above = bracketed(apart["mean"], apart["ci95"], "+.3f") if apart else ""
            cells += [bracketed(of["r2"], of["ci95"]), above]
    return [labels[row["name"]], *cells, number(row["chosen_c"], "g")]


def data_tables(prepared: dict[str, Any]) -> list[Table]:
    """What prepare counted: rejects by reason, groups of volumes, and every single fact last."""
    rejected = sorted(prepared["rejected"].items(), key=lambda item: -item[1])
    files = prepared.get("rejected_files", {})  # stores of before it was written have none
    header = ["reason of rejection", "volumes", *(["first files"] if files else [])]
    first = {reason: ", ".join(map(file_digest, files.get(reason, []))) or "-" for reason, _ in rejected}
    rows = [[reason, str(n), *([first[reason]] if files else [])] for reason, n in rejected]
    tables = [
        Table(
            f"{prepared['kept']} volumes kept, {sum(prepared['rejected'].values())} rejected",
            header,
            rows or [["none", "0"]],
            "python -m utils.report RUN --file DIGEST prints the path of a file." if files else "",
            is_text=True,
        )
    ]
    for key in GROUPS:
        rows = [_group_row(name, group) for name, group in prepared[key].items()]
        tables.append(Table(key.replace("_", " "), GROUP_HEADER, rows, GROUP_NOTE, is_text=True))
    audit = prepared["run"]["audit"] or {}
    short = {kind: part | {"first": [file_digest(p) for p in part["first"]]} for kind, part in audit.items()}
    facts = [
        [key.replace("_", " "), cell(value)]
        for key, value in (prepared | {"run": prepared["run"] | {"audit": short}}).items()
        if key not in ("kept", "rejected", "rejected_files", "quality", *GROUPS)
    ]
    return [*tables, *quality_tables(prepared), Table("the store", ["", ""], facts, is_text=True)]


def quality_tables(prepared: Mapping[str, Any]) -> list[Table]:
    """How good the scans are, of all and by device; nothing of a store that was not measured."""
    of_all = prepared.get("quality")  # stores of before it was measured have none
    if not of_all:
        return []
    groups = {"all": of_all} | {name: part.get("quality") for name, part in prepared["by_device"].items()}
    names = [key.replace("_", " ") for key in of_all]
    rows = [[name, *map(cell, part.values())] for name, part in groups.items() if part]
    return [Table("quality of the scans", ["", *names], rows, QUALITY_NOTE, is_text=True)]


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
        *(next(iter(counts)) if len(counts) == 1 else cell(counts) for counts in sources),
    ]


def file_digest(path: str) -> str:
    """What a shared page calls a file, since clinics put names and birthdays into theirs."""
    return f"file {hashlib.sha256(path.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"


def cell(value: Any) -> str:
    """Any value of a JSON file as text."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return " x ".join(cell(v) for v in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{k} {cell(v)}" for k, v in value.items()) or "none"
    return str(value)


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
