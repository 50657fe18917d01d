"""An OPT volume of a DICOM file, with its geometry, or a named error.

In: a URL of a DICOM file. Out: `read_volume` gives uint8 [D, H, W], superior -> inferior, with its
`OCTHeader`; `open_volume` the same frame by frame. Every fault is an `OCTReadError` with a `RejectReason`.
Only voxels and an `OCTHeader` leave a file.
Standard: DICOM PS3.3 A.52 (Ophthalmic Tomography Image IOD) and PS3.5.
"""

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import PurePosixPath
from typing import IO, Any

import numpy as np
import pydicom
from pydicom.dataset import Dataset
from pydicom.sequence import Sequence as Items

from data_setup.manifest import Record
from data_setup.protocols import BY_NAME, DEVICES, device_of_path, protocol_of_path, protocol_of_text
from data_setup.readers import geometry
from data_setup.readers.faults import (
    OCTReadError,
    RejectReason,
    UnboundedReadError,
    known,
    named_faults,
    number,
)
from data_setup.readers.parts import PART_TAGS, check_whole
from data_setup.readers.pixels import BoundedFile, PixelLayout, check_element, iter_pixels, read_layout
from data_setup.tables.text import SENTINELS, SIDES
from utils.config.schema import StorageOptions
from utils.storage import is_remote, open_url, read_bytes
from utils.storage.ranges import RangeFile

PEEK_BYTES = 2**16  # of one request; the header of some hundred frames
_MAX_RESCALE = 2**16  # no grey scale needs more
_ROUNDING = 1e-4  # of the range of values
FEWEST_LEVELS = 64  # 12 bits in 16 leave 17, 13 leave 33
FEWEST_PLAIN_LEVELS = 32  # of 8 bits in a file that is no DICOM: a label map or a mask has fewer
OPT_SOP_CLASS = "1.2.840.10008.5.1.4.1.1.77.1.5.4"
PIXEL_TAGS = ["SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "NumberOfFrames", "Rows"]
PIXEL_TAGS += ["Columns", "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation"]
_PADDING = ("PixelPaddingValue", "PixelPaddingRangeLimit")
_RESCALE = ("RescaleSlope", "RescaleIntercept")
_REGIONS = {"AnatomicRegionSequence": "AnatomicRegionModifierSequence"}
_REGIONS |= {"PrimaryAnatomicStructureSequence": "PrimaryAnatomicStructureModifierSequence"}
_SIDES = ("ImageLaterality", "Laterality", "FrameLaterality")
SIDE_TAGS = [*_SIDES, *_REGIONS]
_OF_ANATOMY = ["FrameAnatomySequence", "UnassignedSharedConvertedAttributesSequence"]
_OF_ANATOMY += ["UnassignedPerFrameConvertedAttributesSequence"]
_CODES = dict.fromkeys(("7771000", "G-A101", "8966001"), "L")  # SNOMED's left, and left eye
_CODES |= dict.fromkeys(("24028007", "G-A100", "18944008"), "R")
_CODES |= dict.fromkeys(("51440002", "G-A102", "40638003"), "B")
_BOTH = ("b", "ou", "both", "bilateral", "both eyes", "right and left")
_NO_SIDE = SENTINELS | {"unknown"}
# The allow-list: pydicom skips every other root attribute. The items of the two functional group sequences
# come whole; only geometry.py, _rescale and laterality_of take values out of them.
_VOLUME_TAGS = [*PIXEL_TAGS, *PART_TAGS, *_RESCALE, *_PADDING, "ModalityLUTSequence", "PresentationLUTShape"]
_VOLUME_TAGS += ["SOPClassUID", "SOPInstanceUID", "ManufacturerModelName", "ProtocolName"]
_VOLUME_TAGS += ["PixelSpacing", "SliceThickness", "SpacingBetweenSlices", *SIDE_TAGS]
_VOLUME_TAGS += ["SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"]
_GREY = ("MONOCHROME1", "MONOCHROME2")
_PHOTOMETRIC = (*_GREY, "PALETTE COLOR", "RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT", "XYB")


@dataclass(frozen=True)
class OCTHeader:
    """What is known about a volume before its pixels are decoded; (D, H, W) order, mm."""

    url: str
    shape: tuple[int, int, int]
    spacing_mm: tuple[float, float, float]
    spacing_source: str  # shared | per_frame | root | frame_positions | protocol | manifest
    flip_d: bool  # frames as `open_volume` gives them run inferior -> superior
    orientation_source: str  # reference_coordinates | assumed | unknown, and those of the importers
    device: str | None  # as the file states it, else as manifest or path name it; protocol too
    protocol: str | None
    laterality: str | None  # L | R
    sop_instance_uid: str
    transfer_syntax: str
    bits_stored: int
    inverted: bool  # MONOCHROME1: stored white is black
    rescale: tuple[float, float]  # slope, intercept; (1, 0) when the file has none
    padding: tuple[float, float] | None = None  # stored values that are no data, from and to
    order: tuple[int, ...] | None = None  # the place in the file of each frame that `open_volume` gives
    steps_hw: tuple[int, int] = (1, 1)  # -1: the reader turned this axis of the file's array round

    def from_file_order(self, values: np.ndarray, axis: int = 0) -> np.ndarray:
        """Labels [D, H, W], or rows of surfaces [S, D, W] with axis 1, that lie as the file's array does, as
        the frames of `open_volume` lie: B-scans sorted, H and W turned as the reader turned them.
        """
        return self._turned(values if self.order is None else values.take(self.order, axis), axis)

    def to_file_order(self, values: np.ndarray, axis: int = 0) -> np.ndarray:
        """The reverse of `from_file_order`."""
        return self._turned(values if self.order is None else values.take(np.argsort(self.order), axis), axis)

    def _turned(self, values: np.ndarray, axis: int) -> np.ndarray:
        step_h, step_w = self.steps_hw
        values = values[..., ::step_w]
        if step_h > 0:
            return values
        return values[..., ::-1, :] if axis == 0 else self.shape[1] - 1 - values

    @property
    def is_plain(self) -> bool:
        """Whether the stored values are the grey values."""
        return self.bits_stored == 8 and self.rescale == (1.0, 0.0)


@dataclass(frozen=True)
class OCTVolume:
    """voxels uint8 [D, H, W], superior -> inferior where the header knows; header.shape is the same."""

    voxels: np.ndarray
    header: OCTHeader


def open_volume(
    url: str, options: StorageOptions | None = None, record: Record | None = None
) -> tuple[OCTHeader, Iterator[np.ndarray]]:
    """(header, frames uint8 [H, W] in order of their positions): for little memory. Raises OCTReadError.

    The first frame is decoded before the header is returned, so the caller can trust the header's shape and
    allocate it. A fault of another frame is raised at that frame, a constant volume at the end. The caller
    reverses the frames when header.flip_d. `record` names the device and the protocol, instead of the path,
    and the spacing where the file has none.
    """
    frames = _volume(url, options, record)
    return next(frames), frames


def read_volume(url: str, options: StorageOptions | None = None) -> OCTVolume:
    """The whole volume, uint8 [D, H, W], superior -> inferior; raises OCTReadError."""
    header, frames = open_volume(url, options)
    voxels = np.empty(header.shape, np.uint8)
    for index, frame in enumerate(frames):
        voxels[header.shape[0] - 1 - index if header.flip_d else index] = frame
    return OCTVolume(voxels, header)


def read_header(file: BoundedFile, url: str, record: Record | None = None) -> OCTHeader:
    """The header of an open file, without its pixels; raises OCTReadError, not for single frames' faults."""
    header, layout = _header(read_dataset(file, _VOLUME_TAGS, url), file, url, record)
    with named_faults(url, RejectReason.NOT_DICOM, "a pixel data element"):
        check_element(file, layout, url)
    return header


def _volume(url: str, options: StorageOptions | None, record: Record | None) -> Iterator[Any]:
    with open_file(url, options) as opened:
        file = BoundedFile(opened)
        header, layout = _header(read_dataset(file, _VOLUME_TAGS, url), file, url, record)
        frames = iter_pixels(file, layout, url, header.order)
        first = next(frames)
        if first.dtype.itemsize * 8 > layout.bits_allocated:
            expected, actual = f"{layout.bits_allocated} bits", f"{first.dtype} codestreams"
            raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, actual)
        yield header
        yield from grey_frames(chain([first], frames), header)


def grey_frames(frames: Iterable[np.ndarray], header: OCTHeader) -> Iterator[np.ndarray]:
    """Stored values to uint8; raises OCTReadError header_mismatch at a frame with values out of range.

    At the end: constant_volume where all voxels are equal, few_grey_levels where fewer than FEWEST_LEVELS are
    left of more than 8 bits, or of rescaled values, and fewer than FEWEST_PLAIN_LEVELS of 8 bits of a kind
    that labels come in. Nothing is stretched: a scale of each volume's own would change its brightness
    against the others.
    """
    seen = np.zeros(256, bool)
    top = 2**header.bits_stored - 1
    for count, frame in enumerate(frames, start=1):
        if not header.is_plain or frame.dtype != np.uint8:
            slope, intercept = header.rescale
            values = frame if header.padding is None else frame[~_is_padding(frame, header.padding)]
            ends = np.array([values.min(), values.max()] if values.size else [0, 0], float)
            share = (ends * slope + intercept) / top  # 0 black, 1 white
            if values.size and (share.min() < -_ROUNDING or share.max() > 1 + _ROUNDING):
                expected = "values that end in 0 to 2^bits_stored - 1, or inside value_range"
                actual = f"{ends[0]:g} to {ends[1]:g} in B-scan {count} of {header.shape[0]}"
                if header.rescale != (1.0, 0.0):
                    actual += f", times {slope:g} plus {intercept:g}"
                raise OCTReadError(header.url, RejectReason.HEADER_MISMATCH, expected, actual)
        grey = to_uint8(frame, header)
        if not header.is_plain or np.count_nonzero(seen) < FEWEST_PLAIN_LEVELS:
            seen[grey.ravel()] = True
        yield grey
    levels = int(np.count_nonzero(seen))
    if levels == 1:
        actual = f"every voxel {seen.argmax()}"
        raise OCTReadError(header.url, RejectReason.CONSTANT_VOLUME, "an image", actual)
    if levels < FEWEST_LEVELS and not header.is_plain:
        expected = (
            f"{FEWEST_LEVELS} grey levels of 256 or more; BitsStored (bits_stored) is what the data use"
        )
        actual = f"{levels} of {header.bits_stored} bits, the brightest {255 - seen[::-1].argmax()}"
        raise OCTReadError(header.url, RejectReason.FEW_GREY_LEVELS, expected, actual)
    if levels < FEWEST_PLAIN_LEVELS and not header.transfer_syntax.startswith("1.2."):
        expected = f"{FEWEST_PLAIN_LEVELS} grey levels or more"
        actual = f"{levels}: a label map, or a mask? Those of a scan belong into its column label_volume"
        raise OCTReadError(header.url, RejectReason.FEW_GREY_LEVELS, expected, actual)


def _is_padding(frame: np.ndarray, padding: tuple[float, float]) -> np.ndarray:
    return (frame >= padding[0]) & (frame <= padding[1])


def to_uint8(frame: np.ndarray, header: OCTHeader) -> np.ndarray:
    """Stored values to uint8: rescale slope and intercept, then 0..2^bits_stored - 1 linearly to 0..255.
    Values that the header calls padding are 0, as voxels outside the field are.
    """
    stored = frame
    if not header.is_plain or frame.dtype != np.uint8:
        slope, intercept = header.rescale
        scale = 255 / (2**header.bits_stored - 1)
        values = frame.astype(np.float32) * np.float32(slope * scale) + np.float32(intercept * scale)
        frame = np.clip(np.rint(values), 0, 255).astype(np.uint8)
    frame = 255 - frame if header.inverted else frame
    return frame if header.padding is None else np.where(_is_padding(stored, header.padding), 0, frame)


def open_file(url: str, options: StorageOptions | None) -> IO[bytes]:
    """The file, seekable; a remote one comes in one request. Raises OCTReadError missing_file."""
    with named_faults(url, RejectReason.MISSING_FILE, "a file"):
        return io.BytesIO(read_bytes(url, options)) if is_remote(url) else open_url(url, options=options)


def read_dataset(file: BoundedFile, tags: list[str], url: str) -> Dataset:
    """The attributes in `tags`; leaves the file at its pixel data element."""
    with named_faults(url, RejectReason.NOT_DICOM, "a whole DICOM header"):
        try:
            ds = pydicom.dcmread(file, stop_before_pixels=True, specific_tags=tags)
        except UnboundedReadError:  # pydicom would inflate all of it, to whatever size
            expected = "frames at known places: decompress it with dcmconv +te or the like"
            actual = "Deflated Explicit VR Little Endian, a file deflated as a whole"
            raise OCTReadError(url, RejectReason.UNSUPPORTED_PIXELS, expected, actual) from None
        if not ds.file_meta.get("TransferSyntaxUID"):
            raise OCTReadError(url, RejectReason.NOT_DICOM, "a TransferSyntaxUID", "none")
        return ds


def peek_dataset(url: str, size: int, tags: list[str], options: StorageOptions) -> Dataset:
    """The attributes in `tags`, from the first bytes of a file; raises OCTReadError, StorageError."""
    with named_faults(url, RejectReason.NOT_DICOM, "a whole DICOM header"):
        file = BoundedFile(RangeFile(url, size, options, PEEK_BYTES))
        return pydicom.dcmread(file, stop_before_pixels=True, specific_tags=tags)


def _header(ds: Dataset, file: BoundedFile, url: str, record: Record | None) -> tuple[OCTHeader, PixelLayout]:
    """(header, description of the pixels); raises OCTReadError."""
    with named_faults(url, RejectReason.NOT_DICOM, "a DICOM header"):
        sop_class = str(ds.get("SOPClassUID") or "")
        if sop_class != OPT_SOP_CLASS:
            name = known(sop_class, pydicom.uid.UID_dictionary)
            actual = pydicom.uid.UID(name).name if sop_class else "no SOPClassUID"
            raise OCTReadError(url, RejectReason.NOT_OPT, "Ophthalmic Tomography Image Storage", actual)
        if file.tell() >= file.size:
            expected = "a PixelData element"
            actual = f"the end of the file after {file.size} bytes: a cut header, or a file without pixels"
            raise OCTReadError(url, RejectReason.MISSING_PIXEL_DATA, expected, actual)
        raw = replace(geometry.collect(ds), indices=check_whole(ds, url))
        text = {k: str(ds.get(k) or "") for k in ("SOPInstanceUID", "ManufacturerModelName", "ProtocolName")}
        laterality = laterality_of(ds, url)
        rescale = _rescale(ds, url)
        padding = [v[0] for name in _PADDING if (v := geometry.numbers(ds.get(name)))]
        high_bit = None if ds.get("HighBit") is None else int(ds.HighBit)
    layout = read_layout(ds, url)
    _check_pixels(layout, high_bit, url)
    shown_as = str(ds.get("PresentationLUTShape") or "")
    if shown_as == {"MONOCHROME1": "IDENTITY", "MONOCHROME2": "INVERSE"}[layout.photometric]:
        actual = f"{shown_as} (PresentationLUTShape) of {layout.photometric}"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, "one statement of what is black", actual)
    stated = protocol_of_text(text["ProtocolName"])
    in_row = BY_NAME.get(record.protocol) if record else None
    protocol = in_row or protocol_of_path(url) or stated
    device = record.device if record and record.device in DEVICES else device_of_path(url)
    device = device or (protocol.device if protocol else None)
    model = text["ManufacturerModelName"].lower()
    stated_device = next((d for d, (_, name) in DEVICES.items() if name.lower() in model), None)
    stated_device = stated_device or (stated.device if stated else None)
    if layout.frames < 2:
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, "two B-scans or more", layout.frames)
    described = len(raw.per_frame)
    if described not in (0, layout.frames):
        expected = f"{number(layout.frames)} per-frame items (NumberOfFrames)"
        raise OCTReadError(url, RejectReason.FRAME_COUNT_MISMATCH, expected, described)
    named = stated or protocol
    shape = (layout.frames, layout.rows, layout.columns)
    listed = record.spacing_mm if record else None
    measured = geometry.check_geometry(raw, shape, device or stated_device, protocol, url, listed)
    header = OCTHeader(
        url=url,
        shape=shape,
        **vars(measured),
        device=stated_device or device,
        protocol=named.name if named else None,
        laterality=laterality,
        sop_instance_uid=text["SOPInstanceUID"],
        transfer_syntax=known(str(layout.transfer_syntax), pydicom.uid.UID_dictionary),
        bits_stored=layout.bits_stored,
        inverted=layout.photometric == "MONOCHROME1",
        rescale=rescale,
        padding=(min(padding), max(padding)) if padding and ds.get(_PADDING[0]) is not None else None,
    )
    return header, layout


def _check_pixels(layout: PixelLayout, high_bit: int | None, url: str) -> None:
    rules = {
        "SamplesPerPixel": layout.samples == 1,
        f"PhotometricInterpretation {known(layout.photometric, _PHOTOMETRIC)}": layout.photometric in _GREY,
        f"BitsAllocated {layout.bits_allocated}": layout.bits_allocated in (8, 16),
        "signed values": layout.pixel_representation == 0,
        f"HighBit {number(high_bit or 0, 64)}": high_bit in (None, layout.bits_stored - 1),
    }
    wrong = ", ".join(name for name, is_right in rules.items() if not is_right)
    if wrong:
        expected = "one unsigned grey sample of 8 or 16 bits"
        raise OCTReadError(url, RejectReason.UNSUPPORTED_PIXELS, expected, wrong)


def _rescale(ds: Dataset, url: str) -> tuple[float, float]:
    """(slope, intercept) of all frames; raises OCTReadError for levels or frames that differ, and a table."""
    shared = list(ds.get("SharedFunctionalGroupsSequence") or [])[:1]
    frames = list(ds.get("PerFrameFunctionalGroupsSequence") or [])
    transforms = [(g.get("PixelValueTransformationSequence") or [None])[0] for g in (*shared, *frames)]
    if any(i is not None and i.get("ModalityLUTSequence") for i in (ds, *shared, *frames, *transforms)):
        expected = "grey values, or a RescaleSlope and RescaleIntercept"
        raise OCTReadError(url, RejectReason.UNSUPPORTED_PIXELS, expected, "a table (ModalityLUTSequence)")
    root, *own = (_slope_of(item) for item in (ds, *transforms))
    common = (own[0] if shared else None) or root
    in_frames = own[len(shared) :]
    levels = [("root", root), ("shared", common)]
    levels += [("per_frame", pair or common or (1.0, 0.0)) for pair in in_frames if any(in_frames)]
    pairs = {pair: name for name, pair in reversed(levels) if pair is not None}
    if not np.all(np.abs(list(pairs)) <= _MAX_RESCALE):
        raise OCTReadError(url, RejectReason.NOT_FINITE, f"rescale values up to {_MAX_RESCALE}", "others")
    if len(pairs) > 1:
        texts = [f"{number(a)} and {number(b)} ({name})" for (a, b), name in pairs.items()]
        expected = "one RescaleSlope and RescaleIntercept in the whole header"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, ", ".join(texts[:2]))
    return next(iter(pairs), (1.0, 0.0))


def _slope_of(item: Dataset | None) -> tuple[float, float] | None:
    if item is None:
        return None
    slope, intercept = (geometry.numbers(item.get(name)) for name in _RESCALE)
    return ((slope or (1.0,))[0], (intercept or (0.0,))[0]) if slope or intercept else None


def laterality_of(ds: Dataset, url: str) -> str | None:
    """L or R as the header says it, else as the name of the file ends; None where neither does. Raises
    OCTReadError header_mismatch for a header that names both, or an eye and something else.
    """
    stated: dict[str, str] = {}
    for value, where in _sides(ds):
        text = str(value or "").strip().lower()
        if text not in _NO_SIDE:
            word = text.replace(".", "").removesuffix(" eye")
            stated.setdefault(SIDES.get(word, "both eyes" if text in _BOTH else "another value"), where)
    if len(stated) > 1 or "both eyes" in stated:
        texts = [f"{side} ({where})" for side, where in stated.items()]
        expected = "one eye, R or L, in the whole header"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, " and ".join(texts))
    in_name = re.search(r"_([lr])_[0-9.]+\.dcm$", PurePosixPath(url).name)
    stated.pop("another value", None)
    return next(iter(stated), in_name[1].upper() if in_name else None)


def _sides(ds: Dataset) -> Iterator[tuple[Any, str]]:
    """(what the header says of the eye, where) in plain words and in the codes of an anatomic region."""
    places = [("", ds)]
    for name in ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"):
        items = [group.get(key) or [] for group in ds.get(name) or [] for key in _OF_ANATOMY]
        places += [(f" in {name}", item) for item in chain(*items)]
    for where, item in places:
        yield from ((item.get(name), name + where) for name in _SIDES)
        for sequence, of_codes in _REGIONS.items():
            for region in _items(item, sequence):
                yield _side_of(region), sequence + where
                yield from ((_side_of(code), of_codes + where) for code in _items(region, of_codes))


def _items(ds: Dataset, name: str) -> Sequence[Dataset]:
    """Those of a sequence; none where something else is written in its place."""
    with suppress(OSError, EOFError):  # bytes that are no items
        value = ds.get(name)
        return value if isinstance(value, Items) else []
    return []


def _side_of(code: Dataset) -> str | None:
    """R, L or B of a code; None where it means something else."""
    meaning = str(code.get("CodeMeaning") or "").strip().lower()
    return _CODES.get(str(code.get("CodeValue"))) or SIDES.get(meaning) or ("B" if meaning in _BOTH else None)
