"""Thickness of layers from surfaces in the rows of a scan: means, ETDRS sectors, and where the fovea is.

In: surfaces [S, B-scans, A-scans] in rows, as the scan's file lies, NaN where there is none; what is known of
the scan; perhaps what somebody says of its fovea. Out: the fields of a line, places in them as the file lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from data_setup.readers.dicom import OCTHeader
from data_setup.tables.text import read_table
from finetuning.dense.layers.etdrs import etdrs_tables, locate
from finetuning.dense.layers.volumes import layers_of
from utils.config.schema import StorageOptions
from utils.errors import UserError

Place = tuple[float, float]  # B-scan and A-scan, from 0, in the order of the file
CENTRE = "centre"
SCAN_COLUMNS, PLACE_COLUMNS = ("scan", "filepath", "path"), ("b_scan", "a_scan")
EXPECTED = f"{CENTRE}, B-SCAN,A-SCAN of one scan, or a table with the columns scan, b_scan, a_scan"


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
    if (place := _place(word.split(","))) is not None:
        if num_scans > 1:
            raise UserError(f"--fovea {word}: expected one scan, found {num_scans}; give a table")
        return Foveas(of_all=place)
    if "." not in word:
        raise UserError(f"--fovea: expected {EXPECTED}, found {word!r}")
    lines, _, column = read_table(word, options, PLACE_COLUMNS, SCAN_COLUMNS)
    places = {line[column].strip(): _place([line[name] for name in PLACE_COLUMNS]) for line in lines.values()}
    if wrong := [scan for scan, place in places.items() if place is None]:
        raise UserError(f"{word}: expected two numbers from 0, B-scan and A-scan, found others of {wrong[0]}")
    return Foveas(of_scan={scan: place for scan, place in places.items() if place is not None})


def _place(words: Sequence[str]) -> Place | None:
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
