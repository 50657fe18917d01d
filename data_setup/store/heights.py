"""Height maps of a store: surfaces of its volumes on the volumes' own grid.

In: heights of a row's volume, with what was measured. Out: the same by row. Layout under the store's URL:
    heights/                    float32 [N, S, D, W] in voxels along h, 0 the centre of the first; NaN: none
                                S: the most surfaces of a device; attributes: unit, invalid, surfaces,
                                source (a device's maps, or labels that came with the tree)
    height_rows/{row:06d}.json  what became of the row's map, written after its chunk
    heights.parquet             the same, compacted: HEIGHT_COLUMNS
    heights_report.json         the summary of the last `data_setup.prepare --heights`

A device's maps are its output, not truth. A store without heights.parquet has none.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import zarr

from data_setup.readers.heights import MAX_SURFACES
from data_setup.store.format import KEPT, checksum
from data_setup.store.side_array import SideWriter, open_array, read_chunk, read_kept
from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import UserError

DEVICE_MAPS, OF_LABELS = "height maps of the device", "label_surfaces of the manifest"  # sources
HEIGHT_COLUMNS: dict[str, tuple[str, str]] = {
    "row": ("int64", "of the store"),
    "status": ("str", "kept, or the reason why the map is not used"),
    "message": ("str", "the reason in one line"),
    "device": ("str", "device folder"),
    "protocol": ("str", "of the structural scan"),
    "path": ("str", "the map's file relative to the source root"),
    "source_size": ("float64", "bytes of the map's file"),
    "source_version": ("str", "its ETag or modification time when it was read"),
    "volume": ("str", "checksum of the volume that the map was laid on"),
    "surfaces": ("str", "names from the vitreous down, | between; their order is that of the array"),
    "notes": ("str", "oddities that do not hinder, | between"),
    "map_d": ("float64", "B-scans of the map"),
    "map_w": ("float64", "A-scans of the map"),
    "reversed_d": ("bool", "the map's B-scans ran the other way than the scan's"),
    "edge": ("float64", "brightness step at the first surface, in standard deviations of the volume"),
    "edge_reversed": ("float64", "the same with the map's B-scans in reverse order"),
    "valid_share": ("float64", "share of the A-scans inside the field that have every surface"),
    "checksum": ("str", "of the stored heights: BLAKE2b, 16 bytes, hex"),
}


@dataclass(frozen=True)
class HeightWriter(SideWriter):
    """Writes height maps; small and picklable, so that every worker process has one."""

    NAME = "heights"
    ROWS = "height_rows"

    @property
    def source(self) -> str:
        """DEVICE_MAPS or OF_LABELS, of the array that is there."""
        return str(self.array().attrs.get("source", DEVICE_MAPS))

    def create(self, num_rows: int, image_size: tuple[int, int, int], source: str = DEVICE_MAPS) -> None:
        """Make the array, or give the one here `num_rows` rows; UserError where it is of another source."""
        if self.is_there():
            if self.source != source:
                raise UserError(
                    f"{self.url}: heights: expected {source}, found {self.source}; one store has heights of "
                    "one source: prepare into another data.store"
                )
            self.grow(num_rows)
            return
        d, _, w = image_size
        self.make(
            shape=(num_rows, MAX_SURFACES, d, w),
            dtype="float32",
            fill_value=float("nan"),
            dimension_names=("row", "surface", "d", "w"),
            attributes={"source": source},
        )

    def write_row(self, row: int, heights_SDW: np.ndarray | None, fields: Mapping[str, Any]) -> None:
        """Write the chunk (None: a map that is not used), then the row's JSON."""
        own = dict(fields)
        if heights_SDW is not None:
            array = self.array()
            chunk = np.full(array.shape[1:], np.nan, np.float32)
            chunk[: len(heights_SDW)] = heights_SDW
            array[row] = chunk
            own["checksum"] = checksum(chunk)
        self.write_fields(row, own)

    def finalise(self, rows: Sequence[int]) -> pd.DataFrame:
        """Compact the JSON of `rows` to heights.parquet; the attributes name each device's surfaces."""
        written = self.read_rows()
        table = [{**written[row], "row": row} for row in sorted(rows) if row in written]
        types = {name: kind for name, (kind, _) in HEIGHT_COLUMNS.items()}
        index = pd.DataFrame([{"reversed_d": False, **line} for line in table], columns=list(types))
        index = index.astype(types)
        kept = index[index.status == KEPT]
        surfaces = {
            str(device): sorted({tuple(text.split("|")) for text in part.surfaces})
            for device, part in kept.groupby("device")
        }
        self.array().update_attributes(
            {"unit": "voxels along h, 0 the centre of the first", "invalid": "NaN", "surfaces": surfaces}
        )
        buffer = io.BytesIO()
        index.to_parquet(buffer, index=False)
        storage.write_bytes(storage.join(self.url, "heights.parquet"), buffer.getvalue(), self.options)
        return index


class StoredHeights:
    """The height maps of a store for reading; picklable."""

    def __init__(self, url: str, options: StorageOptions | None, index: pd.DataFrame) -> None:
        self.url, self.options = url, options
        self.index = index  # HEIGHT_COLUMNS of the kept maps; label = row

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_array"}

    @classmethod
    def open(cls, url: str, options: StorageOptions | None = None) -> StoredHeights:
        """Raises UserError where the store has no height maps."""
        index = read_kept(url, "heights", HEIGHT_COLUMNS, "height maps", "--heights", options)
        return cls(url, options, index)

    def names(self, row: int) -> tuple[str, ...]:
        """The surfaces of a row's map, in the order of the array."""
        return tuple(str(self.index.surfaces[row]).split("|"))

    @cached_property
    def _array(self) -> zarr.Array:
        return open_array(self.url, "heights", self.options, read_only=True)

    def read(self, row: int) -> np.ndarray:
        """float32 [S, D, W] of a row's surfaces in voxels, NaN where there is none; raises StorageError."""
        place = storage.join(self.url, "heights", f"c.{row}.0.0.0")
        advice = f"remove {self.url}/height_rows/{row:06d}.json and run data_setup.prepare --heights"
        chunk = read_chunk(self._array, row, place, self.index.checksum[row], "heights", advice)
        return chunk[: len(self.names(row))]
