"""One volume as files of every kind that data_setup/readers/open_record.py opens, written by other
libraries.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import tifffile
import yaml
from PIL import Image

Triple = tuple[float, float, float]


def write_yaml(path: Path, **values: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values))
    return path


def anatomical_affine(spacing: Triple, downwards: bool = True) -> np.ndarray:
    """RAS affine of an array [W, H, D]: W grows to the left, H to posterior, D to inferior (or superior)."""
    d, h, w = spacing
    return np.array(
        [[-w, 0, 0, 10.0], [0, -h, 0, 20.0], [0, 0, -d if downwards else d, 30.0], [0, 0, 0, 1]], float
    )


def write_nifti(
    path: Path,
    voxels: np.ndarray,
    spacing: Triple,
    *,
    unit: str = "mm",
    affine: Any = "anatomical",
    **more: Any,
) -> Path:
    """voxels [D, H, W] as an array [W, H, D]; affine None: neither form is set."""
    if isinstance(affine, str):
        affine = anatomical_affine(spacing)
    image = more.get("kind", nib.Nifti1Image)(voxels.transpose(2, 1, 0), affine)
    image.header.set_zooms([spacing[2], spacing[1], spacing[0]])
    image.header.set_xyzt_units(unit)
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(image, path)
    return path


def write_tiff(path: Path, voxels: np.ndarray, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    tifffile.imwrite(path, voxels, **options)
    return path


def write_ome(path: Path, voxels: np.ndarray, spacing: Triple) -> Path:
    sizes = {f"PhysicalSize{a}": 1000 * s for a, s in zip("ZYX", spacing, strict=True)}
    units = {f"PhysicalSize{a}Unit": "\u00b5m" for a in "ZYX"}
    return write_tiff(path, voxels, ome=True, metadata={"axes": "ZYX", **sizes, **units})


def write_imagej(path: Path, voxels: np.ndarray, spacing: Triple) -> Path:
    d, h, w = spacing
    metadata = {"spacing": d, "unit": "mm", "axes": "ZYX"}
    return write_tiff(path, voxels, imagej=True, resolution=(1 / w, 1 / h), metadata=metadata)


def write_images(folder: Path, voxels: np.ndarray, suffix: str = "png", first: int = 0) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"oct_{first + i}.{suffix}" for i in range(len(voxels))]
    for path, plane in zip(paths, voxels, strict=True):
        Image.fromarray(plane).save(path)
    return paths


def write_folder(folder: Path, voxels: np.ndarray, **sidecar: Any) -> Path:
    write_images(folder, voxels)
    write_yaml(folder / "volume.yaml", **sidecar)
    return folder


def raster(
    count: int, step: float, width: float, angle: float = 0.0
) -> list[tuple[float, float, float, float]]:
    """(start x, start y, end x, end y) in mm of lines going down the localizer, turned by degrees."""
    turn = np.deg2rad(angle)
    along = np.array([np.cos(turn), np.sin(turn)])
    down = np.array([-np.sin(turn), np.cos(turn)])
    starts = [np.array([3.0, 3.0]) + i * step * down for i in range(count)]
    return [(*start, *(start + width * along)) for start in starts]


def write_heidelberg(
    path: Path,
    voxels: np.ndarray,
    spacing: Triple,
    *,
    lines: Sequence[tuple[float, float, float, float]] | None = None,
    laterality: str = "R",
    prolog: str = '<?xml version="1.0" encoding="utf-8"?>',
) -> Path:
    """HEDX export: a localizer, then the B-scans, with their images beside the XML."""
    d, h, w = spacing
    lines = lines or raster(len(voxels), d, w * voxels.shape[2])
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [_image_element("LOCALIZER", 0, "slo.tif", (64, 64), (0.1, 0.1), (0, 0, 6, 6))]
    for index, (plane, line) in enumerate(zip(voxels, lines, strict=True), start=1):
        name = f"{path.stem}_{index:03d}.tif"
        Image.fromarray(plane).save(path.parent / name)
        images.append(_image_element("OCT", index, f"C:\\export\\{name}", plane.shape, (h, w), line))
    body = f"""{prolog}
<HEDX><BODY><SWVersion><Name>HEYEX</Name><Version>6.9.53.0</Version></SWVersion><Patient><ID>1</ID>
<LastName>Secret</LastName><FirstNames>Name</FirstNames><Study><ID>1</ID>
<Series><ID>1</ID><Laterality>{laterality}</Laterality>{"".join(images)}</Series>
</Study></Patient></BODY></HEDX>"""
    path.write_text(body, encoding="utf-8")
    return path


def _image_element(
    kind: str, number: int, url: str, size: Sequence[int], scale: Sequence[float], line: Sequence[float]
) -> str:
    x0, y0, x1, y1 = (repr(float(v)) for v in line)
    return f"""<Image><ID>{number}</ID><ImageNumber>{number}</ImageNumber>
<ImageType><Type>{kind}</Type></ImageType>
<OphthalmicAcquisitionContext><Width>{size[1]}</Width><Height>{size[0]}</Height>
<ScaleX>{scale[1]!r}</ScaleX><ScaleY>{scale[0]!r}</ScaleY>
<Start><Coord><X>{x0}</X><Y>{y0}</Y></Coord></Start><End><Coord><X>{x1}</X><Y>{y1}</Y></Coord></End>
</OphthalmicAcquisitionContext><ImageData><ExamURL>{url}</ExamURL></ImageData></Image>"""
