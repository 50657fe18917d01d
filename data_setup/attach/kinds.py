"""The kinds of what can lie on a store's volumes: their arrays, and the columns of their tables.

heights/  float32 [N, S, D, W] in voxels along h, 0 the centre of the first; NaN: none. S: the most
          surfaces of a device, whose maps are its output, not truth
labels/   uint8 [N, D, H, W], a class for every voxel; 0: background, and everything outside the field
flow/     uint8 [N, D, H, W], 0 outside the field: a device's own number, which differs between scanners
enface/   uint8 [N, slab, D, W] in the order of SLABS; a slab that a row lacks is 0
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from data_setup.readers.heights import MAX_SURFACES
from data_setup.readers.octa import SLABS

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
