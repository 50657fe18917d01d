"""Flow cubes and en-face images of OCTA into the store: `python -m data_setup.prepare --flow`.

In: a finalised store and data.octa_manifest_path, retinal_octa/manifest.tsv of AI-READI or octa.tsv of
data_setup.index, whose columns flow_cube_file_path, associated_enface_* and associated_structural_oct_* link
the files to a scan. Out: flow on the volumes' own grid (stored.py), flow_report.json and a table that counts
every mismatch by reason.

A cube covers the field of its scan, with as many voxels as it likes; one that states another field is not
used. It goes through the resampling of the volumes (data_setup/resample.py), an image through the weights of
its two axes. A cube's B-scans run as its scan's do, or the other way: flow lies where there is tissue, so its
correlation with the structural volume decides, and both are in the table (jobs.py). The images run as
their cube.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from data_setup.attach.grid import along_d, at_scan, box, field_to_grid, length_mm
from data_setup.attach.jobs import (
    CLEARER_FIT,
    LEAST_FIT,
    OF_SCAN,
    Job,
    correlation,
    device_table,
    finish,
    match_lines,
    mismatches,
    require_jobs,
    run,
)
from data_setup.attach.stored import FLOW, SideWriter
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.octa import EN_FACE, FLOW_CUBE, SLABS, OctaHeader, read_octa, slab_of
from data_setup.readers.open_record import with_ends
from data_setup.resample import resample_frames
from data_setup.store.format import KEPT
from data_setup.store.reader import PreparedStore
from data_setup.store.summary import words
from data_setup.tables.text import clean_path, read_table
from utils import storage
from utils.config.schema import Config

CUBE = "flow_cube_file_path"
IMAGE = "associated_enface_{}_file_path"
SAME_FIELD = 0.05  # relative: how far a file's own field may be from its scan's


@dataclass(frozen=True, kw_only=True)
class CubeJob(Job):
    """One cube with its images to lay on its volume."""

    KIND, SCORES, CLEARER = FLOW, ("fit", "fit_reversed"), CLEARER_FIT

    images: tuple[tuple[int, str], ...]  # (number in the manifest, URL)

    def source(self) -> dict[str, Any]:
        """A digest of what the files are; raises StorageError, StorageNotFoundError for the cube."""
        cube = storage.stat(self.url, self.store.options)
        facts: list[Any] = [cube.size, cube.etag_or_mtime]
        for number, url in self.images:
            try:
                image = storage.stat(url, self.store.options)
                facts.append([number, url, image.size, image.etag_or_mtime])
            except storage.StorageNotFoundError:
                facts.append([number, url, None])
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
        urls = [self.url, *(url for _, url in self.images)]
        source = with_ends(replace(cube, etag_or_mtime=digest), urls, self.store.options)
        return {"source": source.etag_or_mtime}

    def lay(self) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Cube uint8 [D, H, W] in the direction that fits the volume, images uint8 [slab, D, W], facts."""
        record = self.record
        header, frames = read_octa(self.url, FLOW_CUBE, self.store.options)
        _require_scan(header, record, self.url)
        both = self._both_directions(header, frames)
        inside = box(record, "dhw")
        volume = self.store.read(self.row)[inside]
        fits = [correlation(cube[inside], volume) for cube in both]
        if max(fits) < LEAST_FIT:
            expected = f"a correlation of {LEAST_FIT} with the structural volume"
            raise OCTReadError(self.url, RejectReason.NO_FIT, expected, f"{max(fits):.2f}")
        direction = self.choose(fits)
        slabs, of_images = self._lay_images(direction["reversed_d"])
        sizes = {f"flow_{axis}": count for axis, count in zip("dhw", header.shape, strict=True)}
        return [both[int(direction["reversed_d"])], slabs], sizes | direction | of_images

    def _both_directions(self, header: OctaHeader, frames: np.ndarray) -> list[np.ndarray]:
        """The cube on the volume's grid as its B-scans run, and the other way."""
        record, own = self.record, header.spacing_mm
        # the B-scan distance is not compared: Cirrus states another length for it
        stated = [("h", header.shape[1], own.axial), ("w", header.shape[2], own.lateral)]
        _require_field(stated, record, self.url)
        d, h, w = (length_mm(record, axis) / count for axis, count in zip("dhw", header.shape, strict=True))
        after_d, after_h, after_w = (float(record[f"spacing_after_{axis}"]) for axis in "dhw")
        planes = along_d(header.shape[0], record, self.store.attrs["geometry"])
        grid = header.shape, (d, h, w), self.store.image_size, (after_d, after_h, after_w)
        as_scan = bool(record.flipped_d)
        return [
            resample_frames(frames, *grid, flip_d=flip_d, planes=planes).voxels
            for flip_d in (as_scan, not as_scan)
        ]

    def of_scan(self, laid: Mapping[str, Any]) -> tuple[np.ndarray, tuple[str, ...]]:
        """The images, uint8 [slab, D, W]."""
        images, _ = self._images(bool(laid["reversed_d"]))
        laid_on = [at_scan(image[None], self.record)[0] for image in images.values()]
        return np.stack(laid_on), tuple(images)

    def _lay_images(self, is_reversed: bool) -> tuple[np.ndarray, dict[str, Any]]:
        """(uint8 [slab, D, W], which slabs it has and what became of the others). Raises StorageError."""
        d, _, w = self.store.image_size
        images, left_out = self._images(is_reversed)
        slabs = np.zeros((len(SLABS), d, w), np.uint8)
        for slab, image in images.items():
            of_d, of_w = field_to_grid(image.shape, self.record, self.store.attrs["geometry"])
            slabs[SLABS.index(slab)] = np.rint(of_d @ image.astype(np.float32) @ of_w.T).astype(np.uint8)
        return slabs, {"slabs": "|".join(images), "left_out": "|".join(left_out)}

    def _images(self, is_reversed: bool) -> tuple[dict[str, np.ndarray], list[str]]:
        """Slab -> uint8 [D, W] in the store's order, and what became of the others. Raises StorageError."""
        record = self.record
        images: dict[str, np.ndarray] = {}
        left_out: list[str] = []
        for number, url in self.images:
            try:
                header, frames = read_octa(url, EN_FACE, self.store.options)
                _require_scan(header, record, url)
                slab = slab_of(header.image_type)
                if slab is None or slab in images:
                    expected = f"an image type of {', '.join(name for name in SLABS if name not in images)}"
                    raise OCTReadError(url, RejectReason.UNKNOWN_SLAB, expected, "another one")
                image, own = frames[0], header.spacing_mm
                stated = [("d", image.shape[0], own.distance), ("w", image.shape[1], own.lateral)]
                _require_field(stated, record, url)
                images[slab] = image[::-1] if bool(record.flipped_d) != is_reversed else image
            except storage.StorageNotFoundError:
                left_out.append(f"{number}={RejectReason.MISSING_FILE.value}")
            except OCTReadError as error:
                left_out.append(f"{number}={error.reason.value}")
        return {slab: images[slab] for slab in SLABS if slab in images}, left_out


def read_jobs(cfg: Config, store: PreparedStore) -> tuple[list[CubeJob], Counter[str]]:
    """The cubes of the manifest with their rows, and how many of its lines name none, by reason."""
    url, options = cfg.data.octa_manifest_path, cfg.data.storage_options
    lines, columns, _ = read_table(url, options, [*OF_SCAN, CUBE])
    of_row, counts = match_lines(store, lines, [CUBE], OF_SCAN, ("no_flow_cube", "second_cube"))
    root, jobs = store.attrs["source_root"], []
    numbers = [n for n in range(1, len(SLABS) + 1) if IMAGE.format(n) in columns]
    for row, line in of_row.items():
        path = clean_path(line[CUBE]) or ""
        paths = {n: clean_path(line[IMAGE.format(n)]) for n in numbers}
        images = tuple((n, storage.join(root, image)) for n, image in paths.items() if image)
        jobs.append(CubeJob(row=row, path=path, url=storage.join(root, path), store=store, images=images))
    return jobs, counts


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
        length = length_mm(record, axis)
        if spacing is not None and abs(count * spacing - length) > SAME_FIELD * length:
            expected = f"{length:.2f} mm along {axis}, the field of its scan"
            raise OCTReadError(url, RejectReason.OTHER_FIELD, expected, f"{count * spacing:.2f}")


def prepare_flow(cfg: Config, workers: int) -> int:
    """Lay every linked cube on its volume; returns the exit code. Raises UserError."""
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    jobs, counts = read_jobs(cfg, store)
    writer = SideWriter(FLOW, store.url, store.options)
    if not jobs and (emptied := writer.empty()):
        print("\n".join(emptied))
    require_jobs(jobs, counts, cfg.data.octa_manifest_path, f"a flow cube of a volume in {store.url}")
    writer.create(len(store.index), store.image_size)
    index, away = run(jobs, workers, "cubes")
    report = summarise(index, counts, len(away))
    text = device_table(
        report,
        ["cubes", "fit", "reversed", "unclear", "en-face images"],
        lambda p: [p["kept"], p["fit"], p["reversed_d"], p["unclear"], words(p["slabs"])],
        f"cubes that are not used: {words(report['mismatches'])}",
        f"en-face images that are not used: {words(report['enface_mismatches'])}",
        "Flow is what a device's software computed: no measure of speed, and no truth.",
    )
    return finish(store, "flow", report, text, away, "cubes")


def summarise(index: pd.DataFrame, counts: Mapping[str, int], unread: int) -> dict[str, Any]:
    """flow_report.json: what became of the manifest's lines, by device, and of their en-face images."""
    kept = index[index.status == KEPT]
    images = Counter(part.split("=")[1] for text in kept.left_out for part in text.split("|") if part)
    return {
        "kept": len(kept),
        "unread": unread,
        "mismatches": mismatches(index, counts),
        "enface_mismatches": dict(sorted(images.items())),
        "by_device": {
            str(device): {
                "kept": len(part),
                "reversed_d": int(part.reversed_d.sum()),
                "unclear": int(CubeJob.is_unclear(part.fit, part.fit_reversed).sum()),
                "fit": round(float(np.maximum(part.fit, part.fit_reversed).mean()), 4),
                "slabs": {slab: sum(slab in text.split("|") for text in part.slabs) for slab in SLABS},
            }
            for device, part in kept.groupby("device")
        },
    }
