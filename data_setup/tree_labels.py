"""Labels that come with a tree into the store: `python -m data_setup.prepare --labels`.

In: a finalised store, and a manifest with the columns label_volume (classes of voxels) or label_surfaces
(rows of the image), each a place below the root; label_classes.yaml beside the manifest names the classes.
Out: both on the volumes' own grid (data_setup/store/labels.py, heights.py), labels_report.json, and a table
that counts every mismatch by reason.

A voxel of the grid has the class of the scan's voxel under its centre. Surfaces go through the weights that
made the volume (data_setup/height_maps.py). B-scans run as in the scan's file, and are sorted as its reader
sorts them; those of a NIfTI lie side by side, and where its own header gives their direction, and the scan's
is known, it counts.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import yaml

from data_setup.height_maps import SHARE_INSIDE, lay_on_grid
from data_setup.manifest import unknown_record
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.heights import MAX_SURFACES
from data_setup.readers.labels import (
    LabelVolume,
    label_stat,
    read_label_surfaces,
    read_label_volume,
)
from data_setup.readers.open_record import labelled_header
from data_setup.resample import axis_weights
from data_setup.side_jobs import run_all
from data_setup.store.format import KEPT
from data_setup.store.heights import OF_LABELS, HeightWriter
from data_setup.store.labels import Classes, LabelWriter, counts_text, parse_counts
from data_setup.store.reader import PreparedStore
from data_setup.tables.text import clean_path, fact_of, read_table
from utils import storage
from utils.config.schema import Config
from utils.errors import EXIT_TRY_AGAIN, UserError

VOLUME, SURFACES = "label_volume", "label_surfaces"  # columns of the manifest
CLASSES_FILE = "label_classes.yaml"
MAX_CLASS = 255


@dataclass(frozen=True)
class LabelJob:
    """The labels of one row to lay on its volume."""

    column: str  # VOLUME or SURFACES
    row: int
    path: str  # relative to the source root, or with ./ to the manifest's folder
    url: str
    store: PreparedStore
    classes: Classes
    volume_yaml: str | None = None  # the scan's cell of the manifest

    @property
    def scan(self) -> tuple[str, str]:
        """URL and path of the scan."""
        path = str(self.store.index.path[self.row])
        return storage.join(self.store.attrs["source_root"], path), path

    def stat(self) -> storage.ObjectStat:
        """Size and version of what the labels are read from; raises StorageError, OCTReadError."""
        record = self.store.index.loc[self.row]
        facts = f"{self.volume_yaml}\t{record.orientation_source == 'unknown'}"
        return label_stat(self.url, self.path, self.scan, self.store.options, facts)

    def in_frame_order(self, values: np.ndarray, axis: int) -> np.ndarray:
        """Labels along B-scans in the order of the scan's file, sorted as its reader sorts the frames.

        Raises OCTReadError, StorageError.
        """
        stored = self.store.index.loc[self.row]  # as prepared: a manifest may name what the header does not
        scan = replace(
            unknown_record(*self.scan),
            device=str(stored.device),
            protocol=str(stored.protocol),
            volume_yaml=self.volume_yaml,
        )
        header = labelled_header(scan, self.store.options)
        return values if header is None else header.from_file_order(values, axis)

    @property
    def writer(self) -> LabelWriter | HeightWriter:
        kind = LabelWriter if self.column == VOLUME else HeightWriter
        return kind(self.store.url, self.store.options)


def read_classes(manifest_url: str, options: Any) -> dict[int, str]:
    """value -> name of label_classes.yaml beside the manifest; raises UserError."""
    url = storage.join(manifest_url.rpartition("/")[0], CLASSES_FILE)
    try:
        text = storage.read_text(url, options)
    except storage.StorageNotFoundError as error:
        raise UserError(
            f"{url}: expected the names of the classes beside a manifest with {VOLUME}, found no file; "
            "write lines such as `1: irf`"
        ) from error
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{url}: expected lines such as `1: irf`, found no YAML") from error
    pairs = content.items() if isinstance(content, dict) else ()
    is_right = all(
        isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_CLASS
        and isinstance(name, str) and name.strip()
        for value, name in pairs
    )  # fmt: skip
    names = [str(name).strip() for _, name in pairs]
    if not pairs or not is_right or len(set(names)) != len(names):
        expected = f"a different name for each value from 1 to {MAX_CLASS} (0 is the background)"
        raise UserError(f"{url}: expected {expected}, found {str(content)[:200]}")
    return {int(value): str(name).strip() for value, name in sorted(pairs)}


def read_jobs(cfg: Config, store: PreparedStore) -> tuple[list[LabelJob], Counter[str], list[str]]:
    """(the labels of the manifest with their rows, how many of its lines have none by reason, its columns of
    labels without a single place). Raises UserError.
    """
    url, options = cfg.data.manifest_path, cfg.data.storage_options
    table, columns, _ = read_table(url, options, ("filepath",))
    present = [column for column in (VOLUME, SURFACES) if column in columns]
    if not present:
        raise UserError(
            f"{url}: expected a column {VOLUME} or {SURFACES}, found {', '.join(columns)} "
            "(docs/guides/segmentation.md)"
        )
    has_volumes = VOLUME in present and any(clean_path(line[VOLUME]) for line in table.values())
    classes = read_classes(url, options) if has_volumes else {}
    listed = store.index[store.index["listed"]]
    by_path = dict(zip(listed.path, listed.row, strict=True))
    kept = set(store.kept.tolist())
    jobs: dict[tuple[int, str], LabelJob] = {}
    reasons: Counter[str] = Counter()
    seen: set[int] = set()  # rows with labels
    for line in table.values():
        row = by_path.get(clean_path(line["filepath"]))
        places = {column: path for column in present if (path := clean_path(line[column])) is not None}
        if not places:
            reasons["no_labels"] += 1
        elif row is None:
            reasons["scan_not_in_store"] += 1
        elif row not in kept:
            reasons["scan_rejected"] += 1
        elif row in seen:
            reasons["second_labels"] += 1
        else:
            seen.add(row)
            for column, path in places.items():
                beside = path.startswith("./")  # below the manifest's folder: the root may be read-only
                top = url.rpartition("/")[0] if beside else store.attrs["source_root"]
                place = storage.join(top, path.removeprefix("./"))
                jobs[row, column] = LabelJob(
                    column, int(row), path, place, store, classes, fact_of(line.get("volume_yaml"))
                )
    named = {column for column in present for line in table.values() if clean_path(line[column])}
    return [jobs[key] for key in sorted(jobs)], reasons, [c for c in present if c not in named]


def nearest_voxels(
    values_DHW: np.ndarray, record: pd.Series, geometry: Mapping[str, Any]
) -> tuple[np.ndarray, float]:
    """Classes of the acquired scan in the store's order -> (classes of its stored volume uint8 [D, H, W], the
    share of labelled voxels outside the grid). 0 outside the acquired field.
    """
    result = np.zeros(geometry["image_size"], np.uint8)
    sources, targets, covered = [], [], []
    for axis, count, size in zip("dhw", values_DHW.shape, result.shape, strict=True):
        spacing, target = float(record[f"spacing_before_{axis}"]), float(record[f"spacing_after_{axis}"])
        start, stop = axis_weights(count, spacing, size, target).valid
        centre = (np.arange(start, stop) + 0.5 - size / 2) * target / spacing + count / 2  # in voxels
        sources.append(np.clip(np.floor(centre).astype(int), 0, count - 1))
        targets.append(slice(start, stop))
        own = np.abs((np.arange(count) + 0.5 - count / 2) * spacing)
        covered.append(own <= size * target / 2)
    result[tuple(targets)] = values_DHW[np.ix_(*sources)]
    total = np.count_nonzero(values_DHW)
    inside = np.count_nonzero(values_DHW[np.ix_(*covered)])
    return result, 1 - inside / total if total else 0.0


def lay_volume(job: LabelJob) -> tuple[np.ndarray, dict[str, Any]]:
    """The classes on the grid, and what was counted; raises OCTReadError, StorageError."""
    store, record = job.store, job.store.index.loc[job.row]
    shape = _scan_shape(record)
    read = read_label_volume(job.url, job.path, shape, job.scan, store.options, job.volume_yaml)
    unlisted = sorted(set(np.unique(read.values).tolist()) - {0, *job.classes})
    if unlisted:
        expected = f"0 or a value of {CLASSES_FILE} ({', '.join(map(str, sorted(job.classes)))})"
        raise OCTReadError(job.url, RejectReason.UNLISTED_CLASS, expected, ", ".join(map(str, unlisted[:5])))
    values = job.in_frame_order(read.values, 0) if read.is_in_file_order else read.values
    values = values[::-1] if _is_upwards(read, record) else values
    labels, cut_share = nearest_voxels(values, record, store.attrs["geometry"])
    return labels, {"voxels": counts_text(labels, job.classes), "cut_share": cut_share}


def _scan_shape(record: pd.Series) -> tuple[int, int, int]:
    d, h, w = (int(record[f"shape_before_{axis}"]) for axis in "dhw")
    return d, h, w


def _is_upwards(read: LabelVolume, record: pd.Series) -> bool:
    """Whether the labels' B-scans run from inferior to superior."""
    is_known = read.flip_d is not None and record.orientation_source != "unknown"
    return bool(read.flip_d if is_known else record.flipped_d)


def lay_surfaces(job: LabelJob) -> tuple[np.ndarray, dict[str, Any]]:
    """The surfaces in voxels of the grid, and what was measured; raises OCTReadError, StorageError."""
    record = job.store.index.loc[job.row]
    shape = _scan_shape(record)
    values, names = read_label_surfaces(job.url, shape, job.store.options, record.sop_instance_uid)
    if len(names) > MAX_SURFACES:
        raise OCTReadError(job.url, RejectReason.SURFACE_COUNT, f"up to {MAX_SURFACES} surfaces", len(names))
    known = values[~np.isnan(values)]
    share = float(np.mean((known > -1) & (known < shape[1])))
    if share < SHARE_INSIDE:
        actual = f"{1 - share:.0%} of the heights outside"
        raise OCTReadError(job.url, RejectReason.OUTSIDE_VOLUME, f"rows below {shape[1]}", actual)
    values = job.in_frame_order(values, 1)
    values = values[:, ::-1] if record.flipped_d else values
    heights = lay_on_grid(values, record, job.store.attrs["geometry"])
    d0, d1, w0, w1 = (int(record[f"valid_{edge}"]) for edge in ("d0", "d1", "w0", "w1"))
    complete = ~np.isnan(heights[:, d0:d1, w0:w1]).any(axis=0)
    return heights, {
        "device": record.device,
        "protocol": record.protocol,
        "surfaces": "|".join(names),
        "notes": "",
        "map_d": shape[0],
        "map_w": shape[2],
        "valid_share": float(complete.mean()),
    }


LAY: Mapping[str, Callable[[LabelJob], tuple[np.ndarray, dict[str, Any]]]] = {
    VOLUME: lay_volume,
    SURFACES: lay_surfaces,
}


def prepare_one(job: LabelJob) -> tuple[str, str]:
    """Write one row's labels, or the reason why there are none; (column, status). Raises StorageError."""
    record = job.store.index.loc[job.row]
    fields: dict[str, Any] = {"path": job.path, "volume": record.checksum, "message": None}
    array = None
    try:
        source = job.stat()
        fields |= {"source_size": source.size, "source_version": source.etag_or_mtime}
        array, measured = LAY[job.column](job)
        fields |= measured | {"status": KEPT}
    except storage.StorageNotFoundError as error:
        fields |= {"status": RejectReason.MISSING_FILE.value, "message": error.problem}
    except OCTReadError as error:
        fields |= {"status": error.reason.value, "message": error.detail}
    job.writer.write_row(job.row, array, fields)
    return job.column, fields["status"]


def prepare_labels(cfg: Config, workers: int) -> int:
    """Lay the labels of every line on its volume; returns the exit code. Raises UserError.

    A row whose labels and volume are as they were is not done again.
    """
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    jobs, reasons, without = read_jobs(cfg, store)
    emptied = _empty(store, without)
    if not jobs:
        if emptied:
            print("\n".join(emptied))
        counts = ", ".join(f"{name} {n}" for name, n in sorted(reasons.items())) or "an empty table"
        raise UserError(
            f"{cfg.data.manifest_path}: expected labels of a volume in {store.url}, found none ({counts})"
        )
    of_column = {column: [j for j in jobs if j.column == column] for column in (VOLUME, SURFACES)}
    if of_column[VOLUME]:
        writer = LabelWriter(store.url, store.options)
        writer.create(len(store.index), store.image_size, of_column[VOLUME][0].classes)
    if of_column[SURFACES]:
        HeightWriter(store.url, store.options).create(len(store.index), store.image_size, OF_LABELS)
    away = _run([j for part in of_column.values() for j in _not_done(part)], workers)
    report: dict[str, Any] = {"unread": len(away), "without_labels": dict(sorted(reasons.items()))}
    for column, part in of_column.items():
        if part:
            index = part[0].writer.finalise([j.row for j in part])
            report[column] = summarise(index, part[0].classes)
    url = storage.join(store.url, "labels_report.json")
    storage.write_text(url, json.dumps(report, indent=1) + "\n", store.options)
    print("\n".join([table(report), *emptied]))
    if away:
        print(f"error: {len(away)} labels could not be read, run again; first: {away[0]}", file=sys.stderr)
        return EXIT_TRY_AGAIN
    return 0


def _empty(store: PreparedStore, columns: list[str]) -> list[str]:
    """Empty the store's tables of these kinds of labels, which no line names any more; what was, in words.

    The arrays stay, so that labels that come back are not read again. So do height maps of a device.
    """
    writers: list[LabelWriter | HeightWriter] = []
    if VOLUME in columns:
        writers.append(LabelWriter(store.url, store.options))
    if SURFACES in columns:
        heights = HeightWriter(store.url, store.options)
        writers += [heights] if heights.is_there() and heights.source == OF_LABELS else []
    lines = []
    for writer in writers:
        if writer.is_there() and writer.read_rows():
            writer.finalise([])
            lines.append(f"{writer.NAME}.parquet of the store: emptied, no line of the manifest names any")
    return lines


def _run(jobs: list[LabelJob], workers: int) -> list[str]:
    """Do the jobs; returns the errors of storage that did not answer."""
    away = run_all(prepare_one, jobs, workers, "labels", "volumes")
    return away


def _not_done(jobs: list[LabelJob]) -> list[LabelJob]:
    """The jobs whose row has no labels of this volume from this file yet."""
    if not jobs:
        return []
    written = jobs[0].writer.read_rows()
    return [job for job in jobs if not _is_done(job, written.get(job.row))]


def _is_done(job: LabelJob, written: Mapping[str, Any] | None) -> bool:
    if written is None or written["status"] != KEPT or written["path"] != job.path:
        return False
    if written["volume"] != job.store.index.checksum[job.row]:
        return False
    try:
        source = job.stat()
    except (storage.StorageError, OCTReadError):
        return False  # prepare_one meets the same error and counts it
    return (written["source_size"], written["source_version"]) == (source.size, source.etag_or_mtime)


def summarise(index: pd.DataFrame, classes: Classes) -> dict[str, Any]:
    """What became of the lines of one column: kept, mismatches by reason, and what the labels hold."""
    kept = index[index.status == KEPT]
    result: dict[str, Any] = {
        "kept": len(kept),
        "mismatches": dict(sorted(Counter(index.status[index.status != KEPT].tolist()).items())),
    }
    if "surfaces" in index:
        return result | {"surfaces": sorted(set(kept.surfaces))}
    counts = [parse_counts(text) for text in kept.voxels]
    result["classes"] = {
        name: {
            "volumes": sum(count[value] > 0 for count in counts),
            "voxels": sum(count[value] for count in counts),
        }
        for value, name in classes.items()
    }
    return result | {"cut_share": round(float(kept.cut_share.mean()), 4) if len(kept) else None}


def table(report: Mapping[str, Any]) -> str:
    """The report as a few lines of text."""
    lines = []
    for column in (VOLUME, SURFACES):
        part = report.get(column)
        if part is None:
            continue
        reasons = ", ".join(f"{name} {n}" for name, n in part["mismatches"].items()) or "none"
        lines.append(f"{column}: {part['kept']} volumes; not used: {reasons}")
        if column == SURFACES:
            lines += [f"  {text.replace('|', ' ')}" for text in part["surfaces"]]
            continue
        lines.append(f"  {'class':20s} {'volumes':>8s} {'voxels':>12s}")
        for name, count in part["classes"].items():
            lines.append(f"  {name:20s} {count['volumes']:8d} {count['voxels']:12d}")
        if part["cut_share"]:
            lines.append(f"  {part['cut_share']:.1%} of a volume's labelled voxels lie outside the grid")
    words = ", ".join(f"{name} {n}" for name, n in report["without_labels"].items()) or "none"
    lines.append(f"lines without labels: {words}")
    return "\n".join(lines)
