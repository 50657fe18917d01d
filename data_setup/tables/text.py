"""Tables of text: the manifest, participants.tsv, tables of labels; TSV, CSV or Parquet at any URL.

In: a URL. Out: rows as text by column, an empty text where a cell has no value; and what a cell says.
"""

import csv
import datetime
import io
import itertools
import math
import re
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from utils.config.schema import StorageOptions
from utils.errors import UserError
from utils.storage import read_bytes

PERSON_COLUMNS = ("person_id", "participant_id")  # version 3, versions 1 and 2
SIDES = {"l": "L", "left": "L", "os": "L", "r": "R", "right": "R", "od": "R"}
SIDE_COLUMNS = ("laterality", "eye")  # of tables with a row for each eye
D_ORDERS = {"superior_to_inferior": False, "inferior_to_superior": True, "unknown": False}  # and: flip D
# Texts that the manifests of this family write where a file has no value; in a label they are a class.
SENTINELS = {"", "nan", "none", "null", "n/a", "not reported", "not provided", "varies by frame"}

# What R, pandas, SAS and spreadsheets write for a missing value, and for one that could not be computed.
NO_VALUE = {"", "na", "nan", "-nan", "nat", "n/a", "#n/a", "#na", "<na>", "null", "n.a.", ".", "?"}
NO_VALUE |= {"#null!", "#div/0!", "#value!", "#ref!", "#name?", "#num!"}

Row = dict[str, str]  # of a table, by column
_BETWEEN = re.compile(r"(?<=[^\W_])[\s_-]+(?=[^\W_])")  # two letters or digits
_SEP_LINE = re.compile(r"sep=([,;\t])", re.IGNORECASE)  # what Excel writes above a table, for itself
MOST_TITLE = 20  # lines above a header


def read_table(
    url: str,
    options: StorageOptions,
    required: Iterable[str],
    id_columns: Sequence[str] = PERSON_COLUMNS,
    id_key: str = "",
) -> tuple[dict[int, Row], list[str], str]:
    """({line number: row}, columns, the first of `id_columns` that the table has); raises UserError.

    Parquet and Excel by the name's ending (numbers are those of rows, from 1); commas where it ends in .csv,
    else tabs, or another separator where only that one gives one of `id_columns`. `id_key` names another.
    """
    header, rows = read_cells(url, options, id_columns)
    known_id = next((name for name in id_columns if name in header), None)
    if known_id is None:
        advice = f"; {id_key}=COLUMN names the one with the ids" if id_key else ""
        expected = f"expected a column {' or '.join(id_columns)}"
        raise UserError(f"{url}: {expected}, found {', '.join(header)}{advice}")
    require_columns(header, required, url)
    return {n: dict(zip(header, fields, strict=True)) for n, fields in rows.items()}, header, known_id


def table_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A table with a header line and tabs; a missing cell is empty, a cell of no column is left out."""
    lines = [columns, *([_cell_text(row.get(name)) for name in columns] for row in rows)]
    return "".join("\t".join(map(_quoted, cells)) + "\n" for cells in lines)


def _quoted(cell: str) -> str:
    """A cell as csv reads it back; csv writes a carriage return bare, which ends the line of a reader."""
    return '"' + cell.replace('"', '""') + '"' if re.search('[\t\r\n"]', cell) else cell


def require_columns(columns: Sequence[str], required: Iterable[str], url: str) -> None:
    """Raise UserError for the first column that the table lacks."""
    for column in required:
        if column not in columns:
            raise UserError(f"{url}: expected a column {column}, found {', '.join(columns)}")


def label_of(value: str | None) -> str | None:
    """A class or a group: an empty cell is missing, and so are NO_VALUE; `none` is a class."""
    text = (value or "").strip()
    return None if text.lower() in NO_VALUE else text


def number_of(text: str) -> float | None:
    """A finite number; None for any other text, also for 1_000, which Python would read."""
    try:
        number = float(text.replace("_", "x"))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def spelling_of(label: str) -> str:
    """The same for classes that differ in case, blanks, hyphens or the way of writing a number."""
    folded = _BETWEEN.sub(" ", unicodedata.normalize("NFKC", label).casefold())
    number = number_of(folded)
    return folded if number is None else f"{number:g}"


def fact_of(value: str | None) -> str | None:
    """What a table says of a file or a person: a sentinel is missing too."""
    text = (value or "").strip()
    return None if text.lower() in SENTINELS else text


def person_id_of(value: str | None, known: Collection[str] = ()) -> str | None:
    """The id in a cell; None only of an empty one, since a folder or a header may say `None` or `nan`. An
    integer column with a gap is written as 1001.0: that is 1001, unless an id `known` as 1001.0 is meant.
    """
    text = (value or "").strip()
    whole = text.removesuffix(".0")
    return (whole if whole.isdecimal() and text not in known else text) or None


def twin_ids(cells: Iterable[str | None]) -> set[str]:
    """The ids that stand in a column as 1001.0 beside another one 1001: what `person_id_of` keeps apart."""
    texts = {(cell or "").strip() for cell in cells}
    return {text for text in texts if text.endswith(".0") and text.removesuffix(".0") in texts}


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
        expected = "expected three lengths in mm above 0, D, H, W"
        raise UserError(f"{where}: spacing_mm: {expected}, found {value!r}")
    return d, h, w


def integer_of(value: str | None) -> int | None:
    """A whole number of 0 or more, also as 49.0; None for another text."""
    text = (fact_of(value) or "").removesuffix(".0")
    return int(text) if text.isdecimal() else None


def path_of(value: str | None) -> str | None:
    """A path relative to the root, without a slash at its start; None in an empty cell. Blanks at its ends
    and names such as `none` are the file's: so the index writes what prepare finds.
    """
    text = (value or "").strip("/").removeprefix("dataset/")
    return text if text.strip() and ".." not in text.split("/") else None


def clean_path(value: str | None) -> str | None:
    """The path in a cell that may say that there is none."""
    return path_of(fact_of(value))


def read_cells(
    url: str, options: StorageOptions, id_columns: Sequence[str] = (), is_padded: bool = False
) -> tuple[list[str], dict[int, list[str]]]:
    """(header, {line number: cells}) of a table, see `read_table`; raises UserError, StorageError. Lines
    above the header with nothing after their first cell are its title. `is_padded`: a row may lack its last
    cells, which are then empty.
    """
    ending = url.lower().rpartition(".")[2]
    readers = {"parquet": _parquet_cells, "xlsx": _excel_cells, "xls": _excel_cells}
    read = readers.get(ending)
    header, rows = read(url, options) if read else _text_cells(url, options, id_columns)
    if not header:
        raise UserError(f"{url}: expected a table with a header line, found an empty one")
    for name, count in Counter(filter(None, header)).items():
        if count > 1:
            raise UserError(f"{url}: column {name}: expected it once, found {count} times")
    for number, fields in rows.items():
        fields += [""] * (len(header) - len(fields) if is_padded else 0)
        if len(fields) != len(header):
            expected = f"expected {len(header)} fields, as in the header"
            raise UserError(f"{url}: line {number}: {expected}, found {len(fields)}")
    return header, rows


def _below_title(lines: Iterable[list[str]]) -> int:
    """How many lines stand above the header: those with nothing after their first cell."""
    return next((n for n, line in enumerate(lines) if any(cell.strip() for cell in line[1:])), 0)


def _is_wide(lines: Sequence[Sequence[str]]) -> bool:
    """Whether two lines or more have something after their first cell, as a table has and notes have not."""
    return sum(any(cell.strip() for cell in line[1:]) for line in lines) > 1


def _excel_cells(url: str, options: StorageOptions) -> tuple[list[str], dict[int, list[str]]]:
    """(header, {row number from 1: cells}) of the first sheet of an Excel file; empty rows are left out."""
    try:
        from openpyxl import load_workbook  # of an extra
    except ImportError as error:
        advice = "pip install openpyxl, or save the sheet as CSV UTF-8"
        raise UserError(f"{url}: expected openpyxl, which reads Excel, found none; {advice}") from error
    data = io.BytesIO(read_bytes(url, options))
    try:
        sheets = load_workbook(data, read_only=True, data_only=True).worksheets
        cells, *others = (
            [[_cell_text(cell) for cell in line] for line in sheet.iter_rows(values_only=True)]
            for sheet in sheets
        )
    except (zipfile.BadZipFile, KeyError, ValueError, IndexError, SyntaxError) as error:
        advice = "save it as .xlsx or as CSV UTF-8"
        raise UserError(f"{url}: expected an .xlsx file, found {type(error).__name__}; {advice}") from error
    tables = [sheet.title for sheet, lines in zip(sheets[1:], others, strict=True) if _is_wide(lines)]
    if tables and not _is_wide(cells):
        first = sheets[0].title
        advice = f"found it on {tables[0]!r}; move that sheet to the front, or save it as CSV UTF-8"
        raise UserError(f"{url}: expected the table on the first sheet, {first!r}, {advice}")
    cells = cells[_below_title(cells) :]
    header = [name.strip() for name in cells[0]] if cells else []
    return header, {n: line for n, line in enumerate(cells[1:], 1) if any(line)}


def _separator(header: str, usual: str, id_columns: Sequence[str]) -> str:
    """The usual separator, or the one that splits a header line better: German Excel writes `;` into .csv."""

    def merit(separator: str) -> tuple[bool, int]:
        names = [name.strip(' "') for name in header.split(separator)]
        return not set(id_columns).isdisjoint(names), len(names) if not id_columns else 0

    return max((usual, ",", ";", "\t"), key=merit)  # the first of equal ones


def _text_cells(
    url: str, options: StorageOptions, id_columns: Sequence[str]
) -> tuple[list[str], dict[int, list[str]]]:
    """(header, {line number: cells}) of a TSV or CSV; empty lines are left out."""
    text = io.StringIO(_decoded(url, options), newline="")  # any line end; inside quotes it stays
    usual = "," if url.lower().endswith(".csv") else "\t"
    first = [line.rstrip("\r\n") for line in itertools.islice(text, MOST_TITLE)]
    named = _SEP_LINE.fullmatch(first[0]) if first else None
    widest = first[_below_title([re.split(r"[,;\t]", line) for line in first])] if first else ""
    separator = named[1] if named else _separator(widest, usual, id_columns)
    text.seek(0)
    if named:
        text.readline()
    lines = csv.reader(text, delimiter=separator, strict=True)
    try:
        cells = [(fields, lines.line_num + bool(named)) for fields in lines]
        cells = cells[_below_title([fields for fields, _ in cells[:MOST_TITLE]]) :]
        header = [name.strip() for name in cells[0][0]] if cells else []
        return header, {number: fields for fields, number in cells[1:] if fields}
    except csv.Error as error:
        raise UserError(f"{url}: expected a table with a header line, found: {error}") from error


def _decoded(url: str, options: StorageOptions) -> str:
    data = read_bytes(url, options)
    try:
        if b"\0" not in data:  # in UTF-16 beside each letter
            return data.decode("utf-8-sig")
        actual = "UTF-16"
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        actual = f"byte {data[error.start]:#x} in line {line}, of Latin-1 perhaps"
    raise UserError(f"{url}: expected UTF-8 text, found {actual}; save it as CSV UTF-8")


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
