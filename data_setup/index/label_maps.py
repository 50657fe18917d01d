"""Labels that lie in a tree: label maps or masks of its scans, and the layers that a maker's files hold.

In: the entries of any tree. Out: the same; a label map is no row (status few_grey_levels), and the scan of
its size under the same name has it in `label_volume`. The name of a file or folder says where to look, and so
does a file that is small, or packed very small, or would be; the voxels decide, by stricter rules where no
name does. `localizers` finds pictures beside B-scans.
Layers go to surfaces/PATH.surfaces.npz below the tables, for the column label_surfaces. Whether the lines of
an FDA begin at its first B-scan or at its last is not written in it, and programs differ: the brightness step
at the first boundary decides, in a few B-scans, as for height maps.
"""

import posixpath
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import IO

import numpy as np

from data_setup.attach.jobs import CLEARER_STEP, LEAST_STEP, edge_step
from data_setup.index.candidates import IMAGES, SURFACES_ENDING
from data_setup.index.look import OK, STAND_IN, Entry
from data_setup.manifest import unknown_record
from data_setup.protocols import Triple
from data_setup.readers.dicom import FEWEST_PLAIN_LEVELS, open_file
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.images import is_image, moving_columns, ordered_images
from data_setup.readers.makers import kinds, topcon
from data_setup.readers.makers.library import Surfaces
from data_setup.readers.open_record import open_record
from data_setup.readers.sidecar import Sidecar, read_sidecars, sidecar_urls
from utils.config.schema import StorageOptions
from utils.storage import StorageError, join, list_names, read_range, write_bytes
from utils.workers import in_threads

LABEL_MAP = RejectReason.FEW_GREY_LEVELS.value
_KINDS = ("DICOM", "NIfTI", "NumPy", "MATLAB", "MetaImage", "TIFF", IMAGES)  # labels come in them
_READ = (".nii", ".nii.gz", ".npz")  # and folders of PNG: what `label_volume` may name
_SURE = r"(label|mask)s?(maps?)?|segs?|segment(ed|ations?)|gts?|(ground)?truths?|annotat(ed|ions?)"
_LABELS = re.compile(  # words of a name; a wrong one costs a look
    rf"{_SURE}|contours?|rois?|preds?|predict(ed|ions?)|manual|lesions?|layers?|binary|targets?"
    r"|fluids?|irf|srf|ped|cysts?|prob(abilit(y|ies)|s)?|heatmaps?|lbls?|annots?|consensus|expert|grader|rater"
)
_OF_SCANS = re.compile(r"images?|imgs?|b?scans?|volumes?|octs?|inputs?|raw|data|originals?")
_BESIDE = re.compile(r"tr|ts|train|val|test|maps?|ground|b")  # of the same name
_CHANNEL = re.compile(r"_0\d{3}$")  # of nnU-Net
_SMALL, _PIECE = 2**16, 2**16  # bytes: a file that is looked at whole; what is read of the others
# Bytes for each voxel, of DICOM (lossy scans have more), images and others (floats), or for each byte of
# a piece once packed: of no scan
_PACKED, _PACKED_ELSE, _PLAIN = {"DICOM": 0.05, IMAGES: 0.1}, 0.3, 0.2
_AXES = {"NumPy": "D, H, W", "MATLAB": "H, W, D"}  # where nothing says it, to compare neighbours
# Labels in JPEG have rings: 95 % of voxels near one of 8 peaks. So has many a scan; but beside the highest
# peak, the background, at least half of labels is in the middle of a peak, and of scans up to 40 %.
_PEAKS, _FEW_PEAKS, _NEAR, _CORE, _NEAR_SHARE, _CORE_SHARE = 8, 4, 16, 2, 0.95, 0.45
# Of neighbours; of a scan's voxels half are equal at most, but nearly all after a median filter
_SAME_SHARE, _MOST_CLASSES = 0.9, 64
# Without a name: classes of an exact map (a dark scan keeps 15 levels after a median filter). JPEG and soft
# maps have up to four peaks, a fifth of the scale apart. Their middles hold .92 or more of a mask, .81 of a
# scan, and .96 of one with 10 times the contrast, where neighbours differ much
_FEW_CLASSES, _SAME_SHARE_UNNAMED, _APART, _STEP = 12, 0.94, 47, 16
# Of all voxels, of all but the background, and most jumps; the least that are no background
_SHARES, _LEAST = ((0.965, 0.35, 1.0), (0.95, 0.88, 1.0), (0.92, 0.6, 0.02)), 5e-4
EXACT, BLURRED = "exact", "blurred"
_ENDING = re.compile(r"(\.nii\.gz|\.ome\.tiff?|\.[^./]+)$", re.IGNORECASE)
FOLDER = "surfaces"
_LOOKED_AT = 8  # B-scans that say which way lines run


def with_label_maps(
    root: str, sizes: Mapping[str, int], entries: Sequence[Entry], options: StorageOptions
) -> list[Entry]:
    """The entries with label maps left out, and paired with their scans; raises StorageError."""
    files: dict[str, list[str]] = {}
    for path in filter(is_image, sizes):
        files.setdefault(posixpath.dirname(path), []).append(path)
    looked_at = in_threads(
        lambda e: _may_be_labels(root, e, files.get(e.path, [e.path]), sizes, options), entries
    )
    looks = {e.path: _look(root, e, options) for e, is_it in zip(entries, looked_at, strict=True) if is_it}
    maps = {path for path, look in looks.items() if look is not None}
    scans: dict[str, list[Entry]] = {}
    for entry in (e for e in entries if e.is_row and e.path not in maps):
        scans.setdefault(_key(entry, is_scan=True), []).append(entry)
    pairs: dict[str, list[Entry]] = {}  # path of a scan -> its label maps
    for entry in (e for e in entries if e.path in maps):
        of_name = scans.get(_key(entry)) or scans.get(_key(entry, is_loose=True), [])
        fitting = [s for s in of_name if s.shape == entry.shape or not entry.shape]
        names = {_CHANNEL.sub("", _ENDING.sub("", posixpath.basename(s.path))) for s in fitting}
        for scan in fitting if len(names) == 1 else []:
            pairs.setdefault(scan.path, []).append(entry)
    paired = {path: some[0] for path, some in pairs.items() if len(some) == 1}
    scan_of = {one.path: path for path, one in paired.items()}
    png = {posixpath.dirname(path) for path in sizes if path.lower().endswith(".png")}
    exact = {p for p in scan_of if looks[p] == EXACT and (p in png or p.lower().endswith(_READ))}
    return [
        _left_out(entry, scan_of.get(entry.path), entry.path in exact)
        if entry.path in maps
        else replace(entry, label_volume=_place(paired[entry.path]))
        if entry.path in paired and not entry.label_volume and paired[entry.path].path in exact
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


def is_place_of_labels(path: str, pattern: str | re.Pattern[str] = _LABELS) -> bool:
    """Whether a name in the path is that of labels: labelsTr, masks, eye_seg.nii.gz."""
    names = _ENDING.sub("", path).split("/")
    return any(re.fullmatch(pattern, word) for name in names for word in _words(name))


def _words(name: str) -> list[str]:
    """labelsTr, annotated_masks -> labels, tr, annotated, masks."""
    return [w.lower() for w in re.findall(r"[^\W\d_]+|\d+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name))]


def _may_be_labels(
    root: str, entry: Entry, paths: Sequence[str], sizes: Mapping[str, int], options: StorageOptions
) -> bool:
    """By the name, else by the size or by a piece from the middle of the file, or of the middle image."""
    if entry.kind not in _KINDS or entry.status in (RejectReason.MISSING_FILE.value, LABEL_MAP):
        return False
    if is_place_of_labels(entry.path):
        return entry.kind != "DICOM" or entry.is_row  # a name without an ending may be anything
    if not entry.is_row:
        return False
    packed = _PACKED.get(entry.kind, _PACKED_ELSE) * np.prod(entry.shape or (0,))
    if sum(sizes[path] for path in paths) < max(_SMALL, packed):
        return True
    middle = paths[len(paths) // 2]
    start = max(0, sizes[middle] // 2 - _PIECE // 2)
    try:
        piece = read_range(join(root, middle), start, start + _PIECE, options)
    except StorageError:  # prepare meets it and names it
        return False
    return len(zlib.compress(piece, 1)) < _PLAIN * len(piece)


def _look(root: str, entry: Entry, options: StorageOptions) -> str | None:
    """EXACT or BLURRED labels, None of a scan; what cannot be read is labels by its place only."""
    is_named = is_place_of_labels(entry.path)
    record = unknown_record(join(root, entry.path), entry.path)
    record = replace(record, spacing_mm=entry.spacing_mm or STAND_IN, files=entry.files or None)
    if entry.status == RejectReason.UNKNOWN_AXES:
        text = f"{{axes: [{_AXES.get(entry.kind, 'W, H, D')}], spacing_mm: {list(STAND_IN)}}}"
        record = replace(record, spacing_mm=None, volume_yaml=text)  # beneath the YAML files
    counts = np.zeros(256, int)
    num_pairs = num_same = num_jumps = 0  # neighbours, of which the first is no background
    is_plain = False
    try:
        header, frames = open_record(record, options)
        is_plain = header.is_plain
        for frame in frames:
            counts += np.bincount(frame.ravel(), minlength=256)
            one, other = frame[:, :-1], frame[:, 1:]
            steps = np.maximum(one, other)[mask := one != counts.argmax()] - np.minimum(one, other)[mask]
            num_pairs, num_same = num_pairs + steps.size, num_same + int((steps == 0).sum())
            num_jumps += int((steps > _STEP).sum())
    except OCTReadError as error:
        by_content = (RejectReason.FEW_GREY_LEVELS, RejectReason.CONSTANT_VOLUME)
        by_place = entry.status != OK and is_place_of_labels(entry.path, _SURE)
        if is_named or error.reason != RejectReason.FEW_GREY_LEVELS:  # which a very dark scan has too
            is_black = is_plain and not is_named and error.reason == RejectReason.CONSTANT_VOLUME
            return EXACT if (error.reason in by_content and not is_black) or by_place else None
    except StorageError:
        return None
    levels, same, jumps = np.flatnonzero(counts), *(n / max(1, num_pairs) for n in (num_same, num_jumps))
    if is_named:
        is_exact = len(levels) < FEWEST_PLAIN_LEVELS or (len(levels) <= _MOST_CLASSES and same > _SAME_SHARE)
    else:  # 0, 1, 2 ... or their multiples, a few left out, which a clipped scan has not
        num_steps = levels.max() / np.gcd.reduce(levels)
        is_exact = len(levels) <= _FEW_CLASSES and (len(levels) < 5 or len(levels) > num_steps / 3)
        is_exact = is_exact and same > _SAME_SHARE_UNNAMED
    return EXACT if is_exact else BLURRED if _are_peaks(counts, jumps, is_named) else None


def _are_peaks(counts: np.ndarray, jumps: float, is_named: bool) -> bool:
    """Whether voxels [256] by grey level are a few classes, with the rings of JPEG or soft edges around them;
    `jumps`: share of neighbours that differ much.
    """
    total = counts.sum()
    near, core = _peaks(counts, _PEAKS, _NEAR)
    if is_named and sum(near) >= _NEAR_SHARE * total and sum(core[1:]) >= _CORE_SHARE * (total - near[0]):
        return True
    near, (background, *others) = _peaks(counts, _FEW_PEAKS, _APART)
    if np.count_nonzero(counts) < FEWEST_PLAIN_LEVELS and sum(near[:2]) < total:
        return False  # no rings: a scan of few levels
    return sum(others) >= _LEAST * total and any(
        background + sum(others) >= of_all * total
        and sum(others) >= of_rest * (total - background)
        and jumps <= most
        for of_all, of_rest, most in _SHARES
    )


def _peaks(counts: np.ndarray, most: int, apart: int) -> tuple[list[int], list[int]]:
    """Voxels around each of the highest peaks, and in its middle."""
    rest, near, core = counts.copy(), [], []
    for _ in range(most):
        top = int(rest.argmax())
        core.append(int(rest[max(0, top - _CORE) : top + _CORE + 1].sum()))
        around = slice(max(0, top - apart), top + apart + 1)
        near.append(int(rest[around].sum()))
        rest[around] = 0
    return near, core


def _key(entry: Entry, is_scan: bool = False, is_loose: bool = False) -> str:
    """What a scan and its label map have in common: the path without words of labels, scans and channels."""
    path = _ENDING.sub("", entry.path) if entry.kind != IMAGES else entry.path
    parts = (_CHANNEL.sub("", path) if is_scan else path).split("/")
    return "/".join(filter(None, ("_".join(_rest(_words(part), is_loose)) for part in parts)))


def _rest(words: list[str], is_loose: bool) -> list[str]:
    """The words that say of what it is; `is_loose`: retina_masks is of everything beside it."""
    rest = [word for word in words if not (_LABELS.fullmatch(word) or _OF_SCANS.fullmatch(word))]
    if rest == words:
        return words
    rest = [word for word in rest if not _BESIDE.fullmatch(word)]
    return [] if is_loose and not any(map(str.isdigit, rest)) else rest


def _place(entry: Entry) -> str:
    """What the column label_volume says: a file or a folder below the root."""
    return entry.path + (f"/{entry.files}" if entry.files else "")


def _left_out(entry: Entry, scan: str | None, is_exact: bool) -> Entry:
    paired = f"label_volume of {scan}" if scan else "no scan of its name and size: fill label_volume yourself"
    if scan and not is_exact:
        paired = f"of {scan}; not in its label_volume, which takes whole classes: .npz, NIfTI or PNG, no JPEG"
    return replace(entry, status=LABEL_MAP, message=f"a label map, and no scan ({paired})")


def with_layers(root: str, out: str, entry: Entry, options: StorageOptions) -> Entry:
    """The entry; of a file with layers with the place of their .npz. Raises StorageError."""
    if not entry.is_row:
        return entry
    try:
        drawn = layers_in(join(root, entry.path), entry.kind, entry.spacing_mm, options)
    except OCTReadError as error:  # of the layers alone: the volume is read without them
        return replace(entry, without_labels=f"{error.reason}: {error.detail}")
    if drawn is None:
        return entry
    path = f"{FOLDER}/{entry.path}{SURFACES_ENDING}"
    write_bytes(join(out, path), drawn.to_bytes(), options)
    return replace(entry, label_surfaces=f"./{path}")  # ./ is the manifest's folder


def layers_in(url: str, kind: str, spacing_mm: Triple | None, options: StorageOptions) -> Surfaces | None:
    """The layers in a file, in the order of its frames, None without. Raises OCTReadError, StorageError."""
    if kind not in kinds.LAYERED:
        return None
    with open_file(kinds.split_part(url)[0], options) as file:
        drawn = kinds.surfaces(kind, file, url)
        if drawn is not None and kind == kinds.FDA:
            return _directed(drawn, file, url, spacing_mm)
        return drawn


def _directed(drawn: Surfaces, file: IO[bytes], url: str, spacing_mm: Triple | None) -> Surfaces:
    """The same with its lines as the B-scans run; raises OCTReadError no_edge where these do not tell."""
    first = drawn.heights[0]
    chosen = np.unique(np.linspace(0, len(first) - 1, _LOOKED_AT).astype(int))
    frames = np.stack(list(topcon.stored_frames(file, url, set(chosen.tolist()))))
    spacing = spacing_mm[1] if spacing_mm else np.inf  # of what a YAML still has to say: 1 row
    steps = [edge_step(frames, rows[chosen], spacing) for rows in (first, first[::-1])]
    if max(steps) < LEAST_STEP or max(steps) < CLEARER_STEP * min(steps):
        expected = f"B-scans that get brighter below {drawn.names[0]} only one way"
        raise OCTReadError(url, RejectReason.NO_EDGE, expected, f"steps of {steps[0]:.2f} and {steps[1]:.2f}")
    return drawn if steps[0] > steps[1] else replace(drawn, heights=drawn.heights[:, ::-1])
