"""The leaderboard as files: leaderboard.md, leaderboard.csv, leaderboard.png.

In: a `Board`. Out: the files in its folder, and the Markdown as text. Every number is the primary metric of
the task's kind (finetuning.cohort.metrics.PRIMARY).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from data_setup.store.reader import PreparedStore
from finetuning.answers.columns import DEVICES, HIDDEN, LINEAR, LOW_SHOT, Cells
from finetuning.answers.evaluation import few_people
from finetuning.answers.scorecard import Comparison, Estimate, compare, estimate, people_of_classes
from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL, Cohort
from finetuning.cohort.metrics import PRIMARY
from finetuning.features.entries import Entry
from models.probes import intervals
from models.probes.intervals import ALPHA
from utils import storage
from utils.config.schema import Config
from utils.report.pictures import png
from utils.tables import NONE, Table, interval, number, page, two_cells, with_interval

TABLE_COLUMNS = (LOW_SHOT, DEVICES)  # that have a table of their own
READOUTS = (LINEAR, HIDDEN)


@dataclass(frozen=True)
class Row:
    entry: Entry
    answers: Mapping[str, Cells]

    @property
    def val(self) -> float:
        """What the table is ordered by with the official splits."""
        return self.answers[LINEAR][LINEAR].val


@dataclass(frozen=True)
class Board:
    """All that the pages are made of; rows are in the order of validation, in crossfit by name."""

    cfg: Config
    store: PreparedStore
    cohorts: list[Cohort]
    seeds: list[int]
    columns: list[str]
    rows: list[Row]
    notes: list[str]
    look: int
    is_new_look: bool  # whether this command computed anything
    folder: str

    @property
    def main_columns(self) -> list[str]:
        """The columns on all training participants."""
        return [column for column in self.columns if column not in TABLE_COLUMNS]

    @cached_property
    def estimates(self) -> dict[tuple[str, str], Estimate]:
        """Of every cell: (row, cell) -> estimate."""
        samples, seed = intervals.BOOTSTRAP_SAMPLES, self.cfg.seed
        return {
            (row.entry.label, name): estimate(cell.predictions, samples, seed)
            for row in self.rows
            for answer in row.answers.values()
            for name, cell in answer.items()
        }

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Differences of all pairs of rows in the columns of the main table."""
        predictions = {
            column: {
                row.entry.label: row.answers[column][column].predictions
                for row in self.rows
                if column in row.answers
            }
            for column in self.main_columns
        }
        free = [row.entry.label for row in self.rows if row.entry.is_free]
        return compare(predictions, intervals.BOOTSTRAP_SAMPLES, self.cfg.seed, free)


def write_pages(board: Board) -> str:
    """Write all files; returns the Markdown, with where the files are."""
    title = f"Leaderboard: {board.cfg.task.label_column}"
    text = page(title, sentences(board), [], tables_of(board))
    storage.write_text(storage.join(board.folder, "leaderboard.md"), text)
    storage.write_text(storage.join(board.folder, "leaderboard.csv"), csv_text(board))
    storage.write_bytes(storage.join(board.folder, "leaderboard.png"), png(draw(board), 130))
    return f"{text}\n{board.folder}: leaderboard.md, .csv, .png"


def sentences(board: Board) -> list[str]:
    shown = [c for c in board.comparisons if c.shown]
    doubted = sum(bool(c.doubt) for c in board.comparisons)
    unclear = f"; of {doubted} nothing can be said" if doubted else ""
    order = "validation"
    if board.cfg.eval.protocol == "crossfit":
        order = "name: the validation participants of a fold are evaluated in another"
    unique = {person for c in board.cohorts for person in c.person[c.fold == EVALUATED].tolist()}
    looked = "this command added it" if board.is_new_look else "all answers were kept, this was no new one"
    lines = [
        f"Look {board.look} of this split ({looked}).",
        f"{board.cfg.task.label_column}: {len(unique)} evaluated participants, {_where(board)}; "
        f"{PRIMARY[board.cohorts[0].kind].replace('_', ' ')}, seeds {', '.join(map(str, board.seeds))}.",
        f"Ordered by {order}. Means over seeds where seeds differ: low-shot draws, trained heads.",
        f"{len(board.comparisons)} pairs of rows: "
        + (f"{len(shown)} differences shown" if shown else "no difference shown")
        + f" (Holm's p below {ALPHA:g} over all of them{unclear}).",
    ]
    if board.store.attrs["synthetic"]:
        lines.append("On synthetic data: it says nothing about real retinas.")
    return [*lines, *verdicts(board), *cautions(board), *board.notes]


def _where(board: Board) -> str:
    if board.cfg.eval.protocol == "crossfit":
        unseen = "" if board.cfg.eval.allow_overlap else " that pre-training did not see"
        return f"{len(board.cohorts)} folds of people{unseen} (eval.protocol=crossfit)"
    (cohort,) = board.cohorts
    people = [len(np.unique(cohort.person[cohort.fold == fold])) for fold in (TRAIN, VAL)]
    return f"split {board.cfg.eval.split} (trained on {people[0]}, chosen on {people[1]})"


def verdicts(board: Board) -> list[str]:
    """Each checkpoint against random initialisation, in the linear column; in both readouts against the best
    row without an encoder, best on the evaluated people.
    """
    checkpoints, random = (
        {row.entry.label for row in board.rows if row.entry.name.startswith(kind)}
        for kind in ("checkpoint", "random")
    )
    free = [row.entry.label for row in board.rows if row.entry.is_free]
    known = {key: -np.inf if one["value"] is None else one["value"] for key, one in board.estimates.items()}
    best = {column: max(free, key=lambda label: known[label, column]) for column in READOUTS}
    lines = []
    for c in board.comparisons:
        first, second = (c.first, c.second) if c.first in checkpoints else (c.second, c.first)
        is_random = c.column == LINEAR and second in random
        if first not in checkpoints or not (is_random or second == best.get(c.column)):
            continue
        sign = 1 if first == c.first else -1
        ends = sorted(sign * bound for bound in c.ci95)
        what = second if is_random else f"{second}, the best row without an encoder, {c.column}"
        lines.append(
            f"{first} - {what}: {with_interval(sign * c.value, ends, '+.3f')}, "
            f"{_shown(c)} (p after Holm {c.p_texts[1]}); "
            f"could have shown {c.could_have_shown:.3f}."
        )
    return lines


def _shown(comparison: Comparison) -> str:
    """Whether a difference is shown, or why that cannot be said."""
    if comparison.doubt:
        return f"cannot say, because {comparison.doubt}"
    return "shown" if comparison.shown else "not shown"


def cautions(board: Board) -> list[str]:
    lines = few_people(people_of_classes(board.rows[0].answers[LINEAR][LINEAR].predictions[0]))
    if board.cfg.eval.split == "val" and board.cfg.eval.protocol == "official":
        lines.append("Rows were chosen on the evaluated participants (eval.split=val): they are optimistic.")
    return lines


def tables_of(board: Board) -> list[Table]:
    tables = [_main_table(board)]
    if LOW_SHOT in board.columns:
        tables.append(_low_shot_table(board))
    tables.append(_pair_table(board))
    if DEVICES in board.columns:
        tables += _device_tables(board)
    return tables


def _main_table(board: Board) -> Table:
    columns = board.main_columns
    header = ["row"]
    for column in columns:
        header += [f"{column}, val", f"{column}, {board.cfg.eval.split}", "95 % interval"]
    rows = []
    for row in board.rows:
        texts = [row.entry.label]
        for column in columns:
            if column not in row.answers:
                texts += [NONE] * 3
                continue
            cell = row.answers[column][column]
            one = board.estimates[row.entry.label, column]
            texts += [number(cell.val), *two_cells(one)]
        rows.append(texts)
    note = f"{NONE}: not asked for, or no encoder to train on from." if any(NONE in r for r in rows) else ""
    title = "Rows by validation" if board.cfg.eval.protocol == "official" else "Rows by name"
    return Table(title, header, rows, note)


def _low_shot_table(board: Board) -> Table:
    cells = board.rows[0].answers[LOW_SHOT]
    names = list(cells)
    header = [f"{name} ({cells[name].participants})" for name in names]
    whole = board.rows[0].answers[LINEAR][LINEAR].participants
    rows = [
        [row.entry.label, *(number(board.estimates[row.entry.label, n]["value"]) for n in [*names, LINEAR])]
        for row in board.rows
    ]
    return Table(
        "Low-shot: linear, by share of the training participants",
        ["row", *header, f"100 % ({whole})"],
        rows,
        f"In brackets: participants, each class at least once. Mean of {len(board.seeds)} draws.",
    )


def _pair_table(board: Board) -> Table:
    ranked = sorted(board.comparisons, key=lambda c: (c.p_holm, c.p or 1.0, -abs(c.value)))
    rows = [
        [
            c.column,
            f"{c.first} - {c.second}",
            number(c.value, "+.3f"),
            interval(c.ci95, "+.3f"),
            *c.p_texts,
            _shown(c),
            number(c.could_have_shown),
        ]
        for c in ranked
    ]
    header = ["column", "pair", "difference", "95 % interval", "p", "p (Holm)", "", "could have shown"]
    note = "Paired over participants; intervals are of single pairs, p (Holm) is corrected for all pairs."
    return Table("Differences of all pairs", header, rows, note)


def _device_tables(board: Board) -> list[Table]:
    """Leave one device out, then train device x test device of every row."""
    names = {name for row in board.rows for name in row.answers[DEVICES]}
    left_out = sorted(name for name in names if name.startswith("without "))
    crossed = sorted({tuple(name.split(" on ")) for name in names if " on " in name})
    trained, tested = (sorted({pair[side] for pair in crossed}) for side in (0, 1))

    def texts(row: Row, cells: list[str]) -> list[str]:
        known = (board.estimates.get((row.entry.label, name)) for name in cells)
        return [NONE if one is None else number(one["value"]) for one in known]

    tables = []
    if left_out:
        rows = [[row.entry.label, *texts(row, left_out)] for row in board.rows]
        note = "linear, trained and chosen on all other devices, evaluated on the volumes of this one."
        tables.append(Table("A device left out", ["row", *left_out], rows, note))
    if crossed:
        rows = [
            [f"{row.entry.label}: {one}", *texts(row, [f"{one} on {other}" for other in tested])]
            for row in board.rows
            for one in trained
        ]
        note = "linear, trained and chosen on the volumes of the row's device, evaluated on the column's."
        tables.append(Table("Trained on one device", ["row: trained on", *tested], rows, note))
    return tables


def csv_text(board: Board) -> str:
    """One line a cell: value, interval, validation, seeds and training participants."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    header = "row cell value low high val seeds train_participants look"
    writer.writerow(header.split())
    for row in board.rows:
        for answer in row.answers.values():
            for name, cell in answer.items():
                one = board.estimates[row.entry.label, name]
                low, high = one["ci95"] or ("", "")
                value = "" if one["value"] is None else one["value"]
                fixed = [len(cell.predictions), cell.participants, board.look]
                writer.writerow([row.entry.label, name, value, low, high, cell.val, *fixed])
    return buffer.getvalue()


def draw(board: Board) -> Figure:
    """Rows with intervals, in the order of the table; beside them low-shot curves where there are any."""
    has_curves = LOW_SHOT in board.columns
    height = 1.6 + 0.34 * len(board.rows)
    figure = Figure(figsize=(11 if has_curves else 6.5, max(3.2, height)), layout="constrained")
    axes = figure.subplots(1, 2 if has_curves else 1, squeeze=False)[0]
    labels = [row.entry.label for row in board.rows]
    metric = PRIMARY[board.cohorts[0].kind].replace("_", " ")
    columns = board.main_columns
    for nth, column in enumerate(columns):
        shift = 0.16 * (nth - (len(columns) - 1) / 2)
        for place, label in enumerate(labels):
            one = board.estimates.get((label, column))
            if one is None or one["value"] is None or one["ci95"] is None:
                continue
            axes[0].plot(one["ci95"], [place + shift] * 2, color=f"C{nth}", linewidth=1.4)
            name = column if place == 0 else None
            axes[0].plot(one["value"], place + shift, "o", color=f"C{nth}", markersize=4.5, label=name)
    axes[0].set_yticks(range(len(labels)), labels, fontsize="small")
    axes[0].invert_yaxis()
    axes[0].set_xlabel(f"{metric}, split {board.cfg.eval.split}", fontsize="small")
    if board.cohorts[0].kind in ("classification", "ordinal"):
        axes[0].axvline(1 / len(board.cohorts[0].names), color="0.6", linewidth=1, linestyle=":")
    if len(columns) > 1:
        axes[0].legend(fontsize="small", frameon=False)
    if has_curves:
        _draw_curves(axes[1], board, metric)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize="small")
    return figure


def _draw_curves(axis: Axes, board: Board, metric: str) -> None:
    shares = [*board.rows[0].answers[LOW_SHOT], LINEAR]
    for nth, row in enumerate(board.rows):
        cells = {**row.answers[LOW_SHOT], **row.answers[LINEAR]}
        people = sorted(cells[name].participants for name in shares)
        values = [board.estimates[row.entry.label, name]["value"] for name in shares]
        known = [(p, v) for p, v in zip(people, values, strict=True) if v is not None]
        style = "-" if nth < 10 else "--"
        points = zip(*known, strict=True)
        axis.plot(*points, style, marker="o", color=f"C{nth % 10}", markersize=3, label=row.entry.label)
    axis.set_xscale("log")
    axis.set_xticks(people, [str(count) for count in people])
    axis.minorticks_off()
    axis.set_xlabel("training participants", fontsize="small")
    axis.set_ylabel(metric, fontsize="small")
    axis.legend(fontsize="x-small", frameon=False)
