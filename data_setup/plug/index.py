"""Write the tables and label files of a data set, so that prepare and training are the next two commands.

In: a plug, its scans, an output folder. Out there: manifest.tsv (one row a volume), participants.tsv (one row
a person, or an eye), labels.tsv (what is of a volume alone), labels/*.npz, label_classes.yaml. Volumes are
looked at by their headers; label arrays are read whole, one scan at a time.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import yaml

from data_setup.manifest import unknown_record
from data_setup.plug.facts import Labels, Plug, Scan, Shape, Tree, Triple
from data_setup.readers.dicom import OCTHeader
from data_setup.readers.faults import OCTReadError
from data_setup.readers.open_record import peek_record
from data_setup.tables.splits import stratified_choice
from data_setup.tables.text import label_of, table_text
from utils.config.schema import StorageOptions
from utils.errors import UserError
from utils.storage import exists, join, read_text, write_bytes, write_text
from utils.workers import in_threads

MANIFEST_COLUMNS = (
    "person_id",
    "filepath",
    "device",
    "protocol",
    "anatomic_region",
    "laterality",
    "number_of_frames",
    "height",
    "width",
    "spacing_mm",
    "d_order",
    "files",
    "volume_yaml",
    "label_volume",
    "label_surfaces",
)
LABELS, CLASSES = "labels", "label_classes.yaml"
FEW_PEOPLE = 50  # a set of fewer without splits of its owners gets some
SHARE, LEAST_PEOPLE = 0.2, 2  # of the people: who validates, and who is tested
_STAND_IN = (0.1, 0.003, 0.01)  # mm, to get past a missing spacing to the shape; written nowhere


@dataclass(frozen=True)
class Looked:
    """A scan with what its header says, or why it cannot be opened."""

    scan: Scan
    shape: Shape | None = None
    spacing_mm: Triple | None = None  # the plug's, where neither file nor YAML has one
    fault: str = ""


@dataclass
class Written:
    """What became of the labels."""

    urls: list[str] = field(default_factory=list)
    with_classes: int = 0  # volumes
    with_surfaces: int = 0
    faults: list[str] = field(default_factory=list)


def look(tree: Tree, scan: Scan) -> Looked:
    """The header of a scan; a fault of its file is kept as text. Raises StorageError."""
    record = replace(
        unknown_record(tree.url(scan.path), scan.path),
        device=scan.device,
        protocol=scan.protocol,
        laterality=scan.laterality or "unknown",
        spacing_mm=_STAND_IN if scan.spacing else None,
        files=scan.files or None,
        volume_yaml=_yaml(scan) or None,
    )
    try:
        header: OCTHeader = peek_record(record, tree.sizes.get(scan.path, 0), tree.options)
    except OCTReadError as error:
        return Looked(scan, fault=f"{scan.path}: {error.reason}: {error.detail}")
    is_own = header.spacing_source != "manifest"
    spacing = None if is_own or scan.spacing is None else scan.spacing(header.shape)
    return Looked(scan, header.shape, spacing)


def look_all(tree: Tree, scans: Sequence[Scan]) -> list[Looked]:
    """`look` of every scan, in order."""
    return in_threads(lambda scan: look(tree, scan), scans)


def read_labels(tree: Tree, looked: Looked) -> tuple[Labels, str]:
    """(labels, ""), or (none, why they cannot be used); raises StorageError, UserError."""
    if looked.scan.labels is None or looked.shape is None:
        return Labels(), ""
    try:
        return looked.scan.labels(looked.shape), ""
    except OCTReadError as error:
        return Labels(), f"{error.url.removeprefix(tree.root).lstrip('/')}: {error.reason}: {error.detail}"


def write_index(plug: Plug, tree: Tree, every: Sequence[Looked], out: str) -> Written:
    """Write all tables and labels; raises UserError where another manifest is there, StorageError."""
    written, options = Written(), tree.options
    rows: list[dict[str, str]] = []
    facts: list[Mapping[str, str]] = []
    labels: dict[str, bytes] = {}
    for looked in every:
        found_labels, fault = read_labels(tree, looked)
        written.faults += [fault] if fault else []
        name = f"./{LABELS}/{looked.scan.path.replace('/', '__')}.npz"
        data = _npz(plug, found_labels)
        if data:
            labels[name] = data
        has_classes, has_surfaces = found_labels.classes is not None, found_labels.surfaces is not None
        written.with_classes += has_classes
        written.with_surfaces += has_surfaces
        facts.append({**looked.scan.facts, **found_labels.facts})
        cells = {"label_volume": name * has_classes, "label_surfaces": name * has_surfaces}
        rows.append(_row(looked) | cells)
    tables = {
        "manifest.tsv": table_text(MANIFEST_COLUMNS, rows),
        "participants.tsv": people_table([looked.scan for looked in every], facts),
    }
    if any(looked.scan.visit for looked in every):
        tables["labels.tsv"] = visit_table([looked.scan for looked in every])
    if written.with_classes:
        tables[CLASSES] = yaml.safe_dump(dict(plug.classes_of_voxels(tree)), sort_keys=True)
    for name, text in tables.items():
        _refuse_another(join(out, name), text, options)
    for name, data in labels.items():
        write_bytes(join(out, name), data, options)
    for name, text in tables.items():
        write_text(join(out, name), text, options)
        written.urls.append(join(out, name))
    return written


def people_table(scans: Sequence[Scan], facts: Sequence[Mapping[str, str]]) -> str:
    """participants.tsv: a row for each eye where a person's eyes are known, else for each person.

    A set of few people without splits of its owners gets some (`dealt_splits`).

    Raises UserError where two volumes say different things of one eye, or one person is in two splits.
    """
    rows: dict[tuple[str, str], dict[str, str]] = {}
    splits: dict[str, str] = {}
    for scan, known in zip(scans, facts, strict=True):
        cells = {k: v for k, v in known.items() if label_of(v)}
        row = rows.setdefault((scan.person_id, scan.laterality), {})
        differing = next((k for k, v in cells.items() if row.setdefault(k, v) != v), None)
        if differing:
            raise UserError(
                f"{scan.path}: {differing} of {scan.person_id} {scan.laterality}: expected "
                f"{row[differing]!r} as in another volume, found {cells[differing]!r}"
            )
        if splits.setdefault(scan.person_id, scan.split) != scan.split:
            raise UserError(
                f"{scan.path}: expected {scan.person_id} in one split, found {splits[scan.person_id]!r} and "
                f"{scan.split!r}"
            )
    if needs_splits(splits):
        splits = dealt_splits({person: _labels_of(row) for (person, _), row in rows.items()})
    names = sorted({name for row in rows.values() for name in row})
    has_eyes = any(side for _, side in rows)
    has_splits = any(splits.values())
    columns = ["person_id", *["laterality"] * has_eyes, *["recommended_split"] * has_splits, *names]
    lines = [
        {"person_id": person, "laterality": side, "recommended_split": splits[person], **row}
        for (person, side), row in sorted(rows.items())
    ]
    return table_text(columns, lines)


def _labels_of(row: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, value) for name, value in row.items() if name != "age"))


def needs_splits(splits: Mapping[str, str]) -> bool:
    """Whether a set of these people, with the splits of its owners, gets some here."""
    return not any(splits.values()) and 3 * LEAST_PEOPLE <= len(splits) < FEW_PEOPLE


def dealt_splits(group_of: Mapping[str, Hashable]) -> dict[str, str]:
    """person -> train | val | test for a set without splits: a fifth each validates and tests, at least two.

    By labels, then by a hash of the ids. By the hash alone a set of ten may have one person to validate on,
    with which no head is trained.
    """
    count = max(LEAST_PEOPLE, round(SHARE * len(group_of)))  # of each side
    test = stratified_choice(group_of, count, 0, "plug test")
    rest = {person: group for person, group in group_of.items() if person not in test}
    val = stratified_choice(rest, count, 0, "plug val")
    return {p: "test" if p in test else "val" if p in val else "train" for p in group_of}


def visit_table(scans: Sequence[Scan]) -> str:
    """labels.tsv: what is known of one volume alone, for task.labels_path with task.unit=volume."""
    names = sorted({name for scan in scans for name in scan.visit})
    columns = ["path", "person_id", "laterality", *names]
    rows = [
        {"path": s.path, "person_id": s.person_id, "laterality": s.laterality, **s.visit}
        for s in scans
        if s.visit
    ]
    return table_text(columns, rows)


def count_classes(every: Sequence[Looked]) -> Counter[str]:
    """Volumes by study_group."""
    return Counter(looked.scan.facts.get("study_group", "") or "no class" for looked in every)


def _row(looked: Looked) -> dict[str, str]:
    scan = looked.scan
    frames, height, width = looked.shape or ("", "", "")
    return {
        "person_id": scan.person_id,
        "filepath": scan.path,
        "device": scan.device,
        "protocol": scan.protocol,
        "anatomic_region": scan.region,
        "laterality": scan.laterality,
        "number_of_frames": str(frames),
        "height": str(height),
        "width": str(width),
        "spacing_mm": ", ".join(f"{length:.7g}" for length in looked.spacing_mm or ()),
        "d_order": scan.d_order,
        "files": scan.files,
        "volume_yaml": _yaml(scan),
    }


def _yaml(scan: Scan) -> str:
    """The keys in one line, as a cell."""
    if not scan.yaml:
        return ""
    return yaml.safe_dump(dict(scan.yaml), default_flow_style=True, width=10**6).strip()


def _npz(plug: Plug, labels: Labels) -> bytes:
    """The label file of a volume; empty without labels."""
    arrays: dict[str, np.ndarray] = {}
    if labels.classes is not None:
        arrays["labels"] = np.ascontiguousarray(labels.classes, np.uint8)
    if labels.surfaces is not None:
        arrays["surfaces"] = np.ascontiguousarray(labels.surfaces, np.float32)
        arrays["names"] = np.array(plug.surfaces)
    if not arrays:
        return b""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def _refuse_another(url: str, text: str, options: StorageOptions) -> None:
    if exists(url, options) and read_text(url, options) != text:
        raise UserError(
            f"{url}: expected no table, or the one that this command writes, found another: give --out DIR, "
            "or move it away"
        )
