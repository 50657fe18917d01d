"""Write the tables of a tree; what a table has already stays.

In: entries. Out: manifest.tsv (one row a volume), participants.tsv (one row a person, of a public set one an
eye where its eyes are known), left_out.tsv (other files, and why), labels.parquet (what exports
measured), labels.tsv (what a set says only of a volume), label_classes.yaml. A cell that somebody filled is
never changed: an entry fills empty cells and adds rows at the end.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd
import yaml

from data_setup.index.look import UNKNOWN, Entry
from data_setup.tables.splits import dealt_splits, needs_splits
from data_setup.tables.text import (
    PERSON_COLUMNS,
    SIDES,
    Row,
    fact_of,
    integer_of,
    label_of,
    path_of,
    person_id_of,
    read_table,
    spacing_of,
    table_text,
    twin_ids,
)
from utils.config.schema import StorageOptions
from utils.errors import UserError
from utils.storage import exists, join, read_text, write_bytes

OPTIONAL_COLUMNS = ("volume_yaml", "label_volume", "label_surfaces")  # where any entry has them
PEOPLE_COLUMNS = ("person_id", "study_group", "clinical_site", "age")
LEFT_OUT_COLUMNS = ("filepath", "kind", "reason", "message")


@dataclass
class Written:
    urls: list[str] = field(default_factory=list)
    added: int = 0  # rows of the manifest
    kept: int = 0
    gone: list[str] = field(default_factory=list)  # paths of the manifest that the tree does not have
    moved: list[str] = field(default_factory=list)  # `old -> new` path of rows whose file is elsewhere now
    unsure: list[str] = field(default_factory=list)  # `old -> new?` where several rows or files are alike
    forgot: bool = False  # those `gone` are no longer in the manifest
    differing: list[str] = field(default_factory=list)  # `path: column` where a kept cell is not the file's
    people: set[str] = field(default_factory=set)  # of the manifest, afterwards
    splits: dict[str, str] = field(default_factory=dict)  # person -> recommended_split of the table
    filled: dict[str, set[str]] = field(default_factory=dict)  # path -> columns that its kept row has
    without_split: int = 0  # added to a table of people that has recommended_split
    dealt: bool = False  # splits are dealt to a set that has none
    stale: str = ""  # labels.parquet of an earlier run, where no export has a grid any more


def write_tables(
    out: str,
    entries: Sequence[Entry],
    options: StorageOptions,
    classes: Mapping[int, str] | None = None,
    paths: Collection[str] = (),
    forget: bool = False,
) -> Written:
    """Write them all; `classes`: of a public set, the names of its voxels' classes, maybe none.

    `paths`: files of the tree that are no entries; `forget`: rows of other paths are taken out.

    Raises UserError for a table that cannot be read, StorageError.
    """
    written = Written(forgot=forget)
    rows = [entry for entry in entries if entry.is_row]
    present = {path_of(path) for path in (*paths, *(entry.path for entry in entries))}
    manifest = _manifest(out, rows, present, forget, options, written)  # raises before anything is written
    people = _people(out, rows, options, written, classes is not None)  # both are read before one is written
    texts = _texts_of_set(rows, classes or {})
    for name, text in texts.items():
        _refuse_another(join(out, name), text, options)
    left_out = [
        {"filepath": entry.path, "kind": entry.kind, "reason": entry.status, "message": entry.message}
        for entry in entries
        if not entry.is_row
    ]
    tables = {
        "manifest.tsv": table_text(*manifest),
        "participants.tsv": table_text(*people),
        "left_out.tsv": table_text(LEFT_OUT_COLUMNS, left_out),
    }
    contents = {name: text.encode() for name, text in (tables | texts).items()}
    if labels := [{**_label_ids(e), **e.etdrs} for e in rows if e.etdrs]:
        contents["labels.parquet"] = pd.DataFrame(labels).to_parquet(index=False)
    for name, content in contents.items():
        write_bytes(join(out, name), content, options)
        written.urls.append(join(out, name))
    stale = join(out, "labels.parquet")
    if not labels and exists(stale, options):  # it may be somebody's own: said, not removed
        written.stale = stale
    return written


def manifest_row(entry: Entry) -> Row:
    """The cells of an entry; empty where nothing says it."""
    frames, height, width = entry.shape or ("", "", "")
    return {
        "person_id": entry.person_id,
        "filepath": entry.path,
        "kind": entry.kind,
        "device": entry.device,
        "protocol": entry.protocol,
        "anatomic_region": entry.region,
        "laterality": entry.laterality,
        "number_of_frames": str(frames),
        "height": str(height),
        "width": str(width),
        "spacing_mm": ", ".join(f"{length:.7g}" for length in entry.spacing_mm or ()),
        "d_order": entry.d_order,
        "files": entry.files,
        "sop_instance_uid": entry.sop_instance_uid,
        **{name: value for name in OPTIONAL_COLUMNS if (value := getattr(entry, name))},
    }


def _manifest(
    out: str,
    entries: Sequence[Entry],
    present: Collection[str | None],
    forget: bool,
    options: StorageOptions,
    written: Written,
) -> tuple[list[str], list[Row]]:
    optional = [name for name in OPTIONAL_COLUMNS if any(getattr(entry, name) for entry in entries)]
    usual = (*manifest_row(Entry("", "")), *optional)
    columns, kept = _read(join(out, "manifest.tsv"), ("filepath",), usual, options)
    by_path = {path_of(row["filepath"]): row for row in kept}
    _hand_over(by_path, entries, present, written)
    by_path = {path_of(row["filepath"]): row for row in kept}
    known = {*twin_ids(row["person_id"] for row in kept), *(entry.person_id for entry in entries)}
    _check_people(join(out, "manifest.tsv"), entries, by_path, known)
    fresh = {entry.path: manifest_row(entry) for entry in entries}
    for path, cells in fresh.items():
        row = by_path.get(path_of(path))
        if row is None:
            kept.append(dict.fromkeys(columns, "") | cells)
            written.added += 1
            continue
        written.kept += 1
        written.filled[path] = {name for name in columns if row[name].strip() not in ("", UNKNOWN)}
        for name, value in cells.items():
            if row[name].strip() in ("", UNKNOWN):
                row[name] = value
            elif value not in ("", UNKNOWN) and not _is_same(name, row[name], value, known):
                written.differing.append(f"{path}: {name}")
    written.gone = sorted(path or "" for path in by_path if path not in present)
    if forget:
        kept = [row for row in kept if path_of(row["filepath"]) in present]
    id_column = next(name for name in PERSON_COLUMNS if name in columns)
    written.people = {person_id_of(row[id_column], known) or "" for row in kept}
    return columns, kept


def _hand_over(
    by_path: Mapping[str | None, Row],
    entries: Sequence[Entry],
    present: Collection[str | None],
    written: Written,
) -> None:
    """Give the row of a file that is gone, with its edits, to the only file that is the same scan."""
    keys = [_scan_key(manifest_row(entry)) for entry in entries]
    entries_of = Counter(keys)
    rows = [(_scan_key(row, entries_of), path, row) for path, row in by_path.items()]
    rows_of = Counter(key for key, _, _ in rows)
    fresh = {key: e for key, e in zip(keys, entries, strict=True) if path_of(e.path) not in by_path}
    for key, path, row in rows:
        entry = fresh.get(key)
        if not key or entry is None or path in present:
            continue
        shape = _shape_of(row)
        if (rows_of[key], entries_of[key]) != (1, 1):
            written.unsure.append(f"{path} -> {entry.path}?")
        elif None in shape or shape == entry.shape:
            written.moved.append(f"{path} -> {entry.path}")
            row["filepath"] = entry.path


def _shape_of(row: Row) -> tuple[int | None, ...]:
    return tuple(integer_of(row.get(name)) for name in ("number_of_frames", "height", "width"))


def _scan_key(row: Row, known: Collection[tuple[object, ...]] = ()) -> tuple[object, ...]:
    """What tells a scan from others wherever its file is; empty where nothing does. A spacing that somebody
    filled in is in no file: without it where `known` keys lack it.
    """
    if uid := fact_of(row.get("sop_instance_uid")):
        return (uid,)
    shape, spacing = _shape_of(row), spacing_of(row.get("spacing_mm"), f"{row['filepath']}: spacing_mm")
    if None in shape:
        return ()
    key = (row["filepath"].rpartition("/")[2], row.get("kind"), *shape)
    return (*key, None) if (*key, spacing) not in known and (*key, None) in known else (*key, spacing)


def _check_people(
    url: str, entries: Sequence[Entry], by_path: Mapping[str | None, Row], ids: Collection[str]
) -> None:
    """Raise UserError where a new scan would get an id that its person does not have in the table."""
    known: dict[str, tuple[str, str]] = {}  # the files' person -> a path, and its other id in the table
    num_rows = num_other = 0
    for entry in entries:
        cell = person_id_of(by_path.get(path_of(entry.path), {}).get("person_id"), ids)
        num_rows += cell not in (None, UNKNOWN)
        if cell and cell not in (UNKNOWN, entry.person_id):
            known.setdefault(entry.person_id, (entry.path, cell))
            num_other += 1
    are_other = 2 * num_other > num_rows  # ids of another kind: no new one is comparable
    for entry in (e for e in entries if path_of(e.path) not in by_path):
        person = entry.person_id
        if person in known or are_other:
            path, cell = known.get(person) or next(iter(known.values()))
            raise UserError(
                f"{url}: expected ids as in the table, such as {cell!r} of {path}, found another for it, and "
                f"{person!r} for the new {entry.path}: give --person and --keep-ids as before, or add its "
                "row with filepath and person_id"
            )


def _is_same(column: str, cell: str, value: str, ids: Collection[str]) -> bool:
    """Whether a cell says what the file does, in another spelling perhaps."""
    if column == "laterality":
        return SIDES.get(cell.strip().lower()) == value
    if column == "person_id":
        return person_id_of(cell, ids) == value
    if column == "spacing_mm":
        return spacing_of(cell, column) == spacing_of(value, column)
    return cell == value


def _people(
    out: str, entries: Sequence[Entry], options: StorageOptions, written: Written, is_set: bool
) -> tuple[list[str], list[Row]]:
    url = join(out, "participants.tsv")
    fresh = _rows_of_people(entries, written, is_set)
    names = sorted({name for row in fresh.values() for name in row} - {"recommended_split"})
    eyes = ["laterality"] * any(side for _, side in fresh)
    splits = ["recommended_split"] * any("recommended_split" in row for row in fresh.values())
    of_set = ("person_id", *eyes, *splits, *names)
    columns, kept = _read(url, (), of_set if is_set else PEOPLE_COLUMNS, options)
    id_column = next(name for name in PERSON_COLUMNS if name in columns)
    known = {*twin_ids(row[id_column] for row in kept), *written.people}
    ids = [person_id_of(row[id_column], known) or "" for row in kept]
    if kept and not written.people & (present := set(ids)):
        raise UserError(
            f"{url}: expected people of the files, found {min(present)!r} and others, where the files have "
            f"{min(written.people)!r}: see --keep-ids and --person, or give --out DIR"
        )
    people = {person for person, _ in fresh}
    wanted = {key for key in fresh if key[0] in written.people} | {(p, "") for p in written.people - people}
    for person, row in zip(ids, kept, strict=True):
        wanted.discard((person, SIDES.get(row.get("laterality", "").lower(), "") if is_set else ""))
    for person, side in sorted(wanted):
        cells = {id_column: person, "laterality": side, **fresh.get((person, side), {})}
        kept.append({name: cells.get(name, "") for name in columns})
        written.without_split += "recommended_split" in columns and not cells.get("recommended_split")
    if "recommended_split" in columns:
        persons = (person_id_of(row[id_column], known) or "" for row in kept)
        written.splits = {p: row["recommended_split"] for p, row in zip(persons, kept, strict=True)}
    return columns, kept


def _rows_of_people(
    entries: Sequence[Entry], written: Written, is_set: bool
) -> dict[tuple[str, str], dict[str, str]]:
    """(person, eye) -> facts; the eye is empty but in a set, and so is a fact on which two files differ."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    splits: dict[str, str] = {}
    for entry in entries:
        row = rows.setdefault((entry.person_id, entry.laterality if is_set else ""), {})
        for name, value in entry.facts.items():
            if label_of(value) is None or row.setdefault(name, value) == value:
                continue
            if is_set:
                raise UserError(
                    f"{entry.path}: {name} of {entry.person_id} {entry.laterality}: expected {row[name]!r} "
                    f"as in another volume, found {value!r}"
                )
            row[name] = ""
        if splits.setdefault(entry.person_id, entry.split) != entry.split:
            raise UserError(
                f"{entry.path}: expected {entry.person_id} in one split, found {splits[entry.person_id]!r} "
                f"and {entry.split!r}"
            )
    written.dealt = is_set and needs_splits(splits)
    if written.dealt:
        labels = {p: tuple(sorted((k, v) for k, v in r.items() if k != "age")) for (p, _), r in rows.items()}
        splits = dealt_splits(labels)
    for (person, _), row in rows.items():
        row |= {"recommended_split": splits[person]} if splits[person] else {}
    return rows


def _texts_of_set(entries: Sequence[Entry], classes: Mapping[int, str]) -> dict[str, str]:
    """{name: text} of what a set has besides: labels.tsv of single volumes, label_classes.yaml."""
    texts = {}
    visits = [entry for entry in entries if entry.visit]
    if visits:
        names = sorted({name for entry in visits for name in entry.visit})
        columns = (*_label_ids(visits[0]), *names)
        texts["labels.tsv"] = table_text(columns, [{**_label_ids(e), **e.visit} for e in visits])
    if classes:
        texts["label_classes.yaml"] = yaml.safe_dump(dict(classes), sort_keys=True)
    return texts


def _refuse_another(url: str, text: str, options: StorageOptions) -> None:
    if exists(url, options) and read_text(url, options) != text:
        raise UserError(
            f"{url}: expected no table, or the one that this command writes, found another: give --out DIR, "
            "or move it away"
        )


def _read(
    url: str, required: Sequence[str], usual: Sequence[str], options: StorageOptions
) -> tuple[list[str], list[Row]]:
    """(columns, rows) of a table that may be there already; missing columns of the manifest are added."""
    if not exists(url, options):
        return list(usual), []
    table, columns, id_column = read_table(url, options, required)
    added = [name for name in usual if required and name not in (*columns, "person_id")]
    rows = [row | dict.fromkeys(added, "") for row in table.values()]
    if required and id_column != "person_id":
        rows = [row | {"person_id": row[id_column]} for row in rows]
    return [*columns, *added], rows


def _label_ids(entry: Entry) -> dict[str, str]:
    return {"path": entry.path, "person_id": entry.person_id, "laterality": entry.laterality}
