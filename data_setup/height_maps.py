"""Height maps of the data set into the store: `python -m data_setup.prepare --heights`.

In: a finalised store and data.heights_manifest_path, retinal_octa/manifest.tsv of AI-READI, whose columns
associated_structural_oct_* and associated_segmentation_* link a map to a scan. Out: the maps on the volumes'
own grid (data_setup/store/heights.py), heights_report.json and a table that counts every mismatch by reason.

The grid of a map need not be that of its scan: both cover the same field. Heights go through the weights that
made the volume (data_setup/resample.py), over valid heights alone; a place where less than half of the weight
is valid has none. A map's B-scans run as its scan's do, or the other way: the documentation does not say
which for every device, so the brightness step at the first surface decides, and both are in the table. Where
it does not decide, the clear maps of the protocol do (data_setup/directions.py).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from data_setup.directions import to_turn
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.heights import NUM_SURFACES, HeightMap, read_heights
from data_setup.resample import axis_weights
from data_setup.side_jobs import run_all
from data_setup.store.format import KEPT
from data_setup.store.heights import HeightWriter
from data_setup.store.reader import PreparedStore
from data_setup.tables.text import clean_path, fact_of, read_table
from utils import storage
from utils.config.schema import Config
from utils.errors import EXIT_TRY_AGAIN, UserError

STRUCTURAL, SEGMENTATION = "associated_structural_oct", "associated_segmentation"
LEAST_WEIGHT = 0.5  # share of valid heights under a stored A-scan
STEP_MM = 0.045  # rows above and below the first surface that are compared: a few tissue layers
LEAST_STEP = 0.25  # standard deviations; no first surface of a retina is fainter
CLEARER = 1.1  # so much better must the other direction be
UNCLEAR = "direction_unclear"  # both directions fit: that of the protocol's clear maps, else the file's
SHARE_INSIDE = 0.5  # of the heights must be rows of the scan


@dataclass(frozen=True)
class Link:
    """A map and the row that it is about."""

    row: int
    path: str  # relative to the source root
    url: str


@dataclass(frozen=True)
class HeightJob:
    """One map to lay on its volume."""

    link: Link
    store: PreparedStore
    writer: HeightWriter
    unclear_is_reversed: bool = False  # what is taken where the scan does not decide


def read_links(cfg: Config, store: PreparedStore) -> tuple[list[Link], Counter[str]]:
    """The maps of the manifest with their rows, and how many of its lines name none, by reason."""
    url, options = cfg.data.heights_manifest_path, cfg.data.storage_options
    wanted = [
        f"{what}_{part}" for what in (STRUCTURAL, SEGMENTATION) for part in ("sop_instance_uid", "file_path")
    ]
    table, _, _ = read_table(url, options, wanted)
    listed = store.index[store.index["listed"]]
    by_uid = {uid: row for uid, row in zip(listed.sop_instance_uid, listed.row, strict=True) if uid}
    by_path = dict(zip(listed.path, listed.row, strict=True))
    kept = set(store.kept.tolist())
    links: dict[int, Link] = {}
    reasons: Counter[str] = Counter()
    for line in table.values():
        path = clean_path(line[f"{SEGMENTATION}_file_path"])
        rows = {
            by_uid.get(fact_of(line[f"{STRUCTURAL}_sop_instance_uid"])),
            by_path.get(clean_path(line[f"{STRUCTURAL}_file_path"])),
        } - {None}
        row = rows.pop() if len(rows) == 1 else None
        if path is None:
            reasons["no_segmentation"] += 1
        elif rows:
            reasons["links_disagree"] += 1
        elif row is None:
            reasons["scan_not_in_store"] += 1
        elif row not in kept:
            reasons["scan_rejected"] += 1
        elif listed.device[row] not in NUM_SURFACES:
            reasons["unknown_device"] += 1
        elif row in links:
            reasons["second_map"] += 1
        else:
            links[row] = Link(row, path, storage.join(store.attrs["source_root"], path))
    return [links[row] for row in sorted(links)], reasons


def lay_on_grid(values_SDW: np.ndarray, record: pd.Series, geometry: Mapping[str, Any]) -> np.ndarray:
    """Rows of the acquired scan [S, Dm, Wm] -> voxels of its stored volume, float32 [S, D, W].

    The map's B-scans come in the store's order. `record` is the volume's row of the index. NaN outside the
    acquired field.
    """
    size = geometry["image_size"]
    (d, w), (before_h, after_h) = ("d", "w"), (record.spacing_before_h, record.spacing_after_h)
    weights = [
        axis_weights(
            count,
            float(record[f"shape_before_{axis}"] * record[f"spacing_before_{axis}"]) / count,
            size["dhw".index(axis)],
            float(record[f"spacing_after_{axis}"]),
        ).weights
        for axis, count in zip((d, w), values_SDW.shape[1:], strict=True)
    ]
    is_valid = ~np.isnan(values_SDW)
    sums, shares = (
        weights[0] @ part @ weights[1].T
        for part in (np.where(is_valid, values_SDW, 0).astype(np.float64), is_valid.astype(np.float64))
    )
    rows = np.divide(sums, shares, out=np.full(sums.shape, np.nan), where=shares >= LEAST_WEIGHT)
    # both fields are centred on each other; row r has its centre at r + 1/2 spacings
    mm = (rows + 0.5 - record.shape_before_h / 2) * before_h
    return (mm / after_h + size[1] / 2 - 0.5).astype(np.float32)


def lay_on_scan(values_SDW: np.ndarray, record: Mapping[str, Any], geometry: Mapping[str, Any]) -> np.ndarray:
    """Voxels of a stored volume [S, D, W] -> rows of its acquired scan, float32 [S, B-scans, A-scans].

    The way back of lay_on_grid, with the scan's B-scans in the order of its file. `record` holds the volume's
    columns of the index. NaN where no A-scan of the grid lies.
    """
    size = geometry["image_size"]
    weights = [
        axis_weights(
            size["dhw".index(axis)],
            float(record[f"spacing_after_{axis}"]),
            int(record[f"shape_before_{axis}"]),
            float(record[f"spacing_before_{axis}"]),
        ).weights
        for axis in "dw"
    ]
    is_valid = ~np.isnan(values_SDW)
    sums, shares = (
        weights[0] @ part @ weights[1].T
        for part in (np.where(is_valid, values_SDW, 0).astype(np.float64), is_valid.astype(np.float64))
    )
    voxels = np.divide(sums, shares, out=np.full(sums.shape, np.nan), where=shares >= LEAST_WEIGHT)
    mm = (voxels + 0.5 - size[1] / 2) * float(record["spacing_after_h"])
    rows = mm / float(record["spacing_before_h"]) + record["shape_before_h"] / 2 - 0.5
    return (rows[:, ::-1] if record["flipped_d"] else rows).astype(np.float32)


def edge_step(volume_DHW: np.ndarray, surface_DW: np.ndarray, spacing_h: float) -> float:
    """Mean brightness below a surface less that above it, in standard deviations of the volume; -inf where
    no A-scan has both.
    """
    reach = max(1, round(STEP_MM / spacing_h))
    size = volume_DHW.shape[1]
    inside = (surface_DW >= reach) & (surface_DW < size - 1 - reach)  # False for NaN
    d, w = np.nonzero(inside)
    if not len(d):
        return -np.inf
    at = np.ceil(surface_DW[d, w]).astype(int)
    offsets = np.arange(reach)
    below = volume_DHW[d[:, None], at[:, None] + offsets, w[:, None]].mean()
    above = volume_DHW[d[:, None], at[:, None] - 1 - offsets, w[:, None]].mean()
    return float((below - above) / max(float(volume_DHW.std()), 1e-6))


def prepare_map(job: HeightJob) -> tuple[int, str]:
    """Write one row's heights, or the reason why there are none; (row, status). Raises StorageError."""
    row, store, url = job.link.row, job.store, job.link.url
    record = store.index.loc[row]
    fields: dict[str, Any] = {
        "path": job.link.path,
        "device": record.device,
        "protocol": record.protocol,
        "volume": record.checksum,
        "message": None,
    }
    heights = None
    try:
        source = storage.stat(url, store.options)
        fields |= {"source_size": source.size, "source_version": source.etag_or_mtime}
        map_ = read_heights(url, record.device, store.options)
        heights, measured = _fit(
            map_, store.read(row), record, store.attrs["geometry"], url, job.unclear_is_reversed
        )
        fields |= measured | {"status": KEPT}
    except storage.StorageNotFoundError as error:
        fields |= {"status": RejectReason.MISSING_FILE.value, "message": error.problem}
    except OCTReadError as error:
        fields |= {"status": error.reason.value, "message": error.detail}
    job.writer.write_row(row, heights, fields)
    return row, fields["status"]


def _fit(
    map_: HeightMap,
    volume: np.ndarray,
    record: pd.Series,
    geometry: Mapping[str, Any],
    url: str,
    unclear_is_reversed: bool,
) -> tuple[np.ndarray, dict[str, Any]]:
    """The heights in voxels of the volume, in the direction that fits it, and what was measured."""
    if map_.references and record.sop_instance_uid not in map_.references:
        expected = "the scan of the manifest as the map's referenced image"
        raise OCTReadError(url, RejectReason.WRONG_REFERENCE, expected, "another scan")
    rows = map_.values[~np.isnan(map_.values)]
    share = float(np.mean((rows > -1) & (rows < record.shape_before_h)))
    if share < SHARE_INSIDE:
        expected = f"rows below {record.shape_before_h:.0f}"
        raise OCTReadError(
            url, RejectReason.OUTSIDE_VOLUME, expected, f"{1 - share:.0%} of the heights outside"
        )
    as_scan = map_.values[:, ::-1] if record.flipped_d else map_.values
    both = [lay_on_grid(values, record, geometry) for values in (as_scan, as_scan[:, ::-1])]
    steps = [edge_step(volume, heights[0], float(record.spacing_after_h)) for heights in both]
    if max(steps) < LEAST_STEP:
        expected = f"a step of {LEAST_STEP} standard deviations of brightness at the first surface"
        raise OCTReadError(url, RejectReason.NO_EDGE, expected, f"{max(steps):.2f}")
    is_reversed = steps[1] > CLEARER * max(steps[0], LEAST_STEP / CLEARER)
    notes = map_.notes
    if max(steps) < CLEARER * min(steps):
        is_reversed, notes = unclear_is_reversed, (*notes, UNCLEAR)
    heights = both[int(is_reversed)]
    d0, d1, w0, w1 = (int(record[f"valid_{edge}"]) for edge in ("d0", "d1", "w0", "w1"))
    complete = ~np.isnan(heights[:, d0:d1, w0:w1]).any(axis=0)
    return heights, {
        "surfaces": "|".join(map_.names),
        "notes": "|".join(notes),
        "map_d": map_.values.shape[1],
        "map_w": map_.values.shape[2],
        "reversed_d": bool(is_reversed),
        "edge": steps[0] if np.isfinite(steps[0]) else None,
        "edge_reversed": steps[1] if np.isfinite(steps[1]) else None,
        "valid_share": float(complete.mean()),
    }


def prepare_heights(cfg: Config, workers: int) -> int:
    """Lay every linked map on its volume; returns the exit code. Raises UserError.

    A row whose map and volume are as they were is not done again.
    """
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    links, reasons = read_links(cfg, store)
    if not links:
        counts = ", ".join(f"{name} {n}" for name, n in sorted(reasons.items())) or "an empty table"
        raise UserError(
            f"{cfg.data.heights_manifest_path}: expected a map of a volume in {store.url}, found none "
            f"({counts})"
        )
    writer = HeightWriter(store.url, store.options)
    writer.create(len(store.index), store.image_size)
    written = writer.read_rows()
    jobs = [
        HeightJob(link, store, writer) for link in links if not _is_done(link, written.get(link.row), store)
    ]
    away = run_all(prepare_map, jobs, workers, "heights", "maps")
    index = writer.finalise([link.row for link in links])
    is_unclear = index.notes.fillna("").str.split("|").map(lambda notes: UNCLEAR in notes)
    turned = to_turn(index, is_unclear)
    if turned:
        jobs = [HeightJob(link, store, writer, turned[link.row]) for link in links if link.row in turned]
        away += run_all(prepare_map, jobs, workers, "directions", "maps")
        index = writer.finalise([link.row for link in links])
    report = summarise(index, reasons, len(away))
    storage.write_text(
        storage.join(store.url, "heights_report.json"), json.dumps(report, indent=1) + "\n", store.options
    )
    print(table(report))
    if away:
        print(f"error: {len(away)} maps could not be read, run again; first: {away[0]}", file=sys.stderr)
        return EXIT_TRY_AGAIN
    return 0


def _is_done(link: Link, written: Mapping[str, Any] | None, store: PreparedStore) -> bool:
    """Whether the row's map was laid on this volume from this file."""
    if written is None or written["status"] != KEPT or written["path"] != link.path:
        return False
    if written["volume"] != store.index.checksum[link.row]:
        return False
    try:
        source = storage.stat(link.url, store.options)
    except storage.StorageError:
        return False  # prepare_map meets the same error and counts it
    return (written["source_size"], written["source_version"]) == (source.size, source.etag_or_mtime)


def summarise(index: pd.DataFrame, reasons: Mapping[str, int], unread: int) -> dict[str, Any]:
    """heights_report.json: what became of the manifest's lines, by device."""
    kept = index[index.status == KEPT]
    mismatches = Counter(dict(reasons)) + Counter(index.status[index.status != KEPT].tolist())
    notes = Counter(note for text in kept.notes.fillna("") for note in text.split("|") if note)
    return {
        "kept": len(kept),
        "unread": unread,
        "mismatches": dict(sorted(mismatches.items())),
        "notes": dict(sorted(notes.items())),
        "by_device": {
            str(device): {
                "kept": len(part),
                "surfaces": sorted(set(part.surfaces)),
                "expected_surfaces": NUM_SURFACES[str(device)],
                "reversed_d": int(part.reversed_d.sum()),
                "other_grid": _count_other_grids(part),
                "valid_share": round(float(part.valid_share.mean()), 4),
            }
            for device, part in kept.groupby("device")
        },
    }


def _count_other_grids(part: pd.DataFrame) -> int:
    """Maps whose grid is not the most frequent one of their protocol."""
    sizes = part.map_d.astype(int).astype(str) + "x" + part.map_w.astype(int).astype(str)
    return int(sum(len(s) - s.value_counts().iloc[0] for _, s in sizes.groupby(part.protocol)))


def table(report: Mapping[str, Any]) -> str:
    """The report as a few lines of text."""
    lines = [f"{'device':24s} {'maps':>5s} {'valid':>6s} {'reversed':>8s}  surfaces, from the vitreous down"]
    for device, part in report["by_device"].items():
        names = "; ".join(text.replace("|", " ") for text in part["surfaces"])
        lines.append(
            f"{device:24s} {part['kept']:5d} {part['valid_share']:6.2f} {part['reversed_d']:8d}  {names}"
        )
    words = [f"{name} {n}" for name, n in report["mismatches"].items()]
    lines.append(f"not used: {', '.join(words) or 'none'}")
    lines.append(f"noted: {', '.join(f'{name} {n}' for name, n in report['notes'].items()) or 'nothing'}")
    lines.append("Heights are what a device's software saw: labels of a machine, not truth.")
    return "\n".join(lines)
