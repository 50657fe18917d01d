"""Write one phantom volume as an Ophthalmic Tomography (OPT, PS3.3 A.52) file in its device's manner.

In: voxels in stored frame order, a `FileSpec`. Out: the bytes of a valid file. Root attributes follow the
AI-READI format notes: empty ones where the Spectralis converter writes them, the whole original data set
for Topcon; the functional groups are in groups.py.
"""

from typing import Any

import numpy as np
from pydicom.dataset import FileDataset
from pydicom.sequence import Sequence
from pydicom.uid import (
    JPEG2000,
    UID,
    ExplicitVRLittleEndian,
    JPEG2000Lossless,
    OphthalmicTomographyImageStorage,
    RLELossless,
)

from data_setup.export.items import fill, make_code, make_item, make_uid, new_file, to_bytes
from data_setup.phantom.groups import FileSpec, frame_groups, one, shared_groups
from data_setup.protocols import Shape

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
