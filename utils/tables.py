"""Numbers, intervals and tables as text: the one writer of tables of answers, in Markdown and on a terminal.

In: values of an answer, None where one does not exist. Out: texts of cells, and a `Table` as lines. Its HTML
is the macro of utils/report/tables.html.j2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from utils.errors import shown

NONE = "-"  # what does not exist, or was not measured
ON_VALIDATION = "Chosen only on validation; the evaluated participants were not looked at."  # a note


@dataclass(frozen=True)
class Table:
    """A table as texts; a row's first cell names it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    bold: tuple[int, ...] = ()  # numbers of rows
    is_text: bool = False  # false: columns after the first hold numbers


def number(value: float | None, form: str = ".3f") -> str:
    """A number as `form` says."""
    return NONE if value is None else format(value, form)


def interval(ends: Sequence[float] | None, form: str = ".3f") -> str:
    """`0.512 to 0.634`."""
    return NONE if ends is None else f"{ends[0]:{form}} to {ends[1]:{form}}"


def with_interval(value: float | None, ends: Sequence[float] | None, form: str = ".3f") -> str:
    """`0.570 (0.512 to 0.634)`; the value only, where there is no interval."""
    text = number(value, form)
    return text if value is None or ends is None else f"{text} ({interval(ends, form)})"


def bracketed(value: float, ends: Sequence[float], form: str = ".3f") -> str:
    """`0.570 [0.512, 0.634]`, in sentences that have brackets already."""
    return f"{value:{form}} [{ends[0]:{form}}, {ends[1]:{form}}]"


def estimate(entry: Mapping[str, Any] | None, form: str = ".3f") -> str:
    """An estimate of an answer's file, {value, ci95}, in one cell."""
    return NONE if entry is None else with_interval(entry["value"], entry["ci95"], form)


def two_cells(entry: Mapping[str, Any], form: str = ".3f") -> list[str]:
    """An estimate of an answer's file, {value, ci95}, as a cell of its value and one of its interval."""
    return [number(entry["value"], form), interval(entry["ci95"], form)]


def markdown(table: Table) -> str:
    """A heading, where the table has a title, its note, and the table."""
    rule = ["---", *["---" if table.is_text else "---:"] * (len(table.header) - 1)]
    cells = [[shown(text).replace("|", "\\|") for text in line] for line in (table.header, *table.rows)]
    body = "\n".join(f"| {' | '.join(line)} |" for line in (cells[0], rule, *cells[1:]))
    return "\n\n".join([*([f"## {table.title}"] if table.title else []), *filter(None, [table.note]), body])


def page(title: str, lines: Sequence[str], points: Sequence[str], tables: Sequence[Table]) -> str:
    """A whole Markdown page: the lines that matter most, a list of points, the tables."""
    listed = "\n".join(f"- {point}" for point in points)
    parts = [f"# {title}", *lines, *filter(None, [listed]), *map(markdown, tables)]
    return "\n\n".join(parts) + "\n"


def terminal(table: Table) -> str:
    """The title, aligned columns with the numbers to the right, the note."""
    texts = [[shown(cell) for cell in line] for line in (table.header, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    align = "<" if table.is_text else ">"
    lines = []
    for first, *others in texts:
        cells = [f"{text:{align}{width}}" for text, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells]).rstrip())
    return "\n".join([*filter(None, [table.title]), *lines, *filter(None, [table.note])])
