"""Flow of a store: OCTA cubes and en-face images of its volumes, on the volumes' own grid.

In: flow of a row's volume, with what was measured. Out: the same by row. Layout under the store's URL:
    flow/                    uint8 [N, D, H, W]; 0 outside the acquired field
    enface/                  uint8 [N, slab, D, W] in the order of SLABS; a slab that a row lacks is 0
                             attributes of both: unit; of enface: slabs
    flow_rows/{row:06d}.json what became of the row's cube, written after both chunks
    flow.parquet             the same, compacted: FLOW_COLUMNS
    flow_report.json         the summary of the last `data_setup.prepare --flow`

Flow is a device's own number: scanners, and versions of their software, differ. A store without flow.parquet
has none.
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

from data_setup.readers.octa import SLABS
from data_setup.store.format import checksum
from data_setup.store.side_array import SideWriter, open_array, read_chunk, read_kept
from utils import storage
from utils.config.schema import StorageOptions

UNIT = "flow as the device shows it, 0..255"
FLOW_COLUMNS: dict[str, tuple[str, str]] = {
    "row": ("int64", "of the store"),
    "status": ("str", "kept, or the reason why the cube is not used"),
    "message": ("str", "the reason in one line"),
    "device": ("str", "device folder"),
    "protocol": ("str", "of the structural scan"),
    "path": ("str", "the cube's file relative to the source root"),
    "source": ("str", "sizes and versions of all files when they were read: a digest"),
    "volume": ("str", "checksum of the volume that the cube was laid on"),
    "flow_d": ("float64", "B-scans of the cube"),
    "flow_h": ("float64", "rows of the cube"),
    "flow_w": ("float64", "A-scans of the cube"),
    "reversed_d": ("bool", "the cube's B-scans ran the other way than the scan's"),
    "fit": ("float64", "correlation of flow with the structural volume inside the field"),
    "fit_reversed": ("float64", "the same with the cube's B-scans in reverse order"),
    "slabs": ("str", "those that are stored, | between"),
    "left_out": ("str", "en-face images that are not used: number=reason, | between"),
    "checksum": ("str", "of the stored flow: BLAKE2b, 16 bytes, hex"),
    "enface_checksum": ("str", "of the stored en-face images"),
}


@dataclass(frozen=True)
class EnFaceWriter(SideWriter):
    """The array of slabs; its rows' JSON is that of FlowWriter."""

    NAME = "enface"
    ROWS = "flow_rows"


@dataclass(frozen=True)
class FlowWriter(SideWriter):
    """Writes flow cubes and slabs; small and picklable, so that every worker process has one."""

    NAME = "flow"
    ROWS = "flow_rows"

    @property
    def slabs(self) -> EnFaceWriter:
        return EnFaceWriter(self.url, self.options)

    def create(self, num_rows: int, image_size: tuple[int, int, int]) -> None:
        """Make both arrays, or give those here `num_rows` rows."""
        d, _, w = image_size
        of_slabs = {"unit": UNIT, "slabs": list(SLABS)}
        for writer, shape, names, attributes in (
            (self, image_size, ("row", "d", "h", "w"), {"unit": UNIT}),
            (self.slabs, (len(SLABS), d, w), ("row", "slab", "d", "w"), of_slabs),
        ):
            if writer.is_there():
                writer.grow(num_rows)
                continue
            writer.make(
                shape=(num_rows, *shape),
                dtype="uint8",
                fill_value=0,
                dimension_names=names,
                attributes=attributes,
            )

    def write_row(
        self, row: int, flow: tuple[np.ndarray, np.ndarray] | None, fields: Mapping[str, Any]
    ) -> None:
        """Write the chunks of (cube, slabs) (None: a cube that is not used), then the row's JSON."""
        own = dict(fields)
        if flow is not None:
            self.array()[row], self.slabs.array()[row] = flow
            own["checksum"], own["enface_checksum"] = map(checksum, flow)
        self.write_fields(row, own)

    def finalise(self, rows: Sequence[int]) -> pd.DataFrame:
        """Compact the JSON of `rows` to flow.parquet."""
        written = self.read_rows()
        types = {name: kind for name, (kind, _) in FLOW_COLUMNS.items()}
        table = [{"reversed_d": False, **written[row], "row": row} for row in sorted(rows) if row in written]
        index = pd.DataFrame(table, columns=list(types)).astype(types)
        buffer = io.BytesIO()
        index.to_parquet(buffer, index=False)
        storage.write_bytes(storage.join(self.url, "flow.parquet"), buffer.getvalue(), self.options)
        return index


class StoredFlow:
    """The flow of a store for reading; picklable."""

    def __init__(self, url: str, options: StorageOptions | None, index: pd.DataFrame) -> None:
        self.url, self.options = url, options
        self.index = index  # FLOW_COLUMNS of the kept cubes; label = row

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    @classmethod
    def open(cls, url: str, options: StorageOptions | None = None) -> StoredFlow:
        """Raises UserError where the store has no flow."""
        index = read_kept(url, "flow", FLOW_COLUMNS, "flow cubes", "--flow", options)
        return cls(url, options, index)

    def slabs(self, row: int) -> tuple[str, ...]:
        """The slabs that a row has, from the vitreous down."""
        return tuple(name for name in str(self.index.slabs[row]).split("|") if name)

    @cached_property
    def _cubes(self) -> zarr.Array:
        return open_array(self.url, "flow", self.options, read_only=True)

    @cached_property
    def _enface(self) -> zarr.Array:
        return open_array(self.url, "enface", self.options, read_only=True)

    def read(self, row: int) -> np.ndarray:
        """uint8 [D, H, W] of a row; raises StorageError."""
        return self._chunk(self._cubes, "flow", f"c.{row}.0.0.0", row, self.index.checksum[row])

    def read_slabs(self, row: int) -> dict[str, np.ndarray]:
        """Slab -> uint8 [D, W] of a row; raises StorageError."""
        expected = self.index.enface_checksum[row]
        chunk = self._chunk(self._enface, "enface", f"c.{row}.0.0.0", row, expected)
        return {name: chunk[SLABS.index(name)] for name in self.slabs(row)}

    def _chunk(self, array: zarr.Array, name: str, key: str, row: int, expected: str) -> np.ndarray:
        place = storage.join(self.url, name, key)
        advice = f"remove {self.url}/flow_rows/{row:06d}.json and run data_setup.prepare --flow"
        return read_chunk(array, row, place, expected, name, advice)
