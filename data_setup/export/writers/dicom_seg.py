"""Classes of voxels as a DICOM Segmentation (Supplement 111) of an OPT volume, through highdicom.

In: uint8 [D, H, W] in the order of the scan's file, the scan's DICOM file. Out: a binary segmentation with
a segment for each class, whose frames refer to those of the scan and have their positions.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import pydicom
from pydicom.sr.codedict import codes
from pydicom.uid import generate_uid

from data_setup.export.writers.items import require
from data_setup.readers.dicom import OCTHeader
from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import UserError

MAKER, SERIES_NUMBER = "oct-foundation", 900
NEEDED = ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID", "FrameOfReferenceUID")


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
    Raises OCTReadError for a scan that lacks one of NEEDED, StorageError.
    """
    hd = load_highdicom()
    source = pydicom.dcmread(io.BytesIO(storage.read_bytes(header.url, options)))
    require(source, NEEDED, "DICOM SEG", header.url)
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
        series_number=SERIES_NUMBER,
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
