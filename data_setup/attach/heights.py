"""Height maps of the data set into the store: `python -m data_setup.prepare --heights`.

In: a finalised store and data.octa_manifest_path, retinal_octa/manifest.tsv of AI-READI, whose columns
associated_structural_oct_* and associated_segmentation_* link a map to a scan. Out: the maps on the volumes'
own grid (stored.py), heights_report.json and a table that counts every mismatch by reason.

A map's grid may differ from that of its scan: both cover the same field (grid.py). A map's B-scans run as
its scan's do, or the other way: the documentation does not say which for every device, so the brightness step
at the first surface decides, and both are in the table (jobs.py).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from data_setup.attach.grid import box, lay_on_grid
from data_setup.attach.jobs import (
    CLEARER_STEP,
    LEAST_STEP,
    OF_SCAN,
    Job,
    device_table,
    edge_step,
    finish,
    match_lines,
    mismatches,
    require_jobs,
    run,
)
from data_setup.attach.stored import HEIGHTS, SideWriter
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.heights import NUM_SURFACES, HeightMap, read_heights
from data_setup.store.format import KEPT
from data_setup.store.reader import PreparedStore
from data_setup.store.summary import words
from data_setup.tables.text import clean_path, read_table
from utils import storage
from utils.config.schema import Config

UID, PATH = "associated_segmentation_sop_instance_uid", "associated_segmentation_file_path"
UNCLEAR = "direction_unclear"  # both directions fit: that of the protocol's clear maps, else the file's
SHARE_INSIDE = 0.5  # of the heights must be rows of the scan


@dataclass(frozen=True, kw_only=True)
class MapJob(Job):
    """One map to lay on its volume."""

    KIND, SCORES, CLEARER = HEIGHTS, ("edge", "edge_reversed"), CLEARER_STEP

    def lay(self) -> tuple[list[np.ndarray], dict[str, Any]]:
        """The heights in voxels of the volume, in the direction that fits it, and what was measured."""
        record, geometry, map_ = self.record, self.store.attrs["geometry"], self._read()
        both = [lay_on_grid(values, record, geometry) for values in (map_.values, map_.values[:, ::-1])]
        volume, spacing_h = self.store.read(self.row), float(record.spacing_after_h)
        steps = [edge_step(volume, heights[0], spacing_h) for heights in both]
        if max(steps) < LEAST_STEP:
            expected = f"a step of {LEAST_STEP} standard deviations of brightness at the first surface"
            raise OCTReadError(self.url, RejectReason.NO_EDGE, expected, f"{max(steps):.2f}")
        direction = self.choose(steps)
        notes = (*map_.notes, UNCLEAR) if self.is_unclear(*steps) else map_.notes
        heights = both[int(direction["reversed_d"])]
        return [heights], direction | facts_of(heights, map_.names, map_.values.shape, record, notes)

    def of_scan(self, laid: Mapping[str, Any]) -> tuple[np.ndarray, tuple[str, ...]]:
        map_ = self._read()
        return map_.values[:, ::-1] if laid["reversed_d"] else map_.values, map_.names

    def _read(self) -> HeightMap:
        """The map with its B-scans as the scan's are stored, if they run as its scan's do."""
        record = self.record
        map_ = read_heights(self.url, record.device, self.store.options)
        if map_.references and record.sop_instance_uid not in map_.references:
            expected = "the scan of the manifest as the map's referenced image"
            raise OCTReadError(self.url, RejectReason.WRONG_REFERENCE, expected, "another scan")
        require_inside(map_.values, record, self.url)
        return replace(map_, values=map_.values[:, ::-1]) if record.flipped_d else map_


def read_jobs(cfg: Config, store: PreparedStore) -> tuple[list[MapJob], Counter[str]]:
    """The maps of the manifest with their rows, and how many of its lines name none, by reason."""
    url, root = cfg.data.octa_manifest_path, store.attrs["source_root"]
    lines, _, _ = read_table(url, cfg.data.storage_options, [*OF_SCAN, UID, PATH])
    reasons = ("no_segmentation", "second_map")
    of_row, counts = match_lines(store, lines, [PATH], OF_SCAN, reasons, NUM_SURFACES)
    paths = {row: clean_path(line[PATH]) or "" for row, line in of_row.items()}
    jobs = [MapJob(row=row, path=p, url=storage.join(root, p), store=store) for row, p in paths.items()]
    return jobs, counts


def require_inside(values_SDW: np.ndarray, record: pd.Series, url: str) -> None:
    """Raise outside_volume where too few heights are rows of the scan."""
    rows = values_SDW[~np.isnan(values_SDW)]
    share = float(np.mean((rows > -1) & (rows < record.shape_before_h)))
    if share < SHARE_INSIDE:
        expected = f"rows below {record.shape_before_h:.0f}"
        actual = f"{1 - share:.0%} of the heights outside"
        raise OCTReadError(url, RejectReason.OUTSIDE_VOLUME, expected, actual)


def facts_of(
    heights_SDW: np.ndarray,
    names: Sequence[str],
    shape: tuple[int, ...],
    record: pd.Series,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Columns of heights on the grid, which come from a map of `shape`."""
    lacking = np.isnan(heights_SDW[:, *box(record, "dw")]).any(axis=0)
    return {
        "surfaces": "|".join(names),
        "notes": "|".join(notes),
        "map_d": shape[1],
        "map_w": shape[2],
        "valid_share": float((~lacking).mean()),
    }


def prepare_heights(cfg: Config, workers: int) -> int:
    """Lay every linked map on its volume; returns the exit code. Raises UserError."""
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    jobs, counts = read_jobs(cfg, store)
    require_jobs(jobs, counts, cfg.data.octa_manifest_path, f"a map of a volume in {store.url}")
    SideWriter(HEIGHTS, store.url, store.options).create(len(store.index), store.image_size)
    index, away = run(jobs, workers, "maps")
    report = summarise(index, counts, len(away))
    text = device_table(
        report,
        ["maps", "valid", "reversed", "surfaces, from the vitreous down"],
        lambda p: [p["kept"], p["valid_share"], p["reversed_d"], "; ".join(p["surfaces"]).replace("|", " ")],
        f"not used: {words(report['mismatches'])}",
        f"noted: {words(report['notes'], 'nothing')}",
        "Heights are what a device's software saw: labels of a machine, not truth.",
    )
    return finish(store, "heights", report, text, away, "maps")


def summarise(index: pd.DataFrame, counts: Mapping[str, int], unread: int) -> dict[str, Any]:
    """heights_report.json: what became of the manifest's lines, by device."""
    kept = index[index.status == KEPT]
    notes = Counter(note for text in kept.notes.fillna("") for note in text.split("|") if note)
    return {
        "kept": len(kept),
        "unread": unread,
        "mismatches": mismatches(index, counts),
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
