"""Surfaces as a DICOM Height Map Segmentation (Supplement 240), which data_setup/readers/heights.py reads.

In: float32 [S, D, W], rows of the scan (0: the centre of the first), NaN: none; the scan's DICOM file. Out: a
file of SOP class 1.2.840.10008.5.1.4.1.1.66.8 with FloatPixelData, a frame a surface, from the vitreous down,
whose shared functional group refers to the scan. `prepare --labels` reads it as label_surfaces.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import pydicom
from pydicom.sequence import Sequence as Items
from pydicom.uid import generate_uid

from data_setup.export.writers.items import fill, make_item, new_file, require, to_bytes
from data_setup.readers.heights import HEIGHT_MAP_CLASS
from utils import storage
from utils.config.schema import StorageOptions

INVALID = -1.0  # FloatPixelPaddingValue: no row of a scan, for no device
NEEDED = ("SOPClassUID", "SOPInstanceUID", "SeriesInstanceUID")
_OF_THE_SCAN: tuple[str, ...] = ("PatientName", "PatientID", "PatientBirthDate", "PatientSex")
_OF_THE_SCAN += ("StudyInstanceUID", "StudyDate", "StudyTime", "StudyID", "AccessionNumber")
_OF_THE_SCAN += ("ReferringPhysicianName", "FrameOfReferenceUID", "PositionReferenceIndicator")
_OF_THE_SCAN += ("ImageLaterality", "SpecificCharacterSet")


def write_height_map(
    heights_SDW: np.ndarray,
    names: Sequence[str],
    scan_url: str,
    version: str,
    url: str,
    options: StorageOptions,
) -> None:
    """Write a .dcm at `url`; `version`: of what predicted. Raises OCTReadError, StorageError."""
    scan = pydicom.dcmread(io.BytesIO(storage.read_bytes(scan_url, options)), stop_before_pixels=True)
    require(scan, NEEDED, "Height Map Segmentation", scan_url)
    written = new_file(HEIGHT_MAP_CLASS, generate_uid())
    for keyword in _OF_THE_SCAN:
        if keyword in scan:
            written[keyword] = scan[keyword]
    heights = np.where(np.isnan(heights_SDW), INVALID, heights_SDW).astype("<f4")
    reference = make_item(
        ReferencedSOPClassUID=scan.SOPClassUID, ReferencedSOPInstanceUID=scan.SOPInstanceUID
    )
    of_series = make_item(
        SeriesInstanceUID=scan.SeriesInstanceUID, ReferencedInstanceSequence=Items([reference])
    )
    root = {
        "SOPClassUID": HEIGHT_MAP_CLASS,
        "SOPInstanceUID": written.file_meta.MediaStorageSOPInstanceUID,
        "SeriesInstanceUID": generate_uid(),
        "SeriesNumber": 901,
        "InstanceNumber": 1,
        "Modality": "SEG",
        "Manufacturer": "oct-foundation",
        "ManufacturerModelName": "oct-foundation",
        "SoftwareVersions": version,
        "SegmentationType": "HEIGHTMAP",
        "ContentLabel": "SURFACES",
        "SamplesPerPixel": 1,
        "PhotometricInterpretation": "MONOCHROME2",
        "NumberOfFrames": heights.shape[0],
        "Rows": heights.shape[1],
        "Columns": heights.shape[2],
        "BitsAllocated": 32,
        "FloatPixelPaddingValue": INVALID,
        "SegmentSequence": Items(
            make_item(
                SegmentNumber=number,
                SegmentLabel=name,
                SegmentAlgorithmType="AUTOMATIC",
                SegmentAlgorithmName="oct-foundation",
            )
            for number, name in enumerate(names, start=1)
        ),
        "ReferencedSeriesSequence": Items([of_series]),
        "SharedFunctionalGroupsSequence": Items([make_item(ReferencedImageSequence=Items([reference]))]),
        "PerFrameFunctionalGroupsSequence": Items(
            make_item(SegmentIdentificationSequence=Items([make_item(ReferencedSegmentNumber=number)]))
            for number in range(1, len(names) + 1)
        ),
    }
    fill(written, root)
    written.FloatPixelData = np.ascontiguousarray(heights).tobytes()
    storage.write_bytes(url, to_bytes(written), options)
