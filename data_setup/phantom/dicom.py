"""Write one phantom volume as an Ophthalmic Tomography (OPT, PS3.3 A.52) file in its device's manner.

In: voxels in stored frame order, a `FileSpec`. Out: the bytes of a valid file. Root attributes follow the
AI-READI format notes: empty ones where the Spectralis converter writes them, the whole original data set
for Topcon; the functional groups are in groups.py.
"""

from __future__ import annotations

import io

import numpy as np
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.sequence import Sequence
from pydicom.uid import (
    JPEG2000,
    UID,
    ExplicitVRLittleEndian,
    JPEG2000Lossless,
    OphthalmicTomographyImageStorage,
    RLELossless,
)

from data_setup.export.writers.items import make_code, make_item, make_uid
from data_setup.phantom.groups import FileSpec, frame_groups, shared_groups

SYNTAXES: dict[str, UID] = {
    "explicit": ExplicitVRLittleEndian,
    "j2k": JPEG2000Lossless,
    "rle": RLELossless,
    "j2k_lossy": JPEG2000,
}
LOSSY_RATIO = 8.0
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


def build_dataset(spec: FileSpec, shape: tuple[int, int, int]) -> FileDataset:
    """The data set of a file without its pixels; `shape` is (frames, rows, columns)."""
    frames, rows, columns = shape
    device = spec.protocol.device
    day = spec.visit_date.replace("-", "")
    moment = f"{day}101112"
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = OphthalmicTomographyImageStorage
    meta.MediaStorageSOPInstanceUID = UID(spec.sop_instance_uid)
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.ImplementationClassUID = UID(make_uid("implementation"))
    meta.ImplementationVersionName = "OCT_PHANTOM"
    ds = FileDataset(io.BytesIO(), {}, file_meta=meta, preamble=b"\0" * 128)
    onh = not spec.protocol.is_volume
    anatomy = make_code(*(("81016008", "SCT", "Optic nerve head") if onh else ("5665001", "SCT", "Retina")))
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
        "AcquisitionDeviceTypeCodeSequence": make_code(
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
    ds.DimensionOrganizationSequence = Sequence([make_item(DimensionOrganizationUID=organization)])
    ds.DimensionIndexSequence = Sequence(
        [
            make_item(
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
    ratios = [LOSSY_RATIO] if uid == JPEG2000 else None
    ds.compress(uid, np.ascontiguousarray(voxels), generate_instance_uid=False, j2k_cr=ratios)
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
