"""Is a DICOM file one whole volume that was taken once, and does it say each thing of a frame once?

In: the data set of a multi-frame file. Out: the places that its dimension indices give the frames, or
not_a_volume: a part of a concatenation or of a stack, a second temporal position, a dimension that is neither
stack nor place. What says "1 of 1" is no such sign. header_mismatch: several items where one is allowed, or
the shared group beside the frames' own, that are not the same.
Standard: DICOM PS3.3 C.7.6.16 (concatenation, temporal position) and C.7.6.17 (multi-frame dimensions).
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise, zip_longest
from typing import Any

import numpy as np
from pydicom.datadict import keyword_for_tag
from pydicom.dataset import Dataset

from data_setup.readers.faults import OCTReadError, RejectReason, number
from data_setup.readers.geometry import first, numbers

_OF_CONCATENATION = (
    *("ConcatenationUID", "InConcatenationNumber", "InConcatenationTotalNumber"),
    *("ConcatenationFrameOffsetNumber", "SOPInstanceUIDOfConcatenationSource"),
)
_OF_TIME = (
    *("TemporalPositionIndex", "TemporalPositionIdentifier", "NumberOfTemporalPositions"),
    *("NumberOfTimeSlices", "NumberOfTimeSlots"),
)
_OF_DAYS = ("FrameAcquisitionDateTime", "FrameReferenceDateTime")
_OFFSET = "TemporalPositionTimeOffset"
PART_TAGS = [*_OF_CONCATENATION, *_OF_TIME, _OFFSET, "TemporalPositionSequence", "DimensionIndexSequence"]
_SEQUENCES = (  # of the functional groups, in which these attributes may stand
    "FrameContentSequence",
    "TemporalPositionSequence",
    "UnassignedSharedConvertedAttributesSequence",
    "UnassignedPerFrameConvertedAttributesSequence",
)
_ONE_ITEM: tuple[tuple[str, tuple[str, ...], float, float], ...] = (
    # a sequence of a group, what is read of it, how far two values may be apart: relative, absolute
    ("PixelMeasuresSequence", ("PixelSpacing", "SpacingBetweenSlices", "SliceThickness"), 0.01, 0.0),
    ("PlanePositionSequence", ("ImagePositionPatient",), 0.0, 1e-6),
    ("PlaneOrientationSequence", ("ImageOrientationPatient",), 0.0, 0.01),
    ("FrameContentSequence", ("StackID", "InStackPositionNumber", "DimensionIndexValues"), 0.0, 0.0),
    ("PixelValueTransformationSequence", ("RescaleSlope", "RescaleIntercept"), 0.0, 1e-6),
    ("OphthalmicFrameLocationSequence", ("ReferenceCoordinates", "OphthalmicImageOrientation"), 0.0, 1e-6),
)
_LOCALIZER = "ReferencedSOPInstanceUID"  # an item for each is no contradiction
_NUMBER = "InStackPositionNumber"
_STACK = "StackID"
_PLACES = (
    *(_NUMBER, "ImagePositionPatient", "PlanePositionSequence", "ReferenceCoordinates"),
    *("OphthalmicFrameLocationSequence", "ImagePositionVolume", "PlanePositionVolumeSequence"),
)


def check_whole(ds: Dataset, url: str) -> tuple[tuple[float, ...] | None, ...]:
    """Each frame's index along its place's dimension, or (). Raises not_a_volume, header_mismatch."""
    _check_items(ds, url)
    for actual in _signs(ds):
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, "parallel B-scans of one whole volume", actual)
    columns = [column for _, column in [*_columns(ds)][1:] if len(set(column)) > 1]
    frames = len(ds.get("PerFrameFunctionalGroupsSequence") or [])
    return tuple((index,) for index in columns[0]) if columns and len(columns[0]) == frames else ()


def _check_items(ds: Dataset, url: str) -> None:
    """Raise header_mismatch where a frame has two values of one fact."""
    shared = ds.get("SharedFunctionalGroupsSequence") or []
    frames = ds.get("PerFrameFunctionalGroupsSequence") or [Dataset()]
    for sequence, names, *apart in _ONE_ITEM:
        for name in names:
            common = _stated(shared, sequence, name, "shared")
            for frame in frames:
                own = _stated([frame], sequence, name, "per_frame")
                both = [one for one in (*common[:1], *own[:1]) if one[0] is not None]
                for one, other in chain(pairwise(common), pairwise(own), pairwise(both)):
                    if not _is_same(one[0], other[0], *apart):
                        expected, texts = f"one {name} of a frame", map(_text, (one, other))
                        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, " and ".join(texts))


def _stated(groups: Iterable[Dataset], sequence: str, name: str, level: str) -> list[tuple[Any, str]]:
    """(value, None of an empty one; level) of each item; of items for several localizers of the first's."""
    items = [item for group in groups for item in group.get(sequence) or [Dataset()]]
    values = [item.get(name) for item in items if item.get(_LOCALIZER) == items[0].get(_LOCALIZER)]
    return [((v or None) if isinstance(v, str) else numbers(v), level) for v in values]


def _is_same(one: Any, other: Any, relative: float, absolute: float) -> bool:
    are_numbers = isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other)
    return one == other or (are_numbers and np.allclose(one, other, relative, absolute, equal_nan=True))


def _text(stated: tuple[Any, str]) -> str:
    value, level = stated
    text = "none" if value is None else "a text" if isinstance(value, str) else ", ".join(map(number, value))
    return f"{text} ({level})"


def _signs(ds: Dataset) -> Iterator[str]:
    """What says that the file is a part, or more than one scan."""
    values = {name: list(_values(ds, name)) for name in _OF_CONCATENATION}
    signs = [name for name in _OF_CONCATENATION if values[name]]
    whole = {"InConcatenationNumber": [1.0], "InConcatenationTotalNumber": [1.0]}
    whole["ConcatenationFrameOffsetNumber"] = [0.0]
    parts = {name: [numbers(value) for value in values[name]] for name in whole}
    is_whole = all(part == tuple(whole[name]) for name in whole for part in parts[name])
    if signs and not (is_whole and values["InConcatenationTotalNumber"]):
        totals = [part[0] for part in parts["InConcatenationTotalNumber"] if part and part[0] > 1]
        yield (
            f"one of {number(totals[0])} parts (InConcatenationTotalNumber): join them"
            if totals
            else f"a part of a concatenation ({signs[0]}) that does not say 1 of 1: join the parts"
        )
    for name in _OF_TIME:
        for value in _values(ds, name):
            if numbers(value) != (1.0,):
                yield f"a temporal position beside the first ({name}): write each to a separate file"
    for name in _OF_DAYS:
        if (days := len({str(value)[:8] for value in _values(ds, name)})) > 1:
            yield f"B-scans of {days} days ({name}): write each to a separate file"
    if len({numbers(value) for value in _values(ds, _OFFSET)}) > 1:
        yield f"several temporal positions ({_OFFSET}): write each to a separate file"
    for name, column in _columns(ds):
        counts = Counter(column)
        where = name if name == _NUMBER else f"DimensionIndexValues of {name or 'a dimension without a name'}"
        if name and name not in (*_PLACES, _STACK) and set(counts) != {1.0}:
            yield f"a dimension that is neither stack nor place ({where})"
        elif name == _STACK and len(counts) > 1:
            yield f"{len(counts)} stacks ({where}): write each to a separate file"
        elif len(counts) > 1 and min(counts) > 1:
            ends = f"{number(min(counts))} to {number(max(counts))}"
            yield f"B-scans {ends} of a stack ({where}): join the parts"
        elif len(counts) > 1 and min(counts.values()) > 1:
            yield f"{len(counts)} places for {len(column)} frames ({where}): two scans in one file"


def _values(ds: Dataset, name: str) -> Iterator[Any]:
    """The attribute wherever it is: in the root, and in the functional groups."""
    groups = [*(ds.get("SharedFunctionalGroupsSequence") or [])]
    groups += ds.get("PerFrameFunctionalGroupsSequence") or []
    items = [ds, *groups, *(ds.get("TemporalPositionSequence") or [])]
    items += [item for group in groups for key in _SEQUENCES for item in group.get(key) or []]
    for item in items:
        if (value := item.get(name)) not in (None, ""):
            yield value


def _columns(ds: Dataset) -> Iterator[tuple[str, list[float]]]:
    """(keyword of a dimension, "" where the file names none; its index in each frame that has one)."""
    frames = ds.get("PerFrameFunctionalGroupsSequence") or []
    yield _NUMBER, [n[0] for frame in frames if (n := numbers(first(frame, "FrameContentSequence", _NUMBER)))]
    rows = [numbers(first(frame, "FrameContentSequence", "DimensionIndexValues")) for frame in frames]
    names = [_pointed(item) for item in ds.get("DimensionIndexSequence") or []]
    columns = list(zip_longest(*(row for row in rows if row)))  # a frame may name fewer dimensions
    for index, column in enumerate(columns):
        yield (names[index] if len(names) == len(columns) else ""), [v for v in column if v is not None]


def _pointed(item: Dataset) -> str:
    pointer = item.get("DimensionIndexPointer")
    return "" if pointer is None else keyword_for_tag(pointer) or "a private attribute"
