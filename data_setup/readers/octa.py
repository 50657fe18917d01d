"""OCTA files: one flow cube or en-face image -> its header and uint8 frames.

In: the URL of a file of retinal_octa/flow_cube or retinal_octa/enface. Out: an `OctaHeader`, and uint8
[frames, rows, columns] in file order, an image as one frame [1, B-scans, A-scans]; or an OCTReadError with
its reason. Flow is what a device's software computed from repeated B-scans: no measure of speed.
Standard: DICOM PS3.3 A.84 and A.83, Ophthalmic Optical Coherence Tomography B-scan Volume Analysis and En
Face Image; the en-face image is a projection of a slab, which its image type names.
"""

from dataclasses import dataclass, replace

import numpy as np
from pydicom.dataset import Dataset

from data_setup.readers.dicom import PIXEL_TAGS, SIDE_TAGS, laterality_of, open_file, read_dataset
from data_setup.readers.faults import OCTReadError, RejectReason, known, named_faults
from data_setup.readers.geometry import Measures, first, measures
from data_setup.readers.heights import references_of_groups, uids_of_scans
from data_setup.readers.parts import PART_TAGS, check_whole
from data_setup.readers.pixels import BoundedFile, PixelLayout, iter_pixels, read_layout
from utils.config.schema import StorageOptions

FLOW_CLASS = "1.2.840.10008.5.1.4.1.1.77.1.5.8"
ENFACE_CLASS = "1.2.840.10008.5.1.4.1.1.77.1.5.7"
FLOW_CUBE, EN_FACE = "OCTA flow cube", "OCTA en-face image"
KINDS = {FLOW_CLASS: FLOW_CUBE, ENFACE_CLASS: EN_FACE}
SLABS = ("superficial", "deep", "outer_retina", "choriocapillaris")  # from the vitreous down
_WORD_OF = dict(zip(SLABS, ("superficial", "deep", "outer", "choriocapillaris"), strict=True))
_NO_FLOW = ("structur", "reflectance", "thickness")  # en-face images of other things
_TAGS = [*PIXEL_TAGS, "SOPClassUID", "SOPInstanceUID", "PixelSpacing", *SIDE_TAGS]
_TAGS += ["SliceThickness", "SpacingBetweenSlices", "SharedFunctionalGroupsSequence", "SourceImageSequence"]
_TAGS += ["PerFrameFunctionalGroupsSequence", "ReferencedSeriesSequence", "DerivationImageSequence"]
_TAGS += ["OphthalmicImageTypeCodeSequence", "OphthalmicImageTypeDescription", *PART_TAGS]


@dataclass(frozen=True)
class OctaHeader:
    """What a file says of itself."""

    kind: str  # FLOW_CUBE or EN_FACE
    shape: tuple[int, int, int]  # frames, rows, columns
    spacing_mm: Measures  # of the pixels; of an image `axial` is None and `distance` that of its rows
    sop_instance_uid: str
    laterality: str | None  # L | R
    references: frozenset[str]  # SOPInstanceUIDs of the OCT files that it says it is made from
    image_type: str  # of an en-face image, in the maker's words


def slab_of(image_type: str) -> str | None:
    """The slab of SLABS that a maker's words mean; None for another image."""
    text = image_type.lower()
    if any(word in text for word in _NO_FLOW):
        return None
    return next((slab for slab, word in _WORD_OF.items() if word in text), None)


def read_octa_header(file: BoundedFile, url: str) -> OctaHeader:
    """The header of an open file; raises OCTReadError, not_flow_cube for a file of another class."""
    return _header(read_dataset(file, _TAGS, url), FLOW_CUBE, url)[0]


def read_octa(url: str, kind: str, options: StorageOptions | None = None) -> tuple[OctaHeader, np.ndarray]:
    """(header, uint8 [frames, rows, columns]) of a file of `kind`; raises OCTReadError, StorageError."""
    with open_file(url, options) as opened:
        file = BoundedFile(opened)
        header, layout = _header(read_dataset(file, _TAGS, url), kind, url)
        if header.kind != kind:
            raise _another_class(url, kind, header.kind)
        pixels: np.ndarray | None = None
        for index, frame in enumerate(iter_pixels(file, layout, url)):
            if pixels is None:  # a wrong length has been met by now
                pixels = np.empty(header.shape, np.uint8)
            pixels[index] = _grey(frame, layout.bits_stored)
    assert pixels is not None
    if pixels.min() == pixels.max():
        raise OCTReadError(url, RejectReason.CONSTANT_VOLUME, "flow", f"every pixel {pixels.flat[0]}")
    return header, pixels


def _grey(frame: np.ndarray, bits: int) -> np.ndarray:
    """Stored values to uint8: 0..2^bits - 1 linearly to 0..255."""
    if bits == 8:
        return frame.astype(np.uint8)
    return np.rint(frame.astype(np.float32) * np.float32(255 / (2**bits - 1))).clip(0, 255).astype(np.uint8)


def _header(ds: Dataset, kind: str, url: str) -> tuple[OctaHeader, PixelLayout]:
    """(header, description of the pixels); `kind`: what a file of neither class was expected to be."""
    with named_faults(url, RejectReason.NOT_DICOM, "a DICOM header"):
        sop_class = str(ds.get("SOPClassUID") or "")
    if sop_class not in KINDS:
        raise _another_class(url, kind, "a file of another class")
    layout = read_layout(ds, url)
    grey = layout.photometric == "MONOCHROME2" and layout.samples == 1 and not layout.pixel_representation
    if not grey or layout.bits_allocated not in (8, 16):
        name = known(layout.photometric, ("MONOCHROME1", "MONOCHROME2", "RGB", "PALETTE COLOR"))
        actual = f"{layout.samples} of {layout.bits_allocated} bits, {name}"
        expected = "one unsigned MONOCHROME2 sample of 8 or 16 bits"
        raise OCTReadError(url, RejectReason.UNSUPPORTED_PIXELS, expected, actual)
    is_cube = KINDS[sop_class] == FLOW_CUBE
    if (layout.frames > 1) != is_cube:
        expected = "two B-scans or more" if is_cube else "one frame"
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, expected, layout.frames)
    with named_faults(url, RejectReason.HEADER_MISMATCH, "a description of the pixels"):
        own = measures(ds)
        check_whole(ds, url)
        if is_cube:
            own = measures((first(ds, "SharedFunctionalGroupsSequence", "PixelMeasuresSequence") or [ds])[0])
            own = replace(own, distance=own.distance or own.thickness)
        else:
            own = Measures(None, own.lateral, own.axial)
        code = (ds.get("OphthalmicImageTypeCodeSequence") or [Dataset()])[0]
        text = str(code.get("CodeMeaning") or ds.get("OphthalmicImageTypeDescription") or "").strip()
        header = OctaHeader(
            kind=KINDS[sop_class],
            shape=(layout.frames, layout.rows, layout.columns),
            spacing_mm=own,
            sop_instance_uid=str(ds.get("SOPInstanceUID") or ""),
            laterality=laterality_of(ds, url),
            references=references_of_groups(ds) | _root_references(ds),
            image_type=text,
        )
    return header, layout


def _root_references(ds: Dataset) -> frozenset[str]:
    """The OCT files that the root names."""
    items = list(ds.get("SourceImageSequence") or [])
    for series in ds.get("ReferencedSeriesSequence") or []:
        items += series.get("ReferencedInstanceSequence") or []
    for derivation in ds.get("DerivationImageSequence") or []:
        items += derivation.get("SourceImageSequence") or []
    return uids_of_scans(items)


def _another_class(url: str, kind: str, actual: str) -> OCTReadError:
    reason = RejectReason.NOT_FLOW_CUBE if kind == FLOW_CUBE else RejectReason.NOT_EN_FACE
    return OCTReadError(url, reason, f"an {kind}", actual)
