"""Ophthalmic Tomography (OPT, PS3.3 A.52) of a volume: derived, without names and dates of people.

In: an `ExportVolume`. Out: the bytes of a file with one stack of frames, Explicit VR Little Endian, 8 bits.
The places of the frames are in mm along the patient's axes (LPS): rows to the left, columns to posterior,
frames to inferior. Where the direction of D is unknown no place is written, as then none is true, and
OphthalmicVolumetricPropertiesFlag is NO, which demands none. UIDs are a function of the voxels. dciodvfy
asks of one file for attributes of a concatenation that it forbids in the next line.
"""

from __future__ import annotations

import datetime
import hashlib
import io
from typing import Any

import numpy as np
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.sequence import Sequence
from pydicom.uid import UID, ExplicitVRLittleEndian, OphthalmicTomographyImageStorage

from data_setup.protocols import DEVICES
from data_setup.store_export.volume import ExportVolume
from data_setup.writers.items import make_code, make_item, make_uid

_NUMBER = "{:.10g}"  # DS: at most 16 characters
# The standard wants these, and a store does not know them. Whether the id of the tables identifies somebody
# is not known either, so the file does not say that identity was removed.
NOT_KNOWN = (
    "Written anew. Dummies: AcquisitionDateTime, DetectorType. Nobody looked for BurnedInAnnotation, and "
    "LossyImageCompression is of this file alone, not of its source."
)


def opt_files(volume: ExportVolume, today: datetime.date) -> dict[str, bytes]:
    """{name: content} of a .dcm; `today`: the day of the derived content."""
    ds = _dataset(volume, today)
    data = np.ascontiguousarray(volume.voxels).tobytes()
    ds.PixelData = data + b"\0" * (len(data) % 2)
    ds["PixelData"].VR = "OB"
    buffer = io.BytesIO()
    ds.save_as(buffer, enforce_file_format=True)
    return {f"{volume.stem}.dcm": buffer.getvalue()}


def _dataset(volume: ExportVolume, today: datetime.date) -> FileDataset:
    """The data set without its pixels."""
    digest = hashlib.sha256(volume.voxels.tobytes() + volume.stem.encode()).hexdigest()
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = OphthalmicTomographyImageStorage
    meta.MediaStorageSOPInstanceUID = UID(make_uid(digest, "instance"))
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.ImplementationClassUID = UID(make_uid("oct-foundation", "implementation"))
    ds = FileDataset(io.BytesIO(), {}, file_meta=meta, preamble=b"\0" * 128)
    ds.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
    attributes = _about(volume, digest, today) | _acquisition(volume.is_ordered) | _image(volume)
    for keyword, value in attributes.items():
        setattr(ds, keyword, value)
    if volume.laterality is None:
        del ds.ImageLaterality
    organization = make_uid(digest, "dimension")
    ds.DimensionOrganizationSequence = [make_item(DimensionOrganizationUID=organization)]
    pointers = (0x00209056, 0x00209057)  # StackID, InStackPositionNumber in FrameContentSequence
    ds.DimensionIndexSequence = [
        make_item(
            DimensionOrganizationUID=organization, DimensionIndexPointer=p, FunctionalGroupPointer=0x00209111
        )
        for p in pointers
    ]
    ds.SharedFunctionalGroupsSequence = [_shared_groups(volume)]
    ds.PerFrameFunctionalGroupsSequence = [_frame_groups(volume, i) for i in range(len(volume.voxels))]
    return ds


def _about(volume: ExportVolume, digest: str, today: datetime.date) -> dict[str, Any]:
    """Who, when, with what: nothing of a person but the id of the tables."""
    maker, model = DEVICES.get(volume.device or "", ("", volume.device or ""))
    return {
        "SpecificCharacterSet": "ISO_IR 192",
        "SOPClassUID": OphthalmicTomographyImageStorage,
        "PatientName": "",
        "PatientID": volume.person_id,
        "PatientBirthDate": "",
        "PatientSex": "",
        "ImageComments": NOT_KNOWN,
        "StudyInstanceUID": make_uid(volume.person_id, "study"),
        "StudyDate": "",
        "StudyTime": "",
        "StudyID": "",
        "AccessionNumber": "",
        "ReferringPhysicianName": "",
        "Modality": "OPT",
        "SeriesInstanceUID": make_uid(digest, "series"),
        "SeriesNumber": "1",
        "InstanceNumber": "1",
        "AcquisitionNumber": "1",
        "ContentDate": today.strftime("%Y%m%d"),
        "ContentTime": "000000",
        "Manufacturer": maker or "unknown",
        "ManufacturerModelName": model or "unknown",
        "DeviceSerialNumber": "unknown",
        "SoftwareVersions": "unknown",
        "ProtocolName": volume.protocol or "",
        "FrameOfReferenceUID": make_uid(digest, "frame"),
        "PositionReferenceIndicator": "",
        "SynchronizationFrameOfReferenceUID": make_uid(digest, "clock"),
        "SynchronizationTrigger": "NO TRIGGER",
        "AcquisitionTimeSynchronized": "N",
        "ImageLaterality": volume.laterality or "",
    }


def _acquisition(has_places: bool) -> dict[str, Any]:
    """The attributes of the acquisition that have to be there; what is not known is empty."""
    empty = (
        "EmmetropicMagnification",
        "IntraOcularPressure",
        "HorizontalFieldOfView",
        "PupilDilated",
        "AxialLengthOfTheEye",
    )
    return {
        **dict.fromkeys(empty),
        "AcquisitionDateTime": "19000101000000",  # has to be there, and nothing says it
        "DetectorType": "CCD",  # the same
        "InConcatenationNumber": 1,
        "InConcatenationTotalNumber": 1,
        "ConcatenationFrameOffsetNumber": 0,
        "RefractiveStateSequence": Sequence(),
        "LightPathFilterTypeStackCodeSequence": Sequence(),
        "AcquisitionContextSequence": Sequence(),
        "AcquisitionDeviceTypeCodeSequence": make_code(
            "392012008", "SCT", "Optical Coherence Tomography Scanner"
        ),
        "AnatomicRegionSequence": make_code("5665001", "SCT", "Retina"),
        "OphthalmicAnatomicReferencePointXCoordinate": None,
        "OphthalmicAnatomicReferencePointYCoordinate": None,
        "OphthalmicVolumetricPropertiesFlag": "YES" if has_places else "NO",  # YES demands the planes
    }


def _image(volume: ExportVolume) -> dict[str, Any]:
    frames, rows, columns = volume.voxels.shape
    return {
        "ImageType": ["DERIVED", "PRIMARY"],
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
    }


def _shared_groups(volume: ExportVolume) -> Dataset:
    d, h, w = (_NUMBER.format(mm) for mm in volume.spacing_mm)
    region = make_item(
        AnatomicRegionSequence=make_code("5665001", "SCT", "Retina"), FrameLaterality=volume.laterality or "U"
    )
    groups = make_item(
        FrameAnatomySequence=[region],
        PixelMeasuresSequence=[make_item(PixelSpacing=[h, w], SliceThickness=d, SpacingBetweenSlices=d)],
        DerivationImageSequence=Sequence(),
        ReferencedImageSequence=Sequence(),
    )
    if volume.is_ordered:
        groups.PlaneOrientationSequence = [make_item(ImageOrientationPatient=["1", "0", "0", "0", "1", "0"])]
    return groups


def _frame_groups(volume: ExportVolume, index: int) -> Dataset:
    content = make_item(StackID="1", InStackPositionNumber=index + 1, DimensionIndexValues=[1, index + 1])
    groups = make_item(FrameContentSequence=[content])
    if volume.is_ordered:
        z = _NUMBER.format(-index * volume.spacing_mm[0])
        groups.PlanePositionSequence = [make_item(ImagePositionPatient=["0", "0", z])]
    return groups
