"""What is measured of surfaces: errors, overlap, and thickness of the layers between them, by ETDRS sector.

In: surfaces [S, D, W] in voxels along h (0: the centre of the first), the volume's own spacing in mm. Out: a
number for each surface, layer or sector, in um or as a share; NaN where there is none. Of errors, an A-scan
counts where the device has a height, and so has the prediction: a decoder has heights everywhere, mean
heights of a surface that no training volume has are NaN, another grader may leave A-scans out.

Sectors are of a map of thickness [D, W], superior to inferior, and of the eye's side. The grid (Early
Treatment Diabetic Retinopathy Study, report 10): a disc of 1 mm around the fovea, rings to 3 and 6 mm in
quadrants whose borders are the scan's diagonals. A sector is an integral, not a count of pixels: the map goes
through a cubic spline at QUADRATURE places that each stand for the same area, so that a few coarse B-scans do
not decide who belongs to a sector.

`measured` gives the fields of a line of finetuning.predict: surfaces and places lie in it as the scan's file
does. `Foveas` is what somebody says of where foveas are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from scipy.ndimage import distance_transform_edt, gaussian_filter, map_coordinates
from scipy.spatial import cKDTree

from data_setup.readers.dicom import OCTHeader
from data_setup.tables.text import read_table
from utils.config.schema import StorageOptions
from utils.errors import UserError

HD_PERCENTILE = 95
RETINA = "retina"  # from the first surface to the outer boundary
OUTER = ("BM", "RPE", "OS/RPE")  # of the retina; the first of them that is marked
RADII_MM = (0.5, 1.5, 3.0)
QUADRANTS = ("superior", "nasal", "inferior", "temporal")
SECTORS = ("centre", *(f"{ring}_{q}" for ring in ("inner", "outer") for q in QUADRANTS))
QUADRATURE = (48, 96)  # radii and angles of a sector
LEAST_SHARE = 0.75  # of a sector must lie in the map
SMOOTH_MM, SEARCH_MM = 0.15, 1.2  # of the thickness in which the fovea is sought; around the map's middle
RING_MM, LEAST_PIT_UM = (0.8, 1.5), 20.0  # around a fovea; a normal one is some 80 um below its ring
GIVEN, RASTER, PIT = "given", "raster", "pit"  # how a fovea is known
# words of a region, or of a protocol, for where a raster lies; `wide` may hold a fovea anywhere
MACULA = re.compile(r"macul|fove|(?<![a-z])(mac|ppol|posterior)(?![a-z])", re.IGNORECASE)
ELSEWHERE = re.compile(r"dis[ck]|onh|optic|nerve|papill|rnfl|circle", re.IGNORECASE)
Place = tuple[float, float]  # B-scan and A-scan, from 0, in the order of the file
CENTRE = "centre"
SCAN_COLUMNS, PLACE_COLUMNS = ("scan", "filepath", "path"), ("b_scan", "a_scan")
EXPECTED = f"{CENTRE}, B-SCAN,A-SCAN of one scan, or a table with the columns scan, b_scan, a_scan"


def boundary_error_um(predicted_SDW: np.ndarray, truth_SDW: np.ndarray, spacing_h_mm: float) -> np.ndarray:
    """Mean distance along the A-scan of every surface, um [S]."""
    return known_means(np.abs(predicted_SDW - truth_SDW) * spacing_h_mm * 1000)


def known_means(values_SDW: np.ndarray) -> np.ndarray:
    """Mean over what is known of every surface [S]; NaN of one of which nothing is."""
    count = (~np.isnan(values_SDW)).sum(axis=(1, 2))
    total = np.nansum(values_SDW, axis=(1, 2))
    return np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)


def layer_overlap(predicted_SDW: np.ndarray, truth_SDW: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(Dice, IoU) of the layers between neighbouring surfaces over the whole volume, [S - 1] each.

    Layers are lengths along A-scans, not voxels, so a surface between two voxels counts where it is.
    """
    upper, lower = truth_SDW[:-1], truth_SDW[1:]
    is_known = ~np.isnan(truth_SDW[:-1] + truth_SDW[1:] + predicted_SDW[:-1] + predicted_SDW[1:])
    shared = np.minimum(predicted_SDW[1:], lower) - np.maximum(predicted_SDW[:-1], upper)
    both, truth, predicted = (
        np.where(is_known, np.clip(length, 0, None), 0).sum(axis=(1, 2))
        for length in (shared, lower - upper, predicted_SDW[1:] - predicted_SDW[:-1])
    )
    dice, iou = (np.full(len(both), np.nan) for _ in range(2))
    np.divide(2 * both, truth + predicted, out=dice, where=truth > 0)
    np.divide(both, truth + predicted - both, out=iou, where=truth > 0)
    return dice, iou


def hausdorff95_um(
    predicted_DW: np.ndarray, truth_DW: np.ndarray, spacing_mm: tuple[float, float, float]
) -> float:
    """95th percentile of the distances between two surfaces in space, the larger of both directions, um."""
    d, w = np.nonzero(~np.isnan(truth_DW) & ~np.isnan(predicted_DW))
    if not len(d):
        return float("nan")
    scale = np.array(spacing_mm) * 1000
    truth, predicted = (
        np.column_stack([d, surface[d, w], w]) * scale for surface in (truth_DW, predicted_DW)
    )
    there, back = (cKDTree(b).query(a)[0] for a, b in ((predicted, truth), (truth, predicted)))
    return float(max(np.percentile(there, HD_PERCENTILE), np.percentile(back, HD_PERCENTILE)))


def layers_of(names: Sequence[str], marked: Sequence[int] | None = None) -> dict[str, tuple[int, int]]:
    """Name -> (upper, lower) places of the layers between neighbouring surfaces, and last of the retina where
    its borders are among them. `marked`: places of the surfaces that are there, else all.
    """
    marked = range(len(names)) if marked is None else marked
    place = {names[n]: n for n in marked}
    pairs = {f"{names[a]} to {names[b]}": (a, b) for a, b in pairwise(marked)}
    outer = next((place[name] for name in OUTER if name in place), None)
    return pairs | ({RETINA: (place["ILM"], outer)} if "ILM" in place and outer is not None else {})


class Sector(NamedTuple):
    um: float  # mean thickness of what is known of it; NaN where that is too little
    share: float  # of it that is known


def etdrs(
    thickness_DW: np.ndarray, spacing_mm: tuple[float, float], fovea: tuple[float, float], laterality: str
) -> dict[str, Sector]:
    """Name -> sector; without a thickness where less than LEAST_SHARE of it is known.

    `spacing_mm` (d, w); `fovea` (d, w) in indices. Raises ValueError for a side that is not L or R.
    """
    if laterality not in ("L", "R"):
        raise ValueError(f"laterality: expected L or R, found {laterality}")
    is_known = ~np.isnan(thickness_DW)
    if not is_known.any():
        return dict.fromkeys(SECTORS, Sector(float("nan"), 0.0))
    down_mm, right_mm = np.concatenate([np.stack(places) for places in _places(laterality).values()], axis=1)
    at = np.stack([fovea[0] + down_mm / spacing_mm[0], fovea[1] + right_mm / spacing_mm[1]])
    all_values = map_coordinates(_filled(thickness_DW), at, order=3, mode="nearest")
    weight = map_coordinates(is_known.astype(float), at, order=1, mode="constant", cval=0.0)
    result = {}
    parts = (np.split(part, len(SECTORS)) for part in (all_values, weight > 1 - 1e-6))
    for sector, values, inside in zip(SECTORS, *parts, strict=True):
        share = float(inside.mean())
        result[sector] = Sector(float(values[inside].mean()) if share >= LEAST_SHARE else float("nan"), share)
    return result


def etdrs_tables(
    thickness_um: Mapping[str, np.ndarray],
    record: Mapping[str, Any],
    spacing_mm: tuple[float, float],
    fovea: tuple[float, float],
) -> dict[str, dict[str, Sector]]:
    """Layer -> sector of every map, around the fovea; `record`: the volume's row of an index.

    Raises ValueError where that says no side.
    """
    side = str(record["laterality"])
    if side not in ("L", "R"):
        raise ValueError("expected the side of the eye in the file, found none")
    return {name: etdrs(values, spacing_mm, fovea, side) for name, values in thickness_um.items()}


def locate(
    thickness_um: Mapping[str, np.ndarray],
    record: Mapping[str, Any],
    spacing_mm: tuple[float, float],
    given: tuple[float, float] | None = None,
) -> tuple[tuple[float, float], str]:
    """((d, w) of the fovea in indices, GIVEN, or how it was found: RASTER, where the raster is one of the
    macula by its region or name, PIT, where nothing says so and the retina has a pit in the middle).

    Raises ValueError: another region, no retina, no fovea.
    """
    if given is not None:
        shape = next(iter(thickness_um.values())).shape
        if not all(0 <= place < size for place, size in zip(given, shape, strict=True)):
            raise ValueError("expected a fovea inside the scan, found it outside")
        return given, GIVEN
    is_macula, is_elsewhere = _is_of(record, MACULA), _is_of(record, ELSEWHERE)
    if is_elsewhere and not is_macula:
        raise ValueError(f"expected a raster of the macula, found {_words(record)}")
    if RETINA not in thickness_um:
        raise ValueError(f"expected surfaces from ILM to one of {', '.join(OUTER)}, found others")
    fovea = find_fovea(thickness_um[RETINA], spacing_mm)
    if is_macula and not is_elsewhere:
        return fovea, RASTER
    if (depth := _pit_um(thickness_um[RETINA], spacing_mm, fovea)) < LEAST_PIT_UM:
        raise ValueError(
            f"expected a raster of the macula by its name, or a pit of {LEAST_PIT_UM:g} um in its middle, "
            f"found {_words(record)} and {max(depth, 0):.0f} um"
        )
    return fovea, PIT


def _words(record: Mapping[str, Any]) -> str:
    texts = (str(record.get(name) or "unknown") for name in ("region", "protocol"))
    return ", ".join(t for t in dict.fromkeys(texts) if t not in ("unknown", "nan")) or "no word of it"


def _is_of(record: Mapping[str, Any], pattern: re.Pattern[str]) -> bool:
    """Whether the region says so, or where it says nothing the protocol."""
    region = str(record.get("region") or "unknown")
    is_known = region not in ("unknown", "nan")
    return bool(pattern.search(region if is_known else str(record.get("protocol") or "")))


def _pit_um(thickness_DW: np.ndarray, spacing_mm: tuple[float, float], fovea: tuple[float, float]) -> float:
    """How much thinner the retina is there than in a ring around it; -inf where the ring is not known."""
    smooth = _smoothed(thickness_DW, spacing_mm)
    d, w = np.indices(smooth.shape)
    away_mm = np.hypot((d - fovea[0]) * spacing_mm[0], (w - fovea[1]) * spacing_mm[1])
    ring = smooth[(away_mm >= RING_MM[0]) & (away_mm <= RING_MM[1])]
    least = smooth[round(fovea[0]), round(fovea[1])]
    return float(np.median(ring[np.isfinite(ring)]) - least) if np.isfinite(ring).any() else -np.inf


def _smoothed(thickness_DW: np.ndarray, spacing_mm: tuple[float, float]) -> np.ndarray:
    """Means over SMOOTH_MM of what is known, inf where most is not."""
    is_known = ~np.isnan(thickness_DW)
    sigma = [SMOOTH_MM / s for s in spacing_mm]
    total = gaussian_filter(np.where(is_known, thickness_DW, 0.0), sigma)
    share = gaussian_filter(is_known.astype(float), sigma)
    return np.divide(total, share, out=np.full(total.shape, np.inf), where=is_known & (share > 0.5))


def find_fovea(thickness_DW: np.ndarray, spacing_mm: tuple[float, float]) -> tuple[float, float]:
    """(d, w) where the smoothed thickness of the retina is least, near the middle of the map.

    Raises ValueError where no thickness is known there.
    """
    smooth = _smoothed(thickness_DW, spacing_mm)
    d, w = (np.arange(n) - (n - 1) / 2 for n in smooth.shape)
    away_mm = np.hypot(d[:, None] * spacing_mm[0], w * spacing_mm[1])
    smooth[away_mm > SEARCH_MM] = np.inf
    if not np.isfinite(smooth).any():
        raise ValueError("fovea: expected a thickness near the middle of the map, found none")
    row, column = np.unravel_index(int(smooth.argmin()), smooth.shape)
    return _vertex(smooth[:, column], int(row)), _vertex(smooth[row], int(column))


def _vertex(line: np.ndarray, place: int) -> float:
    """The lowest point of the parabola through a minimum and its neighbours."""
    if not 0 < place < len(line) - 1 or not np.isfinite(line[place - 1 : place + 2]).all():
        return float(place)
    before, here, after = line[place - 1 : place + 2]
    bend = before - 2 * here + after
    return place + (0.5 * (before - after) / bend if bend > 0 else 0.0)


def _filled(values: np.ndarray) -> np.ndarray:
    """The map with its gaps filled by the nearest known value, only for the spline."""
    gaps = np.isnan(values)
    if not gaps.any():
        return values.astype(float)
    nearest = distance_transform_edt(gaps, return_distances=False, return_indices=True)
    return values[tuple(nearest)].astype(float)


def _places(laterality: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Sector -> places of equal area in mm (down, right) of the fovea; nasal is right in a right eye."""
    num_radii, num_angles = QUADRATURE
    nasal = 0.0 if laterality == "R" else 180.0
    middle = {"superior": 90.0, "inferior": 270.0, "nasal": nasal, "temporal": nasal + 180.0}
    share = (np.arange(num_radii) + 0.5) / num_radii
    inner, outer, last = (r**2 for r in RADII_MM)
    rings = {"inner": (inner, outer), "outer": (outer, last)}

    def polar(low: float, high: float, centre_deg: float, width_deg: float) -> tuple[np.ndarray, np.ndarray]:
        radius = np.sqrt(low + share * (high - low))[:, None]
        turn = ((np.arange(num_angles) + 0.5) / num_angles - 0.5) * width_deg
        angle = np.deg2rad(centre_deg + turn)
        return (-radius * np.sin(angle)).ravel(), (radius * np.cos(angle)).ravel()

    places = {"centre": polar(0.0, inner, 0.0, 360.0)}
    for name, (low, high) in rings.items():
        for quadrant in QUADRANTS:
            places[f"{name}_{quadrant}"] = polar(low, high, middle[quadrant], 90.0)
    return places


@dataclass(frozen=True)
class Foveas:
    """Where somebody says that foveas are; nothing of most scans."""

    is_centre: bool = False
    of_all: Place | None = None
    of_scan: Mapping[str, Place] = field(default_factory=dict)  # by path, or by the file's name

    def of(self, path: str, header: OCTHeader) -> Place | None:
        """Of a scan, among the frames of its reader; None where nobody says."""
        if self.is_centre:
            return (header.shape[0] - 1) / 2, (header.shape[2] - 1) / 2
        place = self.of_all or self.of_scan.get(path) or self.of_scan.get(PurePosixPath(path).name)
        order = None if header.order is None else np.argsort(header.order).tolist()
        return None if place is None else _turned(place, header, order)


NOT_GIVEN = Foveas()


def read_foveas(word: str | None, num_scans: int, options: StorageOptions) -> Foveas:
    """What --fovea says; raises UserError."""
    if word is None or word == CENTRE:
        return Foveas(is_centre=word == CENTRE)
    if (place := _numbers(word.split(","))) is not None:
        if num_scans > 1:
            raise UserError(f"--fovea {word}: expected one scan, found {num_scans}; give a table")
        return Foveas(of_all=place)
    if "." not in word:
        raise UserError(f"--fovea: expected {EXPECTED}, found {word!r}")
    lines, _, column = read_table(word, options, PLACE_COLUMNS, SCAN_COLUMNS)
    places = {
        line[column].strip(): _numbers([line[name] for name in PLACE_COLUMNS]) for line in lines.values()
    }
    if wrong := [scan for scan, place in places.items() if place is None]:
        raise UserError(f"{word}: expected two numbers from 0, B-scan and A-scan, found others of {wrong[0]}")
    return Foveas(of_scan={scan: place for scan, place in places.items() if place is not None})


def _numbers(words: Sequence[str]) -> Place | None:
    """Two numbers from 0; None for other words."""
    try:
        first, second = (float(word) for word in words)
    except ValueError:
        return None
    return (first, second) if min(first, second) >= 0 and max(first, second) < np.inf else None


def _turned(place: Place, header: OCTHeader, order: Sequence[int] | None) -> Place:
    """A place in the file as one among the frames of its reader, or back, whichever `order` of B-scans leads
    to: between two B-scans that lie apart there, the nearer one.
    """
    down, across = place
    if order is not None and 0 <= down <= len(order) - 1:
        low = int(down)
        first, second = order[low], order[min(low + 1, len(order) - 1)]
        is_between = abs(second - first) <= 1
        down = first + (down - low) * (second - first) if is_between else order[round(down)]
    return down, across if header.steps_hw[1] > 0 else header.shape[2] - 1 - across


def measured(
    rows_SDW: np.ndarray,
    names: Sequence[str],
    header: OCTHeader,
    fields: Mapping[str, Any],
    foveas: Foveas = NOT_GIVEN,
) -> dict[str, Any]:
    """thickness_um, etdrs_um, etdrs_message, fovea and fovea_source of a line."""
    um = header.from_file_order(rows_SDW, 1).astype(float) * float(fields["spacing_before_h"]) * 1000
    maps = {name: um[lower] - um[upper] for name, (upper, lower) in layers_of(names).items()}
    line: dict[str, Any] = {"thickness_um": {name: mean_or_none(values) for name, values in maps.items()}}
    line |= {"etdrs_um": None, "etdrs_message": None, "fovea": None, "fovea_source": None}
    spacing = float(fields["spacing_before_d"]), float(fields["spacing_before_w"])
    given, last = foveas.of(str(fields["path"]), header), um.shape[1] - 1
    if fields["flipped_d"]:  # sectors are of a map from superior to inferior
        maps = {name: values[::-1] for name, values in maps.items()}
        given = None if given is None else (last - given[0], given[1])
    try:
        (down, across), source = locate(maps, fields, spacing, given)
        tables = etdrs_tables(maps, fields, spacing, (down, across))
    except ValueError as error:
        is_lost = given is None and ("raster" in str(error) or "fovea" in str(error))
        return line | {"etdrs_message": f"{error}; --fovea says where it is" if is_lost else str(error)}
    place = _turned((last - down if fields["flipped_d"] else down, across), header, header.order)
    sectors = {
        layer: {name: None if np.isnan(cell.um) else round(cell.um, 2) for name, cell in table.items()}
        for layer, table in tables.items()
    }
    return line | {"etdrs_um": sectors, "fovea": [round(part, 2) for part in place], "fovea_source": source}


def mean_or_none(values: np.ndarray) -> float | None:
    """Mean of what is known, None where nothing is."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None
