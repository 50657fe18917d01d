"""Functional groups of a phantom file: where each device says what its spacing and positions are.

In: a `FileSpec`, the number of frames. Out: the shared and per-frame functional groups (DICOM PS3.3
C.7.6.16) in the manner of each protocol, as the AI-READI format notes describe them.
"""

import math
from dataclasses import dataclass

from pydicom.dataset import Dataset
from pydicom.sequence import Sequence
from pydicom.uid import OphthalmicPhotography8BitImageStorage

from data_setup.export.items import make_code, make_item
from data_setup.protocols import Protocol, Triple

ONH_CIRCLES_MM = (3.5, 4.1, 4.7)  # diameters of the last three frames of an optic nerve head scan
ONH_RADIAL_SCALE = 0.5  # its radial lines span half of the posterior pole's width
LOCALIZER_SIZE = 1536  # rows and columns of the reference image


@dataclass(frozen=True)
class PositionStyle:
    """How a protocol says where its B-scans lie: position written, empty or absent; coordinates."""

    image_position: str  # "written" | "empty" | "absent"
    reference_coordinates: bool
    inferior_first: bool  # stored from inferior to superior (then the coordinates fall)


_TOP = PositionStyle("written", True, False)
POSITION_STYLES: dict[str, PositionStyle] = {
    "spectralis_onh_rc_hr_oct_oct": PositionStyle("absent", False, False),
    "spectralis_ppol_mac_hr_oct_oct": _TOP,
    "spectralis_mac_20x20_hs_octa_oct": PositionStyle("written", True, True),
    "maestro2_3d_wide_oct_oct": PositionStyle("absent", True, True),
    "maestro2_3d_macula_oct_oct": PositionStyle("absent", True, True),
    "maestro2_macula_6x6_octa_oct": PositionStyle("absent", True, True),
    "triton_3d_radial_oct_oct": PositionStyle("empty", True, False),
    "triton_macula_6x6_octa_oct": PositionStyle("empty", True, False),
    "triton_macula_12x12_octa_oct": PositionStyle("absent", False, False),
    "cirrus_mac_oct_oct": PositionStyle("written", False, True),
    "cirrus_disc_oct_oct": _TOP,
    "cirrus_macula_6x6_octa_oct": PositionStyle("empty", True, True),
    "cirrus_disc_6x6_octa_oct": PositionStyle("absent", True, False),
}


@dataclass(frozen=True)
class FileSpec:
    """Everything about a file except its pixels."""

    person_id: str
    protocol: Protocol
    laterality: str
    spacing_mm: Triple  # true (B-scan distance, axial, lateral)
    sop_instance_uid: str
    reference_uid: str
    visit_date: str  # YYYY-MM-DD
    syntax: str  # key of SYNTAXES


def written_spacing(spec: FileSpec) -> tuple[str, str, str]:
    """The (SliceThickness, axial, lateral) texts as written; Cirrus repeats the lateral one."""
    thickness, axial, lateral = (f"{mm:.10g}" for mm in spec.spacing_mm)
    return (lateral if spec.protocol.device == "zeiss_cirrus" else thickness), axial, lateral


def one(**attributes: object) -> Sequence:
    """A sequence of one item."""
    return Sequence([make_item(**attributes)])


def _reference(spec: FileSpec) -> dict[str, object]:
    return {
        "ReferencedSOPClassUID": OphthalmicPhotography8BitImageStorage,
        "ReferencedSOPInstanceUID": spec.reference_uid,
        "PurposeOfReferenceCodeSequence": make_code("121311", "DCM", "Localizer"),
    }


def shared_groups(spec: FileSpec, anatomy: Sequence) -> Dataset:
    """The shared functional groups; without spacing and orientation for the optic nerve head scan."""
    groups = make_item(
        FrameAnatomySequence=one(AnatomicRegionSequence=anatomy, FrameLaterality=spec.laterality),
        ReferencedImageSequence=one(**_reference(spec)),
        DerivationImageSequence=Sequence(),
    )
    if spec.protocol.is_volume:
        thickness, axial, lateral = written_spacing(spec)
        groups.PlaneOrientationSequence = one(ImageOrientationPatient=["1", "0", "0", "0", "0", "-1"])
        groups.PixelMeasuresSequence = one(SliceThickness=thickness, PixelSpacing=[axial, lateral])
    return groups


def frame_groups(spec: FileSpec, frames: int, columns: int, moment: str) -> Sequence:
    """The per-frame functional groups, in stored order."""
    style = POSITION_STYLES[spec.protocol.name]
    distance, axial, lateral = spec.spacing_mm
    pixels_per_mm = LOCALIZER_SIZE / (columns * lateral)
    reference = _reference(spec)  # the same in every frame
    items = []
    for stored in range(frames):
        anatomical = frames - 1 - stored if style.inferior_first else stored
        content = one(
            FrameAcquisitionDateTime=moment,
            FrameReferenceDateTime=moment,
            FrameAcquisitionDuration=40.0,
            StackID="1",
            InStackPositionNumber=stored + 1,
            DimensionIndexValues=[1, stored + 1],
        )
        groups = make_item(FrameContentSequence=content)
        if not spec.protocol.is_volume:
            circle = stored - (frames - len(ONH_CIRCLES_MM))  # negative: a radial line
            width = lateral * ONH_RADIAL_SCALE if circle < 0 else math.pi * ONH_CIRCLES_MM[circle] / columns
            texts = [f"{axial:.10g}", f"{width:.10g}"]
            groups.PixelMeasuresSequence = one(PixelSpacing=texts)
            groups.PlanePositionSequence = Sequence([Dataset()])
            groups.PlaneOrientationSequence = Sequence([Dataset()])
        if style.image_position == "written":
            y = f"{anatomical * distance:.10g}"
            groups.PlanePositionSequence = one(ImagePositionPatient=["0", y, "0"])
        elif style.image_position == "empty":
            groups.PlanePositionSequence = one(ImagePositionPatient=None)
        if style.reference_coordinates:
            row = LOCALIZER_SIZE / 2 + (anatomical - (frames - 1) / 2) * distance * pixels_per_mm
            groups.OphthalmicFrameLocationSequence = one(
                **reference,
                ReferenceCoordinates=[row, 0.0, row, float(LOCALIZER_SIZE)],
                OphthalmicImageOrientation="LINEAR",
            )
        items.append(groups)
    return Sequence(items)
