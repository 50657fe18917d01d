"""Classes of voxels as a DICOM Segmentation (Supplement 111) of an OPT volume, through highdicom.

In: uint8 [D, H, W] in the order of the scan's frames, the scan's DICOM file. Out: a binary segmentation with
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

from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import UserError

MAKER, SERIES_NUMBER = "oct-foundation", 900


def load_highdicom() -> Any:
    """The module; UserError where it is not installed."""
    try:
        import highdicom
    except ImportError as error:
        raise UserError(
            "--format seg: expected highdicom, found it not installed; pip install '.[seg]'"
        ) from error
    return highdicom


def write_seg(
    labels_DHW: np.ndarray,
    classes: Mapping[int, str],
    scan_url: str,
    version: str,
    url: str,
    options: StorageOptions,
) -> None:
    """Write a .dcm at `url`. `classes`: stored value -> name; `version`: of what predicted. Raises UserError
    for a scan that is no DICOM file with a frame of reference, StorageError.
    """
    hd = load_highdicom()
    source = pydicom.dcmread(io.BytesIO(storage.read_bytes(scan_url, options)))
    if "FrameOfReferenceUID" not in source:
        raise UserError(f"{scan_url}: expected a FrameOfReferenceUID for a DICOM SEG, found none")
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
    )
    buffer = io.BytesIO()
    written.save_as(buffer)
    storage.write_bytes(url, buffer.getvalue(), options)


def read_seg(url: str, scan_url: str, options: StorageOptions) -> tuple[np.ndarray, list[str]]:
    """(segment numbers uint8 [D, H, W] in the order of the scan's frames, their labels)."""
    hd = load_highdicom()
    source = pydicom.dcmread(io.BytesIO(storage.read_bytes(scan_url, options)), stop_before_pixels=True)
    written = hd.seg.segread(io.BytesIO(storage.read_bytes(url, options)))
    frames = list(range(1, int(source.NumberOfFrames) + 1))
    labels = written.get_pixels_by_source_frame(source.SOPInstanceUID, frames, combine_segments=True)
    return labels.astype(np.uint8), [
        str(written.get_segment_description(n).segment_label) for n in written.segment_numbers
    ]
