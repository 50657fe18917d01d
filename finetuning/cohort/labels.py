"""Labels of a task: any table with an id and a column, matched to volumes, eyes or people of the store.

In: a configuration (task.*) and the store's index. Out: `Labels`. The table is TSV, CSV or Parquet at any
URL; without task.labels_path it is participants.tsv of AI-READI, version 2 or 3. An empty cell and words such
as NA are missing values: the text `none` is a class. Sex and dates are refused as labels. What is wrong with
a task's words, checkpoint or table is refused before torch is imported.
"""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import pandas as pd
from omegaconf import OmegaConf

from data_setup.tables.text import (
    PERSON_COLUMNS,
    SIDE_COLUMNS,
    SIDES,
    label_of,
    number_of,
    path_of,
    person_id_of,
    read_table,
    spelling_of,
)
from utils.cli import AddArguments, parse_words, require_folder, require_there
from utils.config.load import require_changes, storage_options_of
from utils.config.schema import DENSE_KINDS, Config, TaskConfig
from utils.config.written import read_file, read_words
from utils.errors import ConfigError, UserError

VOLUME_COLUMNS = ("sop_instance_uid", "path", "filepath")
SHOWN = 10  # unmatched ids in the log
NO_SEX = (
    "AI-READI does not release sex: PatientSex of its files is the same dummy, M, for everybody, so a score "
    "would say nothing"
)
NO_DATE = "dates and times identify people, and say when they were examined, not what they have"
# words of a column's name, also as DICOM joins them: PatientSex, study_date, AcquisitionDateTime
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_PREFIX = r"(patient|birth|study|series|acquisition|content|visit|exam|instance|creation)*"
_SEX = re.compile(_PREFIX + "(sex|gender)")
_DATE = re.compile(_PREFIX + "(date|datetime|timestamp|dob|birthday)")
_TIME = re.compile(_PREFIX + "time")
_DAY, _YEAR = r"(0?[1-9]|[12]\d|3[01])", r"(19|20)\d\d"
_MONTH = r"(0?[1-9]|1[0-2]|(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*)"
_ORDERS = ((_YEAR, _MONTH, _DAY), (_DAY, _MONTH, _YEAR), (_MONTH, _DAY, _YEAR))
_DATE_TEXT = re.compile(f"({'|'.join('[-./ ,]+'.join(order) for order in _ORDERS)})([T ,].*)?", re.IGNORECASE)
_PLAIN_DATE = re.compile(rf"{_YEAR}(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])")
_WHOLE = re.compile(r"-?\d+\.0")
_CLOCK = re.compile(r"\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?")
log = logging.getLogger(__name__)

Value = str | tuple[float, ...]  # a class, or numbers


@dataclass(frozen=True)
class Labels:
    """What a table says of units of the store."""

    names: tuple[str, ...]  # classes (ordinal: lowest first), labels of multilabel, or the one value's column
    target: dict[str, tuple[float, ...]]  # unit -> a class number, a value, or 0 and 1 a name
    unmatched: tuple[str, ...]  # ids that the store does not have, in the table's words, sorted


def units_of(index: pd.DataFrame, unit: str) -> pd.Series:
    """Whom a row is about: SOP instance (else path), PERSON_L or _R (missing: unknown), or person."""
    if unit == "volume":
        return index["sop_instance_uid"].where(index["sop_instance_uid"].fillna("") != "", index["path"])
    if unit == "eye":
        side = index["laterality"]
        return (index["person_id"] + "_" + side).where(side.isin(["L", "R"]))
    return index["person_id"]


def read_labels(cfg: Config, index: pd.DataFrame) -> Labels:
    """The labels of units in `index`, a part of the store's; raises UserError with line, id and value."""
    task, url = cfg.task, cfg.task.labels_path or cfg.data.participants_path
    columns = label_columns(task)
    for column in columns:
        refuse_name(url, column)
    ids = _id_columns(task)
    table, header, id_column = read_table(url, cfg.data.storage_options, columns, ids, "task.id_column")
    for column in columns:
        refuse_dates(url, column, [row[column] for row in table.values()])
    side_column = _side_column(url, task, header)
    unit_of_id, known = _store_ids(index, task.unit), {*index["person_id"], *index["path"]}
    values: dict[str, Value] = {}
    first_lines: dict[str, int] = {}  # class -> where it stands
    unmatched, num_missing = set(), 0
    for line, row in table.items():
        where = f"{url}: line {line}"
        side = row[side_column] if side_column else ""
        row_id = _row_id(row[id_column], side, task.unit, where, known)
        value = None
        if row_id is not None:
            value = _value(task, [row[column] for column in columns], f"{where}: {row_id}")
        if row_id is None or value is None:
            num_missing += 1
            continue
        unit = unit_of_id.get(row_id, row_id)
        if values.setdefault(unit, value) != value:
            raise UserError(
                f"{where}: {', '.join(columns)} of {row_id}: expected one label, found "
                f"{_shown(values[unit])} and {_shown(value)}"
            )
        if row_id not in unit_of_id:
            unmatched.add(row_id)
        elif isinstance(value, str):
            first_lines.setdefault(value, line)
    refuse_spellings(f"{url}: {', '.join(columns)}", first_lines)
    matched = {unit: value for unit, value in values.items() if unit not in unmatched}
    _tell(url, id_column, matched, sorted(unmatched), num_missing, list(unit_of_id))
    classes, target = _numbered(task, matched)
    return Labels(columns if classes is None else classes, target, tuple(sorted(unmatched)))


def _side_column(url: str, task: TaskConfig, header: Sequence[str]) -> str | None:
    """The column of the table that says which eye; raises UserError where the task needs one."""
    column = next((name for name in SIDE_COLUMNS if name in header), None)
    if task.unit == "eye" and column is None:
        raise UserError(
            f"{url}: task.unit=eye: expected a column {' or '.join(SIDE_COLUMNS)}, found {', '.join(header)}"
        )
    return column


def label_columns(task: TaskConfig) -> tuple[str, ...]:
    if task.kind == "multilabel":
        return tuple(task.names or ())
    return (task.label_column,)


def _id_columns(task: TaskConfig) -> tuple[str, ...]:
    usual = VOLUME_COLUMNS if task.unit == "volume" else PERSON_COLUMNS
    return (task.id_column,) if task.id_column else usual


def check_table(config: str, overrides: Sequence[str], is_training: bool = False) -> None:
    """Raise UserError for a table without a column, or a folder that cannot be written: before torch."""
    written = OmegaConf.merge(read_file(config), read_words(overrides))
    content = OmegaConf.to_container(written, resolve=False)
    assert isinstance(content, dict)
    given = {name: part for name, part in content.items() if isinstance(part, dict)}
    for section, name in (("run", "dir"), ("train", "ckpt_dir"))[: 1 + is_training]:
        if isinstance(place := given.get(section, {}).get(name), str) and "$" not in place:
            require_folder(f"{section}.{name}", place)
    known = {field.name for field in fields(TaskConfig)}
    task = TaskConfig(**{name: value for name, value in given.get("task", {}).items() if name in known})
    url = task.labels_path
    if not isinstance(url, str) or "$" in url or task.kind in DENSE_KINDS:
        return
    options, ids = storage_options_of(overrides), _id_columns(task)
    _, header, _ = read_table(url, options, label_columns(task), ids, "task.id_column")
    _side_column(url, task, header)


def is_task_file(path: str | Path) -> bool:
    """Whether a file of configs/ names no method: a task's. False where it cannot be read."""
    try:
        return "method" not in read_file(path)
    except ConfigError:
        return False


def wanted_checkpoint(path: str | Path, overrides: Sequence[str]) -> str:
    """What a task's file, or the command line, gives as model.checkpoint; raises ConfigError for null."""
    wanted = OmegaConf.select(OmegaConf.merge(read_file(path), read_words(overrides)), "model.checkpoint")
    if wanted is None:
        raise ConfigError(
            f"{path}: model.checkpoint: expected a checkpoint or a run's folder, found null; add "
            "model.checkpoint=RUN_OR_FILE to the command"
        )
    return str(wanted)


def check_task(config: str, overrides: Sequence[str], is_training: bool = True) -> None:
    """Raise UserError for a task without its checkpoint, and for what check_table refuses."""
    check_table(config, overrides, is_training)
    if is_task_file(config):
        require_there("model.checkpoint", wanted_checkpoint(config, overrides))


def parse_config_or_head(
    command: str, description: str, argv: Sequence[str] | None, add_arguments: AddArguments | None = None
) -> argparse.Namespace:
    """The words of a command line; raises UserError unless one of --config and --head is there."""

    def add_all(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--head", metavar="FILE_OR_RUN", help="in place of --config")
        if add_arguments:
            add_arguments(parser)

    asked = parse_words(command, description, argv, add_all, needs_config=False)
    if bool(asked.config) == bool(asked.head):
        number = "both" if asked.config else "neither"
        raise UserError(f"--config, --head: expected one of them, found {number}")
    require_there("--head", asked.head)
    if asked.config:
        check_task(asked.config, asked.overrides, is_training=False)
    else:
        require_changes("evaluate", asked.overrides)
    return asked


def refuse_name(url: str, column: str) -> None:
    """Raise UserError for a column whose name says sex, a date or, in its last word, a time."""
    words = [word.lower() for word in _WORD.findall(column)]
    if any(_SEX.fullmatch(word) for word in words):
        raise UserError(f"{url}: column {column}: expected another label: {NO_SEX}")
    if any(_DATE.fullmatch(word) for word in words):
        raise UserError(f"{url}: column {column}: expected another label: {NO_DATE}")
    if words and _TIME.fullmatch(words[-1]):
        advice = "a duration names its unit, as in reaction_time_s"
        raise UserError(f"{url}: column {column}: expected another label: {NO_DATE}; {advice}")


def refuse_dates(url: str, column: str, cells: Iterable[str]) -> None:
    """Raise UserError where a cell is written as a date or a clock time, or all are dates as YYYYMMDD."""
    texts = [text for text in map(str.strip, cells) if text]
    dates = [text for text in texts if _DATE_TEXT.fullmatch(text) or _CLOCK.fullmatch(text)]
    if not dates and all(_PLAIN_DATE.fullmatch(text) for text in texts):
        dates = texts
    if dates:
        raise UserError(f"{url}: column {column}: expected a label, found {dates[0]!r}: {NO_DATE}")


def refuse_spellings(where: str, first_lines: Mapping[str, int]) -> None:
    """Raise UserError for two classes that differ in case, blanks, hyphens or the way of writing a number."""
    spellings: dict[str, str] = {}
    for text, line in first_lines.items():
        other = spellings.setdefault(spelling_of(text), text)
        if other != text:
            raise UserError(
                f"{where}: expected one spelling of a class, found {other!r} in line {first_lines[other]} "
                f"and {text!r} in line {line}; write it one way where they are one class, else in words that "
                "differ in more"
            )


def _store_ids(index: pd.DataFrame, unit: str) -> dict[str, str]:
    """Every id that a table may name a unit by -> the unit."""
    units = units_of(index, unit)
    known = units.notna()
    ids = dict(zip(units[known], units[known], strict=True))
    if unit == "volume":
        ids |= dict(zip(index["path"], units, strict=True))
    return ids


def _row_id(cell: str, side: str, unit: str, where: str, known: Collection[str]) -> str | None:
    """A row's id as the store writes it, by its `known` people and paths; None of an empty cell."""
    if unit == "volume":
        return path if (path := path_of(cell)) in known else path_of(cell.strip())
    person = person_id_of(cell, known)
    if unit == "participant" or person is None:
        return person
    if side.strip().lower() not in SIDES:
        raise UserError(f"{where}: {person}: expected an eye as OD, OS, L, R, left or right, found {side!r}")
    return f"{person}_{SIDES[side.strip().lower()]}"


def _value(task: TaskConfig, cells: Sequence[str], where: str) -> Value | None:
    """What the cells of a row say: a class, or numbers; None where one is empty."""
    known = task.names or ()
    texts = [text for cell in cells if (text := cell if cell in known else label_of(cell)) is not None]
    if len(texts) < len(cells):
        return None
    if task.kind == "regression":
        number = number_of(texts[0])
        if number is None:
            raise UserError(f"{where}: {task.label_column}: expected a number, found {texts[0]!r}")
        return (number,)
    if task.kind == "multilabel":
        for column, text in zip(known, texts, strict=True):
            if number_of(text) not in (0.0, 1.0):
                raise UserError(f"{where}: {column}: expected 0 or 1, found {text!r}")
        return tuple(float(text) for text in texts)
    # an integer column with a gap is written as 1.0
    text = texts[0] if texts[0] in known or not _WHOLE.fullmatch(texts[0]) else texts[0].removesuffix(".0")
    if task.kind == "ordinal" and text not in known:
        raise UserError(
            f"{where}: {task.label_column}: expected a class of task.names "
            f"({', '.join(known)}), found {texts[0]!r}"
        )
    return text


def _numbered(
    task: TaskConfig, values: dict[str, Value]
) -> tuple[tuple[str, ...] | None, dict[str, tuple[float, ...]]]:
    """(classes, None for numbers; {unit: class number or numbers})."""
    if task.kind in ("regression", "multilabel"):
        return None, {unit: value for unit, value in values.items() if not isinstance(value, str)}
    texts = {unit: value for unit, value in values.items() if isinstance(value, str)}
    classes = tuple(task.names or sorted(set(texts.values())))
    return classes, {unit: (float(classes.index(text)),) for unit, text in texts.items()}


def _shown(value: Value) -> str:
    return repr(value) if isinstance(value, str) else ", ".join(f"{number:g}" for number in value)


def _tell(
    url: str,
    id_column: str,
    matched: dict[str, Value],
    unmatched: list[str],
    num_missing: int,
    store_ids: list[str],
) -> None:
    """Log how many ids match, and which do not; raises UserError where none does."""
    if not matched and unmatched:
        example = store_ids[0] if store_ids else "nothing"
        raise UserError(
            f"{url}: expected ids of the store in column {id_column}, found none among {len(unmatched)}: "
            f"the table has {unmatched[0]!r}, the store has {example!r}"
        )
    if not matched:
        raise UserError(f"{url}: expected labels, found none ({num_missing} rows without an id or a label)")
    if num_missing:
        log.info("%s: %d rows without an id or a label are left out", url, num_missing)
    if unmatched:
        more = ", ..." if len(unmatched) > SHOWN else ""
        shown = ", ".join(unmatched[:SHOWN])
        log.warning("%s: %d labelled ids are not in the store: %s%s", url, len(unmatched), shown, more)
