"""Heidelberg's XML export (HEYEX "XML"): one .xml and its B-scan images in one folder, as an OCT volume.

Every Image of type OCT is a B-scan. ImageNumber orders them where all have one, else the file does. ScaleX is
the lateral spacing, ScaleY the axial one. Start and End of each B-scan, in mm on the localizer, give the
distance between B-scans and their direction; the localizer's y grows to inferior. Radial and circle scans are
no volume. The patient's names and dates in the file are never read. The element names follow eyepy's reader
(MIT).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element

import numpy as np
from defusedxml import ElementTree

from data_setup.readers import geometry
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.geometry import Measures, RawGeometry
from data_setup.readers.images import iter_images
from data_setup.readers.sidecar import Sidecar, checked_frames, make_header, reading
from utils.config.schema import StorageOptions
from utils.storage import join, list_names, read_bytes

MAX_XML_BYTES = 2**28
DEVICE = "heidelberg_spectralis"
_UNEVEN = 0.25  # relative: a B-scan is missing where a step differs by more than this from the median
_PARALLEL = 0.95  # signed cosine with the first line, so an opposite line is not parallel
_LENGTH = 0.05  # relative: Start to End against Width x ScaleX; from centre to centre is one pixel less
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
    raw = _geometry(scans)
    geometry.check_is_volume(raw, None, url)
    _check_even(scans, url)
    _check_lines(scans, url)
    spacing = geometry.spacing(raw, len(scans), None, None, url)
    flip_d, orientation_source = geometry.orientation(raw)
    sizes = {s.size for s in scans}
    if len(sizes) > 1:
        raise OCTReadError(url, RejectReason.FRAME_SIZE_MISMATCH, "one size for all B-scans", sorted(sizes))
    urls = [join(folder, s.file) for s in scans]
    first = next(iter_images(urls, url, options))
    header = make_header(
        url,
        "Heidelberg XML",
        (len(scans), *scans[0].size),
        first.dtype,
        spacing,
        Sidecar(),
        flip_d=flip_d,
        orientation_source=orientation_source,
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
    )


def _check_even(scans: list[_BScan], url: str) -> None:
    """Raise frame_count_mismatch where the lines leave a gap, not_a_volume where they do not advance."""
    lines = np.array([(s.start, s.end) for s in scans])
    steps = np.linalg.norm(np.diff(lines.mean(axis=1), axis=0), axis=1)
    if not len(steps) or not steps.min() > 0:
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, "B-scans beside each other", "some in one place")
    middle = float(np.median(steps))
    if np.abs(steps - middle).max() > _UNEVEN * middle:
        actual = f"steps of {steps.min():.3g} to {steps.max():.3g} mm"
        raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, "evenly spaced B-scans", actual)


def _check_lines(scans: list[_BScan], url: str) -> None:
    """Raise header_mismatch for a line of another length than its image or from right to left, not_a_volume
    for one that runs another way than the first: its B-scan would be mirrored against the others.
    """
    lines = np.array([(s.end[0] - s.start[0], s.end[1] - s.start[1]) for s in scans])
    lengths = np.linalg.norm(lines, axis=1)
    widths = np.array([s.size[1] * s.scale[1] for s in scans])
    wrong = np.flatnonzero(~(np.abs(lengths - widths) <= _LENGTH * widths))
    if len(wrong):
        i = wrong[0]
        expected = f"Start to End of B-scan {i + 1} as long as Width x ScaleX, {widths[i]:.4g} mm"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, f"{lengths[i]:.4g} mm")
    turned = np.flatnonzero(~(lines @ lines[0] > _PARALLEL * lengths * lengths[0]))
    if len(turned):
        actual = f"B-scan {turned[0] + 1} runs another way than the first"
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, "B-scans of one direction", actual)
    x, y = lines.sum(axis=0)
    if x < 0 and abs(x) >= abs(y):
        expected = "lines from left to right on the localizer"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, "from right to left")
