"""Order, spacing and orientation of B-scans from what a file states; nothing is invented.

In: the numbers that `collect` takes from a DICOM file's functional groups, or heidelberg.py from an XML.
Out: `check_geometry` gives the order of the frames, `spacing_mm` (D, H, W), and whether they run
inferior -> superior, each with its source; a file that contradicts itself is a reject. Lengths are in mm.
Standard: DICOM PS3.3, Enhanced multi-frame functional groups and Ophthalmic Frame Location.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydicom.dataset import Dataset

from data_setup.protocols import DEVICES, Protocol, Shape, Triple
from data_setup.readers.faults import OCTReadError, RejectReason, known, number

# Wide enough for phantoms of a few voxels over the whole field. 1 mm, the placeholder of careless writers, is
# out of range on every axis.
PLAUSIBLE_MM = {"B-scan distance": (0.001, 0.6), "axial": (0.0005, 0.05), "lateral": (0.001, 0.5)}
CIRRUS = "zeiss_cirrus"
MOST_MM = {"D": 20, "H": 6, "W": 20}  # the field of a scan; no device takes more of a retina
_SHOWN_MM = 100  # the largest length that a message repeats
_AGREE = 1e-3  # relative: spacings of one volume
_SHORT = 1e-6  # no direction
_FAR = 1e9  # no coordinate is near this; the squares of larger ones overflow
_PARALLEL = 0.95  # signed cosine with the first B-scan's line; an opposite line mirrors its B-scan
_ASKEW = 0.05  # cosine between the rows and the columns of one B-scan
_ASIDE = 0.25  # of the field: how far from their line the B-scans may lie
_UNEVEN = 0.25  # relative: a B-scan is missing where a step differs by more than this from the median
_SAME_PLACE = 1e-3  # relative to the longest step
_LENGTH = 0.05  # relative: two statements of one length
_ROUNDED = 0.01  # relative: one length at two levels of a header
_TERMS = {"axial": "PixelSpacing (axial)", "lateral": "PixelSpacing (lateral)"}
_TERMS |= {"distance": "SpacingBetweenSlices", "thickness": "SliceThickness"}


@dataclass(frozen=True)
class Measures:
    """One Pixel Measures item: any part may be missing."""

    axial: float | None = None
    lateral: float | None = None
    distance: float | None = None  # between B-scans: SpacingBetweenSlices
    thickness: float | None = None  # of a B-scan: SliceThickness


@dataclass(frozen=True)
class RawGeometry:
    """The file's values about geometry, unchecked; a tuple has an item for every frame, or none."""

    per_frame: tuple[Measures, ...]
    positions: tuple[tuple[float, ...] | None, ...]  # ImagePositionPatient
    references: tuple[tuple[float, ...] | None, ...]  # ReferenceCoordinates: (row, column) of start .. end
    shared: Measures = Measures()
    root: Measures = Measures()
    orientations: tuple[tuple[float, ...] | None, ...] = ()  # ImageOrientationPatient
    shapes: frozenset[str] = frozenset()  # OphthalmicImageOrientation values
    stacks: frozenset[str] = frozenset()  # StackID values
    numbers: tuple[tuple[float, ...] | None, ...] = ()  # InStackPositionNumber
    indices: tuple[tuple[float, ...] | None, ...] = ()  # of DimensionIndexValues, the one that is the place
    reference_unit: str = "pixels"  # | mm
    is_converted: bool = False  # by AI-READI, whose converters write the distance into SliceThickness


@dataclass(frozen=True)
class Geometry:
    """What is known about a volume; `order` has the index in the file of each frame, None: as in the file."""

    order: tuple[int, ...] | None
    spacing_mm: Triple  # (D, H, W)
    spacing_source: str  # shared | per_frame | root | frame_positions | protocol | manifest
    flip_d: bool  # the frames in this order run inferior -> superior
    orientation_source: str  # reference_coordinates | assumed | unknown


def numbers(value: Any) -> tuple[float, ...] | None:
    """A DICOM numeric value as floats; None when it is absent or empty."""
    if value is None or value == "":
        return None
    values = [value] if isinstance(value, (int, float, str)) else list(value)
    return tuple(float(v) for v in values) or None


def _are_near(values: Iterable[float]) -> bool:
    return all(abs(v) <= _FAR for v in values)  # not for NaN


def first(ds: Dataset | None, *path: str) -> Any:
    """Value at a path of keywords through first items of sequences; None when a part is absent or empty."""
    node: Any = ds
    for keyword in path[:-1]:
        items = node.get(keyword) if node is not None else None
        node = items[0] if items else None
    return node.get(path[-1]) if node is not None else None


def measures(item: Dataset) -> Measures:
    """The spacing attributes of a Pixel Measures item or of the root."""
    pixel = numbers(item.get("PixelSpacing"))
    lengths = (numbers(item.get(name)) for name in ("SpacingBetweenSlices", "SliceThickness"))
    axial, lateral = pixel if pixel and len(pixel) == 2 else (None, None)
    return Measures(axial, lateral, *(length[0] if length else None for length in lengths))


def collect(ds: Dataset) -> RawGeometry:
    """Read the functional groups into plain numbers; empty attributes and sequences count as absent."""
    shared = next(iter(ds.get("SharedFunctionalGroupsSequence") or []), None)
    frames = list(ds.get("PerFrameFunctionalGroupsSequence") or [])

    def of_frames(*path: str) -> tuple[tuple[float, ...] | None, ...]:
        return tuple(numbers(first(frame, *path)) for frame in frames)

    measured, orientation = "PixelMeasuresSequence", ("PlaneOrientationSequence", "ImageOrientationPatient")
    common = numbers(first(shared, *orientation))
    location = "OphthalmicFrameLocationSequence"
    shapes = [first(g, location, "OphthalmicImageOrientation") for g in [shared, *frames]]
    stacks = [first(g, "FrameContentSequence", "StackID") for g in frames]
    return RawGeometry(
        shared=measures((first(shared, measured) or [Dataset()])[0]),
        per_frame=tuple(measures((first(f, measured) or [Dataset()])[0]) for f in frames),
        root=measures(ds),
        positions=of_frames("PlanePositionSequence", "ImagePositionPatient"),
        orientations=(*of_frames(*orientation), common),
        references=of_frames(location, "ReferenceCoordinates"),
        shapes=frozenset(str(s) for s in shapes if s),
        stacks=frozenset(str(s) for s in stacks if s),
        numbers=of_frames("FrameContentSequence", "InStackPositionNumber"),
        is_converted="InConcatenationTotalNumber" in ds and "ConcatenationFrameOffsetNumber" in ds,
    )


def check_geometry(
    raw: RawGeometry,
    shape: Shape,
    device: str | None,
    protocol: Protocol | None,
    url: str,
    listed: Triple | None = None,
) -> Geometry:
    """The geometry of a volume of `shape` (frames, rows, columns); `listed`: the manifest's spacing, for what
    the file does not say. The frames are ordered by InStackPositionNumber, else by DimensionIndexValues, else
    by their positions, else as in the file; two of these that differ are a reject. Raises OCTReadError:
    not_a_volume, frame_count_mismatch, missing_spacing, implausible_spacing, header_mismatch.
    """
    _check_one_volume(raw, protocol, url)
    _check_directions(raw, url)
    lines = _reference_lines(raw)
    points = {
        "ImagePositionPatient": (_points(raw.positions, 3), "mm"),
        "ReferenceCoordinates": (None if lines is None else lines.mean(axis=1), raw.reference_unit),
    }
    # A DICOM file may fill all positions with one placeholder; an XML's Start and End are measured.
    are_measured = raw.reference_unit == "mm"
    stated = {
        n: (p, u) for n, (p, u) in points.items() if p is not None and (are_measured or np.ptp(p, 0).any())
    }
    # A count of frames that no item bears out may be any number: nothing of that length is made.
    is_described = len(raw.positions) == shape[0]
    counts = {"InStackPositionNumber": raw.numbers, "DimensionIndexValues": raw.indices}
    order, distance = _order(counts, shape[0], stated, url) if is_described else (None, None)
    spacing_mm, source = _spacing(raw, shape[0], distance, device, protocol, url, listed)
    if lines is not None and raw.reference_unit == "mm":
        _check_lengths(lines, shape[2] * spacing_mm[2], url)
    if order is None:
        return Geometry(None, spacing_mm, source, False, "unknown")
    whole = {name: p[order[-1]] - p[order[0]] for name, (p, _) in stated.items()}
    return Geometry(tuple(order.tolist()), spacing_mm, source, *_orientation(whole))


def _check_one_volume(raw: RawGeometry, protocol: Protocol | None, url: str) -> None:
    """Raise not_a_volume for radial and circle scans, and for several stacks."""
    terms = ("LINEAR", "NONLINEAR", "TRANSVERSE")
    shapes = ", ".join(sorted({known(s, terms) for s in raw.shapes}))
    faults = {
        f"protocol {protocol.name if protocol else None}": protocol is not None and not protocol.is_volume,
        f"OphthalmicImageOrientation {shapes}": bool(raw.shapes - {"LINEAR"}),
        f"{len(raw.stacks)} stacks (StackID): write each to a separate file": len(raw.stacks) > 1,
    }
    for actual in (text for text, is_fault in faults.items() if is_fault):
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, "parallel B-scans of one whole volume", actual)


def _check_directions(raw: RawGeometry, url: str) -> None:
    """Raise not_a_volume where a B-scan runs another way than the first, header_mismatch for mirrored."""
    planes = [o if o and len(o) == 6 and _are_near(o) else (0.0,) * 6 for o in raw.orientations or (None,)]
    lines = _reference_lines(raw)
    vectors = {
        "ReferenceCoordinates": np.zeros((1, 2)) if lines is None else lines[:, 1] - lines[:, 0],
        "rows of ImageOrientationPatient": np.array(planes)[:, :3],
        "columns of ImageOrientationPatient": np.array(planes)[:, 3:],
    }
    _check_parallel(vectors, url)
    across, down = vectors["rows of ImageOrientationPatient"], vectors["columns of ImageOrientationPatient"]
    lengths = np.linalg.norm(across, axis=1) * np.linalg.norm(down, axis=1)
    if (np.abs((across * down).sum(axis=1)) > _ASKEW * lengths).any():
        expected = "rows and columns at right angles (ImageOrientationPatient)"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, "others")
    rows, columns = vectors["ReferenceCoordinates"].sum(axis=0)
    x, y, z = vectors["rows of ImageOrientationPatient"].sum(axis=0)
    is_mirrored = columns < -abs(rows) if lines is not None else x < -max(abs(y), abs(z))
    if is_mirrored:
        expected = "B-scans from left to right on the localizer, or to the patient's left"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, "from right to left, so mirrored")


def _check_parallel(vectors: dict[str, np.ndarray], url: str) -> None:
    """Raise not_a_volume where a vector of a B-scan [frames, axes] has another direction than the first."""
    for name, some in vectors.items():
        lengths = np.linalg.norm(some, axis=1)
        base = some[np.argmax(lengths > _SHORT)]
        cosine = some @ base / np.maximum(lengths * np.linalg.norm(base), _SHORT**2)
        for index in np.flatnonzero((cosine < _PARALLEL) & (lengths > _SHORT))[:1]:
            angle = math.degrees(math.acos(max(-1.0, float(cosine[index]))))
            expected = f"parallel B-scans of one direction ({name})"
            actual = f"B-scan {index + 1} turned by {angle:.0f} degrees"
            raise OCTReadError(url, RejectReason.NOT_A_VOLUME, expected, actual)


def check_lines(lines: np.ndarray, unit: str, url: str) -> None:
    """Raise as check_geometry where B-scans, in the order of their numbers, have lines [frames, 2 (start,
    end), 2] that are not parallel, even and in this order; which way `unit` runs is not known.
    """
    middles = lines.mean(axis=1)
    if not _are_near(lines.ravel()) or not np.ptp(middles, axis=0).any():
        return  # placeholders
    _check_parallel({"start to end": lines[:, 1] - lines[:, 0]}, url)
    order, _ = _order({}, len(lines), {"places": (middles, unit)}, url)
    if not np.array_equal(order, np.arange(len(lines))):
        expected = "B-scans in the order of their numbers"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, "another order of their places")


def _check_lengths(lines: np.ndarray, width: float, url: str) -> None:
    """Raise header_mismatch for a line [frames, 2, 2] of another length than its B-scan is wide, in mm."""
    lengths = np.linalg.norm(lines[:, 1] - lines[:, 0], axis=1)
    for index in np.flatnonzero(~(np.abs(lengths - width) <= _LENGTH * width))[:1]:
        expected = f"Start to End of B-scan {index + 1} as long as Width x ScaleX, {width:.4g} mm"
        actual = f"{number(lengths[index], _SHOWN_MM)} mm"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, actual)


def _order(
    counts: dict[str, tuple[tuple[float, ...] | None, ...]],
    frames: int,
    stated: dict[str, tuple[np.ndarray, str]],
    url: str,
) -> tuple[np.ndarray, float | None]:
    """(indices of the frames in order, distance between B-scans in mm or None)."""
    order, source, distance = np.arange(frames), "", None

    def require(is_same: bool, name: str) -> None:
        if not is_same:
            expected = f"frames in the order of {source}"
            raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, f"another order in {name}")

    for name, values in counts.items():
        by_number = _order_by_number(values, name, frames, bool(stated or source), url)
        if by_number is not None and source:
            require(any(np.array_equal(order, by_number[::step]) for step in (1, -1)), name)
        elif by_number is not None:
            order, source = by_number, name
    for name, (points, unit) in stated.items():
        along = _along_line(points, name, url)
        if along[order[-1]] < along[order[0]]:
            along = -along
        by_place = order[np.argsort(along[order], kind="stable")]  # as it was where it runs backwards
        rounding = 1.0 if unit == "pixels" else 0.0
        if not source:
            order, source = by_place, name
        require(np.diff(along[order]).min() >= -max(rounding, _SAME_PLACE * np.ptp(along)), name)
        steps = np.diff(along[order])
        low, middle, high = float(steps.min()), float(np.median(steps)), float(steps.max())
        if low <= _SAME_PLACE * high and (high > 2 * rounding or not rounding):
            expected = f"B-scans beside each other ({name})"
            actual = "some in one place: a B-scan twice, or two scans in one file"
            raise OCTReadError(url, RejectReason.NOT_A_VOLUME, expected, actual)
        if max(high - middle, middle - low) > _UNEVEN * middle + rounding:
            ends = " to ".join(number(float(f"{step:.3g}")) for step in (low, high))
            actual = f"steps of {ends} {unit}: B-scans are missing, or two scans in one file"
            expected = f"evenly spaced B-scans ({name})"
            raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, expected, actual)
        if unit == "mm" and distance is None:
            whole = points[order[-1]] - points[order[0]]
            distance = float(np.median(np.diff(points[order], axis=0) @ (whole / np.linalg.norm(whole))))
    return order, distance


def _order_by_number(
    values: tuple[tuple[float, ...] | None, ...], name: str, frames: int, is_known: bool, url: str
) -> np.ndarray | None:
    """The indices by number; None where not all differ. Raises frame_count_mismatch if none order them."""
    if len(values) != frames or not all(v is not None and _are_near(v) for v in values):
        return None
    column = np.array([v[0] for v in values if v is not None])
    low, high, different = column.min(), column.max(), len(np.unique(column))
    if different == frames == high - low + 1:
        return np.argsort(column)
    if different == 1 or is_known:
        return None
    expected = f"{name} {number(low)} to {number(high)}, each once"
    raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, expected, f"{different} in {frames} frames")


def _along_line(points: np.ndarray, name: str, url: str) -> np.ndarray:
    """How far each point lies along the line through the two that are farthest apart; raises not_a_volume."""
    start = points[np.linalg.norm(points - points[0], axis=1).argmax()]
    end = points[np.linalg.norm(points - start, axis=1).argmax()]
    length = max(float(np.linalg.norm(end - start)), 1 / _FAR)
    along = (points - start) @ ((end - start) / length)
    aside = np.linalg.norm(points - start - np.outer(along / length, end - start), axis=1).max()
    if aside > _ASIDE * length:
        actual = f"some beside it by {aside / length:.0%} of its length"
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, f"B-scans along one line ({name})", actual)
    return along


def _spacing(
    raw: RawGeometry,
    frames: int,
    measured: float | None,
    device: str | None,
    protocol: Protocol | None,
    url: str,
    listed: Triple | None,
) -> tuple[Triple, str]:
    """(B-scan distance, axial, lateral) in mm and the source of the B-scan distance. `measured`, the distance
    between the positions, has to agree with a stated one. SliceThickness states it for the devices of DEVICES
    and for AI-READI's converters only. Cirrus writes the lateral spacing there: the positions come first,
    then the field of the protocol. `listed` comes last.
    """
    stated = {name: _stated(raw, name, url) for name in ("axial", "lateral", "distance", "thickness")}
    tag = "SpacingBetweenSlices"
    if stated["distance"] is None and (device in DEVICES or raw.is_converted):
        stated["distance"], tag = stated["thickness"], "SliceThickness"
    plane = [value[1] for name in ("axial", "lateral") if (value := stated[name]) is not None]
    is_listed = len(plane) < 2 and listed is not None
    axial, lateral = listed[1:] if listed and is_listed else (*plane, None, None)[:2]
    if axial is None or lateral is None:
        raise OCTReadError(url, RejectReason.MISSING_SPACING, "PixelSpacing (axial, lateral)", "none")
    header = stated["distance"]
    positions = None if measured is None else ("frame_positions", measured)
    candidates = [header, positions]
    is_trap = device == CIRRUS and header is not None and math.isclose(header[1], lateral, rel_tol=_AGREE)
    if device == CIRRUS:
        field = ("protocol", protocol.field_mm[0] / (frames - 1)) if protocol and frames > 1 else None
        candidates = [positions, field, None if is_trap else header]
    if header and measured and not is_trap and not math.isclose(header[1], measured, rel_tol=_LENGTH):
        expected = f"{tag} within {100 * _LENGTH:g} % of the distance between positions"
        texts = (f"{number(mm, _SHOWN_MM)} mm" for mm in (header[1], measured))
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, " and ".join(texts))
    candidates.append(("manifest", listed[0]) if listed else None)
    chosen = next((c for c in candidates if c is not None), None)
    if chosen is None:
        actual = "none"
        if (thickness := stated["thickness"]) is not None:
            why = "which Cirrus fills with the lateral" if is_trap else "only the thickness of a B-scan"
            actual = f"SliceThickness {number(thickness[1], _SHOWN_MM)}, {why}"
        expected = "a distance between B-scans (SpacingBetweenSlices, positions)"
        raise OCTReadError(url, RejectReason.MISSING_SPACING, expected, actual)
    source, distance = chosen
    check_plausible((distance, axial, lateral), source, url)
    return (distance, axial, lateral), "manifest" if is_listed else source


def _stated(raw: RawGeometry, name: str, url: str) -> tuple[str, float] | None:
    """(level, length in mm) of the first level of the header that states it, for all frames if for any."""
    in_frames = [value for m in raw.per_frame if (value := getattr(m, name)) is not None]
    if in_frames and not np.allclose(in_frames, in_frames[0], rtol=_AGREE, atol=0, equal_nan=True):
        actual = f"{name} spacing {' .. '.join(number(f(in_frames), _SHOWN_MM) for f in (min, max))} mm"
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, "one spacing for all frames", actual)
    levels = {"shared": getattr(raw.shared, name), "per_frame": next(iter(in_frames), None)}
    levels["root"] = getattr(raw.root, name)
    values = [(level, value) for level, value in levels.items() if value is not None]
    for level, value in values[1:]:
        if not math.isclose(value, values[0][1], rel_tol=_ROUNDED):
            expected = f"one {_TERMS[name]} in the whole header"
            texts = (f"{number(mm, _SHOWN_MM)} mm ({where})" for where, mm in (values[0], (level, value)))
            raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, " and ".join(texts))
    complete = [v for v in values if v[0] != "per_frame" or len(in_frames) == len(raw.per_frame)]
    return next(iter(complete), None)


def check_plausible(spacing_mm: Triple, source: str, url: str) -> None:
    """Raise implausible_spacing for a (B-scan distance, axial, lateral) in mm that no OCT volume has."""
    for (name, (low, high)), value in zip(PLAUSIBLE_MM.items(), spacing_mm, strict=True):
        if not low <= value <= high:
            expected = f"{name} spacing in {low:g}..{high:g} mm"
            actual = f"{number(value, _SHOWN_MM)} mm ({source})"
            raise OCTReadError(url, RejectReason.IMPLAUSIBLE_SPACING, expected, actual)
    if not spacing_mm[1] < spacing_mm[2]:
        expected = f"axial spacing below the lateral one, {spacing_mm[2]:g} mm"
        actual = f"{spacing_mm[1]:g} mm: the two may be swapped ({source})"
        raise OCTReadError(url, RejectReason.IMPLAUSIBLE_SPACING, expected, actual)


def check_field(shape: Shape, spacing_mm: Triple, source: str, url: str) -> None:
    """Raise implausible_spacing for a (D, H, W) in voxels that is a larger field than any device scans."""
    for (name, most), count, mm in zip(MOST_MM.items(), shape, spacing_mm, strict=True):
        if count * mm > most:
            expected = f"a field of up to {most} mm along {name}"
            actual = f"{count} x {number(mm, _SHOWN_MM)} mm = {count * mm:.3g} mm ({source})"
            raise OCTReadError(url, RejectReason.IMPLAUSIBLE_SPACING, expected, actual)


def _orientation(whole: dict[str, np.ndarray]) -> tuple[bool, str]:
    """(flip D to run superior -> inferior, source) by the way from the first place to the last.
    ReferenceCoordinates: rows of the localizer grow downwards, to inferior. ImagePositionPatient: along z it
    is LPS (superior is +z); along y it is assumed to grow to inferior. No device's file has shown that yet,
    so its source is "assumed". Conflicting or absent evidence, and a vertical raster: (False, "unknown").
    """
    rows, columns = whole.get("ReferenceCoordinates", (0.0, 0.0))
    x, y, z = whole.get("ImagePositionPatient", (0.0, 0.0, 0.0))
    by_reference = np.sign(rows) if abs(rows) > abs(columns) else 0
    by_position = (0, np.sign(y), -np.sign(z))[int(np.argmax(np.abs((x, y, z))))]
    if by_reference * by_position < 0 or not (by_reference or by_position):
        return False, "unknown"
    if by_reference:
        return bool(by_reference < 0), "reference_coordinates"
    return bool(by_position < 0), "assumed"


def _points(values: tuple[tuple[float, ...] | None, ...], length: int) -> np.ndarray | None:
    """[frames, length], when every frame has its values."""
    points = [v for v in values if v and len(v) == length and _are_near(v)]
    return np.array(points) if len(points) == len(values) and len(points) > 1 else None


def _reference_lines(raw: RawGeometry) -> np.ndarray | None:
    """[frames, 2 (start, end), 2 (row, column)] on the localizer, when every frame has its line."""
    ends = tuple(r[:2] + r[-2:] if r and len(r) >= 4 and len(r) % 2 == 0 else None for r in raw.references)
    points = _points(ends, 4)
    return None if points is None else points.reshape(-1, 2, 2)
