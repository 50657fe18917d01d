"""Flow cubes and en-face images of OCTA into the store: `python -m data_setup.prepare --flow`.

In: a finalised store and data.flow_manifest_path, retinal_octa/manifest.tsv of AI-READI or octa.tsv of
data_setup.index, whose columns flow_cube_file_path, associated_enface_* and associated_structural_oct_* link
the files to a scan. Out: flow on the volumes' own grid (data_setup/store/flow.py), flow_report.json and a
table that counts every mismatch by reason.

A cube covers the field of its scan, with as many voxels as it likes; one that states another field is not
used. It goes through the resampling of the volumes (data_setup/resample.py), an image through the weights of
its two axes. A cube's B-scans run as its scan's do, or the other way: flow lies where there is tissue, so its
correlation with the structural volume decides, and both are in the table; where it does not, the clear cubes
of the protocol do (data_setup/directions.py). The images run as their cube.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from data_setup.directions import to_turn
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.octa import EN_FACE, FLOW_CUBE, SLABS, OctaHeader, read_octa, slab_of
from data_setup.resample import axis_weights, resample_frames
from data_setup.side_jobs import run_all
from data_setup.store.flow import FlowWriter
from data_setup.store.format import KEPT
from data_setup.store.reader import PreparedStore
from data_setup.tables.text import clean_path, fact_of, read_table
from utils import storage
from utils.config.schema import Config
from utils.errors import EXIT_TRY_AGAIN, UserError

STRUCTURAL, CUBE = "associated_structural_oct", "flow_cube_file_path"
IMAGE = "associated_enface_{}_file_path"
SAME_FIELD = 0.05  # relative: how far a file's own field may be from its scan's
LEAST_FIT = 0.2  # correlation; a cube of the same scan has more
CLEARER = 1.02  # so much better must one direction be, or the scan does not decide


@dataclass(frozen=True)
class Link:
    """A cube with its images and the row that they are about."""

    row: int
    path: str  # relative to the source root
    url: str
    images: tuple[tuple[int, str], ...]  # (number in the table, URL)


@dataclass(frozen=True)
class FlowJob:
    """One cube to lay on its volume."""

    link: Link
    store: PreparedStore
    writer: FlowWriter
    unclear_is_reversed: bool = False  # what is taken where the scan does not decide


def read_links(cfg: Config, store: PreparedStore) -> tuple[list[Link], Counter[str]]:
    """The cubes of the manifest with their rows, and how many of its lines name none, by reason."""
    url, options = cfg.data.flow_manifest_path, cfg.data.storage_options
    wanted = [f"{STRUCTURAL}_sop_instance_uid", f"{STRUCTURAL}_file_path", CUBE]
    table, columns, _ = read_table(url, options, wanted)
    numbers = [n for n in range(1, len(SLABS) + 1) if IMAGE.format(n) in columns]
    listed = store.index[store.index["listed"]]
    by_uid = {uid: row for uid, row in zip(listed.sop_instance_uid, listed.row, strict=True) if uid}
    by_path = dict(zip(listed.path, listed.row, strict=True))
    kept = set(store.kept.tolist())
    links: dict[int, Link] = {}
    reasons: Counter[str] = Counter()
    for line in table.values():
        path = clean_path(line[CUBE])
        rows = {
            by_uid.get(fact_of(line[f"{STRUCTURAL}_sop_instance_uid"])),
            by_path.get(clean_path(line[f"{STRUCTURAL}_file_path"])),
        } - {None}
        row = rows.pop() if len(rows) == 1 else None
        if path is None:
            reasons["no_flow_cube"] += 1
        elif rows:
            reasons["links_disagree"] += 1
        elif row is None:
            reasons["scan_not_in_store"] += 1
        elif row not in kept:
            reasons["scan_rejected"] += 1
        elif row in links:
            reasons["second_cube"] += 1
        else:
            root = store.attrs["source_root"]
            paths = {n: clean_path(line[IMAGE.format(n)]) for n in numbers}
            images = tuple((n, storage.join(root, image)) for n, image in paths.items() if image)
            links[row] = Link(row, path, storage.join(root, path), images)
    return [links[row] for row in sorted(links)], reasons


def prepare_cube(job: FlowJob) -> tuple[int, str]:
    """Write one row's flow, or the reason why there is none; (row, status). Raises StorageError."""
    link, store = job.link, job.store
    record = store.index.loc[link.row]
    fields: dict[str, Any] = {"path": link.path, "device": record.device, "protocol": record.protocol}
    fields |= {"volume": record.checksum, "message": None}
    flow = None
    try:
        fields["source"] = _digest(link, store)
        header, frames = read_octa(link.url, FLOW_CUBE, store.options)
        _require_scan(header, record, link.url)
        cube, measured = _lay_cube(header, frames, store, record, link.url, job.unclear_is_reversed)
        slabs, of_images = _lay_images(link, store, record, measured["reversed_d"])
        flow = cube, slabs
        fields |= measured | of_images | {"status": KEPT}
    except storage.StorageNotFoundError as error:
        fields |= {"status": RejectReason.MISSING_FILE.value, "message": error.problem}
    except OCTReadError as error:
        fields |= {"status": error.reason.value, "message": error.detail}
    job.writer.write_row(link.row, flow, fields)
    return link.row, fields["status"]


def _require_scan(header: OctaHeader, record: pd.Series, url: str) -> None:
    """Raise header_mismatch for the other eye than the scan's, wrong_reference for another source."""
    is_known = header.laterality is not None and record.laterality in ("L", "R")
    if is_known and header.laterality != record.laterality:
        expected = f"laterality {record.laterality}, as its scan in the store"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, header.laterality)
    if header.references and record.sop_instance_uid not in header.references:
        expected = "the scan of the manifest as the file's source"
        raise OCTReadError(url, RejectReason.WRONG_REFERENCE, expected, "another scan")


def _require_field(stated: Sequence[tuple[str, int, float | None]], record: pd.Series, url: str) -> None:
    """Raise other_field where (axis, pixels, spacing in mm) is not the scan's length of that axis."""
    for axis, count, spacing in stated:
        length = float(record[f"shape_before_{axis}"] * record[f"spacing_before_{axis}"])
        if spacing is not None and abs(count * spacing - length) > SAME_FIELD * length:
            expected = f"{length:.2f} mm along {axis}, the field of its scan"
            raise OCTReadError(url, RejectReason.OTHER_FIELD, expected, f"{count * spacing:.2f}")


def _lay_cube(
    header: OctaHeader,
    frames: np.ndarray,
    store: PreparedStore,
    record: pd.Series,
    url: str,
    unclear_is_reversed: bool,
) -> tuple[np.ndarray, dict[str, Any]]:
    """The cube on the volume's grid uint8 [D, H, W], in the direction that fits it, and what was measured."""
    own = header.spacing_mm  # the B-scan distance is left aside: Cirrus states another length for it
    _require_field([("h", header.shape[1], own.axial), ("w", header.shape[2], own.lateral)], record, url)
    d, h, w = (
        float(record[f"shape_before_{axis}"] * record[f"spacing_before_{axis}"]) / count
        for axis, count in zip("dhw", header.shape, strict=True)
    )
    after_d, after_h, after_w = (float(record[f"spacing_after_{axis}"]) for axis in "dhw")
    laid = resample_frames(
        frames,
        header.shape,
        (d, h, w),
        store.image_size,
        (after_d, after_h, after_w),
        flip_d=bool(record.flipped_d),
    )
    box = tuple(slice(int(record[f"valid_{a}0"]), int(record[f"valid_{a}1"])) for a in "dhw")
    volume = store.read(int(record.row))[box]
    both = [laid.voxels, laid.voxels[::-1]]  # the field's middle is the grid's
    fits = [correlation(cube[box], volume) for cube in both]
    if max(fits) < LEAST_FIT:
        expected = f"a correlation of {LEAST_FIT} with the structural volume"
        raise OCTReadError(url, RejectReason.NO_FIT, expected, f"{max(fits):.2f}")
    is_reversed = unclear_is_reversed if _is_unclear(*fits) else fits[1] > fits[0]
    measured: dict[str, Any] = {
        "flow_d": header.shape[0],
        "flow_h": header.shape[1],
        "flow_w": header.shape[2],
    }
    measured |= {"fit": fits[0], "fit_reversed": fits[1], "reversed_d": is_reversed}
    return both[int(is_reversed)], measured


def _is_unclear(fit: float, fit_reversed: float) -> bool:
    """Whether neither direction fits CLEARER times as well as the other."""
    return max(fit, fit_reversed) < CLEARER * min(fit, fit_reversed)


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Pearson's correlation of two arrays of one shape; 0 where one of them is constant."""
    a, b = (part.astype(np.float32).ravel() for part in (first, second))
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / scale if scale else 0.0


def _lay_images(
    link: Link, store: PreparedStore, record: pd.Series, is_reversed: bool
) -> tuple[np.ndarray, dict[str, Any]]:
    """(uint8 [slab, D, W], which slabs it has and what became of the others). Raises StorageError."""
    d, _, w = store.image_size
    slabs = np.zeros((len(SLABS), d, w), np.uint8)
    there: list[str] = []
    left_out: list[str] = []
    for number, url in link.images:
        try:
            header, frames = read_octa(url, EN_FACE, store.options)
            _require_scan(header, record, url)
            slab = slab_of(header.image_type)
            if slab is None or slab in there:
                expected = f"an image type of {', '.join(name for name in SLABS if name not in there)}"
                raise OCTReadError(url, RejectReason.UNKNOWN_SLAB, expected, "another one")
            slabs[SLABS.index(slab)] = _lay_image(header, frames[0], record, (d, w), is_reversed, url)
            there.append(slab)
        except storage.StorageNotFoundError:
            left_out.append(f"{number}={RejectReason.MISSING_FILE.value}")
        except OCTReadError as error:
            left_out.append(f"{number}={error.reason.value}")
    order = [slab for slab in SLABS if slab in there]
    return slabs, {"slabs": "|".join(order), "left_out": "|".join(left_out)}


def _lay_image(
    header: OctaHeader,
    image: np.ndarray,
    record: pd.Series,
    size: tuple[int, int],
    is_reversed: bool,
    url: str,
) -> np.ndarray:
    """An en-face image on the grid's B-scans and A-scans, uint8 [D, W]; 0 outside the field."""
    own = header.spacing_mm
    _require_field([("d", image.shape[0], own.distance), ("w", image.shape[1], own.lateral)], record, url)
    weights = [
        axis_weights(
            count,
            float(record[f"shape_before_{axis}"] * record[f"spacing_before_{axis}"]) / count,
            target,
            float(record[f"spacing_after_{axis}"]),
        ).weights
        for axis, count, target in zip("dw", image.shape, size, strict=True)
    ]
    in_order = image[::-1] if bool(record.flipped_d) != is_reversed else image
    return np.rint(weights[0] @ in_order.astype(np.float32) @ weights[1].T).astype(np.uint8)


def prepare_flow(cfg: Config, workers: int) -> int:
    """Lay every linked cube on its volume; returns the exit code. Raises UserError.

    A row whose files and volume are as they were is not done again.
    """
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    links, reasons = read_links(cfg, store)
    writer = FlowWriter(store.url, store.options)
    if not links:
        if writer.is_there() and writer.read_rows():
            writer.finalise([])  # the arrays stay: cubes that come back are not read again
            print("flow.parquet of the store: emptied, no line of the table names a cube of a volume")
        counts = ", ".join(f"{name} {n}" for name, n in sorted(reasons.items())) or "an empty table"
        raise UserError(
            f"{cfg.data.flow_manifest_path}: expected a flow cube of a volume in {store.url}, found none "
            f"({counts})"
        )
    writer.create(len(store.index), store.image_size)
    written = writer.read_rows()
    jobs = [
        FlowJob(link, store, writer) for link in links if not _is_done(link, written.get(link.row), store)
    ]
    away = run_all(prepare_cube, jobs, workers, "flow", "cubes")
    index = writer.finalise([link.row for link in links])
    turned = to_turn(index, _unclear_rows(index))
    if turned:
        jobs = [FlowJob(link, store, writer, turned[link.row]) for link in links if link.row in turned]
        away += run_all(prepare_cube, jobs, workers, "directions", "cubes")
        index = writer.finalise([link.row for link in links])
    report = summarise(index, reasons, len(away))
    text = json.dumps(report, indent=1) + "\n"
    storage.write_text(storage.join(store.url, "flow_report.json"), text, store.options)
    print(table(report))
    if away:
        print(f"error: {len(away)} cubes could not be read, run again; first: {away[0]}", file=sys.stderr)
        return EXIT_TRY_AGAIN
    return 0


def _digest(link: Link, store: PreparedStore) -> str:
    """A digest of what the files of a row are; raises StorageError, StorageNotFoundError for the cube."""
    source = storage.stat(link.url, store.options)
    facts: list[Any] = [source.size, source.etag_or_mtime]
    for number, url in link.images:
        try:
            image = storage.stat(url, store.options)
            facts.append([number, url, image.size, image.etag_or_mtime])
        except storage.StorageNotFoundError:
            facts.append([number, url, None])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _is_done(link: Link, written: Mapping[str, Any] | None, store: PreparedStore) -> bool:
    """Whether the row's flow was laid on this volume from these files."""
    if written is None or written["status"] != KEPT or written["path"] != link.path:
        return False
    if written["volume"] != store.index.checksum[link.row]:
        return False
    try:
        return bool(written["source"] == _digest(link, store))
    except storage.StorageError:
        return False  # prepare_cube meets the same error and counts it


def summarise(index: pd.DataFrame, reasons: Mapping[str, int], unread: int) -> dict[str, Any]:
    """flow_report.json: what became of the manifest's lines, by device, and of their en-face images."""
    kept = index[index.status == KEPT]
    mismatches = Counter(dict(reasons)) + Counter(index.status[index.status != KEPT].tolist())
    images = Counter(part.split("=")[1] for text in kept.left_out for part in text.split("|") if part)
    return {
        "kept": len(kept),
        "unread": unread,
        "mismatches": dict(sorted(mismatches.items())),
        "enface_mismatches": dict(sorted(images.items())),
        "by_device": {
            str(device): {
                "kept": len(part),
                "reversed_d": int(part.reversed_d.sum()),
                "unclear": int(_unclear_rows(part).sum()),
                "fit": round(float(np.maximum(part.fit, part.fit_reversed).mean()), 4),
                "slabs": {slab: sum(slab in text.split("|") for text in part.slabs) for slab in SLABS},
            }
            for device, part in kept.groupby("device")
        },
    }


def _unclear_rows(index: pd.DataFrame) -> pd.Series:
    """Which rows of flow.parquet have a direction that their scan does not decide."""
    return pd.Series(
        [_is_unclear(*fits) for fits in zip(index.fit, index.fit_reversed, strict=True)], index.index, bool
    )


def table(report: Mapping[str, Any]) -> str:
    """The report as a few lines of text."""
    lines = [f"{'device':24s} {'cubes':>5s} {'fit':>6s} {'reversed':>8s} {'unclear':>7s}  en-face images"]
    for device, part in report["by_device"].items():
        images = ", ".join(f"{name} {count}" for name, count in part["slabs"].items())
        counts = f"{part['reversed_d']:8d} {part['unclear']:7d}"
        lines.append(f"{device:24s} {part['kept']:5d} {part['fit']:6.2f} {counts}  {images}")
    for name, key in (("cubes", "mismatches"), ("en-face images", "enface_mismatches")):
        words = ", ".join(f"{reason} {count}" for reason, count in report[key].items()) or "none"
        lines.append(f"{name} that are not used: {words}")
    return "\n".join(
        [*lines, "Flow is what a device's software computed: no measure of speed, and no truth."]
    )
