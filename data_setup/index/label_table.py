"""A table of labels compared with the people of a tree, before anything is trained: `index --labels TABLE`.

In: a table of any kind that `read_table` reads, and the entries. Out: lines of the summary: which column has
the ids, how many are here, and of those that are not the nearest that is.
"""

import difflib
import re
from collections.abc import Sequence

from data_setup.index.look import Entry
from data_setup.index.people import digest_of
from data_setup.tables.text import PERSON_COLUMNS, path_of, person_id_of, read_cells
from utils.config.schema import StorageOptions
from utils.errors import UserError

_IDS = (*PERSON_COLUMNS, "path", "filepath", "sop_instance_uid")
_NAMED = 5  # ids of a line


def compare_labels(url: str, entries: Sequence[Entry], options: StorageOptions) -> list[str]:
    """Lines about the table at `url`; raises UserError where none of its ids is one of the entries'."""
    people = {entry.person_id for entry in entries if entry.is_row}
    known = {name for e in entries if e.is_row for name in (e.person_id, e.path, e.sop_instance_uid) if name}
    header, rows = read_cells(url, options)
    ids_of = {
        name: [text for text in (_id(cells[place], known) for cells in rows.values()) if text]
        for place, name in enumerate(header)
    }
    column = max(header, key=lambda name: (len(known & set(ids_of[name])), name in _IDS, -header.index(name)))
    ids = list(dict.fromkeys(ids_of[column]))
    here = [text for text in ids if text in known]
    strangers = [text for text in ids if text not in known]
    near = {re.sub(r"[\W_]+", "_", name).casefold(): name for name in sorted(known)}
    named = [f"{text!r}{_nearest(text, near)}" for text in strangers[:_NAMED]]
    more = ", ..." if len(strangers) > _NAMED else ""
    if not here:
        advice = f"expected ids of the tree, such as {min(people)!r}, in one of its columns"
        if any(digest_of(text) in people for ids in ids_of.values() for text in ids):
            advice += "; its ids are those of the headers: give --keep-ids"
        raise UserError(f"{url}: {advice}, found in {column}: {', '.join(named) or 'none'}{more}")
    lines = [f"labels      {url}: {len(here)} of {len(ids)} ids of column {column} are in the tree"]
    lines[0] += f"; task.id_column={column}" if column not in _IDS else ""
    if strangers:
        lines.append(f"  warning: {len(strangers)} are not: {', '.join(named)}{more}")
    if by_person := people & set(here):
        without = sorted(people - by_person)
        if without:
            some = ", ".join(without[:_NAMED]) + (", ..." if len(without) > _NAMED else "")
            lines.append(f"  {len(without)} people of the tree have no line: {some}")
    return lines


def _id(cell: str, known: set[str]) -> str | None:
    """What a cell names: a path or UID of the tree, else the id of a person."""
    path = path_of(cell)
    return path if path in known else person_id_of(cell, known)


def _nearest(text: str, near: dict[str, str]) -> str:
    match = difflib.get_close_matches(re.sub(r"[\W_]+", "_", text).casefold(), near, 1)
    return f" (near {near[match[0]]!r})" if match else ""
