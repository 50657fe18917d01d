"""What can lie on a store's volumes: its kinds, how they are written and read.

In: arrays of a row's volume, with what was measured. Out: the same by row.
heights/  float32 [N, S, D, W] in voxels along h, 0 the centre of the first; NaN: none. S: the most
          surfaces of a device, whose maps are its output, not truth
labels/   uint8 [N, D, H, W], a class for every voxel; 0: background, and everything outside the field
flow/     uint8 [N, D, H, W], 0 outside the field: a device's own number, which differs between scanners
enface/   uint8 [N, slab, D, W] in the order of SLABS; a slab that a row lacks is 0

Layout of a Kind under the store's URL, beside volumes/:
    ARRAY/                 a chunk a row, for each of its arrays
    ROWS/{row:06d}.json    what became of the row, written after its chunks: a row counts when this exists
    NAME.parquet           the same, compacted to its columns
    NAME_report.json       the summary of the last `data_setup.prepare` of its mode

A store without NAME.parquet has none.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import pandas as pd
import zarr

from data_setup.readers.heights import MAX_SURFACES
from data_setup.readers.octa import SLABS
from data_setup.store.format import KEPT, RowFiles, checksum, chunk_key, intact, write_table
from data_setup.store.writer import array_metadata
from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import UserError
from utils.storage.zarr_keys import ObjectStore

COLUMNS: dict[str, tuple[str, str]] = {  # name -> (pandas type, meaning)
    "row": ("int64", "of the store"),
    "status": ("str", "kept, or the reason why the file is not used"),
    "message": ("str", "the reason in one line"),
    "device": ("str", "device folder"),
    "protocol": ("str", "of the structural scan"),
    "path": ("str", "of the file relative to the source root"),
    "source_size": ("float64", "bytes of the file, or of all its images"),
    "source_version": ("str", "its ETag or modification time when it was read"),
    "source": ("str", "sizes and versions of all files when they were read: a digest"),
    "volume": ("str", "checksum of the volume that the file was laid on"),
    "surfaces": ("str", "names from the vitreous down, | between; their order is that of the array"),
    "notes": ("str", "oddities that do no harm, | between"),
    "map_d": ("float64", "B-scans of the map"),
    "map_w": ("float64", "A-scans of the map"),
    "flow_d": ("float64", "B-scans of the cube"),
    "flow_h": ("float64", "rows of the cube"),
    "flow_w": ("float64", "A-scans of the cube"),
    "reversed_d": ("bool", "the file's B-scans ran the other way than the scan's"),
    "edge": ("float64", "brightness step at the first surface, in standard deviations of the volume"),
    "edge_reversed": ("float64", "the same with the map's B-scans in reverse order"),
    "fit": ("float64", "correlation of flow with the structural volume inside the field"),
    "fit_reversed": ("float64", "the same with the cube's B-scans in reverse order"),
    "valid_share": ("float64", "share of the A-scans inside the field that have every surface"),
    "voxels": ("str", "class=count of the stored voxels, | between"),
    "cut_share": ("float64", "share of the labelled voxels of the file that lie outside the grid"),
    "slabs": ("str", "those that are stored, | between"),
    "left_out": ("str", "en-face images that are not used: number=reason, | between"),
    "checksum": ("str", "of what is stored: BLAKE2b, 16 bytes, hex"),
    "enface_checksum": ("str", "of the stored en-face images"),
}
UNIT = "flow as the device shows it, 0..255"
DEVICE_MAPS, OF_LABELS = "height maps of the device", "label_surfaces of the manifest"  # sources of heights


@dataclass(frozen=True)
class ArrayOf:
    """One array of a kind, a chunk a row."""

    name: str
    dims: tuple[str, ...]  # of a row
    dtype: str = "uint8"
    fill: float = 0
    attributes: Mapping[str, Any] = field(default_factory=dict)
    checksum: str = "checksum"  # its column

    def shape(self, image_size: tuple[int, int, int]) -> tuple[int, ...]:
        """Of a row on this grid."""
        lengths = dict(zip("dhw", image_size, strict=True)) | {"surface": MAX_SURFACES, "slab": len(SLABS)}
        return tuple(lengths[name] for name in self.dims)


@dataclass(frozen=True)
class Kind:
    """What can lie on volumes."""

    name: str  # of its table, its report, and the mode of data_setup.prepare
    what: str  # in errors
    rows: str  # the folder of the rows' JSON
    arrays: tuple[ArrayOf, ...]
    columns: str  # of COLUMNS
    names: str = ""  # the column that lists the planes of a row
    fixed: str = ""  # the attribute in which all rows of a store agree
    one: str = ""  # the same in words
    attributes_of: Callable[[pd.DataFrame], dict[str, Any]] | None = None  # of the array, from the kept rows


def _surface_attributes(kept: pd.DataFrame) -> dict[str, Any]:
    """What a reader of the array has to know: the surfaces of each device."""
    surfaces = {
        str(device): sorted({tuple(text.split("|")) for text in part.surfaces})
        for device, part in kept.groupby("device")
    }
    return {"unit": "voxels along h, 0 the centre of the first", "invalid": "NaN", "surfaces": surfaces}


HEIGHTS = Kind(
    name="heights",
    what="height maps",
    rows="height_rows",
    arrays=(ArrayOf("heights", ("surface", "d", "w"), "float32", float("nan"), {"source": DEVICE_MAPS}),),
    columns="row status message device protocol path source_size source_version volume surfaces notes map_d "
    "map_w reversed_d edge edge_reversed valid_share checksum",
    names="surfaces",
    fixed="source",
    one="heights of one source",
    attributes_of=_surface_attributes,
)
LABELS = Kind(
    name="labels",
    what="label volumes",
    rows="label_rows",
    arrays=(ArrayOf("labels", ("d", "h", "w")),),
    columns="row status message path source_size source_version volume voxels cut_share checksum",
    fixed="classes",
    one="one list of classes",
)
_OF_SLABS = {"unit": UNIT, "slabs": list(SLABS)}
FLOW = Kind(
    name="flow",
    what="flow cubes",
    rows="flow_rows",
    arrays=(
        ArrayOf("flow", ("d", "h", "w"), attributes={"unit": UNIT}),
        ArrayOf("enface", ("slab", "d", "w"), attributes=_OF_SLABS, checksum="enface_checksum"),
    ),
    columns="row status message device protocol path source volume flow_d flow_h flow_w reversed_d fit "
    "fit_reversed slabs left_out checksum enface_checksum",
    names="slabs",
)


@dataclass(frozen=True)
class SideWriter:
    """Writes a kind; small and picklable, so that every worker process has one."""

    kind: Kind
    url: str  # of the store
    options: StorageOptions | None = None

    def is_there(self) -> bool:
        return self._has(self.kind.arrays[0])

    def attributes(self) -> dict[str, Any]:
        """Of the first array, which is there."""
        first = self.kind.arrays[0]
        return {**first.attributes, **self._array(first).attrs}

    def create(self, num_rows: int, image_size: tuple[int, int, int], **attributes: Any) -> None:
        """Make the arrays or give them `num_rows` rows; UserError of another source or `attributes`."""
        fixed = self.kind.fixed
        if fixed and self.is_there():
            given = {**self.kind.arrays[0].attributes, **attributes}[fixed]
            if (stored := self.attributes()[fixed]) != given:
                raise UserError(
                    f"{self.url}: {self.kind.name}: expected the {fixed} {stored} of the store, found "
                    f"{given}; one store has {self.kind.one}: prepare into another data.store"
                )
        for one in self.kind.arrays:
            if not self._has(one):
                shape, of_all = (num_rows, *one.shape(image_size)), {**one.attributes, **attributes}
                more = {"dtype": one.dtype, "fill_value": one.fill, "attributes": of_all}
                files = array_metadata(one.name, shape, one.dims, "shuffle", **more)
                name = f"{one.name}/zarr.json"
                storage.write_bytes(storage.join(self.url, name), files[name], self.options)
            elif (array := self._array(one)).shape[0] < num_rows:
                array.resize((num_rows, *array.shape[1:]))

    def _has(self, one: ArrayOf) -> bool:
        return storage.exists(storage.join(self.url, one.name, "zarr.json"), self.options)

    def _array(self, one: ArrayOf) -> zarr.Array:
        return _open_array(self.url, one, self.options, read_only=False)

    def write_row(self, row: int, values: Sequence[np.ndarray] | None, fields: Mapping[str, Any]) -> None:
        """Write a chunk of each array (None: not used), filled up to its size, then the row's JSON."""
        own = dict(fields)
        if values is not None:
            for one, value in zip(self.kind.arrays, values, strict=True):
                array = self._array(one)
                chunk = np.full(array.shape[1:], one.fill, one.dtype)
                chunk[: len(value)] = value
                array[row] = chunk
                own[one.checksum] = checksum(chunk)
        self.rows.write(row, own)

    @property
    def rows(self) -> RowFiles:
        return RowFiles(storage.join(self.url, self.kind.rows), self.options)

    def finalise(self, rows: Sequence[int]) -> pd.DataFrame:
        """Compact the JSON of `rows` to NAME.parquet."""
        written = self.rows.read()
        types = {name: COLUMNS[name][0] for name in self.kind.columns.split()}
        table = [{"reversed_d": False, **written[row], "row": row} for row in sorted(rows) if row in written]
        index = pd.DataFrame(table, columns=list(types)).astype(types)
        if self.kind.attributes_of is not None:
            attributes = self.kind.attributes_of(index[index.status == KEPT])
            self._array(self.kind.arrays[0]).update_attributes(attributes)
        return write_table(storage.join(self.url, f"{self.kind.name}.parquet"), index, self.options)

    def empty(self) -> list[str]:
        """Empty the table where no line of a manifest names a file any more; what was done, in words. The
        arrays stay, so that files that come back are not read again.
        """
        if not (self.is_there() and self.rows.read()):
            return []
        self.finalise([])
        return [f"{self.kind.name}.parquet of the store: emptied, no line of the manifest names any"]


class Stored:
    """A kind of a store for reading; picklable."""

    KIND: ClassVar[Kind]

    def __init__(self, url: str, options: StorageOptions | None, index: pd.DataFrame) -> None:
        self.url, self.options = url, options
        self.index = index  # the kind's columns of the kept rows; label = row

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_arrays"}

    @classmethod
    def open(cls, url: str, options: StorageOptions | None = None) -> Self:
        """Raises UserError where the store has none."""
        kind, name = cls.KIND, f"{cls.KIND.name}.parquet"
        index_url, command = storage.join(url, name), f"run data_setup.prepare --{cls.KIND.name}"
        try:
            data = storage.read_bytes(index_url, options)
        except storage.StorageNotFoundError as error:
            expected = f"expected {kind.what} in the store, found no {name}"
            raise UserError(f"{url}: {expected}; {command}") from error
        with intact(index_url, f"{command} again, which writes it"):
            index = pd.read_parquet(io.BytesIO(data))[kind.columns.split()]
        return cls(url, options, index[index.status == KEPT].set_index("row", drop=False).rename_axis(None))

    @cached_property
    def _arrays(self) -> list[zarr.Array]:
        return [_open_array(self.url, one, self.options, read_only=True) for one in self.KIND.arrays]

    def names(self, row: int) -> tuple[str, ...]:
        """The surfaces or slabs that a row has, from the vitreous down."""
        return tuple(name for name in str(self.index[self.KIND.names][row]).split("|") if name)

    def read(self, row: int) -> np.ndarray:
        """The chunk of a row; raises StorageError."""
        return self._chunk(row, 0)

    def _chunk(self, row: int, number: int) -> np.ndarray:
        """A row's chunk of the array of this number, whose checksum is compared; raises StorageError."""
        one = self.KIND.arrays[number]
        place = chunk_key(row, storage.join(self.url, one.name))
        json_url = f"{self.url}/{self.KIND.rows}/{row:06d}.json"
        advice = f"remove {json_url} and run data_setup.prepare --{self.KIND.name}"
        try:
            chunk = np.asarray(self._arrays[number][row])
        except (RuntimeError, ValueError) as error:  # of the codec
            problem = f"expected the {one.name} of row {row}, found {error}; {advice}"
            raise storage.StorageError(place, problem) from error
        if checksum(chunk) != self.index[one.checksum][row]:
            raise storage.StorageError(place, f"expected the {one.name} of row {row}, found others; {advice}")
        return chunk


class StoredHeights(Stored):
    """Height maps: float32 [S, D, W] in voxels, NaN where there is none."""

    KIND = HEIGHTS

    @property
    def source(self) -> str:
        """DEVICE_MAPS or OF_LABELS: who drew them."""
        return str(self._arrays[0].attrs.get("source", DEVICE_MAPS))

    def read(self, row: int) -> np.ndarray:
        """Of the row's own surfaces; raises StorageError."""
        return super().read(row)[: len(self.names(row))]


class StoredLabels(Stored):
    """Label volumes: uint8 [D, H, W]."""

    KIND = LABELS

    @property
    def classes(self) -> dict[int, str]:
        """value -> name, without the background."""
        stored: Any = self._arrays[0].attrs["classes"]
        return {int(value): str(name) for value, name in stored.items()}

    def counts(self, row: int) -> dict[int, int]:
        """value -> stored voxels of a row, without the background."""
        return parse_counts(str(self.index.voxels[row]))


class StoredFlow(Stored):
    """Flow: uint8 [D, H, W] of a cube, and its en-face images."""

    KIND = FLOW

    def read_slabs(self, row: int) -> dict[str, np.ndarray]:
        """Slab -> uint8 [D, W] of a row; raises StorageError."""
        chunk = self._chunk(row, 1)
        return {name: chunk[SLABS.index(name)] for name in self.names(row)}


def counts_text(labels_DHW: np.ndarray, classes: Mapping[int, str]) -> str:
    """`1=20|2=0`: the voxels of each class."""
    counts = np.bincount(labels_DHW.ravel(), minlength=256)
    return "|".join(f"{value}={counts[value]}" for value in sorted(classes))


def parse_counts(text: str) -> dict[int, int]:
    """What `counts_text` wrote."""
    return {int(value): int(count) for value, count in (part.split("=") for part in text.split("|"))}


def _open_array(url: str, one: ArrayOf, options: StorageOptions | None, read_only: bool) -> zarr.Array:
    """The array of a store; raises UserError for damaged metadata."""
    keys = ObjectStore(url, options, read_only=read_only)
    with intact(storage.join(url, one.name, "zarr.json")):
        return zarr.open_array(keys, path=one.name, mode="r" if read_only else "r+", zarr_format=3)
