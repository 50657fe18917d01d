"""Tables of text: the manifest, participants.tsv, tables of labels; TSV, CSV or Parquet at any URL.

In: a URL. Out: rows as text by column, an empty text where a cell has no value; and what a cell says.
"""

from __future__ import annotations

import csv
import datetime
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from utils.config.schema import StorageOptions
from utils.errors import UserError
from utils.storage import read_bytes, read_text

PERSON_COLUMNS = ("person_id", "participant_id")  # version 3, versions 1 and 2
SIDES = {"l": "L", "left": "L", "os": "L", "r": "R", "right": "R", "od": "R"}
SIDE_COLUMNS = ("laterality", "eye")  # of tables with a row for each eye
D_ORDERS = {"superior_to_inferior": False, "inferior_to_superior": True, "unknown": False}  # and: flip D
# Texts that the manifests of this family write where a file has no value; in a label they are a class.
SENTINELS = {"", "nan", "none", "null", "n/a", "not reported", "not provided", "varies by frame"}

# What R, pandas and spreadsheets write for a missing value.
NO_VALUE = {"", "na", "nan", "-nan", "nat", "n/a", "#n/a", "#na", "<na>", "null"}

Row = dict[str, str]  # of a table, by column


def read_table(
    url: str, options: StorageOptions, required: Iterable[str], id_columns: Sequence[str] = PERSON_COLUMNS
) -> tuple[dict[int, Row], list[str], str]:
    """({line number: row}, columns, the first of `id_columns` that the table has); raises UserError.

    Parquet where the name ends in .parquet (numbers are those of rows, from 1); commas where it ends in .csv;
    else tabs.
    """
    is_parquet = url.lower().endswith(".parquet")
    header, rows = _parquet_cells(url, options) if is_parquet else _text_cells(url, options)
    if not header:
        raise UserError(f"{url}: expected a table with a header line, found an empty one")
    for name, count in Counter(filter(None, header)).items():
        if count > 1:
            raise UserError(f"{url}: column {name}: expected it once, found {count} times")
    for number, fields in rows.items():
        if len(fields) != len(header):
            raise UserError(
                f"{url}: line {number}: expected {len(header)} fields, as in the header, found {len(fields)}"
            )
    known_id = next((name for name in id_columns if name in header), None)
    if known_id is None:
        raise UserError(f"{url}: expected a column {' or '.join(id_columns)}, found {', '.join(header)}")
    require_columns(header, required, url)
    return {n: dict(zip(header, fields, strict=True)) for n, fields in rows.items()}, header, known_id


def table_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A table with a header line and tabs; a missing cell is empty, a cell of no column is left out."""
    buffer = io.StringIO()
    table = csv.DictWriter(
        buffer, columns, restval="", delimiter="\t", lineterminator="\n", extrasaction="ignore"
    )
    table.writeheader()
    table.writerows(rows)
    return buffer.getvalue()


def require_columns(columns: Sequence[str], required: Iterable[str], url: str) -> None:
    """Raise UserError for the first column that the table lacks."""
    for column in required:
        if column not in columns:
            raise UserError(f"{url}: expected a column {column}, found {', '.join(columns)}")


def label_of(value: str | None) -> str | None:
    """A class or a group: an empty cell is missing, and so are NO_VALUE; `none` is a class."""
    text = (value or "").strip()
    return None if text.lower() in NO_VALUE else text


def fact_of(value: str | None) -> str | None:
    """What a table says of a file or a person: a sentinel is missing too."""
    text = (value or "").strip()
    return None if text.lower() in SENTINELS else text


def person_id_of(value: str | None) -> str | None:
    """The id in a cell; an integer column with a gap is written as 1001.0."""
    text = fact_of(value)
    return text.removesuffix(".0") if text else None


def spacing_of(value: str | None, where: str) -> tuple[float, float, float] | None:
    """(D, H, W) in mm of a cell such as `0.12, 0.0039, 0.0117`, in brackets or not; raises UserError."""
    text = fact_of(value)
    if text is None:
        return None
    try:
        d, h, w = (float(part) for part in re.split(r"[,;\s]+", text.strip("[]() ")))
    except ValueError:
        d = h = w = math.nan
    if not all(0 < length < math.inf for length in (d, h, w)):
        raise UserError(
            f"{where}: spacing_mm: expected three lengths in mm above 0, D, H, W, found {value!r}"
        )
    return d, h, w


def integer_of(value: str | None) -> int | None:
    """A whole number of 0 or more, also as 49.0; None for another text."""
    text = (fact_of(value) or "").removesuffix(".0")
    return int(text) if text.isdecimal() else None


def clean_path(value: str | None) -> str | None:
    """A path relative to the root, without a slash at its start; None where there is none."""
    text = (fact_of(value) or "").strip("/").removeprefix("dataset/")
    return text if text and ".." not in text.split("/") else None


def _text_cells(url: str, options: StorageOptions) -> tuple[list[str], dict[int, list[str]]]:
    """(header, {line number: cells}) of a TSV or CSV; empty lines are left out."""
    text = io.StringIO(read_text(url, options), newline=None)  # None: any line end
    lines = csv.reader(text, delimiter="," if url.lower().endswith(".csv") else "\t", strict=True)
    try:
        header = [name.strip() for name in next(lines, [])]
        return header, {number: fields for fields, number in ((f, lines.line_num) for f in lines) if fields}
    except csv.Error as error:
        raise UserError(f"{url}: expected a table with a header line, found: {error}") from error


def _parquet_cells(url: str, options: StorageOptions) -> tuple[list[str], dict[int, list[str]]]:
    """(column names, {row number from 1: cells}) of a Parquet file."""
    data = read_bytes(url, options)
    try:
        table = pq.read_table(io.BytesIO(data))
    except pa.ArrowException as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{url}: expected a Parquet table, found: {reason}") from error
    cells = [[_cell_text(cell) for cell in column.to_pylist()] for column in table.columns]
    return list(table.column_names), {n: list(row) for n, row in enumerate(zip(*cells, strict=True), 1)}


def _cell_text(cell: Any) -> str:
    """A value as a text table writes it: true as 1, a date as ISO."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return ""
    if isinstance(cell, bool):
        return str(int(cell))
    if isinstance(cell, (datetime.date, datetime.time)):
        return cell.isoformat()
    return str(cell)
