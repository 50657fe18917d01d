"""What the index says of a table of labels (`--labels`): which column has the ids, how many are in the tree,
the nearest of the others, and columns that no class can be learned from as they are.
"""

import difflib
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence

from data_setup.index.look import Entry
from data_setup.index.people import digest_of
from data_setup.tables.text import PERSON_COLUMNS, SIDE_COLUMNS, label_of, path_of, person_id_of, spelling_of
from utils.errors import UserError

_IDS = (*PERSON_COLUMNS, "path", "filepath", "sop_instance_uid")
_NAMED_IDS = 5
_MOST_CLASSES = 20  # values of a column of classes
_CORRECT = "both of one id: correct one, or give each eye its line and a column eye"
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_OF_VISITS = re.compile(  # more than one each; dr_stage is of no age
    r"(exam|study|birth|visit|image|scan|file)?(visit|exam|date|day|week|month|time|age|file|path|image|scan|session"
    r"|uid)s?(date|time|path|name|point|stamp|id|no|nr|number)?",
    re.IGNORECASE,
)


def compare_labels(
    url: str, table: tuple[list[str], dict[int, list[str]]], entries: Sequence[Entry]
) -> list[str]:
    """Lines about a table, as `read_cells` gives it; raises UserError where no id is one of the entries'."""
    people = {entry.person_id for entry in entries if entry.is_row}
    known = {name for e in entries if e.is_row for name in (e.person_id, e.path, e.sop_instance_uid) if name}
    header, rows = table
    ids_of = {
        name: [text for text in (_id(cells[place], known) for cells in rows.values()) if text]
        for place, name in enumerate(header)
    }
    column = max(header, key=lambda name: (len(known & set(ids_of[name])), name in _IDS, -header.index(name)))
    ids = list(dict.fromkeys(ids_of[column]))
    here = [text for text in ids if text in known]
    strangers = [text for text in ids if text not in known]
    near = {re.sub(r"[\W_]+", "_", name).casefold(): name for name in sorted(known)}
    named = [f"{text!r}{_nearest(text, near)}" for text in strangers[:_NAMED_IDS]]
    more = ", ..." if len(strangers) > _NAMED_IDS else ""
    if not here:
        advice = f"expected ids of the tree, such as {min(people)!r}, in one of its columns"
        if any(digest_of(text) in people for ids in ids_of.values() for text in ids):
            advice += "; its ids are those of the headers: give --keep-ids"
        problem = f"{url}: {advice}, found in {column}: {', '.join(named) or 'none'}{more}"
        rule = "; an id from a path has _ for blanks, commas and hyphens: write the same in the table"
        rule *= any(" (near " in text for text in named)
        rule += "; of an Excel file the first sheet is read" * url.lower().endswith((".xlsx", ".xls"))
        raise UserError(problem + rule)
    lines = [f"labels      {url}: {len(here)} of {len(ids)} ids of column {column} are in the tree"]
    lines[0] += f"; task.id_column={column}" if column not in _IDS else ""
    if strangers:
        lines.append(f"  warning: {len(strangers)} are not: {', '.join(named)}{more}")
    if not people.isdisjoint(here) and (without := sorted(people - set(here))):
        some = ", ".join(without[:_NAMED_IDS]) + (", ..." if len(without) > _NAMED_IDS else "")
        lines.append(f"  {len(without)} people of the tree have no line: {some}")
    return lines + [f"  {text}" for text in _doubts(header, rows, column)]


def _doubts(header: Sequence[str], rows: Mapping[int, Sequence[str]], id_column: str) -> list[str]:
    """Of columns of classes: one class only, two spellings of one, and two classes of a person or an eye;
    one plain line where eyes or visits tell the lines of an id apart, so that columns may say other things.
    """
    keys = [header.index(id_column), *(n for n, name in enumerate(header) if name.lower() in SIDE_COLUMNS)]
    id_of = {line: tuple(row[key].strip().lower() for key in keys) for line, row in rows.items()}
    of_visits = [n for n, name in enumerate(header) if any(map(_OF_VISITS.fullmatch, _WORD.findall(name)))]
    ids = {*id_of.values()}
    apart = [
        n for n in of_visits if n not in keys and len({(i, rows[k][n]) for k, i in id_of.items()}) > len(ids)
    ]
    has_several = bool(apart) or keys[0] in of_visits or len(ids) > len({one[0] for one in ids})
    lines, single, varying = [], [], []
    for place, name in enumerate(header):
        cells = [(line, label) for line, row in rows.items() if (label := label_of(row[place]))]
        if place in keys or len(cells) < 2 or (count := len({text for _, text in cells})) > _MOST_CLASSES:
            continue
        spelled = [(line, label, spelling_of(label)) for line, label in cells]
        if pair := _pair((spelling, line, label, label) for line, label, spelling in spelled):
            lines.append(f"warning: {name} is {pair}: write one class one way")
        if place not in of_visits and (pair := _pair((id_of[n], n, text, same) for n, text, same in spelled)):
            varying.append(name)
            if not apart:
                lines.append(f"warning: {name} is {pair}: {_CORRECT}")
        if count == 1 and has_several:
            single.append(name)
        elif count == 1:
            lines.append(f"warning: {name} is {cells[0][1]!r} in every line: a label needs two classes")
    texts = {"one value in every line": single, "several values an id": varying if apart else []}
    if parts := [f"{', '.join(names)} ({text})" for text, names in texts.items() if names]:
        lines.append(f"no labels by {id_column}: {'; '.join(parts)}")
    return lines


def _pair(cells: Iterable[tuple[Hashable, int, str, str]]) -> str:
    """The first two of (group, line, label, value) that are of one group and have two values, in words."""
    first: dict[Hashable, tuple[int, str, str]] = {}
    for group, line, label, value in cells:
        before, one, other_value = first.setdefault(group, (line, label, value))
        if other_value != value:
            return f"{one!r} in line {before} and {label!r} in line {line}"
    return ""


def _id(cell: str, known: set[str]) -> str | None:
    """What a cell names: a path or UID of the tree, else the id of a person."""
    path = path_of(cell)
    return path if path in known else person_id_of(cell, known)


def _nearest(text: str, near: dict[str, str]) -> str:
    match = difflib.get_close_matches(re.sub(r"[\W_]+", "_", text).casefold(), near, 1)
    return f" (near {near[match[0]]!r})" if match else ""
