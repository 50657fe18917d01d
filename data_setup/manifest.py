"""Read manifest.tsv and participants.tsv: records, participant-level splits and labels for all stages.

In: a `Config` (data.*, task.*, seed). Out: `Record`s in the order (person_id, path) with device, protocol and
region from the file's path, its URL, its split and what is known about the participant. Rows that are not
used are counted by reason. Version 2 (participant_id) and version 3 (person_id) of AI-READI read alike. A
manifest with columns device and protocol needs no AI-READI paths: docs/guides/importers.md.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from data_setup.protocols import BY_NAME, DEVICES, PROTOCOLS, device_of_path, protocol_of_path
from data_setup.splits import seeded_split
from utils.config.schema import Config, StorageOptions
from utils.errors import ConfigError, UserError
from utils.storage import join, list_names, read_text

SPLITS = ("train", "val", "test")
_ID_COLUMNS = ("person_id", "participant_id")  # version 3, versions 1 and 2
TREE = ("retinal_oct", "structural_oct")
_AI_READI_COLUMNS = ("sop_instance_uid", "laterality", "number_of_frames", "height", "width")
# Texts that the manifests of this family write where they have no value.
_SENTINELS = {"", "nan", "none", "null", "n/a", "not reported", "not provided", "varies by frame"}


@dataclass(frozen=True)
class Record:
    """One OCT file of the manifest; shape is (frames, height, width) as the manifest says."""

    person_id: str
    device: str
    protocol: str  # Protocol.name, the version 3 spelling
    region: str
    laterality: str  # L | R | unknown
    path: str  # relative to the root, no leading slash
    url: str
    sop_instance_uid: str
    shape: tuple[int, int, int] | None
    split: str  # train | val | test
    study_group: str | None
    clinical_site: str | None
    age: int | None


@dataclass(frozen=True)
class RecordList:
    records: list[Record]
    skipped: dict[str, int]  # rows that are not used, by reason
    split_source: str  # recommended_split | seeded_70_10_20
    unused: list[Record]  # the other rows that name a file; device, protocol, person may be unknown in them
    root: str  # what the paths are relative to

    @property
    def doubles(self) -> list[Record]:
        """Unused rows that give another file the SOPInstanceUID of a record: the first row is used."""
        paths = {r.path for r in self.records}
        uids = {r.sop_instance_uid for r in self.records} - {""}
        by_path = {r.path: r for r in self.unused if r.path not in paths and r.sop_instance_uid in uids}
        return list(by_path.values())


def read_records(cfg: Config) -> RecordList:
    """The records that pass the data.* filters, by (person_id, path); raises UserError, ConfigError."""
    allowed = wanted_values(cfg)
    participants, split_source = read_participants(cfg)
    rows, unused, skipped = _manifest_rows(cfg)
    records = []
    for row in rows:
        person = participants.get(row.person_id)
        if person is None:
            skipped["participant_unknown"] += 1
            unused.append(row)
            continue
        if person["split"] is None:
            skipped["participant_without_split"] += 1
            unused.append(row)
            continue
        record = replace(row, **person)
        rejected = next(
            (k for k, (field, values) in allowed.items() if getattr(record, field) not in values), None
        )
        if rejected:
            skipped[f"filtered_by_{rejected}"] += 1
            unused.append(record)
        else:
            records.append(record)
    records.sort(key=lambda r: (r.person_id, r.path))
    limit = cfg.data.max_samples
    if limit is not None and len(records) > limit:
        skipped["beyond_max_samples"] = len(records) - limit
        unused += records[limit:]
        records = records[:limit]
    if not records:
        counts = ", ".join(f"{k} {n}" for k, n in sorted(skipped.items())) or "an empty manifest"
        raise UserError(f"{cfg.data.manifest_path}: expected at least one usable row, found none ({counts})")
    root = _tree_root(cfg)
    records, unused = ([replace(r, url=join(root, r.path)) for r in part] for part in (records, unused))
    return RecordList(records, dict(sorted(skipped.items())), split_source, unused, root)


def read_participants(cfg: Config) -> tuple[dict[str, dict[str, Any]], str]:
    """({person_id: split, study_group, clinical_site, age}, where the split comes from); raises UserError."""
    url = cfg.data.participants_path
    table, id_column = _read_table(url, cfg.data.storage_options, ("study_group", "clinical_site", "age"))
    people: dict[str, dict[str, Any]] = {}
    for row in table.to_dict("records"):
        person_id = _person_id(row[id_column])
        if person_id is None:
            continue
        split = _text(row.get("recommended_split"))
        if split is not None and split not in SPLITS:
            raise UserError(
                f"{url}: recommended_split of {person_id}: expected {' | '.join(SPLITS)}, found {split!r}"
            )
        person = {
            "split": split,
            "study_group": _text(row["study_group"]),
            "clinical_site": _text(row["clinical_site"]),
            "age": _integer(row["age"]),
        }
        if people.setdefault(person_id, person) != person:
            raise UserError(f"{url}: participant {person_id}: expected one row, found two that differ")
    if "recommended_split" in table.columns:
        return people, "recommended_split"
    strata = {p: (v["study_group"], v["clinical_site"]) for p, v in people.items()}
    split_of = seeded_split(strata, cfg.seed)
    for person_id, person in people.items():
        person["split"] = split_of[person_id]
    return people, "seeded_70_10_20"


def load_labels(cfg: Config) -> dict[str, str]:
    """{person_id: label} of task.*; people without a label are left out; raises UserError."""
    url = cfg.task.labels_path or cfg.data.participants_path
    table, id_column = _read_table(
        url, cfg.data.storage_options, (cfg.task.label_column,), cfg.task.id_column
    )
    labels: dict[str, str] = {}
    for raw_id, raw_label in zip(table[id_column], table[cfg.task.label_column], strict=True):
        person_id, label = _person_id(raw_id), _text(raw_label)
        if person_id is None or label is None:
            continue
        if labels.setdefault(person_id, label) != label:
            raise UserError(
                f"{url}: {cfg.task.label_column} of {person_id}: expected one label, "
                f"found {labels[person_id]!r} and {label!r}"
            )
    return labels


def _manifest_rows(cfg: Config) -> tuple[list[Record], list[Record], Counter[str]]:
    """(records without participant and URL, rows that are not used, counts of those by reason)."""
    table, id_column = _read_table(cfg.data.manifest_path, cfg.data.storage_options, ("filepath",))
    if not {"device", "protocol"} <= set(table.columns):
        _require(table, _AI_READI_COLUMNS, cfg.data.manifest_path)
    rows: list[Record] = []
    unused: list[Record] = []
    skipped: Counter[str] = Counter()
    paths: set[str] = set()
    uids: set[str] = set()
    for row in table.to_dict("records"):
        path = _clean_path(row["filepath"])
        person_id = _person_id(row[id_column])
        uid = _text(row.get("sop_instance_uid")) or ""
        known = protocol_of_path(path) if path else None
        device = _text(row.get("device")) or (device_of_path(path) if path else None)
        protocol = _text(row.get("protocol")) or (known.name if known else None)
        known = BY_NAME.get(protocol) if protocol else None
        reasons = {
            "row_without_path": path is None,
            "row_without_person": person_id is None,
            "unknown_device": device is None,
            "unknown_protocol": protocol is None,
            "not_a_volume": known is not None and not known.is_volume,
            "duplicate_row": path in paths or (uid != "" and uid in uids),
        }
        reason = next((name for name, applies in reasons.items() if applies), None)
        if reason:
            skipped[reason] += 1
        if path is None:
            continue
        frames, height, width = (_integer(row.get(c)) for c in ("number_of_frames", "height", "width"))
        record = Record(
            person_id=person_id or "unknown",
            device=device or "unknown",
            protocol=known.name if known else protocol or "unknown",
            region=known.region if known else _text(row.get("anatomic_region")) or "unknown",
            laterality=_laterality(row.get("laterality"), path),
            path=path,
            url="",
            sop_instance_uid=uid,
            shape=(frames, height, width) if frames and height and width else None,
            split="",
            study_group=None,
            clinical_site=None,
            age=None,
        )
        if reason:
            unused.append(record)
        else:
            paths.add(path)
            uids.add(uid)
            rows.append(record)
    return rows, unused, skipped


def wanted_values(cfg: Config) -> dict[str, tuple[str, set[str]]]:
    """{data.* filter: (record field, wanted values)} of the filters that are set; raises ConfigError."""
    volumes = [p for p in PROTOCOLS if p.is_volume]
    known: dict[str, tuple[str, list[str]]] = {
        "device_filter": ("device", list(DEVICES)),
        "protocol_filter": ("protocol", [p.name for p in volumes]),
        "region_filter": ("region", sorted({p.region for p in volumes})),
        "laterality_filter": ("laterality", ["L", "R"]),
    }
    filters = {}
    for key, (field, values) in known.items():
        wanted = getattr(cfg.data, key)
        if wanted is None:
            continue
        if field == "protocol":  # the version 2 spelling means the same protocol
            wanted = [BY_NAME[w].name if w in BY_NAME else w for w in wanted]
        unknown = [w for w in wanted if w not in values]
        if unknown or not wanted:
            raise ConfigError(
                f"data.{key}: expected some of {', '.join(values)}; or null for all, "
                f"found {', '.join(map(repr, unknown)) or 'an empty list'}"
            )
        filters[key] = (field, set(wanted))
    return filters


def _tree_root(cfg: Config) -> str:
    """The folder of the records' paths: data.gcs_root, dataset/ in it, or a repeated retinal_oct/."""
    root, options = cfg.data.gcs_root, cfg.data.storage_options
    names = list_names(root, options)
    if TREE[0] not in names and "dataset" in names:
        root = join(root, "dataset")
    inside = list_names(join(root, TREE[0]), options)
    if TREE[1] not in inside and TREE[0] in inside:
        root = join(root, TREE[0])
    return root


def _read_table(
    url: str, options: StorageOptions, columns: Iterable[str], id_column: str | None = None
) -> tuple[pd.DataFrame, str]:
    """(table of texts, name of its id column); tab separated, or by comma when the name ends in .csv."""
    text = read_text(url, options)
    separator = "," if url.lower().endswith(".csv") else "\t"
    try:
        table = pd.read_csv(io.StringIO(text), sep=separator, dtype=str, keep_default_na=False)
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise UserError(f"{url}: expected a table with a header line, found: {error}".strip()) from error
    table.columns = [str(c).strip() for c in table.columns]
    header = ", ".join(table.columns)
    names = (id_column,) if id_column else _ID_COLUMNS
    found_id = next((name for name in names if name in table.columns), None)
    if found_id is None:
        raise UserError(f"{url}: expected a column {' or '.join(names)}, found {header}")
    _require(table, columns, url)
    return table, found_id


def _require(table: pd.DataFrame, columns: Iterable[str], url: str) -> None:
    for column in columns:
        if column not in table.columns:
            raise UserError(f"{url}: expected a column {column}, found {', '.join(table.columns)}")


def _text(value: Any) -> str | None:
    text = value.strip() if isinstance(value, str) else ""
    return None if text.lower() in _SENTINELS else text


def _integer(value: Any) -> int | None:
    text = (_text(value) or "").removesuffix(".0")
    return int(text) if text.isdecimal() else None


def _person_id(value: Any) -> str | None:
    text = _text(value)
    return text.removesuffix(".0") if text else None  # an integer column with a gap is written as 1001.0


def _clean_path(value: Any) -> str | None:
    text = (_text(value) or "").strip("/").removeprefix("dataset/")
    return text if text and ".." not in text.split("/") else None


def _laterality(value: Any, path: str) -> str:
    text = (_text(value) or "").upper()
    if text in ("L", "R"):
        return text
    side = next((s for s in ("_l_", "_r_") if s in path.rpartition("/")[2]), None)
    return side.strip("_").upper() if side else "unknown"
