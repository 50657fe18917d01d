"""Heidelberg's XML export (HEYEX "XML"): one .xml and its B-scan images in one folder, as an OCT volume.

Every Image of type OCT is a B-scan, in the order of ImageNumber where all have one, else of the file. ScaleX
is the lateral spacing, ScaleY the axial one; the distance between B-scans and their direction follow from
Start and End of each, in mm on the localizer, whose y grows to inferior. Radial and circle scans are no
volume. Names and dates of the patient are in the file; nothing of them is read. The element names follow
eyepy's reader (MIT).
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
from data_setup.readers.images import iter_images, read_image
from data_setup.readers.sidecar import Sidecar, checked_frames, make_header, reading
from utils.config.schema import StorageOptions
from utils.storage import join, list_names, read_bytes

MAX_XML_BYTES = 2**28
DEVICE = "heidelberg_spectralis"
_UNEVEN = 0.25  # a step between B-scans further than this from the median: one is missing
_PARALLEL = 0.95  # cosine with the first line, with its sign: not the other way round
_LENGTH = (
    0.05  # relative: from Start to End against Width x ScaleX; centres of pixels lie one pixel less apart
)
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
    there = set(list_names(folder or ".", options))
    missing = [i for i, s in enumerate(scans, start=1) if s.file not in there]
    if missing:
        said = f"the images of {len(scans)} B-scans beside the XML"
        found = f"{len(missing)} missing, the first of B-scan {missing[0]}"
        raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, said, found)
    raw = _geometry(scans)
    geometry.check_is_volume(raw, None, url)
    _check_even(scans, url)
    _check_lines(scans, url)
    spacing, source = geometry.spacing(raw, len(scans), None, None, url)
    flip_d, orientation_source = geometry.orientation(raw)
    sizes = {s.size for s in scans}
    if len(sizes) > 1:
        raise OCTReadError(
            url, RejectReason.FRAME_SIZE_MISMATCH, "one size for all B-scans", f"{sorted(sizes)}"
        )
    urls = [join(folder, s.file) for s in scans]
    first = read_image(urls[0], url, f"image 1 of {len(urls)}", options)
    header = make_header(
        url,
        "Heidelberg XML",
        (len(scans), *scans[0].size),
        first.dtype,
        (spacing, source),
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
        numbers = [int(t) if (t := i.findtext("ImageNumber")) else None for i in images]
    if None not in numbers:
        if len(set(numbers)) != len(numbers):
            raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, "one B-scan an ImageNumber", "two")
        # A localizer or another picture of the series may stand between B-scans.
        with reading(url, RejectReason.CORRUPT_FILE, "numbers in the XML"):
            taken = {int(t) for i in series[0].iter("Image") if (t := i.findtext("ImageNumber"))}
        first, last = min(taken & set(numbers)), max(taken & set(numbers))
        if missing := last - first + 1 - sum(first <= n <= last for n in taken):
            said = f"ImageNumber {first} to {last} without a gap"
            raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, said, f"{missing} missing")
        scans = [scan for _, scan in sorted(zip(numbers, scans, strict=True), key=lambda pair: pair[0] or 0)]
    laterality = (series[0].findtext("Laterality") or "").strip().upper()
    return scans, laterality if laterality in ("L", "R") else None


def _is_oct(image: Element) -> bool:
    return (image.findtext("ImageType/Type") or "").strip() == "OCT"


def _b_scan(image: Element, url: str) -> _BScan:
    context = "OphthalmicAcquisitionContext"

    def number(path: str) -> float:
        text = image.findtext(f"{context}/{path}")
        if text is None:
            said = f"{path} of every B-scan"
            reason = RejectReason.MISSING_SPACING if "Scale" in path or "Coord" in path else None
            raise OCTReadError(url, reason or RejectReason.CORRUPT_FILE, said, "none")
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
    """As of a DICOM file: centres of the lines as positions, the lines as (row, column) on the localizer."""
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
        found = f"steps of {steps.min():.3g} to {steps.max():.3g} mm"
        raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, "evenly spaced B-scans", found)


def _check_lines(scans: list[_BScan], url: str) -> None:
    """Raise not_a_volume where lines run against the first, header_mismatch where one is not its image.

    A line from right to left would show its B-scans mirrored against all others.
    """
    lines = np.array([(s.end[0] - s.start[0], s.end[1] - s.start[1]) for s in scans])
    lengths = np.linalg.norm(lines, axis=1)
    widths = np.array([s.size[1] * s.scale[1] for s in scans])
    wrong = np.flatnonzero(~(np.abs(lengths - widths) <= _LENGTH * widths))
    if len(wrong):
        i = wrong[0]
        said = f"Start to End of B-scan {i + 1} as long as Width x ScaleX, {widths[i]:.4g} mm"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, said, f"{lengths[i]:.4g} mm")
    turned = np.flatnonzero(~(lines @ lines[0] > _PARALLEL * lengths * lengths[0]))
    if len(turned):
        found = f"B-scan {turned[0] + 1} runs another way than the first"
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, "B-scans of one direction", found)
    x, y = lines.sum(axis=0)
    if x < 0 and abs(x) >= abs(y):
        said = "lines from left to right on the localizer"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, said, "from right to left")
