"""Predictions as files that other programs open, in the geometry of the scan that they are of.

In: classes of voxels, uint8 [D, H, W] in the frame order of the scan's file (for NIfTI as its reader sorts
the frames, side by side), or surfaces, float32 [S, D, W] in rows of the scan (0: the centre of the first,
NaN: none); what its header says. Out, as `prepare --labels` reads them:
  NIfTI    of the scan's own array order and affine where it is NIfTI, else [W, H, D] with W to the patient's
           left, H to posterior, and D as the frames run
  PNG      one a B-scan, whose grey values are the classes
  DICOM Height Map Segmentation (Supplement 240, SOP class 1.2.840.10008.5.1.4.1.1.66.8): FloatPixelData, a
           frame a surface, from the vitreous down, whose shared functional group refers to the scan
and, for other programs, a binary DICOM Segmentation (Supplement 111) through highdicom, with a segment for
each class, whose frames refer to those of the scan and have their positions.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Mapping, Sequence
from typing import Any

import nibabel as nib
import numpy as np
import pydicom
from PIL import Image
from pydicom.sequence import Sequence as Items
from pydicom.sr.codedict import codes
from pydicom.uid import generate_uid

from data_setup.export.items import fill, make_item, new_file, require, to_bytes
from data_setup.readers import nifti
from data_setup.readers.dicom import OCTHeader, open_file
from data_setup.readers.heights import HEIGHT_MAP_CLASS
from data_setup.readers.sidecar import read_sidecars, sidecar_urls
from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import UserError

MAKER, SEG_SERIES, HEIGHTS_SERIES = "oct-foundation", 900, 901
INVALID = -1.0  # FloatPixelPaddingValue: no row of a scan, for no device
_NEEDED_OF_SEG = ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID", "FrameOfReferenceUID")
_NEEDED_OF_HEIGHTS = ("SOPClassUID", "SOPInstanceUID", "SeriesInstanceUID")
_OF_THE_SCAN: tuple[str, ...] = ("PatientName", "PatientID", "PatientBirthDate", "PatientSex")
_OF_THE_SCAN += ("StudyInstanceUID", "StudyDate", "StudyTime", "StudyID", "AccessionNumber")
_OF_THE_SCAN += ("ReferringPhysicianName", "FrameOfReferenceUID", "PositionReferenceIndicator")
_OF_THE_SCAN += ("ImageLaterality", "SpecificCharacterSet")


def write_nifti(
    labels_DHW: np.ndarray, header: OCTHeader, path: str, url: str, options: StorageOptions
) -> None:
    """Write a .nii.gz at `url`; `path`: of the scan below its root. Raises OCTReadError, StorageError."""
    if header.transfer_syntax == "NIfTI":
        with open_file(header.url, options) as file:
            sidecar = read_sidecars(sidecar_urls(header.url, path, False), options)
            image = nifti.image_like(labels_DHW, file, header.url, sidecar)
    else:
        d, h, w = header.spacing_mm
        along = np.diag([-w, -h, d if header.flip_d else -d, 1.0])
        image = nib.Nifti1Image(labels_DHW.transpose(2, 1, 0), along)
        image.header.set_xyzt_units("mm")
    storage.write_bytes(url, gzip.compress(image.to_bytes(), mtime=0), options)


def write_png(labels_DHW: np.ndarray, url: str, options: StorageOptions) -> None:
    """Write a PNG for each B-scan into the folder `url`: frame_0001.png, ..."""
    for number, plane in enumerate(labels_DHW, start=1):
        buffer = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(plane)).save(buffer, format="PNG")
        storage.write_bytes(storage.join(url, f"frame_{number:04d}.png"), buffer.getvalue(), options)


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
    require(scan, _NEEDED_OF_HEIGHTS, "Height Map Segmentation", scan_url)
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
        "SeriesNumber": HEIGHTS_SERIES,
        "InstanceNumber": 1,
        "Modality": "SEG",
        "Manufacturer": MAKER,
        "ManufacturerModelName": MAKER,
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
                SegmentAlgorithmName=MAKER,
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


def load_highdicom() -> Any:
    """The module; UserError where it is not installed."""
    try:
        import highdicom
    except ImportError as error:
        raise UserError(
            "--format seg: expected highdicom, found it not installed; pip install highdicom"
        ) from error
    return highdicom


def write_seg(
    labels_DHW: np.ndarray,
    classes: Mapping[int, str],
    header: OCTHeader,
    version: str,
    url: str,
    options: StorageOptions,
) -> None:
    """Write a .dcm at `url`. `classes`: stored value -> name; `version`: of what predicted.
    Raises OCTReadError for a scan that lacks one of _NEEDED_OF_SEG, StorageError.
    """
    hd = load_highdicom()
    source = pydicom.dcmread(io.BytesIO(storage.read_bytes(header.url, options)))
    require(source, _NEEDED_OF_SEG, "DICOM SEG", header.url)
    algorithm = hd.AlgorithmIdentificationSequence(
        name=MAKER, version=version, family=codes.cid7162.ArtificialIntelligence
    )
    values = sorted(classes)
    descriptions = [
        hd.seg.SegmentDescription(
            segment_number=number,
            segment_label=classes[value],
            segmented_property_category=codes.SCT.MorphologicallyAbnormalStructure,
            segmented_property_type=hd.sr.CodedConcept(f"class_{value}", "99OCT", classes[value][:64]),
            algorithm_type=hd.seg.SegmentAlgorithmTypeValues.AUTOMATIC,
            algorithm_identification=algorithm,
        )
        for number, value in enumerate(values, start=1)
    ]
    number_of = np.zeros(256, np.uint8)
    number_of[values] = np.arange(1, len(values) + 1)
    own = {} if _has_positions(source) else _own_geometry(hd, header)
    for group, position in zip(
        source.get("PerFrameFunctionalGroupsSequence", []), own.get("plane_positions", []), strict=False
    ):
        if "PlanePositionSequence" not in group:  # highdicom lays no mask on a scan that lies nowhere
            group.PlanePositionSequence = position
    written = hd.seg.Segmentation(
        source_images=[source],
        pixel_array=number_of[labels_DHW],
        segmentation_type=hd.seg.SegmentationTypeValues.BINARY,
        segment_descriptions=descriptions,
        series_instance_uid=generate_uid(),
        series_number=SEG_SERIES,
        sop_instance_uid=generate_uid(),
        instance_number=1,
        manufacturer=MAKER,
        manufacturer_model_name=MAKER,
        software_versions=version,
        device_serial_number="none",
        omit_empty_frames=False,
        **own,
    )
    buffer = io.BytesIO()
    written.save_as(buffer)
    storage.write_bytes(url, buffer.getvalue(), options)


def _has_positions(source: pydicom.Dataset) -> bool:
    """Whether the scan says where each of its frames lies in the patient."""
    shared = (source.get("SharedFunctionalGroupsSequence") or [pydicom.Dataset()])[0]
    groups = source.get("PerFrameFunctionalGroupsSequence") or [pydicom.Dataset()]

    def holds(name: str, keyword: str, size: int) -> bool:
        items = [(group.get(name) or shared.get(name) or [{}])[0].get(keyword) for group in groups]
        return all(item is not None and len(item) == size for item in items)

    return (
        all(group.get("PlanePositionSequence") for group in groups)
        and holds("PlanePositionSequence", "ImagePositionPatient", 3)
        and holds("PlaneOrientationSequence", "ImageOrientationPatient", 6)
        and holds("PixelMeasuresSequence", "PixelSpacing", 2)
    )


def _own_geometry(hd: Any, header: OCTHeader) -> dict[str, Any]:
    """For a scan without positions: A-scans to the patient's left, rows to posterior, B-scans as they run."""
    d, h, w = header.spacing_mm
    step = d if header.flip_d else -d
    patient = hd.CoordinateSystemNames.PATIENT
    return {
        "pixel_measures": hd.PixelMeasuresSequence(
            pixel_spacing=[float(f"{h:.10g}"), float(f"{w:.10g}")],
            slice_thickness=float(f"{d:.10g}"),
            spacing_between_slices=float(f"{d:.10g}"),
        ),
        "plane_orientation": hd.PlaneOrientationSequence(patient, [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]),
        "plane_positions": [
            hd.PlanePositionSequence(patient, [0.0, 0.0, float(f"{step * frame:.10g}")])
            for frame in header.to_file_order(np.arange(header.shape[0])).tolist()
        ],
    }
