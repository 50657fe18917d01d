"""Which entries of an index are label maps or masks, and of which scans.

In: the entries of any tree. Out: the same; a label map is no row (status few_grey_levels), and the scan of
its size under the same name has it in `label_volume`. The name of a file or folder says where to look, and so
does a file that is packed very small; the voxels decide. `localizers` finds pictures beside B-scans.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from data_setup.index.candidates import IMAGES
from data_setup.index.look import OK, Entry
from data_setup.manifest import unknown_record
from data_setup.readers.dicom import FEWEST_PLAIN_LEVELS
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.images import moving_columns, ordered_images
from data_setup.readers.open_record import open_record
from data_setup.readers.sidecar import Sidecar, read_sidecars, sidecar_urls
from utils.config.schema import StorageOptions
from utils.storage import StorageError, join, list_names

LABEL_MAP = RejectReason.FEW_GREY_LEVELS.value
_KINDS = ("NIfTI", "NumPy", "MATLAB", "MetaImage", "TIFF", IMAGES)  # kinds that labels are written in
_READ = (".nii", ".nii.gz", ".npz")  # and folders of PNG: what `label_volume` may name
_WORD = r"(?:labels?|masks?|seg|segs|segmentations?|gt|ground[_ -]?truth|annotations?)"
_FOLDER = re.compile(rf"{_WORD}(?:T[rs]|Val|_?(?:tr|ts|train|val|test))?", re.IGNORECASE)
_OF_SCANS = re.compile(r"(?:images?|imgs?|scans?|volumes?|oct)(?:T[rs]|Val)?", re.IGNORECASE)
_STEM = re.compile(rf"^{_WORD}[_-]|[_-]{_WORD}$", re.IGNORECASE)
_CHANNEL = re.compile(r"_0\d{3}$")  # of nnU-Net
_PACKED = 0.02  # bytes of a gzipped file for each voxel; speckle takes fifty times as many
_ENDING = re.compile(r"(\.nii\.gz|\.ome\.tiff?|\.[^./]+)$", re.IGNORECASE)


def with_label_maps(
    root: str, sizes: Mapping[str, int], entries: Sequence[Entry], options: StorageOptions
) -> list[Entry]:
    """The entries with label maps left out, and paired with their scans; raises StorageError."""
    maps = {e.path for e in entries if _may_be_labels(e, sizes) and _are_labels(root, e, options)}
    scans: dict[str, list[Entry]] = {}
    for entry in (e for e in entries if e.is_row and e.path not in maps):
        scans.setdefault(_key(entry, is_scan=True), []).append(entry)
    pairs: dict[str, list[Entry]] = {}  # path of a scan -> its label maps
    for entry in (e for e in entries if e.path in maps):
        fitting = [s for s in scans.get(_key(entry), []) if s.shape == entry.shape or not entry.shape]
        for scan in fitting if len({_name(s) for s in fitting}) == 1 else []:
            pairs.setdefault(scan.path, []).append(entry)
    paired = {one.path: path for path, some in pairs.items() if len(some) == 1 for one in some}
    return [
        _left_out(entry, paired.get(entry.path))
        if entry.path in maps
        else replace(entry, label_volume=_place(pairs[entry.path][0]))
        if len(pairs.get(entry.path, [])) == 1 and not entry.label_volume
        else entry
        for entry in entries
    ]


def localizers(root: str, entries: Sequence[Entry], options: StorageOptions) -> list[str]:
    """A line for each folder of images with one picture beside each B-scan, and the key that cuts it off."""
    lines = []
    for entry in (e for e in entries if e.kind == IMAGES and e.is_row):
        url = join(root, entry.path)
        try:
            sidecar = read_sidecars(sidecar_urls(url, entry.path, True), options)
            if sidecar.columns is not None:
                continue
            pattern = Sidecar(files=sidecar.files or entry.files or None)
            names = ordered_images(list_names(url, options), pattern, url)
            columns = moving_columns([join(url, name) for name in names], url, options)
        except (OCTReadError, StorageError):  # prepare meets it and names it
            continue
        if columns:
            key = "columns: [{:.3g}, {:.3g}]".format(*columns)
            lines.append(
                f"warning: {entry.path}: a localizer beside every B-scan? `{key}` in its YAML cuts it off"
            )
    return lines


def is_place_of_labels(path: str) -> bool:
    """Whether a name in the path is that of labels: labelsTr, masks, eye_seg.nii.gz."""
    *folders, name = path.split("/")
    return any(_FOLDER.fullmatch(part) for part in (*folders, name)) or bool(
        _STEM.search(_ENDING.sub("", name))
    )


def _may_be_labels(entry: Entry, sizes: Mapping[str, int]) -> bool:
    if entry.kind not in _KINDS or entry.status in (RejectReason.MISSING_FILE.value, LABEL_MAP):
        return False
    is_packed = entry.path.lower().endswith(".gz") and entry.shape is not None
    voxels = int(np.prod(entry.shape or (1,)))
    return is_place_of_labels(entry.path) or (is_packed and sizes.get(entry.path, voxels) < _PACKED * voxels)


def _are_labels(root: str, entry: Entry, options: StorageOptions) -> bool:
    """Whether its voxels have fewer values than a scan; what cannot be read is labels by its place alone."""
    record = unknown_record(join(root, entry.path), entry.path)
    record = replace(record, spacing_mm=entry.spacing_mm or (0.1, 0.003, 0.01), files=entry.files or None)
    values: set[int] = set()
    try:
        for frame in open_record(record, options)[1]:
            values.update(np.unique(frame).tolist())
            if len(values) >= FEWEST_PLAIN_LEVELS:
                return False
    except OCTReadError as error:
        by_content = (RejectReason.FEW_GREY_LEVELS, RejectReason.CONSTANT_VOLUME)
        return error.reason in by_content or (entry.status != OK and is_place_of_labels(entry.path))
    except StorageError:
        return False
    return True


def _key(entry: Entry, is_scan: bool = False) -> str:
    """What a scan and its label map have in common: the path without words of labels, scans and channels."""
    path = _ENDING.sub("", entry.path) if entry.kind != IMAGES else entry.path
    parts = [part for part in path.split("/") if not (_FOLDER.fullmatch(part) or _OF_SCANS.fullmatch(part))]
    name = _STEM.sub("", parts[-1]) if parts else ""
    return "/".join([*parts[:-1], _CHANNEL.sub("", name) if is_scan else name]).lower()


def _name(entry: Entry) -> str:
    return _CHANNEL.sub("", _ENDING.sub("", posixpath.basename(entry.path)))


def _place(entry: Entry) -> str:
    """What the column label_volume says: a file or a folder below the root, where it can be read."""
    is_read = entry.kind == IMAGES or entry.path.lower().endswith(_READ)
    return entry.path + (f"/{entry.files}" if entry.files else "") if is_read else ""


def _left_out(entry: Entry, scan: str | None) -> Entry:
    paired = f"label_volume of {scan}" if scan else "no scan of its name and size: fill label_volume yourself"
    return replace(entry, status=LABEL_MAP, message=f"a label map, and no scan ({paired})")
