"""One volume as files of every kind that data_setup/readers/open_record.py opens, written by other
libraries.
"""

import re
import zlib
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


def write_imagej(path: Path, voxels: np.ndarray, spacing: Triple, **options: Any) -> Path:
    d, h, w = spacing
    metadata = {"spacing": d, "unit": "mm", "axes": "ZYX"}
    return write_tiff(path, voxels, imagej=True, resolution=(1 / w, 1 / h), metadata=metadata, **options)


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


def write_heyex_series(path: Path, voxels: np.ndarray, spacing: Triple, side: str = "R") -> Path:
    """An export of HEYEX 6.12: a byte order mark, one line, Series as the root, names in brackets, JPEG."""
    d, h, w = spacing
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = raster(len(voxels), d, w * voxels.shape[2])[::-1]  # y falls
    images = []
    for number, line in enumerate([None, *lines]):
        kind, size, scale = (
            ("OCT", voxels.shape[1:], (h, w)) if number else ("LOCALIZER", (64, 64), (0.1, 0.1))
        )
        name, pixels = f"5DD3{number:04X}.jpg", voxels[number - 1] if number else np.zeros((64, 64), np.uint8)
        url = f"file:///\\\\server\\share$\\folder\\{name}"
        image = _image_element(kind, number, url, size, scale, line or (0, 0, 6, 6))
        images.append(image.replace("<ImageType>", f"<Laterality>{side}</Laterality><ImageType>"))
        colour = Image.fromarray(np.repeat(pixels[..., None], 3, axis=-1))
        colour.save(path.parent / f"{kind} {side} {number} [{name}].jpg", quality=95)
    text = f"<Series><ID>1</ID>{ETDRS}<NumImages>{len(images)}</NumImages>{''.join(images)}</Series>"
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "").encode())
    return path


def write_heyex_body(path: Path, voxels: np.ndarray, spacing: Triple, side: str = "L") -> Path:
    """An older export: BODY as the root, no type and no name of an image; LZW TIFF in a folder below."""
    d, h, w = spacing
    (path.parent / "volume1").mkdir(parents=True, exist_ok=True)
    localizer = _image_element("", 0, "", (768, 768), (0.01, 0.01), (0, 0, 6, 6))
    images = [re.sub(r"<Start>.*</End>", "", localizer, flags=re.DOTALL)]
    for number, line in enumerate(raster(len(voxels), d, w * voxels.shape[2])[::-1], start=1):
        images.append(_image_element("", number, "", voxels.shape[1:], (h, w), line))
        colour = Image.fromarray(np.repeat(voxels[number - 1][..., None], 3, axis=-1))
        colour.save(path.parent / "volume1" / f"{number}-Input.tif", compression="tiff_lzw")
    body = "".join(images).replace("<ImageType><Type></Type></ImageType>", "")
    body = re.sub(r"<ExamURL>.*?</ExamURL>", "<Extension>TIF</Extension>", body)
    path.write_text(
        f"<BODY><ExportType>Data</ExportType>\n<Patient><ID>7</ID><LastName>Secret</LastName><Study><Series>\n"
        f"<Laterality>{side}</Laterality><NumImages>{len(images)}</NumImages>{body}</Series></Study></Patient></BODY>"
    )
    return path


ETDRS = """<ThicknessGrid><Name>1, 3, 6 mm ETDRS</Name><TotalVolume>8.729</TotalVolume>
<Zone><Name>C0</Name><AvgThickness>0.319</AvgThickness><Volume>0.251</Volume>
<ValidPixelPercentage>100.000</ValidPixelPercentage></Zone>
<Zone><Name>S2</Name><AvgThickness>0.305</AvgThickness><Volume>1.617</Volume>
<ValidPixelPercentage>65.119</ValidPixelPercentage></Zone></ThicknessGrid>"""


def write_metaimage(
    path: Path, values: np.ndarray, spacing: Sequence[float], *, is_compressed: bool = False
) -> None:
    """[D, H, W] as x = W, y = H, z = D in the manner of ITK: .mha in one file, .mhd beside .raw or .zraw."""
    data = values.astype(values.dtype.newbyteorder("<")).tobytes()
    data = zlib.compress(data) if is_compressed else data
    raw = path.with_suffix(".zraw" if is_compressed else ".raw")
    is_local = path.suffix == ".mha"
    lines = ["ObjectType = Image", "NDims = 3", "BinaryData = True", "BinaryDataByteOrderMSB = False"]
    lines.append(f"CompressedData = {is_compressed}")
    lines += [f"CompressedDataSize = {len(data)}"] if is_compressed else []
    lines += ["TransformMatrix = 1 0 0 0 1 0 0 0 1", "Offset = 0 0 0", "CenterOfRotation = 0 0 0"]
    lines.append(f"ElementSpacing = {' '.join(map(str, spacing[::-1]))}")
    lines.append(f"DimSize = {' '.join(map(str, values.shape[::-1]))}")
    lines.append(f"ElementType = MET_{'UCHAR' if values.dtype == np.uint8 else 'USHORT'}")
    lines.append(f"ElementDataFile = {'LOCAL' if is_local else raw.name}\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("\n".join(lines).encode() + (data if is_local else b""))
    if not is_local:
        raw.write_bytes(data)
