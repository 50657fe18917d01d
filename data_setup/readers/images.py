"""Multi-page TIFF, and folders of B-scan images with a volume.yaml, as an OCT volume.

Each page or image is a B-scan. Rows go from vitreous to choroid (H), columns along the B-scan (W). The
spacing comes from the YAML, or from the metadata of OME-TIFF or ImageJ. The one number that differs in their
names, wherever it is, orders the images of a folder, without a gap.
"""

import fnmatch
import io
import math
import re
import struct
from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy as np
from defusedxml import ElementTree
from PIL import Image, ImageOps, TiffImagePlugin
from tifffile import TiffFile, TiffTags

from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.sidecar import (
    FOLDER_SIDECAR,
    Sidecar,
    check_length,
    checked_frames,
    make_header,
    reading,
)
from utils.config.schema import StorageOptions
from utils.storage import join, list_names, read_bytes

MAX_PIXELS = 2**26  # of one B-scan; checked before it is decoded
_FORMATS = {".png": "PNG", ".tif": "TIFF", ".tiff": "TIFF", ".bmp": "BMP", ".jpg": "JPEG", ".jpeg": "JPEG"}
_MODES = {"L": "u1", "I;16": "u2", "I;16L": "u2", "I;16B": "u2", "I": "i4", "F": "f4"}
_MM = {
    **dict.fromkeys(("mm", "millimeter", "millimeters"), 1.0),
    **dict.fromkeys(("um", "\u00b5m", "\u03bcm", "\\u00b5m", "micron", "microns", "micrometer"), 1e-3),
    **dict.fromkeys(("nm", "nanometer"), 1e-6),
    **dict.fromkeys(("cm", "centimeter"), 10.0),
    **dict.fromkeys(("inch",), 25.4),
    **dict.fromkeys(("m", "meter"), 1e3),
}
_NEARLY = 0.05  # of the brightest value, of the pixels of a column, of the columns of a B-scan
_LOCALIZER = 0.15  # of the width, at least, is a localizer
_UNITS = ("unit", "xunit", "yunit", "zunit")
_IMAGEJ = (*_UNITS, "spacing", "images", "channels", "slices", "frames")  # what is read of its description
_ONE_VOLUME = "one image of one channel and one time, a slice a page"
_PLANES = "every plane of TiffData once, in the order of the pages"
_PHOTOMETRIC, _ORIENTATION = 262, 274  # TIFF tags
_COLOURS = ("RGB", "P", "RGBA", "LA", "PA")  # grey where their channels are equal and nothing is transparent


def read_tiff(file: IO[bytes], url: str, sidecar: Sidecar) -> Iterator[Any]:
    """The header, then uint8 frames [H, W] in the order of the pages; raises OCTReadError."""
    with reading(url, RejectReason.CORRUPT_FILE, "a TIFF file"):
        tiff = TiffFile(file, is_lsm=False, is_scanimage=False)  # their pages are not in the file's own chain
        if tiff.is_bigtiff and tiff.byteorder == ">":  # Pillow cannot decode it
            expected, actual = "TIFF, or BigTIFF little-endian", "BigTIFF with big-endian numbers"
            raise OCTReadError(url, RejectReason.UNSUPPORTED_FORMAT, expected, actual)
        numbers = _pages(tiff)
        pages = len(numbers)
        file.seek(0)
        image = Image.open(file, formats=("TIFF",))
        image.seek(numbers[0] if len(tiff.pages) > 1 else 0)
    first = pixels_of(image, url, f"page 1 of {pages}")
    check_length(pages * first.nbytes, url)
    with reading(url, RejectReason.CORRUPT_FILE, "the metadata of its TIFF tags"):
        spacing, source, described = _tiff_spacing(tiff, (pages, *first.shape), url)
    if described not in (None, pages):
        raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, f"{described} pages (metadata)", pages)
    header = make_header(url, "TIFF", (pages, *first.shape), first.dtype, (spacing, source), sidecar)
    yield header
    in_one = pages > 1 == len(tiff.pages)
    frames = _slices_behind(file, tiff, pages, url) if in_one else _decoded_pages(image, numbers, url)
    yield from checked_frames(frames, header)


def read_folder(url: str, sidecar: Sidecar, options: StorageOptions | None) -> Iterator[Any]:
    """The header, then uint8 frames [H, W] by number; raises OCTReadError."""
    urls = [join(url, name) for name in ordered_images(list_names(url, options), sidecar, url)]
    first = next(iter_images(urls, url, options, sidecar.columns))
    spacing = (None, f"no {FOLDER_SIDECAR} with one")
    header = make_header(url, "images", (len(urls), *first.shape), first.dtype, spacing, sidecar)
    yield header
    yield from checked_frames(iter_images(urls, url, options, sidecar.columns), header)


def ordered_images(names: Sequence[str], sidecar: Sidecar, url: str) -> list[str]:
    """The B-scan images of a folder by the one number that differs in their names; raises OCTReadError."""
    images = [n for n in names if is_image(n)]
    if sidecar.files is not None:
        images = fnmatch.filter(images, sidecar.files)
    if len(images) < 2:
        expected = f"two B-scan images or more ({', '.join(_FORMATS)})"
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, expected, len(images))
    numbers = differing_numbers(images)
    if numbers is None:
        expected = f"names that differ in one number; or files: PATTERN in {FOLDER_SIDECAR}"
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, expected, "other images among them")
    by_number = dict(zip(numbers, images, strict=True))
    low, high = min(by_number), max(by_number)
    if not len(by_number) == len(images) == high - low + 1:
        expected, actual = f"B-scans {low} to {high} without a gap", f"{len(by_number)} numbers"
        raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, expected, actual)
    return [by_number[number] for number in range(low, high + 1)]


def is_image(name: str) -> bool:
    """Whether the ending is that of an image, and the file no hidden one."""
    return _suffix(name) in _FORMATS and not name.startswith(".")


def differing_numbers(names: Sequence[str]) -> list[int] | None:
    """The number of each name, at the one place where they differ; None where they differ elsewhere too. What
    is in brackets is left out: Heidelberg writes the name of its file there.
    """
    parts = [re.split(r"(\d+)", re.sub(r"\[[^\]]*\]", "", name)) for name in names]
    texts = {(*part[:-1:2], part[-1].lower()) for part in parts}  # the ending in any case
    if len(texts) != 1:
        return None
    columns = list(zip(*([int(number) for number in part[1::2]] for part in parts), strict=True))
    differing = [column for column in columns if len(set(column)) > 1]
    return list(differing[0]) if len(differing) == 1 else None


def iter_images(
    urls: Sequence[str], url: str, options: StorageOptions | None, columns: tuple[float, float] | None = None
) -> Iterator[np.ndarray]:
    """Stored values [H, W] of each image, or of `columns`, a share of its width; `url` is the volume's."""
    turns: set[int] = set()
    for index, image_url in enumerate(urls, start=1):
        where, kind = f"image {index} of {len(urls)}", _FORMATS.get(_suffix(image_url))
        data = read_bytes(image_url, options)
        with reading(url, RejectReason.CORRUPT_FILE, f"{where} to be an image"):
            image = Image.open(io.BytesIO(data), formats=tuple(set(_FORMATS.values())))
            frames = int(getattr(image, "n_frames", 1))
            if frames > 1 and image.format == "TIFF":
                numbers = _pages(TiffFile(io.BytesIO(data), is_lsm=False, is_scanimage=False))
                frames = len(numbers)
                image.seek(numbers[0])
        if image.format != kind:
            expected = f"{where}: {kind}, as its name says"
            raise OCTReadError(url, RejectReason.WRONG_KIND, expected, image.format)
        if frames != 1:
            raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, f"{where}: one image", frames)
        yield pixels_of(image, url, where, columns, turns)


def turn_of(image: Image.Image) -> int:
    """The image's orientation by EXIF, 1 to 8; 1 where it has none. A PNG is decoded for that."""
    turn = image.getexif().get(_ORIENTATION, 1)
    return turn if turn in range(1, 9) else 1


def upright(image: Image.Image) -> Image.Image:
    """The image as a viewer shows it; of a TIFF Pillow's decoder turns the pixels itself."""
    is_turned = not isinstance(image, TiffImagePlugin.TiffImageFile) and turn_of(image) != 1
    return ImageOps.exif_transpose(image) if is_turned else image


def pixels_of(
    image: Image.Image,
    url: str,
    where: str,
    columns: tuple[float, float] | None = None,
    turns: set[int] | None = None,
) -> np.ndarray:
    """Stored values [H, W] upright, uint8, uint16, int32 or float32; raises OCTReadError for colour, say.

    `columns`: the share of the width that is looked at, from and to. `turns`: the orientations of the images
    before this one, which takes up its own; two are a reject.
    """
    tags = image.tag_v2 if isinstance(image, TiffImagePlugin.TiffImageFile) else {}
    limits = {
        f"up to {MAX_PIXELS} pixels": image.width * image.height <= MAX_PIXELS,
        "one grey value a pixel": image.mode in (*_MODES, *_COLOURS),
        # Pillow swaps rows and columns for the others, and the spacing would not follow.
        "Orientation 1 to 4, rows as rows": tags.get(_ORIENTATION, 1) in range(1, 5),
        # Pillow inverts 8 bits alone.
        "black is 0 in more than 8 bits": tags.get(_PHOTOMETRIC) != 0 or image.mode == "L",
    }
    for expected in (text for text, is_right in limits.items() if not is_right):
        actual = f"another image ({image.width} x {image.height}, {image.mode}) in {where}"
        raise OCTReadError(url, RejectReason.UNSUPPORTED_PIXELS, expected, actual)
    with reading(url, RejectReason.CORRUPT_PIXEL_DATA, f"{where} to decode"):
        turn = tags.get(_ORIENTATION, 1) if tags else turn_of(image)
        if turns is not None and turns | {turn} != {turn}:
            expected = f"one orientation of all B-scans (EXIF), {min(turns)}"
            raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, f"{turn} in {where}")
        (turns if turns is not None else set()).add(turn)
        image = upright(image)
        if columns is not None:
            first, last = (round(share * image.width) for share in columns)
            image = image.crop((first, 0, last, image.height))
        if image.mode in _MODES:
            return np.asarray(image).astype(_MODES[image.mode], copy=False)
        colours = np.asarray(image.convert("RGBA" if image.mode.endswith("A") else "RGB"))
    is_grey = (colours[..., :3] == colours[..., :1]).all()
    if not is_grey or colours[..., 3:].min(initial=255) < 255:  # three equal channels are grey
        actual = f"{'transparent pixels' if is_grey else 'colour'} in {where}"
        raise OCTReadError(url, RejectReason.UNSUPPORTED_PIXELS, "one grey value a pixel", actual)
    return np.ascontiguousarray(colours[..., 0])


def moving_columns(
    urls: Sequence[str], url: str, options: StorageOptions | None
) -> tuple[float, float] | None:
    """(from, to) in shares of the width that differ between images which are else alike: the B-scan beside a
    localizer; None where there is none. Three images are read; raises OCTReadError, StorageError.
    """
    some = [urls[0], urls[len(urls) // 2], urls[-1]]
    images = [image.astype(float) for image in iter_images(some, url, options)]
    if len({image.shape for image in images}) > 1:
        return None
    top = max(float(image.max()) for image in images) or 1.0
    same = np.all([np.abs(image - images[0]) <= _NEARLY * top for image in images[1:]], axis=0)
    is_still = same.mean(axis=0) >= 1 - _NEARLY
    width = len(is_still)
    first, last = (int(is_still[::step].argmin()) for step in (1, -1))
    ends = slice(first, width - last)
    still = np.delete(images[0], np.arange(width)[ends], axis=1)
    is_picture = still.size and still.std() > _NEARLY * top
    if max(first, last) < _LOCALIZER * width or is_still.all() or is_still[ends].mean() > _NEARLY:
        return None
    return (first / width, 1 - last / width) if is_picture else None


def count_pages(file: IO[bytes], url: str) -> int:
    """The number of pages of a TIFF file, without its pixels; raises OCTReadError."""
    with reading(url, RejectReason.CORRUPT_FILE, "a TIFF file"):
        return len(_pages(TiffFile(file, is_lsm=False, is_scanimage=False)))


def _pages(tiff: TiffFile) -> Sequence[int]:
    """The numbers of the pages from 0, but of thumbnails (NewSubfileType 1) beside them; raises for a cut
    chain, which tifffile and Pillow take for its end, and a loop.
    """
    offsets, full, last = set(), [], tiff.pages.first.offset
    for number, page in enumerate(tiff.pages):
        last = page.offset
        if last in offsets:
            raise ValueError("a loop in the chain of pages")
        offsets.add(last)
        full += [number] * (not getattr(page, "subfiletype", 0) & 1)
    layout, file = tiff.tiff, tiff.filehandle
    if len(offsets) == 1 and tiff.imagej_metadata is not None:  # all slices behind one directory
        return range(max(1, int(tiff.imagej_metadata.get("images", 1))))
    file.seek(last)
    tags = struct.unpack(layout.tagnoformat, file.read(layout.tagnosize))[0]
    file.seek(tags * layout.tagsize, 1)
    if struct.unpack(layout.offsetformat, file.read(layout.offsetsize)) != (0,):
        raise ValueError("a last page that names another one")
    return full or range(len(offsets))


def _decoded_pages(image: Image.Image, numbers: Sequence[int], url: str) -> Iterator[np.ndarray]:
    turns: set[int] = set()
    for index, number in enumerate(numbers, start=1):
        with reading(url, RejectReason.CORRUPT_FILE, f"page {index} of {len(numbers)}"):
            image.seek(number)
        yield pixels_of(image, url, f"page {index} of {len(numbers)}", turns=turns)


def _slices_behind(file: IO[bytes], tiff: TiffFile, count: int, url: str) -> Iterator[np.ndarray]:
    """Stored values [H, W] of an ImageJ stack of one directory, whose slices follow the first one."""
    page = tiff.pages.first
    plain = page.compression == 1 and page.samplesperpixel == 1 and page.photometric == 1
    tags = {tag.code for tag in page.tags}
    if not (plain and page.is_contiguous and page.dtype is not None and _ORIENTATION not in tags):
        expected = "an ImageJ stack of one directory with plain grey slices, upright"
        raise OCTReadError(url, RejectReason.UNSUPPORTED_FORMAT, expected, "another")
    dtype, start = page.dtype.newbyteorder(tiff.byteorder), page.dataoffsets[0]
    length = math.prod(page.shape) * dtype.itemsize
    if start + count * length > (size := file.seek(0, 2)):
        expected = f"{count} slices (metadata), {start + count * length} bytes"
        raise OCTReadError(url, RejectReason.TRUNCATED_PIXEL_DATA, expected, size)
    for index in range(count):
        file.seek(start + index * length)
        frame = np.frombuffer(file.read(length), dtype).reshape(page.shape)
        yield frame.astype(dtype.newbyteorder("="))


def _tiff_spacing(
    tiff: TiffFile, size: tuple[int, ...], url: str
) -> tuple[list[float] | None, str, int | None]:
    """((D, H, W) mm or None, source or why there is none, number of B-scans in the metadata)."""
    if tiff.imagej_metadata is not None:
        _check_once(tiff.pages.first.description, url)
        return _imagej_spacing(tiff.imagej_metadata, tiff.pages.first.tags, url)
    text = tiff.pages.first.description
    if text.lstrip().startswith("<") and "OME" in text[:2000]:  # tiff.is_ome looks at the end alone
        return _ome_spacing(text, size, url)
    return None, "no OME or ImageJ metadata", None


def _ome_spacing(text: str, size: tuple[int, ...], url: str) -> tuple[list[float] | None, str, int | None]:
    pixels = [e for e in ElementTree.fromstring(text.encode()).iter() if e.tag.endswith("}Pixels")]
    if len(pixels) != 1:
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, _ONE_VOLUME, f"{len(pixels)} images")
    get = pixels[0].get
    count, channels, times = (int(get(f"Size{a}", 1)) for a in "ZCT")
    _check_one_volume(channels, times, url)
    if count != size[0]:
        return None, "another number of pages", count
    described = tuple(int(get(f"Size{a}") or 0) for a in "YX")
    if described != size[1:]:
        expected = f"pages of {described[0]} x {described[1]} (SizeY, SizeX)"
        raise OCTReadError(url, RejectReason.FRAME_SIZE_MISMATCH, expected, f"{size[1]} x {size[2]}")
    _check_plane_order(pixels[0], count, url)
    lengths = [get(f"PhysicalSize{a}") for a in "ZYX"]
    units = [_MM.get(get(f"PhysicalSize{a}Unit", "\u00b5m").lower()) for a in "ZYX"]  # the schema's default
    spacing = [float(n) * unit for n, unit in zip(lengths, units, strict=True) if n and unit]
    if len(spacing) < 3:
        return None, "OME-XML without three PhysicalSize", count
    return spacing, "ome_xml", count


def _check_plane_order(pixels: Any, count: int, url: str) -> None:
    """Raise header_mismatch where TiffData do not put every plane Z on page Z of this file, once."""
    pages: list[tuple[int, int]] = []  # (plane, page)
    files = set()
    for data in (e for e in pixels if e.tag.endswith("}TiffData")):
        # The schema's defaults: one plane where IFD is given, else all of the file.
        length = int(data.get("PlaneCount", count if data.get("IFD") is None else 1))
        plane, page = int(data.get("FirstZ", 0)), int(data.get("IFD", 0))
        if any(int(data.get(f"First{a}", 0)) for a in "CT") or not 1 <= length <= count - len(pages):
            raise OCTReadError(
                url, RejectReason.HEADER_MISMATCH, _PLANES, "planes outside of the image, or twice"
            )
        pages += ((plane + i, page + i) for i in range(length))
        files |= {e.text for e in data if e.tag.endswith("}UUID")}
    if len(files) > 1:
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, _ONE_VOLUME, f"{len(files)} files")
    if pages and sorted(pages) != [(i, i) for i in range(count)]:
        moved = sum(plane != page for plane, page in pages)
        actual = f"{len(pages)} planes in the list, {moved} on another page"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, _PLANES, actual)


def _check_one_volume(channels: int, times: int, url: str) -> None:
    if (channels, times) != (1, 1):
        actual = f"{channels} channels and {times} times"
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, _ONE_VOLUME, actual)


def _check_once(text: str, url: str) -> None:
    """Raise header_mismatch for a description of ImageJ with two values of a key, or of the unit."""
    stated: dict[str, str] = {}
    for key, value in (line.partition("=")[::2] for line in text.splitlines()):
        fact = "unit" if key in _UNITS else key
        if fact in _IMAGEJ and stated.setdefault(fact, value) != value:
            raise OCTReadError(url, RejectReason.HEADER_MISMATCH, f"one {fact} (ImageJ)", "two values")


def _imagej_spacing(
    metadata: dict[str, Any], tags: TiffTags, url: str
) -> tuple[list[float] | None, str, int | None]:
    count, channels, times = (int(metadata.get(key, 1)) for key in ("images", "channels", "frames"))
    _check_one_volume(channels, times, url)
    if (slices := int(metadata.get("slices", count))) != count:
        raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, f"{count} slices, as images", slices)
    unit = _MM.get(str(metadata.get("unit")).lower())
    ratios = [tags.valueof(name) for name in ("YResolution", "XResolution")]  # of pixels and units
    if unit is None or "spacing" not in metadata or not all(ratio and all(ratio) for ratio in ratios):
        return None, "ImageJ metadata without spacing, unit of length and resolution", count
    return [s * unit for s in (metadata["spacing"], *(units / n for n, units in ratios))], "imagej", count


def _suffix(name: str) -> str:
    return "." + name.rpartition(".")[2].lower()
