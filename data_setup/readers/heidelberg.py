"""Heidelberg's XML export (HEYEX "XML"): one .xml and its B-scan images in one folder, as an OCT volume.

Every Image of type OCT is a B-scan. ScaleX is the lateral spacing, ScaleY the axial one. Start and End, in mm
on the localizer, give order, distance and direction of the B-scans, checked as in a DICOM file (geometry.py);
the localizer's y grows to inferior. ImageNumber, where all have one, has no gap.
The patient's names and dates in the file are never read. The element names follow eyepy's reader (MIT).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element

from defusedxml import ElementTree

from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.geometry import Measures, RawGeometry, check_geometry
from data_setup.readers.images import iter_images
from data_setup.readers.sidecar import Sidecar, checked_frames, make_header, reading
from utils.config.schema import StorageOptions
from utils.storage import join, list_names, read_bytes

MAX_XML_BYTES = 2**28
DEVICE = "heidelberg_spectralis"
_Point = tuple[float, float]


@dataclass(frozen=True)
class _BScan:
    file: str
    size: tuple[int, int]  # rows, columns
    scale: tuple[float, float]  # mm: axial, lateral
    start: _Point  # mm: x, y
    end: _Point


def read_xml(url: str, options: StorageOptions | None) -> Iterator[Any]:
    """The header, then uint8 frames [H, W] in order; raises OCTReadError."""
    scans, laterality = _parse(url, options)
    folder = url.rpartition("/")[0]
    names = set(list_names(folder or ".", options))
    missing = [i for i, s in enumerate(scans, start=1) if s.file not in names]
    if missing:
        expected = f"the images of {len(scans)} B-scans beside the XML"
        actual = f"{len(missing)} missing, the first of B-scan {missing[0]}"
        raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, expected, actual)
    sizes = {s.size for s in scans}
    if len(sizes) > 1:
        raise OCTReadError(url, RejectReason.FRAME_SIZE_MISMATCH, "one size for all B-scans", sorted(sizes))
    shape = (len(scans), *scans[0].size)
    measured = check_geometry(_geometry(scans), shape, None, None, url)
    urls = [join(folder, scans[index].file) for index in measured.order or range(len(scans))]
    first = next(iter_images(urls, url, options))
    header = make_header(
        url,
        "Heidelberg XML",
        shape,
        first.dtype,
        (measured.spacing_mm, measured.spacing_source),
        Sidecar(),
        flip_d=measured.flip_d,
        orientation_source=measured.orientation_source,
        laterality=laterality,
        device=DEVICE,
    )
    yield header
    yield from checked_frames(iter_images(urls, url, options), header)


def image_urls(url: str, options: StorageOptions | None) -> list[str]:
    """The URLs of the B-scan images that an export names; raises OCTReadError, StorageError."""
    return [join(url.rpartition("/")[0], scan.file) for scan in _parse(url, options)[0]]


def _parse(url: str, options: StorageOptions | None) -> tuple[list[_BScan], str | None]:
    """(B-scans in order, L | R | None)."""
    data = read_bytes(url, options)
    if len(data) > MAX_XML_BYTES:
        raise OCTReadError(url, RejectReason.CORRUPT_FILE, f"up to {MAX_XML_BYTES} bytes of XML", len(data))
    # No entities, no external files: an export has none, and an attack needs them.
    with reading(url, RejectReason.CORRUPT_FILE, "XML without entities"):
        root = ElementTree.fromstring(data)
    if root.tag != "HEDX":
        raise OCTReadError(url, RejectReason.WRONG_KIND, "a Heidelberg export (HEDX)", "other XML")
    series = [s for s in root.iter("Series") if any(_is_oct(i) for i in s.iter("Image"))]
    if len(series) != 1:
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, "one series of OCT B-scans", len(series))
    images = [i for i in series[0].iter("Image") if _is_oct(i)]
    with reading(url, RejectReason.CORRUPT_FILE, "numbers in the XML"):
        scans = [_b_scan(i, url) for i in images]
        numbers = _image_numbers(images)
        # A localizer or another picture of the series may stand between B-scans.
        all_numbers = set(_image_numbers(list(series[0].iter("Image"))))
    if len(numbers) == len(images):
        by_number = dict(zip(numbers, scans, strict=True))
        if len(by_number) != len(scans):
            raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, "one B-scan an ImageNumber", "two")
        first, last = min(by_number), max(by_number)
        if missing := last - first + 1 - sum(first <= n <= last for n in all_numbers):
            expected = f"ImageNumber {first} to {last} without a gap"
            raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, expected, f"{missing} missing")
        scans = [by_number[number] for number in sorted(by_number)]
    laterality = (series[0].findtext("Laterality") or "").strip().upper()
    return scans, laterality if laterality in ("L", "R") else None


def _image_numbers(images: list[Element]) -> list[int]:
    return [int(text) for image in images if (text := image.findtext("ImageNumber"))]


def _is_oct(image: Element) -> bool:
    return (image.findtext("ImageType/Type") or "").strip() == "OCT"


def _b_scan(image: Element, url: str) -> _BScan:
    def number(path: str) -> float:
        text = image.findtext(f"OphthalmicAcquisitionContext/{path}")
        if text is None:
            is_size = path in ("Height", "Width")
            reason = RejectReason.CORRUPT_FILE if is_size else RejectReason.MISSING_SPACING
            raise OCTReadError(url, reason, f"{path} of every B-scan", "none")
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(path)
        return value

    name = re.split(r"[\\/]", (image.findtext("ImageData/ExamURL") or "").strip())[-1]
    if name in ("", ".", ".."):
        raise OCTReadError(url, RejectReason.CORRUPT_FILE, "ExamURL of every B-scan", "none")
    return _BScan(
        name,
        (int(number("Height")), int(number("Width"))),
        (number("ScaleY"), number("ScaleX")),
        (number("Start/Coord/X"), number("Start/Coord/Y")),
        (number("End/Coord/X"), number("End/Coord/Y")),
    )


def _geometry(scans: list[_BScan]) -> RawGeometry:
    """As in a DICOM file: positions are the centres of the lines, references their (row, column)."""
    return RawGeometry(
        shared=Measures(),
        per_frame=tuple(Measures(*s.scale) for s in scans),
        root=Measures(),
        positions=tuple(((s.start[0] + s.end[0]) / 2, (s.start[1] + s.end[1]) / 2, 0.0) for s in scans),
        orientations=(),
        references=tuple((s.start[1], s.start[0], s.end[1], s.end[0]) for s in scans),
        shapes=frozenset(),
        reference_unit="mm",
    )
