"""Height maps of retinal surfaces: one Height Map Segmentation file -> heights in rows of its OCT scan.

In: the URL of a file of retinal_octa/segmentation, its device. Out: a `HeightMap`, float32 [S, D, W] from the
vitreous down, NaN where the device marks no surface; or an OCTReadError with its reason. Frames are in file
order. Standard: DICOM Supplement 240, SOP class 1.2.840.10008.5.1.4.1.1.66.8: FloatPixelData (7FE0,0008), a
frame a surface. The heights are what a device's software saw: labels of a machine, not truth.

What real files do, and what is done here:
  class       version 2 files have a placeholder for the SOP class: accepted, noted
  invalid     a height at or below INVALID_UP_TO of its device is no height
  order       Spectralis stores the lowest surface second: the order of depth decides
  names       SegmentLabel where every frame has a known one. Topcon's labels stand in another order than the
              surfaces: the labels are dealt out by depth, and this is noted. Else surface_01, surface_02, ...

A map that says itself what is no height (FloatPixelPaddingValue), as export/predictions.py writes, is
read by `read_stated_heights`: any number of surfaces, in the order and by the labels of the file.
"""

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pydicom
from pydicom.dataset import Dataset

from data_setup.readers.dicom import OPT_SOP_CLASS, open_file, read_dataset
from data_setup.readers.faults import OCTReadError, RejectReason, named_faults, number
from data_setup.readers.pixels import BoundedFile
from utils.config.schema import StorageOptions

HEIGHT_MAP_CLASS = "1.2.840.10008.5.1.4.1.1.66.8"
_PLACEHOLDER_CLASS = re.compile(r"1\.2\.840\.10008\.5\.1\.4\.x+\.1", re.IGNORECASE)
NUM_SURFACES = {"heidelberg_spectralis": 11, "topcon_maestro2": 9, "topcon_triton": 10, "zeiss_cirrus": 2}
INVALID_UP_TO = dict.fromkeys(NUM_SURFACES, -0.5) | {"zeiss_cirrus": 0.5}  # no row of a scan is so low
MAX_SURFACES = max(NUM_SURFACES.values())
# labels that the devices write, by depth; several names mean the same boundary
_BY_DEPTH = "ILM RNFL=RNFL/GCL GCL IPL=IPL/INL INL OPL ELM PR1=IS/OS PR2=OS/RPE RPE BM CSI"
DEPTH_OF_LABEL = {label: d for d, labels in enumerate(_BY_DEPTH.split()) for label in labels.split("=")}
PLACEHOLDER, REORDERED = "placeholder_class", "labels_in_another_order"
UNLABELLED, UNORDERED = "no_labels", "frames_not_by_depth"
_TAGS = ["SOPClassUID", "NumberOfFrames", "Rows", "Columns", "SegmentSequence", "FloatPixelPaddingValue"]
_TAGS += ["SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence", "ReferencedSeriesSequence"]
_FLOAT_PIXELS = (0x7FE0, 0x0008)


@dataclass(frozen=True)
class HeightMap:
    """Surfaces of one scan, from the vitreous down."""

    values: np.ndarray  # float32 [S, D, W]: rows of the OCT scan, 0 the centre of its first; NaN: none
    names: tuple[str, ...]  # of the surfaces; they mean what the device means by them
    references: frozenset[str]  # SOPInstanceUIDs of the OCT files that the map says it is about
    notes: tuple[str, ...]  # oddities that do not hinder


def read_heights(url: str, device: str, options: StorageOptions | None = None) -> HeightMap:
    """The surfaces of a file; raises OCTReadError, StorageError, and KeyError for an unknown device."""
    stored = _read(url, NUM_SURFACES[device], options)
    with np.errstate(invalid="ignore"):
        is_height = np.isfinite(stored.values) & (stored.values > INVALID_UP_TO[device])
    values = np.where(is_height, stored.values, np.float32(np.nan))
    if np.isnan(values).all(axis=(1, 2)).any():
        lacking = int(np.isnan(values).all(axis=(1, 2)).sum())
        expected = "heights of every surface"
        raise OCTReadError(url, RejectReason.NO_VALID_HEIGHTS, expected, f"none of {lacking} surfaces")
    values, names, notes = _by_depth(values, list(stored.names))
    return HeightMap(values, names, stored.references, (*notes, *stored.notes))


def read_stated_heights(url: str, options: StorageOptions | None = None) -> HeightMap:
    """The surfaces of a file with FloatPixelPaddingValue, as in it; raises OCTReadError, StorageError."""
    stored = _read(url, None, options)
    if stored.padding is None or len(stored.names) != len(stored.values):
        expected = f"FloatPixelPaddingValue, and a label for each of {len(stored.values)} surfaces"
        actual = f"{'no' if stored.padding is None else 'a'} padding value, {len(stored.names)} labels"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, actual)
    is_height = np.isfinite(stored.values) & (stored.values != np.float32(stored.padding))
    values = np.where(is_height, stored.values, np.float32(np.nan))
    return HeightMap(values, stored.names, stored.references, stored.notes)


@dataclass(frozen=True)
class _Stored(HeightMap):
    """Values and labels as they stand in a file."""

    padding: float | None  # FloatPixelPaddingValue


def _read(url: str, expected_count: int | None, options: StorageOptions | None) -> _Stored:
    """What a file holds; `expected_count` of surfaces, None: any. Raises OCTReadError, StorageError."""
    with open_file(url, options) as opened:
        file = BoundedFile(opened)
        ds = _header(file, url)
        with named_faults(url, RejectReason.HEADER_MISMATCH, "a description of the frames"):
            shape = (int(ds.NumberOfFrames), int(ds.Rows), int(ds.Columns))
            labels = [str(s.get("SegmentLabel") or "").strip() for s in ds.get("SegmentSequence") or []]
            references = references_of_groups(ds)
            padding = ds.get("FloatPixelPaddingValue")
            padding = None if padding is None else float(padding)
        if min(shape) < 1 or max(shape[1:]) > 0xFFFF:
            raise OCTReadError(url, RejectReason.HEADER_MISMATCH, "sizes above 0", _text(shape))
        if expected_count is not None and shape[0] != expected_count:
            expected = f"{expected_count} surfaces of its device"
            raise OCTReadError(url, RejectReason.SURFACE_COUNT, expected, number(shape[0]))
        values = _float_pixels(file, ds, shape, url)
    notes = () if str(ds.SOPClassUID) == HEIGHT_MAP_CLASS else (PLACEHOLDER,)
    return _Stored(values, tuple(labels), references, notes, padding)


def _header(file: BoundedFile, url: str) -> Dataset:
    """The attributes of _TAGS; leaves the file at its pixel data. Raises not_dicom, not_height_map."""
    ds = read_dataset(file, _TAGS, url)
    with named_faults(url, RejectReason.NOT_DICOM, "a whole DICOM header"):
        sop_class, syntax = str(ds.get("SOPClassUID") or ""), ds.file_meta.TransferSyntaxUID
        is_plain = not syntax.is_encapsulated and not syntax.is_deflated and syntax.is_little_endian
    if sop_class != HEIGHT_MAP_CLASS and not _PLACEHOLDER_CLASS.fullmatch(sop_class):
        actual = pydicom.uid.UID(sop_class).name if sop_class in pydicom.uid.UID_dictionary else "another"
        expected = "Height Map Segmentation Storage"
        raise OCTReadError(url, RejectReason.NOT_HEIGHT_MAP, expected, actual)
    if not is_plain:
        expected = "plain little endian values, as the standard asks of floats"
        raise OCTReadError(url, RejectReason.UNSUPPORTED_PIXELS, expected, "another transfer syntax")
    return ds


def references_of_groups(ds: Dataset) -> frozenset[str]:
    """The OCT files that the functional groups name; references to photographs are others."""
    groups = [*(ds.get("SharedFunctionalGroupsSequence") or [])[:1]]
    groups += list(ds.get("PerFrameFunctionalGroupsSequence") or [])
    items = [item for group in groups for item in group.get("ReferencedImageSequence") or []]
    for group in groups:
        for derivation in group.get("DerivationImageSequence") or []:
            items += derivation.get("SourceImageSequence") or []
    return uids_of_scans(items)


def uids_of_scans(items: Iterable[Dataset]) -> frozenset[str]:
    """The SOPInstanceUIDs of those referenced items that are OCT volumes."""
    return frozenset(
        str(item.ReferencedSOPInstanceUID)
        for item in items
        if item.get("ReferencedSOPClassUID") == OPT_SOP_CLASS and item.get("ReferencedSOPInstanceUID")
    )


def _float_pixels(file: BoundedFile, ds: Dataset, shape: tuple[int, int, int], url: str) -> np.ndarray:
    """float32 [S, D, W] of the FloatPixelData element; its length is checked before memory is taken."""
    is_implicit = ds.file_meta.TransferSyntaxUID.is_implicit_VR
    head = file.read(8 if is_implicit else 12)
    if len(head) < (8 if is_implicit else 12) or struct.unpack("<HH", head[:4]) != _FLOAT_PIXELS:
        expected = "FloatPixelData (7FE0,0008)"
        raise OCTReadError(url, RejectReason.MISSING_PIXEL_DATA, expected, "none, or pixels of another kind")
    length = struct.unpack("<L", head[-4:])[0]
    wanted = 4 * shape[0] * shape[1] * shape[2]
    if length != wanted:
        expected = f"{number(wanted, 2**40)} bytes for {_text(shape)} heights"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, f"{number(length, 2**40)}")
    if file.size - file.tell() < wanted:
        actual = f"{file.size - file.tell()} before the end of the file"
        raise OCTReadError(url, RejectReason.TRUNCATED_PIXEL_DATA, f"{wanted} bytes", actual)
    return np.frombuffer(file.read(wanted), "<f4").reshape(shape)


def _by_depth(values: np.ndarray, labels: list[str]) -> tuple[np.ndarray, tuple[str, ...], tuple[str, ...]]:
    """(surfaces from the vitreous down, names, notes) by their medians where all of them have a height."""
    notes = []
    everywhere = ~np.isnan(values).any(axis=0)
    chosen = everywhere if everywhere.any() else np.ones_like(everywhere)
    depth = np.nanmedian(values[:, chosen], axis=1)
    order = np.argsort(depth, kind="stable")
    if not np.array_equal(order, np.arange(len(order))):
        notes.append(UNORDERED)
    names = tuple(f"surface_{number:02d}" for number in range(1, len(values) + 1))
    known = [DEPTH_OF_LABEL.get(label.upper()) for label in labels]
    depths = [d for d in known if d is not None]
    if len(depths) == len(values) and len(set(depths)) == len(values):
        names = tuple(labels[number] for number in np.argsort(depths))
        if names != tuple(labels[number] for number in order):
            notes.append(REORDERED)
    else:
        notes.append(UNLABELLED)
    return values[order], names, tuple(notes)


def _text(shape: tuple[int, int, int]) -> str:
    return " x ".join(map(number, shape))
