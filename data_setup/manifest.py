"""Read manifest.tsv and participants.tsv: records, participant-level splits and labels for all stages.

In: a `Config` (data.*, task.*, seed). Out: `Record`s in the order (person_id, path) with device, protocol and
region from the file's path, its URL, its split and what is known about the participant. Rows that are not
used are counted by reason. Version 2 (participant_id) and version 3 (person_id) of AI-READI read alike. A
manifest with columns device and protocol needs no AI-READI paths (docs/guides/importers.md), and at another
place it needs no participants.tsv. data_setup/index writes one for any folder.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from data_setup.protocols import BY_NAME, DEVICES, PROTOCOLS, Shape, Triple, device_of_path, protocol_of_path
from data_setup.tables.splits import RECOMMENDED as RECOMMENDED
from data_setup.tables.splits import TREE as TREE
from data_setup.tables.splits import (
    eye_of,
    may_lack_participants,
    of_eye,
    read_participants,
    stratified_choice,
)
from data_setup.tables.text import (
    D_ORDERS,
    PERSON_COLUMNS,
    SENTINELS,
    SIDES,
    fact_of,
    integer_of,
    label_of,
    path_of,
    person_id_of,
    read_table,
    require_columns,
    spacing_of,
    twin_ids,
)
from utils.config.schema import Config, StorageOptions
from utils.errors import ConfigError, UserError
from utils.storage import StorageNotFoundError, exists, join, list_names
from utils.workers import in_threads

if TYPE_CHECKING:
    import pandas as pd

_AI_READI_COLUMNS = ("sop_instance_uid", "laterality", "number_of_frames", "height", "width")
_OPTIONAL_COLUMNS = ("study_group", "clinical_site", "age")  # of participants.tsv
log = logging.getLogger(__name__)
_NO_SIDE = SENTINELS | {"unknown", "unknown_laterality"}


@dataclass(frozen=True, kw_only=True)
class Record:
    """One OCT file of the manifest; shape is (frames, height, width) as the manifest says."""

    person_id: str = "unknown"
    device: str = "unknown"
    protocol: str = "unknown"  # Protocol.name, the version 3 spelling
    region: str = "unknown"
    laterality: str = "unknown"  # L | R | unknown
    path: str  # relative to the root, no leading slash
    url: str
    sop_instance_uid: str = ""
    shape: Shape | None = None
    split: str = ""  # train | val | test
    study_group: str | None = None
    clinical_site: str | None = None
    age: int | None = None
    spacing_mm: Triple | None = None  # these three are beside or in place of the file's
    d_order: str | None = None  # a key of tables.D_ORDERS
    files: str | None = None  # of a folder: pattern of its B-scan images
    volume_yaml: str | None = None  # keys of a volume.yaml in one line, beneath those of the YAML files
    line: int = dataclasses.field(default=0, compare=False)  # of the manifest


def unknown_record(url: str, path: str | None = None) -> Record:
    """A record that says nothing but where the file is, at `path` below its root: its header is believed."""
    return Record(path=path or url, url=url)


@dataclass(frozen=True)
class RecordList:
    records: list[Record]
    skipped: dict[str, int]  # rows that are not used, by reason
    split_source: str  # RECOMMENDED | SEEDED
    unused: list[Record]  # the other rows that name a file; device, protocol, person may be unknown in them
    root: str  # what the paths are relative to
    filtered: list[Record]  # those of `unused` that a filter, data.max_samples or a lacking file excludes
    copies: dict[str, str]  # path of a row without its file -> of the row that has the scan's file

    @property
    def doubles(self) -> list[Record]:
        """The records whose SOPInstanceUID an earlier one has: copies by their voxels, or other scans."""
        first: dict[str, str] = {}
        uids = ((r, r.sop_instance_uid) for r in self.records)
        return [r for r, uid in uids if uid and first.setdefault(uid, r.path) != r.path]


def read_records(cfg: Config) -> RecordList:
    """The records that pass the data.* filters, by (person_id, path); raises UserError, ConfigError."""
    rows, unused, skipped = _manifest_rows(cfg.data.manifest_path, cfg.data.storage_options)
    root = _tree_root(cfg)
    copies = _without_their_file(rows, root, cfg.data.storage_options)
    named = {name: {getattr(row, name) for row in rows} for name in FILTERED.values()}
    allowed = wanted_values(cfg, named)
    participants, split_source = read_participants(cfg, {row.person_id for row in rows})
    records, filtered = [], []
    for row in rows:
        person = of_eye(participants.get(row.person_id, {}), row.laterality)
        if person is None:
            is_nobody = row.person_id.lower() in SENTINELS  # a person called None is in the table of people
            skipped["row_without_person" if is_nobody else "participant_unknown"] += 1
            unused.append(row)
            continue
        record = replace(row, **vars(person))
        if not record.split:
            skipped["participant_without_split"] += 1
            unused.append(row)
            continue
        failing = (k for k, (field, values) in allowed.items() if getattr(record, field) not in values)
        rejected = next(failing, None)
        if record.path in copies:
            skipped["duplicate_row"] += 1
            filtered.append(record)  # a volume that the store has of it stays
        elif rejected:
            skipped[f"filtered_by_{rejected}"] += 1
            filtered.append(record)
        else:
            records.append(record)
    records.sort(key=lambda r: (r.person_id, r.path))
    limit = cfg.data.max_samples
    if limit is not None and len(records) > limit:
        skipped["beyond_max_samples"] = len(records) - limit
        strata = {r.path: (r.clinical_site, r.device, r.study_group) for r in records}
        chosen = stratified_choice(strata, limit, cfg.seed, "max_samples")
        filtered += [r for r in records if r.path not in chosen]
        records = [r for r in records if r.path in chosen]
    if not records:
        counts = ", ".join(f"{k} {n}" for k, n in sorted(skipped.items())) or "an empty manifest"
        raise UserError(f"{cfg.data.manifest_path}: expected at least one usable row, found none ({counts})")
    records, filtered, unused = (
        [replace(r, url=join(root, r.path)) for r in part] for part in (records, filtered, unused)
    )
    unused += filtered
    return RecordList(records, dict(sorted(skipped.items())), split_source, unused, root, filtered, copies)


def _without_their_file(rows: Iterable[Record], root: str, options: StorageOptions) -> dict[str, str]:
    """{path of a row without its file: path of the only row of its SOPInstanceUID that has one}.

    Both are of one person; or they are the only two with this UID, and no cell gives them two shapes. Any
    other row without its file stays, and `prepare` names it. All rows with a file are used: whether two are
    one scan is seen in their voxels (StoreWriter.finalise).
    """
    groups: dict[str, list[Record]] = {}
    for row in rows:
        groups.setdefault(row.sop_instance_uid or row.path, []).append(row)
    several = [group for group in groups.values() if len(group) > 1]

    def is_there(path: str) -> bool:  # E2E: `eye.e2e#2` is a volume of eye.e2e
        return any(exists(join(root, name), options) for name in (path, re.sub(r"#\d+$", "", path)))

    asked = [row.path for group in several for row in group]
    there = {path for path, found_it in zip(asked, in_threads(is_there, asked), strict=True) if found_it}
    copies: dict[str, str] = {}
    for group in several:
        present = [row for row in group if row.path in there]
        for row in group if len(present) == 1 else ():
            shape, other = row.shape, present[0].shape
            fits = len(group) == 2 and (None in (shape, other) or shape == other)
            if row.path not in there and (fits or row.person_id == present[0].person_id):
                copies[row.path] = present[0].path
    return copies


def load_labels(cfg: Config) -> dict[str, str]:
    """{person_id: label} of task.*; with task.unit=eye {person_id + _L or _R: label}; raises UserError. Units
    whose label is empty are left out, and so is everybody where `read_participants` needs no table.
    """
    url, column = cfg.task.labels_path or cfg.data.participants_path, cfg.task.label_column
    required = () if cfg.task.labels_path is None and column in _OPTIONAL_COLUMNS else (column,)
    ids = (cfg.task.id_column,) if cfg.task.id_column else PERSON_COLUMNS
    try:
        table, _, id_column = read_table(url, cfg.data.storage_options, required, ids, "task.id_column")
    except StorageNotFoundError:
        if cfg.task.labels_path is None and not required and may_lack_participants(cfg):
            return {}
        raise
    labels: dict[str, str] = {}
    twins = twin_ids(row[id_column] for row in table.values())
    for line, row in table.items():
        person_id, label = person_id_of(row[id_column], twins), label_of(row.get(column))
        if person_id is None or label is None:
            continue
        unit = unit_of(cfg, person_id, eye_of(row, f"{url}: line {line}"))
        if labels.setdefault(unit, label) != label:
            two = f"found {labels[unit]!r} and {label!r}"
            raise UserError(f"{url}: {column} of {unit}: expected one label, {two}")
    return labels


def unit_of(cfg: Config, person_id: str, eye: str) -> str:
    """The key of `load_labels` for an eye of a person."""
    return f"{person_id}_{eye}" if cfg.task.unit == "eye" and eye in ("L", "R") else person_id


def records_of_table(url: str, root: str, options: StorageOptions) -> list[Record]:
    """All rows that name a file below `root`, without their participants. Raises UserError, StorageError."""
    rows, unused, _ = _manifest_rows(url, options)
    return [replace(row, url=join(root, row.path)) for row in [*rows, *unused]]


def _manifest_rows(url: str, options: StorageOptions) -> tuple[list[Record], list[Record], Counter[str]]:
    """(records without participant and URL, rows that are not used, counts of those by reason)."""
    table, columns, id_column = read_table(url, options, ("filepath",))
    if not {"device", "protocol"} <= set(columns):
        require_columns(columns, _AI_READI_COLUMNS, url)
    rows: list[Record] = []
    unused: list[Record] = []
    skipped: Counter[str] = Counter()
    people: dict[str, str] = {}  # path -> person
    twins = twin_ids(row[id_column] for row in table.values())
    spelled = {path_of(row["filepath"]) for row in table.values()}
    for line, row in table.items():
        path = path_of(row["filepath"])
        if path and (plain := re.sub(r"^(\./+)+", "", path)) in spelled:  # both a.nii and ./a.nii
            path = plain
        person_id = person_id_of(row[id_column], twins)
        uid = fact_of(row.get("sop_instance_uid")) or ""
        known = protocol_of_path(path) if path else None
        device = fact_of(row.get("device")) or (device_of_path(path) if path else None)
        protocol = fact_of(row.get("protocol")) or (known.name if known else None)
        known = BY_NAME.get(protocol) if protocol else None
        reasons = {
            "row_without_path": path is None,
            "row_without_person": person_id is None,
            "unknown_device": device is None,
            "unknown_protocol": protocol is None,
            "not_a_volume": known is not None and not known.is_volume,
            "duplicate_row": path in people,
        }
        reason = next((name for name, applies in reasons.items() if applies), None)
        if reason:
            skipped[reason] += 1
        if path is None:
            continue
        where = f"{url}: line {line}"
        if person_id and people.get(path, person_id) != person_id:
            both = f"{people[path]!r} and {person_id!r}"
            raise UserError(f"{where}: expected {path!r} in the rows of one person, found {both}")
        frames, height, width = (integer_of(row.get(c)) for c in ("number_of_frames", "height", "width"))
        record = Record(
            person_id=person_id or "unknown",
            device=device or "unknown",
            protocol=known.name if known else protocol or "unknown",
            region=known.region if known else fact_of(row.get("anatomic_region")) or "unknown",
            laterality=_laterality(row.get("laterality"), path, where),
            path=path,
            url="",
            sop_instance_uid=uid,
            shape=(frames, height, width) if frames and height and width else None,
            spacing_mm=spacing_of(row.get("spacing_mm"), where),
            d_order=_d_order(row.get("d_order"), where),
            files=row.get("files") or None,
            volume_yaml=fact_of(row.get("volume_yaml")),
            line=line,
        )
        if reason:
            unused.append(record)
        else:
            people[path] = record.person_id
            rows.append(record)
    return rows, unused, skipped


FILTERED = {  # data.* filter -> record field and store column
    "device_filter": "device",
    "protocol_filter": "protocol",
    "laterality_filter": "laterality",
}


def wanted_values(cfg: Config, named: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, set[str]]]:
    """{data.* filter: (record field, wanted values)} of the filters that are set; raises ConfigError. A
    wanted name is one that the cohort has (`named`: field -> names), or a known one of protocols.py.
    """
    volumes = [p for p in PROTOCOLS if p.is_volume]
    usual = {
        "device_filter": set(DEVICES),
        "protocol_filter": {p.name for p in volumes},
        "laterality_filter": {"L", "R"},
    }
    filters = {}
    for key, field in FILTERED.items():
        wanted = getattr(cfg.data, key)
        if wanted is None:
            continue
        if field == "protocol":  # the version 2 spelling means the same protocol
            wanted = [BY_NAME[w].name if w in BY_NAME else w for w in wanted]
        if field == "laterality":
            wanted = [SIDES.get(w.lower(), w) for w in wanted]
        present = set(named[field]) - {"unknown"} if field != "laterality" else set()
        names = [*sorted(present), *sorted(usual[key] - present)]
        unknown = [w for w in wanted if w not in names]
        if unknown or not wanted:
            raise ConfigError(
                f"data.{key}: expected some of {', '.join(names)}; or null for all, "
                f"found {', '.join(map(repr, unknown)) or 'an empty list'}"
            )
        filters[key] = (field, set(wanted))
    return filters


def select_wanted(cfg: Config, index: pd.DataFrame) -> pd.DataFrame:
    """The kept rows of a store's index that pass the data.* filters; raises ConfigError."""
    named = {field: {str(name) for name in index[field].dropna()} for field in FILTERED.values()}
    for field, values in wanted_values(cfg, named).values():
        index = index[index[field].isin(values)]
    return _good_enough(cfg, index)


def _good_enough(cfg: Config, index: pd.DataFrame) -> pd.DataFrame:
    """The rows of data.min_quality or better, and how many are not; raises ConfigError for rows without."""
    least = cfg.data.min_quality
    if least is None:
        return index
    if unmeasured := int(index["quality"].isna().sum()):
        raise ConfigError(
            f"data.min_quality: expected volumes whose quality was measured, found {unmeasured} of "
            f"{len(index)} without: an older version prepared them; use another data.store, or null"
        )
    kept = index[index["quality"] >= least]
    log.info("data.min_quality %g: %d of %d volumes are left out", least, len(index) - len(kept), len(index))
    return kept


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


def _d_order(value: str | None, where: str) -> str | None:
    text = fact_of(value)
    if text is not None and text not in D_ORDERS:
        raise UserError(f"{where}: d_order: expected {' | '.join(D_ORDERS)} or nothing, found {value!r}")
    return text


def _laterality(value: str | None, path: str, where: str) -> str:
    """L | R | unknown by the manifest's word, else by the file's name; raises UserError for another word."""
    word = (value or "").strip().lower()
    if word in SIDES:
        return SIDES[word]
    if word not in _NO_SIDE:
        raise UserError(
            f"{where}: laterality: expected L, R, OS, OD, left, right or nothing, found {value!r}"
        )
    side = next((s for s in ("_l_", "_r_") if s in path.rpartition("/")[2]), None)
    return side.strip("_").upper() if side else "unknown"
