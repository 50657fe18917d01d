"""Write one phantom volume as an Ophthalmic Tomography (OPT, PS3.3 A.52) DICOM file in each device's own
manner.

In: voxels in stored frame order, a `FileSpec`. Out: the bytes of a valid file. The manners follow the AI-
READI format notes: shared groups for volumes; Spectralis optic nerve head scans with per-frame spacing
only; Cirrus with the lateral spacing in SliceThickness; empty attributes where the Spectralis converter
writes them; positions as ImagePositionPatient and/or ReferenceCoordinates, growing from superior to
inferior.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass

import numpy as np
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
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

from data_setup.protocols import Protocol

SYNTAXES: dict[str, UID] = {
    "explicit": ExplicitVRLittleEndian,
    "j2k": JPEG2000Lossless,
    "rle": RLELossless,
    "j2k_lossy": JPEG2000,
}
LOSSY_RATIO = 8.0
LOCALIZER_SIZE = 1536  # rows and columns of the reference image
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
    spacing_mm: tuple[float, float, float]  # true (B-scan distance, axial, lateral)
    sop_instance_uid: str
    reference_uid: str
    visit_date: str  # YYYY-MM-DD
    syntax: str  # key of SYNTAXES


def make_uid(*parts: object) -> str:
    """A 2.25 UID that is a function of `parts`."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return f"2.25.{int.from_bytes(digest[:16], 'big') >> 2}"


def written_spacing(spec: FileSpec) -> tuple[str, str, str]:
    """The (SliceThickness, axial, lateral) texts as written; Cirrus repeats the lateral one."""
    thickness, axial, lateral = (f"{mm:.10g}" for mm in spec.spacing_mm)
    return (lateral if spec.protocol.device == "zeiss_cirrus" else thickness), axial, lateral


def _code(value: str, scheme: str, meaning: str) -> Sequence:
    item = Dataset()
    item.CodeValue, item.CodingSchemeDesignator, item.CodeMeaning = value, scheme, meaning
    return Sequence([item])


def _item(**attributes: object) -> Dataset:
    item = Dataset()
    for keyword, value in attributes.items():
        setattr(item, keyword, value)
    return item


def _reference(spec: FileSpec) -> dict[str, object]:
    return {
        "ReferencedSOPClassUID": OphthalmicPhotography8BitImageStorage,
        "ReferencedSOPInstanceUID": spec.reference_uid,
        "PurposeOfReferenceCodeSequence": _code("121311", "DCM", "Localizer"),
    }


def shared_groups(spec: FileSpec, anatomy: Sequence) -> Dataset:
    """The shared functional groups; without spacing and orientation for the optic nerve head scan."""
    groups = _item(
        FrameAnatomySequence=Sequence(
            [_item(AnatomicRegionSequence=anatomy, FrameLaterality=spec.laterality)]
        ),
        ReferencedImageSequence=Sequence([_item(**_reference(spec))]),
        DerivationImageSequence=Sequence(),
    )
    if spec.protocol.is_volume:
        thickness, axial, lateral = written_spacing(spec)
        groups.PlaneOrientationSequence = Sequence(
            [_item(ImageOrientationPatient=["1", "0", "0", "0", "0", "-1"])]
        )
        groups.PixelMeasuresSequence = Sequence(
            [_item(SliceThickness=thickness, PixelSpacing=[axial, lateral])]
        )
    return groups


def frame_groups(spec: FileSpec, frames: int, columns: int, moment: str) -> Sequence:
    """The per-frame functional groups, in stored order."""
    style = POSITION_STYLES[spec.protocol.name]
    distance, axial, lateral = spec.spacing_mm
    pixels_per_mm = LOCALIZER_SIZE / (columns * lateral)
    items = []
    for stored in range(frames):
        anatomical = frames - 1 - stored if style.inferior_first else stored
        groups = _item(
            FrameContentSequence=Sequence(
                [
                    _item(
                        FrameAcquisitionDateTime=moment,
                        FrameReferenceDateTime=moment,
                        FrameAcquisitionDuration=40.0,
                        StackID="1",
                        InStackPositionNumber=stored + 1,
                        DimensionIndexValues=[1, stored + 1],
                    )
                ]
            )
        )
        if not spec.protocol.is_volume:
            width = lateral * (0.5 if stored < frames - 3 else 0.8)  # radial lines and circles differ
            groups.PixelMeasuresSequence = Sequence([_item(PixelSpacing=[f"{axial:.10g}", f"{width:.10g}"])])
            groups.PlanePositionSequence = Sequence([Dataset()])
            groups.PlaneOrientationSequence = Sequence([Dataset()])
        if style.image_position == "written":
            y = f"{anatomical * distance:.10g}"
            groups.PlanePositionSequence = Sequence([_item(ImagePositionPatient=["0", y, "0"])])
        elif style.image_position == "empty":
            groups.PlanePositionSequence = Sequence([_item(ImagePositionPatient=None)])
        if style.reference_coordinates:
            row = LOCALIZER_SIZE / 2 + (anatomical - (frames - 1) / 2) * distance * pixels_per_mm
            groups.OphthalmicFrameLocationSequence = Sequence(
                [
                    _item(
                        **_reference(spec),
                        ReferenceCoordinates=[row, 0.0, row, float(LOCALIZER_SIZE)],
                        OphthalmicImageOrientation="LINEAR",
                    )
                ]
            )
        items.append(groups)
    return Sequence(items)


def build_dataset(spec: FileSpec, shape: tuple[int, int, int]) -> FileDataset:
    """The data set of a file without its pixels; `shape` is (frames, rows, columns)."""
    frames, rows, columns = shape
    device = spec.protocol.device
    day = spec.visit_date.replace("-", "")
    moment = f"{day}101112"
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = OphthalmicTomographyImageStorage
    meta.MediaStorageSOPInstanceUID = spec.sop_instance_uid
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.ImplementationClassUID = make_uid("implementation")
    meta.ImplementationVersionName = "OCT_PHANTOM"
    ds = FileDataset(None, {}, file_meta=meta, preamble=b"\0" * 128)
    onh = not spec.protocol.is_volume
    anatomy = _code(*(("81016008", "SCT", "Optic nerve head") if onh else ("5665001", "SCT", "Retina")))
    manufacturer, model = MODEL_TEXT[device]
    root = {
        "SpecificCharacterSet": "ISO_IR 192",
        "ImageType": ["DERIVED" if device == "zeiss_cirrus" else "ORIGINAL", "PRIMARY"],
        "SOPClassUID": OphthalmicTomographyImageStorage,
        "SOPInstanceUID": spec.sop_instance_uid,
        "StudyDate": day,
        "ContentDate": day,
        "AcquisitionDateTime": moment,
        "StudyTime": "101112",
        "ContentTime": "101112",
        "AccessionNumber": "",
        "Modality": "OPT",
        "Manufacturer": manufacturer,
        "ReferringPhysicianName": "",
        "ManufacturerModelName": model,
        "PatientName": "",
        "PatientID": spec.person_id,
        "PatientBirthDate": "",
        "PatientSex": "M",
        "DeviceSerialNumber": "00000",
        "SoftwareVersions": "0.0.0",
        "ProtocolName": "Macular Cube" if device == "zeiss_cirrus" else spec.protocol.protocol_name,
        "SynchronizationTrigger": "NO TRIGGER",
        "AcquisitionTimeSynchronized": "N",
        "DetectorType": "CCD",
        "AcquisitionDuration": 2.0,
        "StudyInstanceUID": make_uid("study", spec.person_id, day),
        "SeriesInstanceUID": make_uid("series", spec.sop_instance_uid),
        "StudyID": "",
        "SeriesNumber": "1",
        "AcquisitionNumber": "1",
        "InstanceNumber": "1",
        "FrameOfReferenceUID": make_uid("frame", spec.sop_instance_uid),
        "ImageLaterality": spec.laterality,
        "SynchronizationFrameOfReferenceUID": make_uid("clock", spec.sop_instance_uid),
        "PositionReferenceIndicator": "",
        "InConcatenationNumber": 1,
        "InConcatenationTotalNumber": 1,
        "ConcatenationFrameOffsetNumber": 0,
        "EmmetropicMagnification": None,
        "IntraOcularPressure": None,
        "HorizontalFieldOfView": 30.0,
        "PupilDilated": "YES",
        "DegreeOfDilation": None,
        "LightPathFilterTypeStackCodeSequence": Sequence(),
        "RefractiveStateSequence": Sequence(),
        "AxialLengthOfTheEye": None,
        "DepthSpatialResolution": 7.0 if device == "heidelberg_spectralis" else 6.0,
        "MaximumDepthDistortion": 0.5,
        "AlongScanSpatialResolution": 14.0,
        "MaximumAlongScanDistortion": 0.5,
        "AcrossScanSpatialResolution": 14.0,
        "MaximumAcrossScanDistortion": 0.5,
        "IlluminationWaveLength": WAVELENGTH_NM[device],
        "IlluminationPower": 1200.0,
        "IlluminationBandwidth": 50.0,
        "MydriaticAgentSequence": Sequence(),
        "AnatomicRegionSequence": anatomy,
        "AcquisitionDeviceTypeCodeSequence": _code(
            "392012008", "SCT", "Optical Coherence Tomography Scanner"
        ),
        "SamplesPerPixel": 1,
        "PhotometricInterpretation": "MONOCHROME2",
        "NumberOfFrames": frames,
        "Rows": rows,
        "Columns": columns,
        "BitsAllocated": 8,
        "BitsStored": 8,
        "HighBit": 7,
        "PixelRepresentation": 0,
        "BurnedInAnnotation": "NO",
        "LossyImageCompression": "00",
        "PresentationLUTShape": "IDENTITY",
        "AcquisitionContextSequence": Sequence(),
    }
    if device == "heidelberg_spectralis" and "20x20" not in spec.protocol.name:
        # the converter writes every attribute of its list, empty where the export has none
        root |= {
            "DerivationDescription": None,
            "HorizontalFieldOfView": None,
            "InConcatenationNumber": None,
            "InConcatenationTotalNumber": None,
            "ConcatenationFrameOffsetNumber": None,
            "LossyImageCompressionRatio": None,
            "LossyImageCompressionMethod": None,
        }
    elif device.startswith("topcon") or "20x20" in spec.protocol.name:
        root |= {
            "SeriesDate": day,
            "SeriesTime": "101112",
            "InstanceCreationDate": day,
            "InstanceCreationTime": "101112",
            "OphthalmicVolumetricPropertiesFlag": "YES",
            "OphthalmicAnatomicReferencePointXCoordinate": None,
            "OphthalmicAnatomicReferencePointYCoordinate": None,
        }
    for keyword, value in root.items():
        setattr(ds, keyword, value)
    if "20x20" in spec.protocol.name:
        ds.Laterality = spec.laterality
    organization = make_uid("dimension", spec.sop_instance_uid)
    ds.DimensionOrganizationSequence = Sequence([_item(DimensionOrganizationUID=organization)])
    ds.DimensionIndexSequence = Sequence(
        [
            _item(
                DimensionOrganizationUID=organization,
                DimensionIndexPointer=tag,
                FunctionalGroupPointer=0x00209111,
            )
            for tag in (0x00209056, 0x00209057)
        ]
    )
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
    extra = {"j2k_cr": [LOSSY_RATIO]} if uid == JPEG2000 else {}
    ds.compress(
        uid, np.ascontiguousarray(voxels), encapsulate_ext=False, generate_instance_uid=False, **extra
    )
    if uid == JPEG2000:
        ds.LossyImageCompression = "01"
        ds.LossyImageCompressionRatio = f"{voxels.size / len(ds.PixelData):.4g}"
        ds.LossyImageCompressionMethod = "ISO_15444_1"


def to_bytes(ds: FileDataset) -> bytes:
    """The file's bytes (Part 10, with preamble and checked file meta)."""
    buffer = io.BytesIO()
    ds.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()


def write_volume(voxels: np.ndarray, spec: FileSpec) -> bytes:
    """The bytes of an OPT file holding uint8 `voxels` [F,rows,columns] in stored frame order."""
    ds = build_dataset(spec, voxels.shape)
    add_pixels(ds, voxels, spec.syntax)
    return to_bytes(ds)
