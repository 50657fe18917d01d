"""Heidelberg's XML export (HEYEX "XML"): one .xml and its B-scan images, as an OCT volume.

The root is HEDX, BODY or the Series itself, by the version of HEYEX. Every Image of type OCT is a B-scan;
where images have no type, those with Start and End are. ScaleX is the lateral spacing, ScaleY the axial one.
Start and End, in mm on the localizer, give order, distance and direction of the B-scans, checked as for DICOM
(geometry.py); the y of the localizer grows to inferior. ImageNumber, where all have one, has no gap.
The images lie beside the XML or in one folder below it. ExamURL names them, as `5DD37430.jpg` or in brackets,
`OCT R 1 [5DD37430.jpg].jpg`; without it the one number that differs in their names is the ImageNumber.
The patient's names and dates in the file are never read. The element names follow eyepy's reader (MIT).
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.etree.ElementTree import Element

from defusedxml import ElementTree

from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.geometry import Measures, RawGeometry, check_geometry
from data_setup.readers.images import differing_numbers, is_image, iter_images
from data_setup.readers.sidecar import Sidecar, checked_frames, make_header, reading
from data_setup.tables.text import SIDES
from utils.config.schema import StorageOptions
from utils.storage import join, list_names, read_bytes

MAX_XML_BYTES = 2**28
DEVICE = "heidelberg_spectralis"
_ROOTS = ("HEDX", "BODY", "Series")
_LINE = ("Start/Coord/X", "Start/Coord/Y", "End/Coord/X", "End/Coord/Y")
_ONCE = re.compile("Laterality|NumImages|ImageNumber|Type|Height|Width|ScaleX|ScaleY|X|Y|ExamURL")
_Point = tuple[float, float]


@dataclass(frozen=True)
class _BScan:
    file: str  # the name that ExamURL ends in; empty where there is none
    number: int | None  # ImageNumber
    size: tuple[int, int]  # rows, columns
    scale: tuple[float, float]  # mm: axial, lateral
    start: _Point  # mm: x, y
    end: _Point


@dataclass(frozen=True)
class Export:
    scans: tuple[_BScan, ...]  # in the order of ImageNumber
    other_numbers: frozenset[int]  # ImageNumber of the localizer and other pictures
    laterality: str | None  # L | R
    patient_id: str | None  # it may identify a person
    etdrs: dict[str, float] = field(default_factory=dict)  # etdrs_c0_thickness_mm, ... of its ThicknessGrid


def read_xml(url: str, options: StorageOptions | None) -> Iterator[Any]:
    """The header, then uint8 frames [H, W] in order; raises OCTReadError."""
    export = read_export(url, options)
    scans = export.scans
    files = _files(export, url, options)
    sizes = {s.size for s in scans}
    if len(sizes) > 1:
        raise OCTReadError(url, RejectReason.FRAME_SIZE_MISMATCH, "one size for all B-scans", sorted(sizes))
    shape = (len(scans), *scans[0].size)
    lines = [(s.start, s.end) for s in scans]
    raw = geometry_of_lines(lines, [Measures(*s.scale) for s in scans])
    measured = check_geometry(raw, shape, None, None, url)
    urls = [join(_folder(url), files[index]) for index in measured.order or range(len(scans))]
    first = next(iter_images(urls, url, options))
    side, dtype, none = export.laterality, first.dtype, Sidecar()
    header = make_header(url, "Heidelberg XML", shape, dtype, measured, none, laterality=side, device=DEVICE)
    yield header
    yield from checked_frames(iter_images(urls, url, options), header)


def image_urls(url: str, options: StorageOptions | None) -> list[str]:
    """The URLs of the B-scan images that an export names; raises OCTReadError, StorageError."""
    return [join(_folder(url), file) for file in _files(read_export(url, options), url, options)]


def read_export(url: str, options: StorageOptions | None) -> Export:
    """What the XML says, without its images; raises OCTReadError, StorageError."""
    data = read_bytes(url, options)
    if len(data) > MAX_XML_BYTES:
        raise OCTReadError(url, RejectReason.CORRUPT_FILE, f"up to {MAX_XML_BYTES} bytes of XML", len(data))
    # No entities, no external files: an attack needs them.
    with reading(url, RejectReason.CORRUPT_FILE, "XML without entities"):
        root = ElementTree.fromstring(data)
    if root.tag not in _ROOTS:
        expected = f"a Heidelberg export ({', '.join(_ROOTS)})"
        raise OCTReadError(url, RejectReason.WRONG_KIND, expected, "other XML")
    series = [s for s in root.iter("Series") if any(_is_oct(i) for i in s.iter("Image"))]
    if len(series) != 1:
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, "one series of OCT B-scans", len(series))
    for part in series[0].iter():
        stated: dict[str, str | None] = {}
        for leaf in (leaf for leaf in part if _ONCE.fullmatch(leaf.tag)):
            if stated.setdefault(leaf.tag, leaf.text) != leaf.text:
                expected = f"one {leaf.tag} in a part of the XML"
                raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, "two values")
    images = list(series[0].iter("Image"))
    of_scans = [i for i in images if _is_oct(i)]
    with reading(url, RejectReason.CORRUPT_FILE, "numbers in the XML"):
        scans = _in_order([_b_scan(i, url) for i in of_scans], images, url)
        others = frozenset(_numbers([i for i in images if not _is_oct(i)]))
        num_images = int(series[0].findtext("NumImages") or len(images))
        etdrs = _etdrs(series[0])
    if num_images != len(images):
        expected = f"{num_images} images (NumImages)"
        raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, expected, len(images))
    patient = next((p for p in root.iter("Patient")), None)
    ids = [] if patient is None else [(patient.findtext(k) or "").strip() for k in ("PatientID", "ID")]
    patient_id = next(filter(None, ids), None)
    return Export(tuple(scans), others, _laterality(series[0], of_scans, url), patient_id, etdrs)


def _in_order(scans: list[_BScan], images: list[Element], url: str) -> list[_BScan]:
    """The B-scans by ImageNumber, as in the file where not all have one; raises frame_count_mismatch."""
    numbers = [s.number for s in scans if s.number is not None]
    if len(numbers) < len(scans):
        return scans
    by_number = dict(zip(numbers, scans, strict=True))
    if len(by_number) != len(scans):
        raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, "one B-scan an ImageNumber", "two")
    first, last = min(by_number), max(by_number)
    # A localizer or another picture of the series may stand between B-scans.
    if missing := last - first + 1 - sum(first <= n <= last for n in set(_numbers(images))):
        expected = f"ImageNumber {first} to {last} without a gap"
        raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, expected, f"{missing} missing")
    return [by_number[number] for number in sorted(by_number)]


def _numbers(images: Sequence[Element]) -> list[int]:
    return [int(text) for image in images if (text := image.findtext("ImageNumber"))]


def _is_oct(image: Element) -> bool:
    kind = image.findtext("ImageType/Type")
    if kind is not None:
        return kind.strip() == "OCT"
    return all(image.findtext(f"OphthalmicAcquisitionContext/{path}") for path in _LINE)


def _laterality(series: Element, images: Sequence[Element], url: str) -> str | None:
    """L | R of the series and of each B-scan, None where none says it; raises header_mismatch for both."""
    words = {(part.findtext("Laterality") or "").strip().lower() for part in (series, *images)}
    sides = {SIDES[word] for word in words if word in SIDES}
    if len(sides) > 1:
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, "one eye in all B-scans", "both")
    return next(iter(sides), None)


def _etdrs(series: Element) -> dict[str, float]:
    """Thickness in mm, volume in mm3 and valid percent of each zone that the first ThicknessGrid has."""
    grid = series.find("ThicknessGrid")
    if grid is None:
        return {}
    texts = {"etdrs_total_volume_mm3": grid.findtext("TotalVolume")}
    names = {"AvgThickness": "thickness_mm", "Volume": "volume_mm3", "ValidPixelPercentage": "valid_percent"}
    for zone in grid.iter("Zone"):
        name = (zone.findtext("Name") or "").strip().lower()
        if re.fullmatch(r"[a-z]\d", name):  # C0, N1, N2, S1, ...
            texts |= {f"etdrs_{name}_{unit}": zone.findtext(key) for key, unit in names.items()}
    values = {key: float(text) for key, text in texts.items() if text}
    return {key: value for key, value in values.items() if math.isfinite(value)}


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
    return _BScan(
        "" if name in (".", "..") else name,
        next(iter(_numbers([image])), None),
        (int(number("Height")), int(number("Width"))),
        (number("ScaleY"), number("ScaleX")),
        (number(_LINE[0]), number(_LINE[1])),
        (number(_LINE[2]), number(_LINE[3])),
    )


def _folder(url: str) -> str:
    return url.rpartition("/")[0] or "."


def _files(export: Export, url: str, options: StorageOptions | None) -> list[str]:
    """The image of each B-scan, relative to the XML's folder: beside it, or in one folder below it."""
    names = list_names(_folder(url), options)
    has_names = all(s.file for s in export.scans)
    if not has_names and any(s.number is None for s in export.scans):
        raise OCTReadError(url, RejectReason.CORRUPT_FILE, "ExamURL or ImageNumber of every B-scan", "none")
    if not has_names and sum(n.lower().endswith(".xml") for n in names) > 1:
        expected = "one XML in a folder, where it does not name its images"
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, expected, "several")
    match = _by_name if has_names else _by_number
    sets = match(export, names)
    if not sets:
        folders = [n for n in names if not is_image(n) and not n.lower().endswith(".xml")]
        below = {folder: list_names(join(_folder(url), folder), options) for folder in folders}
        sets = [[f"{f}/{n}" for n in files] for f, inner in below.items() for files in match(export, inner)]
    if len(sets) > 1:
        actual = f"{len(sets)} sets of them"
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, "the images of its B-scans once", actual)
    if sets:
        return sets[0]
    expected = f"the images of {len(export.scans)} B-scans beside the XML, or in one folder below it"
    actual = "no set of names with these numbers"
    if has_names:
        missing = [i for i, name in enumerate(_named(export, names), 1) if name is None]
        actual = f"{len(missing)} missing, the first of B-scan {missing[0]}" if missing else "one named twice"
    raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, expected, actual)


def _by_name(export: Export, names: Sequence[str]) -> list[list[str]]:
    """One list with the file that each B-scan names; no list where one is missing or named twice."""
    files = [name for name in _named(export, names) if name is not None]
    return [files] if len(set(files)) == len(export.scans) else []


def _named(export: Export, names: Sequence[str]) -> list[str | None]:
    """The file of each B-scan: of the name in ExamURL, else the only one that has it in brackets."""
    inner = [(match[1].casefold(), name) for name in names if (match := re.search(r"\[([^\]]+)\]", name))]
    counts = Counter(key for key, _ in inner)
    files = {key: name for key, name in inner if counts[key] == 1} | {name.casefold(): name for name in names}
    return [files.get(scan.file.casefold()) for scan in export.scans]


def _by_number(export: Export, names: Sequence[str]) -> list[list[str]]:
    """The files of the B-scans by their number, of every set of names that has just these numbers."""
    wanted = [scan.number for scan in export.scans if scan.number is not None]
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in filter(is_image, names):
        groups.setdefault(tuple(re.split(r"\d+", name.lower())), []).append(name)
    sets = []
    for group in groups.values():
        numbers = differing_numbers(group)
        if numbers is None:
            continue
        by_number = dict(zip(numbers, group, strict=True))
        if len(by_number) == len(group) and {*wanted} <= {*numbers} <= {*wanted, *export.other_numbers}:
            sets.append([by_number[number] for number in wanted])
    return sets


def geometry_of_lines(lines: Sequence[tuple[_Point, _Point]], measures: Sequence[Measures]) -> RawGeometry:
    """The (start, end) of each B-scan, (x, y) in mm on the localizer, as in a DICOM file. Positions are the
    centres of the lines, references their (row, column).
    """
    return RawGeometry(
        per_frame=tuple(measures),
        positions=tuple(((start[0] + end[0]) / 2, (start[1] + end[1]) / 2, 0.0) for start, end in lines),
        references=tuple((start[1], start[0], end[1], end[0]) for start, end in lines),
        reference_unit="mm",
    )
