"""Write one phantom volume as an Ophthalmic Tomography (OPT, PS3.3 A.52) file in its device's manner.

In: voxels in stored frame order, a `FileSpec`. Out: the bytes of a valid file. Root attributes follow the
AI-READI format notes: empty ones where the Spectralis converter writes them, the whole original data set
for Topcon; functional groups (PS3.3 C.7.6.16) with spacings and positions where the device says them.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydicom.dataset import Dataset, FileDataset
from pydicom.sequence import Sequence
from pydicom.uid import (
    JPEG2000,
    UID,
    ExplicitVRLittleEndian,
    JPEG2000Lossless,
    OphthalmicPhotography8BitImageStorage,
    OphthalmicTomographyImageStorage,
    RLELossless,
)

from data_setup.export.items import fill, make_code, make_item, make_uid, new_file, to_bytes
from data_setup.protocols import Protocol, Shape, Triple

SYNTAXES: dict[str, UID] = {
    "explicit": ExplicitVRLittleEndian,
    "j2k": JPEG2000Lossless,
    "rle": RLELossless,
    "j2k_lossy": JPEG2000,
}
LOSSY_RATIO = 8.0
_SCANNER = ("392012008", "SCT", "Optical Coherence Tomography Scanner")
# attributes that have one value in every file
# fmt: off
_CONSTANT: dict[str, Any] = {
    "SpecificCharacterSet": "ISO_IR 192", "Modality": "OPT", "PatientSex": "M", "SoftwareVersions": "0.0.0",
    "DeviceSerialNumber": "00000", "SynchronizationTrigger": "NO TRIGGER", "DetectorType": "CCD",
    "AcquisitionTimeSynchronized": "N", "AcquisitionDuration": 2.0, "PupilDilated": "YES",
    "InConcatenationNumber": 1, "InConcatenationTotalNumber": 1, "ConcatenationFrameOffsetNumber": 0,
    "MaximumDepthDistortion": 0.5, "MaximumAlongScanDistortion": 0.5, "MaximumAcrossScanDistortion": 0.5,
    "AlongScanSpatialResolution": 14.0, "AcrossScanSpatialResolution": 14.0, "HorizontalFieldOfView": 30.0,
    "IlluminationPower": 1200.0, "IlluminationBandwidth": 50.0, "PixelRepresentation": 0,
    "SamplesPerPixel": 1, "PhotometricInterpretation": "MONOCHROME2",
    "BitsAllocated": 8, "BitsStored": 8, "HighBit": 7,
    "BurnedInAnnotation": "NO", "LossyImageCompression": "00", "PresentationLUTShape": "IDENTITY",
}
# fmt: on
_DATES = ("StudyDate", "ContentDate")
_TIMES = ("StudyTime", "ContentTime")
_EMPTY: tuple[str, ...] = ("AccessionNumber", "ReferringPhysicianName", "PatientName", "PatientBirthDate")
_EMPTY += ("StudyID", "PositionReferenceIndicator")
_ABSENT: tuple[str, ...] = ("EmmetropicMagnification", "IntraOcularPressure", "DegreeOfDilation")
_ABSENT += ("AxialLengthOfTheEye",)
_FIRST = ("SeriesNumber", "AcquisitionNumber", "InstanceNumber")
_NONE: tuple[str, ...] = ("LightPathFilterTypeStackCodeSequence", "RefractiveStateSequence")
_NONE += ("MydriaticAgentSequence", "AcquisitionContextSequence")
_EMPTY_OF_SPECTRALIS = (
    *("DerivationDescription", "HorizontalFieldOfView", "InConcatenationNumber"),
    *("InConcatenationTotalNumber", "ConcatenationFrameOffsetNumber"),
    *("LossyImageCompressionRatio", "LossyImageCompressionMethod"),
)
MODEL_TEXT = {
    "heidelberg_spectralis": ("Heidelberg Engineering", "Spectralis"),
    "topcon_maestro2": ("Topcon", "3DOCT-1Maestro2"),
    "topcon_triton": ("Topcon", "Triton plus"),
    "zeiss_cirrus": ("Carl Zeiss Meditec", "CIRRUS HD-OCT"),
}
WAVELENGTH_NM = {
    "heidelberg_spectralis": 880.0,
    "topcon_maestro2": 840.0,
    "topcon_triton": 1050.0,
    "zeiss_cirrus": 840.0,
}


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


def build_dataset(spec: FileSpec, shape: Shape) -> FileDataset:
    """The data set of a file without its pixels; `shape` is (frames, rows, columns)."""
    frames, rows, columns = shape
    device = spec.protocol.device
    day = spec.visit_date.replace("-", "")
    moment = f"{day}101112"
    ds = new_file(OphthalmicTomographyImageStorage, spec.sop_instance_uid)
    ds.file_meta.ImplementationClassUID = UID(make_uid("implementation"))
    ds.file_meta.ImplementationVersionName = "OCT_PHANTOM"
    onh = not spec.protocol.is_volume
    anatomy = make_code(*(("81016008", "SCT", "Optic nerve head") if onh else ("5665001", "SCT", "Retina")))
    manufacturer, model = MODEL_TEXT[device]
    root = {
        **_CONSTANT,
        **dict.fromkeys(_DATES, day),
        **dict.fromkeys(_TIMES, "101112"),
        **dict.fromkeys(_EMPTY, ""),
        **dict.fromkeys(_ABSENT, None),
        **dict.fromkeys(_FIRST, "1"),
        **dict.fromkeys(_NONE, Sequence()),
        "ImageType": ["DERIVED" if device == "zeiss_cirrus" else "ORIGINAL", "PRIMARY"],
        "SOPClassUID": OphthalmicTomographyImageStorage,
        "SOPInstanceUID": spec.sop_instance_uid,
        "AcquisitionDateTime": moment,
        "Manufacturer": manufacturer,
        "ManufacturerModelName": model,
        "PatientID": spec.person_id,
        "ProtocolName": "Macular Cube" if device == "zeiss_cirrus" else spec.protocol.protocol_name,
        "StudyInstanceUID": make_uid("study", spec.person_id, day),
        "SeriesInstanceUID": make_uid("series", spec.sop_instance_uid),
        "FrameOfReferenceUID": make_uid("frame", spec.sop_instance_uid),
        "ImageLaterality": spec.laterality,
        "SynchronizationFrameOfReferenceUID": make_uid("clock", spec.sop_instance_uid),
        "DepthSpatialResolution": 7.0 if device == "heidelberg_spectralis" else 6.0,
        "IlluminationWaveLength": WAVELENGTH_NM[device],
        "AnatomicRegionSequence": anatomy,
        "AcquisitionDeviceTypeCodeSequence": make_code(*_SCANNER),
        "NumberOfFrames": frames,
        "Rows": rows,
        "Columns": columns,
    }
    if device == "heidelberg_spectralis" and "20x20" not in spec.protocol.name:
        # the converter writes every attribute of its list, empty where the export has none
        root |= dict.fromkeys(_EMPTY_OF_SPECTRALIS, None)
    elif device.startswith("topcon") or "20x20" in spec.protocol.name:
        root |= {
            **dict.fromkeys(("SeriesDate", "InstanceCreationDate"), day),
            **dict.fromkeys(("SeriesTime", "InstanceCreationTime"), "101112"),
            **dict.fromkeys((f"OphthalmicAnatomicReferencePoint{axis}Coordinate" for axis in "XY"), None),
            "OphthalmicVolumetricPropertiesFlag": "YES",
        }
    fill(ds, root)
    if "20x20" in spec.protocol.name:
        ds.Laterality = spec.laterality
    organization = make_uid("dimension", spec.sop_instance_uid)
    ds.DimensionOrganizationSequence = one(DimensionOrganizationUID=organization)
    of_index = {"DimensionOrganizationUID": organization, "FunctionalGroupPointer": 0x00209111}
    pointers = (0x00209056, 0x00209057)
    ds.DimensionIndexSequence = Sequence(make_item(DimensionIndexPointer=tag, **of_index) for tag in pointers)
    ds.SharedFunctionalGroupsSequence = Sequence([shared_groups(spec, anatomy)])
    ds.PerFrameFunctionalGroupsSequence = frame_groups(spec, frames, columns, moment)
    return ds


def add_pixels(ds: FileDataset, voxels: np.ndarray, syntax: str) -> None:
    """Put uint8 voxels [F,rows,columns] into `ds` in the transfer syntax `syntax` (a key of SYNTAXES)."""
    uid = SYNTAXES[syntax]
    if uid == ExplicitVRLittleEndian:
        data = np.ascontiguousarray(voxels).tobytes()
        ds.PixelData = data + b"\0" * (len(data) % 2)
        ds["PixelData"].VR = "OB"
        return
    ratios = [LOSSY_RATIO] if uid == JPEG2000 else None
    ds.compress(uid, np.ascontiguousarray(voxels), generate_instance_uid=False, j2k_cr=ratios)
    if uid == JPEG2000:
        ds.LossyImageCompression = "01"
        ds.LossyImageCompressionRatio = f"{voxels.size / len(ds.PixelData):.4g}"
        ds.LossyImageCompressionMethod = "ISO_15444_1"


def write_volume(voxels: np.ndarray, spec: FileSpec) -> bytes:
    """The bytes of an OPT file holding uint8 `voxels` [F,rows,columns] in stored frame order."""
    ds = build_dataset(spec, voxels.shape)
    add_pixels(ds, voxels, spec.syntax)
    return to_bytes(ds)
