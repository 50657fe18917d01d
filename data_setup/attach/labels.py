"""Labels that come with a tree into the store: `python -m data_setup.prepare --labels`.

In: a finalised store, and a manifest with the columns label_volume (classes of voxels) or label_surfaces
(rows of the image), each a place below the root; label_classes.yaml beside the manifest names the classes.
Out: both on the volumes' own grid (stored.py), labels_report.json, and a table that counts every mismatch by
reason.

A voxel of the grid has the class of the scan's voxel under its centre. Surfaces go through the weights that
made the volume (heights.py). B-scans run as in the scan's file, and are sorted as its reader sorts them;
those of a NIfTI lie side by side, and where its own header gives their direction, and the scan's is known, it
counts.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import yaml

from data_setup.attach.grid import lay_on_grid, nearest_voxels
from data_setup.attach.heights import facts_of, require_inside
from data_setup.attach.jobs import Job, finish, match_lines, mismatches, require_jobs, run
from data_setup.attach.stored import HEIGHTS, LABELS, OF_LABELS, SideWriter, counts_text, parse_counts
from data_setup.manifest import unknown_record
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.heights import MAX_SURFACES
from data_setup.readers.labels import label_stat, read_label_surfaces, read_label_volume
from data_setup.readers.open_record import labelled_header
from data_setup.store.format import KEPT
from data_setup.store.reader import PreparedStore
from data_setup.store.summary import words
from data_setup.tables.text import clean_path, fact_of, read_table
from utils import storage
from utils.config.schema import Config
from utils.config.written import plain_yaml
from utils.errors import UserError, shown
from utils.tables import Table, terminal

VOLUME, SURFACES = "label_volume", "label_surfaces"  # columns of the manifest
SECOND = "label_surfaces_2"  # of another grader, who is measured as a head is and trains none
CLASSES_FILE = "label_classes.yaml"
MAX_CLASS = 255


@dataclass(frozen=True, kw_only=True)
class LabelJob(Job):
    """The labels of one row to lay on its volume; `path` begins with ./ below the manifest's folder."""

    COLUMN: ClassVar[str]  # of the manifest
    FACTS = ()

    classes: Mapping[int, str]  # value -> name, without the background
    volume_yaml: str | None  # the scan's cell of the manifest

    @property
    def scan(self) -> tuple[str, str]:
        """URL and path of the scan."""
        path = str(self.store.index.path[self.row])
        return storage.join(self.store.attrs["source_root"], path), path

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the scan."""
        d, h, w = (int(self.record[f"shape_before_{axis}"]) for axis in "dhw")
        return d, h, w

    def source(self) -> dict[str, Any]:
        """Size and version of what the labels are read from; raises StorageError, OCTReadError."""
        facts = f"{self.volume_yaml}\t{self.record.orientation_source == 'unknown'}"
        source = label_stat(self.url, self.path, self.scan, self.store.options, facts)
        return {"source_size": source.size, "source_version": source.etag_or_mtime}

    def in_frame_order(self, values: np.ndarray, axis: int) -> np.ndarray:
        """Labels along B-scans in file order, as the reader sorts them. Raises OCTReadError, StorageError."""
        stored = self.record  # as prepared: a manifest may name what the header does not
        scan = replace(
            unknown_record(*self.scan),
            device=str(stored.device),
            protocol=str(stored.protocol),
            volume_yaml=self.volume_yaml,
        )
        header = labelled_header(scan, self.store.options)
        return values if header is None else header.from_file_order(values, axis)


@dataclass(frozen=True, kw_only=True)
class VolumeJob(LabelJob):
    """A class for every voxel."""

    KIND, COLUMN = LABELS, VOLUME

    def lay(self) -> tuple[list[np.ndarray], dict[str, Any]]:
        """The classes on the grid, and what was counted; raises OCTReadError, StorageError."""
        values, _ = self.of_scan({})
        labels, cut_share = nearest_voxels(values, self.record, self.store.attrs["geometry"])
        return [labels], {"voxels": counts_text(labels, self.classes), "cut_share": cut_share}

    def of_scan(self, laid: Mapping[str, Any]) -> tuple[np.ndarray, tuple[str, ...]]:
        record, options = self.record, self.store.options
        read = read_label_volume(self.url, self.path, self.shape, self.scan, options, self.volume_yaml)
        unlisted = sorted(set(np.unique(read.values).tolist()) - {0, *self.classes})
        if unlisted:
            expected = f"0 or a value of {CLASSES_FILE} ({', '.join(map(str, sorted(self.classes)))})"
            actual = ", ".join(map(str, unlisted[:5]))
            raise OCTReadError(self.url, RejectReason.UNLISTED_CLASS, expected, actual)
        values = self.in_frame_order(read.values, 0) if read.is_in_file_order else read.values
        is_known = read.flip_d is not None and record.orientation_source != "unknown"
        is_upwards = read.flip_d if is_known else record.flipped_d  # from inferior to superior
        return values[::-1] if is_upwards else values, ()


@dataclass(frozen=True, kw_only=True)
class SurfaceJob(LabelJob):
    """Surfaces as rows of the image."""

    KIND, COLUMN = HEIGHTS, SURFACES

    def lay(self) -> tuple[list[np.ndarray], dict[str, Any]]:
        """The surfaces in voxels of the grid, and what was measured; raises OCTReadError, StorageError."""
        record, (values, names) = self.record, self.of_scan({})
        heights = lay_on_grid(values, record, self.store.attrs["geometry"])
        facts = facts_of(heights, names, values.shape, record)
        return [heights], {"device": record.device, "protocol": record.protocol, **facts}

    def of_scan(self, laid: Mapping[str, Any]) -> tuple[np.ndarray, tuple[str, ...]]:
        record = self.record
        uid, options = record.sop_instance_uid, self.store.options
        values, names = read_label_surfaces(self.url, self.shape, options, uid)
        if len(names) > MAX_SURFACES:
            expected = f"up to {MAX_SURFACES} surfaces"
            raise OCTReadError(self.url, RejectReason.SURFACE_COUNT, expected, len(names))
        require_inside(values, record, self.url)
        values = self.in_frame_order(values, 1)
        return values[:, ::-1] if record.flipped_d else values, tuple(names)


@dataclass(frozen=True, kw_only=True)
class SecondJob(SurfaceJob):
    """Surfaces of another grader."""

    COLUMN = SECOND


JOBS: tuple[type[LabelJob], ...] = (VolumeJob, SurfaceJob)


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
        content = plain_yaml(text)
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
        raise UserError(f"{url}: expected lines such as `1: irf`, found no plain YAML ({why})") from error
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
    lines, columns, _ = read_table(url, options, ("filepath",))
    present = [column for column in (VOLUME, SURFACES) if column in columns]
    if not present:
        raise UserError(
            f"{url}: expected a column {VOLUME} or {SURFACES}, found {', '.join(columns)} "
            "(docs/guides/layers.md)"
        )
    named = {column for column in present for line in lines.values() if clean_path(line[column])}
    classes = read_classes(url, options) if VOLUME in named else {}
    reasons = ("no_labels", "second_labels")
    of_row, counts = match_lines(store, lines, present, (None, "filepath"), reasons)
    jobs: list[LabelJob] = []
    for row, line in of_row.items():
        cell = fact_of(line.get("volume_yaml"))
        paths = {job: path for job in JOBS if (path := clean_path(line.get(job.COLUMN))) is not None}
        for job, path in paths.items():
            place = _place(path, url, store)
            jobs.append(job(row=row, path=path, url=place, store=store, classes=classes, volume_yaml=cell))
    return jobs, counts, [column for column in present if column not in named]


def _place(path: str, manifest_url: str, store: PreparedStore) -> str:
    """Where a cell of the manifest lies; ./ is the manifest's folder, since the root may be read-only."""
    top = manifest_url.rpartition("/")[0] if path.startswith("./") else store.attrs["source_root"]
    return storage.join(top, path.removeprefix("./"))


def second_graders(cfg: Config, store: PreparedStore) -> dict[int, SurfaceJob]:
    """Row -> the surfaces of another grader that the manifest names; raises UserError, StorageError."""
    url = cfg.data.manifest_path
    lines, columns, _ = read_table(url, cfg.data.storage_options, ("filepath",))
    if SECOND not in columns:
        return {}
    of_row, _ = match_lines(store, lines, [SECOND], (None, "filepath"), ("no_labels", "second_labels"))
    jobs: dict[int, SurfaceJob] = {}
    for row, line in of_row.items():
        path, cell = str(clean_path(line[SECOND])), fact_of(line.get("volume_yaml"))
        place = _place(path, url, store)
        jobs[row] = SecondJob(row=row, path=path, url=place, store=store, classes={}, volume_yaml=cell)
    return jobs


def prepare_labels(cfg: Config, workers: int) -> int:
    """Lay the labels of every line on its volume; returns the exit code. Raises UserError."""
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    jobs, counts, without = read_jobs(cfg, store)
    emptied = _empty(store, without)
    if not jobs and emptied:
        print("\n".join(emptied))
    require_jobs(jobs, counts, cfg.data.manifest_path, f"labels of a volume in {store.url}")
    parts = {job.COLUMN: part for job in JOBS if (part := [j for j in jobs if isinstance(j, job)])}
    classes = jobs[0].classes
    given: dict[str, dict[str, Any]] = {
        VOLUME: {"classes": {str(value): name for value, name in classes.items()}},
        SURFACES: {"source": OF_LABELS},
    }
    for column, part in parts.items():
        writer = SideWriter(part[0].KIND, store.url, store.options)
        writer.create(len(store.index), store.image_size, **given[column])
    report: dict[str, Any] = {"unread": 0, "without_labels": dict(sorted(counts.items()))}
    away: list[storage.StorageError] = []
    for column, part in parts.items():
        index, lost = run(part, workers, "volumes")
        away += lost
        report[column] = summarise(index, classes)
    report["unread"] = len(away)
    return finish(store, "labels", report, "\n".join([table(report), *emptied]), away, "labels")


def _empty(store: PreparedStore, columns: list[str]) -> list[str]:
    """Empty the tables of labels that no line names any more; what was, in words. Device heights stay."""
    lines: list[str] = []
    for job in JOBS:
        writer = SideWriter(job.KIND, store.url, store.options)
        if job.COLUMN in columns and writer.is_there():
            is_of_labels = writer.attributes().get("source", OF_LABELS) == OF_LABELS
            lines += writer.empty() if is_of_labels else []
    return lines


def summarise(index: pd.DataFrame, classes: Mapping[int, str]) -> dict[str, Any]:
    """What became of the lines of one column: kept, mismatches by reason, and what the labels hold."""
    kept = index[index.status == KEPT]
    result: dict[str, Any] = {"kept": len(kept), "mismatches": mismatches(index, {})}
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
        lines.append(f"{column}: {part['kept']} volumes; not used: {words(part['mismatches'])}")
        if column == SURFACES:
            lines += [f"  {text.replace('|', ' ')}" for text in part["surfaces"]]
            continue
        counts = [[f"  {n}", str(c["volumes"]), str(c["voxels"])] for n, c in part["classes"].items()]
        lines += terminal(Table("", ["  class", "volumes", "voxels"], counts)).splitlines()
        if part["cut_share"]:
            lines.append(f"  {part['cut_share']:.1%} of a volume's labelled voxels lie outside the grid")
    lines.append(f"lines without labels: {words(report['without_labels'])}")
    return "\n".join(map(shown, lines))
