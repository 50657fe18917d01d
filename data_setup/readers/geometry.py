"""Spacing and orientation of an OPT volume from its header; nothing is invented.

In: the numbers that `collect` takes from the functional groups. Out: `spacing_mm` (D, H, W), and whether the
frames have to be reversed to run superior -> inferior, each with its source. Lengths are in mm.
Standard: DICOM PS3.3, Enhanced multi-frame functional groups and Ophthalmic Frame Location.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydicom.dataset import Dataset

from data_setup.protocols import Protocol
from data_setup.readers.faults import OCTReadError, RejectReason, known, number

# Wide enough for phantoms of a few voxels over the whole field. 1 mm, the placeholder of careless writers, is
# out of range on every axis.
PLAUSIBLE_MM = {"B-scan distance": (0.001, 0.6), "axial": (0.0005, 0.05), "lateral": (0.001, 0.5)}
CIRRUS = "zeiss_cirrus"
_SHOWN_MM = 100  # the largest length that a message repeats
_AGREE = 1e-3  # relative: spacings of one volume
_FAR = 1e9  # no coordinate is near this; the squares of larger ones overflow
_PARALLEL = 0.95  # cosine: B-scans of one raster, and steps along one line


@dataclass(frozen=True)
class Measures:
    """One Pixel Measures item: any part may be missing."""

    axial: float | None = None
    lateral: float | None = None
    distance: float | None = None  # between B-scans


@dataclass(frozen=True)
class RawGeometry:
    """The header's values about geometry, unchecked."""

    shared: Measures
    per_frame: tuple[Measures, ...]
    root: Measures
    positions: tuple[tuple[float, ...] | None, ...]  # ImagePositionPatient of every frame
    orientations: tuple[tuple[float, ...], ...]  # ImageOrientationPatient of the frames that have one
    references: tuple[tuple[float, ...] | None, ...]  # ReferenceCoordinates of every frame
    shapes: frozenset[str]  # OphthalmicImageOrientation values


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


def measures(item: Dataset | None) -> Measures:
    """The spacing attributes of a Pixel Measures item or of the root."""
    if item is None:
        return Measures()
    pixel = numbers(item.get("PixelSpacing"))
    distance = numbers(item.get("SpacingBetweenSlices")) or numbers(item.get("SliceThickness"))
    axial, lateral = pixel if pixel and len(pixel) == 2 else (None, None)
    return Measures(axial, lateral, distance[0] if distance else None)


def collect(ds: Dataset) -> RawGeometry:
    """Read the functional groups into plain numbers; empty attributes and sequences count as absent."""
    shared = next(iter(ds.get("SharedFunctionalGroupsSequence") or []), None)
    frames = list(ds.get("PerFrameFunctionalGroupsSequence") or [])

    def item(group: Dataset | None, keyword: str) -> Dataset | None:
        return next(iter(group.get(keyword) or []), None) if group is not None else None

    groups = ([shared] if shared is not None else []) + frames
    orientations = [numbers(first(g, "PlaneOrientationSequence", "ImageOrientationPatient")) for g in groups]
    shapes = [first(g, "OphthalmicFrameLocationSequence", "OphthalmicImageOrientation") for g in groups]
    return RawGeometry(
        shared=measures(item(shared, "PixelMeasuresSequence")),
        per_frame=tuple(measures(item(f, "PixelMeasuresSequence")) for f in frames),
        root=measures(ds),
        positions=tuple(numbers(first(f, "PlanePositionSequence", "ImagePositionPatient")) for f in frames),
        orientations=tuple(o for o in orientations if o and len(o) == 6 and _are_near(o)),
        references=tuple(
            numbers(first(f, "OphthalmicFrameLocationSequence", "ReferenceCoordinates")) for f in frames
        ),
        shapes=frozenset(str(s) for s in shapes if s),
    )


def check_is_volume(raw: RawGeometry, protocol: Protocol | None, url: str) -> None:
    """Raise not_a_volume for radial and circle scans, which no D axis orders."""
    parallel = "parallel B-scans (a volume)"
    if protocol is not None and not protocol.is_volume:
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, parallel, f"protocol {protocol.name}")
    if raw.shapes - {"LINEAR"}:
        terms = ("LINEAR", "NONLINEAR", "TRANSVERSE")
        actual = f"OphthalmicImageOrientation {', '.join(sorted({known(s, terms) for s in raw.shapes}))}"
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, parallel, actual)
    rows = np.array([o[:3] for o in raw.orientations] or [(1.0, 0.0, 0.0)])
    lines = _reference_lines(raw)
    if lines is None:
        lines = np.array([[0.0, 1.0]])
    for name, vectors in (("ImageOrientationPatient", rows), ("ReferenceCoordinates", lines)):
        lengths = np.linalg.norm(vectors, axis=1)
        cosine = np.abs(vectors @ vectors[0]) / np.maximum(lengths * lengths[0], 1e-12)
        if np.any((cosine < _PARALLEL) & (lengths > 1e-6)) and lengths[0] > 1e-6:
            angle = math.degrees(math.acos(min(1.0, float(cosine.min()))))
            actual = f"{name} turned by {angle:.0f} degrees"
            raise OCTReadError(url, RejectReason.NOT_A_VOLUME, parallel, actual)


def spacing(
    raw: RawGeometry, frames: int, device: str | None, protocol: Protocol | None, url: str
) -> tuple[tuple[float, float, float], str]:
    """(B-scan distance, axial, lateral) in mm and the source of the B-scan distance.

    Shared groups first, then per frame, then root; sources: shared, per_frame, root, frame_positions,
    protocol. Cirrus writes the lateral spacing into SliceThickness: there the frame positions come first,
    then the field of the protocol. Raises OCTReadError missing_spacing, implausible_spacing or, where the
    frames disagree, not_a_volume.
    """
    levels = {"shared": raw.shared, "per_frame": _agreed(raw.per_frame, url), "root": raw.root}
    planes = ((m.axial, m.lateral) for m in levels.values() if m.axial is not None and m.lateral is not None)
    plane = next(planes, None)
    if plane is None:
        raise OCTReadError(url, RejectReason.MISSING_SPACING, "PixelSpacing (axial, lateral)", "none")
    axial, lateral = plane
    header = next(((k, m.distance) for k, m in levels.items() if m.distance is not None), None)
    measured = _position_distance(raw)
    positions = None if measured is None else ("frame_positions", measured)
    candidates = [header, positions]
    if device == CIRRUS:
        field = None
        if protocol is not None and frames > 1:
            field = ("protocol", protocol.field_mm[0] / (frames - 1))
        is_lateral = header is not None and math.isclose(header[1], lateral, rel_tol=_AGREE)
        candidates = [positions, field, None if is_lateral else header]
    chosen = next((c for c in candidates if c is not None), None)
    if chosen is None:
        actual = "none"
        if header is not None:
            actual = f"SliceThickness {number(header[1], _SHOWN_MM)}, which Cirrus fills with the lateral"
        raise OCTReadError(url, RejectReason.MISSING_SPACING, "a distance between B-scans", actual)
    source, distance = chosen
    check_plausible((distance, axial, lateral), source, url)
    return (distance, axial, lateral), source


def check_plausible(spacing_mm: tuple[float, float, float], source: str, url: str) -> None:
    """Raise implausible_spacing for a (B-scan distance, axial, lateral) that no OCT volume has."""
    for (name, (low, high)), value in zip(PLAUSIBLE_MM.items(), spacing_mm, strict=True):
        if not low <= value <= high:
            expected = f"{name} spacing in {low:g}..{high:g} mm"
            actual = f"{number(value, _SHOWN_MM)} mm ({source})"
            raise OCTReadError(url, RejectReason.IMPLAUSIBLE_SPACING, expected, actual)


def orientation(raw: RawGeometry) -> tuple[bool, str]:
    """(flip D to run superior -> inferior, source); conflicting or absent evidence: (False, "unknown").

    ReferenceCoordinates: rows of the localizer grow downwards, to inferior. ImagePositionPatient: along z it
    is LPS (superior is +z); along y it grows to inferior, as the OCT converters write it.
    """
    by_reference = _reference_direction(raw)
    by_position = _position_direction(raw)
    if by_reference and by_position and by_reference != by_position:
        return False, "unknown"
    if by_reference:
        return by_reference < 0, "reference_coordinates"
    if by_position:
        return by_position < 0, "image_position"
    return False, "unknown"


def _agreed(items: tuple[Measures, ...], url: str) -> Measures:
    """The measures that all frames share; a value of only some frames counts as none."""
    values = {}
    for name in ("axial", "lateral", "distance"):
        column = [getattr(m, name) for m in items]
        present = [v for v in column if v is not None]
        if present and not np.allclose(present, present[0], rtol=_AGREE, atol=0, equal_nan=True):
            actual = f"{name} spacing {' .. '.join(number(f(present), _SHOWN_MM) for f in (min, max))} mm"
            raise OCTReadError(url, RejectReason.NOT_A_VOLUME, "one spacing for all frames", actual)
        values[name] = present[0] if present and len(present) == len(column) else None
    return Measures(**values)


def _positions(raw: RawGeometry) -> np.ndarray | None:
    points = [p for p in raw.positions if p and len(p) == 3 and _are_near(p)]
    return np.array(points) if len(points) == len(raw.positions) and len(points) > 1 else None


def _position_distance(raw: RawGeometry) -> float | None:
    """Median distance between neighbouring frames, when their positions step along one line."""
    points = _positions(raw)
    if points is None:
        return None
    steps = np.diff(points, axis=0)
    whole = points[-1] - points[0]
    lengths = np.linalg.norm(steps, axis=1)
    if np.linalg.norm(whole) == 0 or np.any(lengths == 0):
        return None
    cosine = steps @ whole / (lengths * np.linalg.norm(whole))
    return float(np.median(lengths)) if np.all(cosine > _PARALLEL) else None


def _position_direction(raw: RawGeometry) -> int:
    """+1: superior first, -1: inferior first, 0: unknown."""
    if _position_distance(raw) is None:
        return 0
    points = _positions(raw)
    assert points is not None
    x, y, z = points[-1] - points[0]
    axis = int(np.argmax(np.abs((x, y, z))))
    return (0, 1 if y > 0 else -1, 1 if z < 0 else -1)[axis]


def _reference_points(raw: RawGeometry) -> np.ndarray | None:
    """[frames, 2 (start, end), 2 (row, column)] on the localizer, when every frame has its line."""
    lines = [r[:2] + r[-2:] for r in raw.references if r and len(r) >= 4 and len(r) % 2 == 0]
    if len(lines) != len(raw.references) or len(lines) < 2 or not all(map(_are_near, lines)):
        return None
    return np.array(lines).reshape(-1, 2, 2)


def _reference_lines(raw: RawGeometry) -> np.ndarray | None:
    points = _reference_points(raw)
    return None if points is None else points[:, 1] - points[:, 0]


def _reference_direction(raw: RawGeometry) -> int:
    points = _reference_points(raw)
    if points is None:
        return 0
    centres = points.mean(axis=1)
    rows, columns = centres[-1] - centres[0]
    steps = np.diff(centres[:, 0])
    if abs(rows) <= abs(columns) or np.mean(np.sign(steps) == np.sign(rows)) < 0.9:
        return 0
    return 1 if rows > 0 else -1
