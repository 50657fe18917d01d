"""Small eyes for imitations: the phantom's anatomy, so that layers, lesions and classes mean something.

In: what is wrong with an eye, and its number. Out: voxels, surfaces and lesions of the phantom at SHAPE; and
writers of the files that the sets come in. An imitation has fewer and larger voxels than its set:
`write_spacing` says so in a volume.yaml at its root.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from data_setup.phantom.anatomy import SURFACES, make_eye
from data_setup.phantom.cohort import draw_factors
from data_setup.phantom.files import write_file
from data_setup.phantom.render import LESIONS, render
from data_setup.protocols import BY_NAME
from data_setup.readers.sidecar import FOLDER_SIDECAR

SHAPE = (5, 44, 32)
SPACING_MM = (0.6, 0.049, 0.19)
_PROTOCOL = BY_NAME["maestro2_macula_6x6_octa_oct"]
_NOTHING: dict[str, Any] = {"drusen_rate": 0.0, "cyst_rate": 0.0, "foci_rate": 0.0, "srf_probability": 0.0}
KINDS: dict[str, dict[str, Any]] = {  # what is wrong -> factors of the phantom's eye
    "normal": {},
    "drusen": {"drusen_rate": 25.0},
    "fluid": {"cyst_rate": 10.0, "srf_probability": 1.0, "drusen_rate": 6.0},
}


@dataclass(frozen=True)
class Eye:
    """One eye in file order: superior to inferior."""

    voxels: np.ndarray  # uint8 [D, H, W]
    surfaces: Mapping[str, np.ndarray]  # name of the phantom -> float32 [D, W], rows
    lesions: Mapping[str, np.ndarray]  # name of the phantom -> bool [D, H, W]
    laterality: str
    age: int


@lru_cache(maxsize=64)
def eye(kind: str, number: int) -> Eye:
    """The eye of a kind out of KINDS; a pure function of its arguments."""
    seed = [list(KINDS).index(kind), number]
    rng = np.random.default_rng(seed)
    factors = replace(draw_factors(0, rng), **(_NOTHING | KINDS[kind]))
    side = "RL"[number % 2]
    scan = render(make_eye(factors, rng), _PROTOCOL, SHAPE, SPACING_MM, side, seed)
    surfaces = dict(zip(SURFACES, scan.surfaces, strict=True))
    lesions = {name: scan.lesions == value for value, name in enumerate(LESIONS)}
    return Eye(scan.voxels, surfaces, lesions, side, factors.age)


def layers(one: Eye) -> dict[str, np.ndarray]:
    """{upper surface: bool [D, H, W]} of what lies between neighbouring surfaces, and all of the retina."""
    rows = np.arange(SHAPE[1])[None, :, None]

    def between(upper: str, lower: str) -> np.ndarray:
        return (rows >= one.surfaces[upper][:, None]) & (rows < one.surfaces[lower][:, None])

    names = list(one.surfaces)
    return {"retina": between("ILM", "BM")} | {pair[0]: between(*pair) for pair in pairwise(names)}


def write_spacing(root: Path) -> None:
    """volume.yaml: the spacing of every imitated volume below."""
    text = yaml.safe_dump({"spacing_mm": list(SPACING_MM)}, default_flow_style=None)
    write_file(
        root / FOLDER_SIDECAR, f"# an imitation: fewer and larger voxels than in the set\n{text}".encode()
    )


def write_image(path: Path, pixels: np.ndarray) -> None:
    """uint8 [H, W] or [H, W, 3] in the kind of the path's ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write_mat(path: Path, **arrays: Any) -> None:
    """A MATLAB file, version 5."""
    from scipy.io import savemat

    buffer = io.BytesIO()
    savemat(buffer, arrays, do_compression=True)
    write_file(path, buffer.getvalue())


def write_npz(path: Path, **arrays: Any) -> None:
    """A compressed archive of arrays."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=True, **arrays)
    write_file(path, buffer.getvalue())


def write_mhd(path: Path, voxels: np.ndarray) -> None:
    """voxels [D, H, W] as x = W, y = H, z = D, in a .mhd and its .raw."""
    d, h, w = voxels.shape
    lengths = " ".join(f"{s:g}" for s in reversed(SPACING_MM))
    kind = {"uint8": "MET_UCHAR", "uint16": "MET_USHORT"}[voxels.dtype.name]
    raw = path.with_suffix(".raw")
    lines = [
        "ObjectType = Image",
        "NDims = 3",
        "BinaryData = True",
        "BinaryDataByteOrderMSB = False",
        "CompressedData = False",
        f"ElementSpacing = {lengths}",
        f"DimSize = {w} {h} {d}",
        f"ElementType = {kind}",
        f"ElementDataFile = {raw.name}",
    ]
    write_file(path, ("\n".join(lines) + "\n").encode())
    write_file(raw, voxels.astype(voxels.dtype.newbyteorder("<")).tobytes())


def write_xlsx(path: Path, rows: list[dict[str, Any]]) -> None:
    """A sheet with a header line; needs openpyxl."""
    import pandas as pd

    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_excel(path, index=False)
