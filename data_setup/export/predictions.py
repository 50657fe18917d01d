"""Predictions as files that other programs open, in the geometry of the scan that they are of.

In: classes of voxels, uint8 [D, H, W] in the frame order of the scan's file (for NIfTI as its reader sorts
the frames, side by side), or surfaces, float32 [S, D, W] in rows of the scan (0: the centre of the first,
NaN: none); what its header says. Out, as `prepare --labels` reads them:
  NIfTI    of the scan's own array order and affine where it is NIfTI, else [W, H, D] with W to the patient's
           left, H to posterior, and D as the frames run
  npz      `labels`, or `surfaces` with `names`
  PNG      one a B-scan, whose grey values are the classes
  DICOM Height Map Segmentation (Supplement 240, SOP class 1.2.840.10008.5.1.4.1.1.66.8): FloatPixelData, a
           frame a surface, from the vitreous down, whose shared functional group refers to the scan
and, for other programs, a binary DICOM Segmentation (Supplement 111) through highdicom, with a segment for
each class, whose frames refer to those of the scan and have their positions.

Both are written from nothing but what is named here. Anonymous ones name nobody: their patient and study are
empty, the UIDs of study and series are functions of the scan's. Those of the scan's instance and of its frame
of reference are its own: by them a file is paired with the scan, and lies on it.
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

from data_setup.export.items import fill, make_item, make_uid, new_file, require, to_bytes
from data_setup.readers import nifti
from data_setup.readers.dicom import OCTHeader, open_file
from data_setup.readers.faults import RejectReason, named_faults
from data_setup.readers.heights import HEIGHT_MAP_CLASS
from data_setup.readers.sidecar import read_sidecars, sidecar_urls
from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import UserError

MAKER, SEG_SERIES, HEIGHTS_SERIES = "oct-foundation", 900, 901
UTF8 = "ISO_IR 192"
_PLACES = {  # what is taken of a functional group
    "PlanePositionSequence": ("ImagePositionPatient",),
    "PlaneOrientationSequence": ("ImageOrientationPatient",),
    "PixelMeasuresSequence": ("PixelSpacing", "SliceThickness", "SpacingBetweenSlices"),
}
INVALID = -1.0  # FloatPixelPaddingValue: no row of a scan, for no device
_NEEDED_OF_SEG = ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID", "FrameOfReferenceUID")
_NEEDED_OF_HEIGHTS = ("SOPClassUID", "SOPInstanceUID", "SeriesInstanceUID")
_NAMED: tuple[str, ...] = ("PatientName", "PatientID", "PatientBirthDate", "PatientSex")  # who and when
_NAMED += ("StudyDate", "StudyTime", "StudyID", "AccessionNumber", "ReferringPhysicianName")
_UIDS = ("StudyInstanceUID", "SeriesInstanceUID")  # of anonymous files functions of the scan's
_ABOUT_THE_IMAGE: tuple[str, ...] = ("SOPClassUID", "SOPInstanceUID", "FrameOfReferenceUID")
_ABOUT_THE_IMAGE += ("NumberOfFrames", "Rows", "Columns")
_LONGEST_NAME = 64  # letters of a name in DICOM (LO)
_NIFTI_TEXTS = ("descrip", "db_name", "aux_file", "intent_name")  # where a maker may write a name


def write_nifti(
    labels_DHW: np.ndarray, header: OCTHeader, path: str, url: str, options: StorageOptions
) -> None:
    """Write a .nii.gz at `url`; `path`: of the scan below its root. Raises OCTReadError, StorageError."""
    if header.transfer_syntax == "NIfTI":
        with open_file(header.url, options) as file:
            sidecar = read_sidecars(sidecar_urls(header.url, path, False), options)
            image = nifti.image_like(labels_DHW, file, header.url, sidecar)
        for name in set(_NIFTI_TEXTS) & set(image.header.keys()):
            image.header[name] = b""
    else:
        d, h, w = header.spacing_mm
        along = np.diag([-w, -h, d if header.flip_d else -d, 1.0])
        image = nib.Nifti1Image(labels_DHW.transpose(2, 1, 0), along)
        image.header.set_xyzt_units("mm")
    storage.write_bytes(url, gzip.compress(image.to_bytes(), mtime=0), options)


def write_npz(arrays: Mapping[str, np.ndarray], url: str, options: StorageOptions) -> None:
    """Write an .npz at `url`: `labels` [D, H, W], or `surfaces` [S, D, W] and `names`."""
    np.savez_compressed(buffer := io.BytesIO(), allow_pickle=False, **arrays)
    storage.write_bytes(url, buffer.getvalue(), options)


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
    anonymous: bool = True,
) -> None:
    """Write a .dcm at `url`; `version`: of what predicted. Raises OCTReadError, StorageError."""
    scan = _source(scan_url, _NEEDED_OF_HEIGHTS, "Height Map Segmentation", anonymous, options)
    written = new_file(HEIGHT_MAP_CLASS, generate_uid())
    for keyword in (*_NAMED, "StudyInstanceUID", "FrameOfReferenceUID", "ImageLaterality"):
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
        "SpecificCharacterSet": UTF8,
        "PositionReferenceIndicator": "",
        "PatientIdentityRemoved": "YES" if anonymous else "NO",
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
                SegmentLabel=_label(name),
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
    anonymous: bool = True,
) -> None:
    """Write a .dcm at `url`. `classes`: stored value -> name; `version`: of what predicted.
    Raises OCTReadError for a scan that lacks one of _NEEDED_OF_SEG, or that highdicom refuses, StorageError.
    """
    hd = load_highdicom()
    source = _source(header.url, _NEEDED_OF_SEG, "DICOM SEG", anonymous, options)
    _lay_frames(hd, source, header)
    algorithm = hd.AlgorithmIdentificationSequence(
        name=MAKER, version=version, family=codes.cid7162.ArtificialIntelligence
    )
    values = sorted(classes)
    descriptions = [
        hd.seg.SegmentDescription(
            segment_number=number,
            segment_label=_label(classes[value]),
            segmented_property_category=codes.SCT.MorphologicallyAbnormalStructure,
            segmented_property_type=hd.sr.CodedConcept(f"class_{value}", "99OCT", _label(classes[value])),
            algorithm_type=hd.seg.SegmentAlgorithmTypeValues.AUTOMATIC,
            algorithm_identification=algorithm,
        )
        for number, value in enumerate(values, start=1)
    ]
    number_of = np.zeros(256, np.uint8)
    number_of[values] = np.arange(1, len(values) + 1)
    with named_faults(header.url, RejectReason.UNSUPPORTED_FORMAT, "a scan that highdicom can refer to"):
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
            specific_character_set=UTF8,
        )
    written.PatientIdentityRemoved = "YES" if anonymous else "NO"
    buffer = io.BytesIO()
    written.save_as(buffer)
    storage.write_bytes(url, buffer.getvalue(), options)


def _label(name: str) -> str:
    """A class or a surface as DICOM holds a name: a backslash would begin a second one."""
    return name.replace("\\", "/")[:_LONGEST_NAME]


def _source(
    url: str, needed: tuple[str, ...], what: str, anonymous: bool, options: StorageOptions
) -> pydicom.Dataset:
    """What a file about a scan takes from it, and nothing else; raises OCTReadError, StorageError."""
    content = io.BytesIO(storage.read_bytes(url, options))
    with named_faults(url, RejectReason.CORRUPT_FILE, "a DICOM header"):
        scan = pydicom.dcmread(content, stop_before_pixels=True)
    require(scan, needed, what, url)
    source = pydicom.Dataset()
    source.SpecificCharacterSet = UTF8
    with named_faults(url, RejectReason.CORRUPT_FILE, "a DICOM header"):
        for keyword in _NAMED:
            setattr(source, keyword, "" if anonymous else scan.get(keyword) or "")
        for keyword in _UIDS:
            if uid := scan.get(keyword):
                setattr(source, keyword, make_uid(keyword, uid) if anonymous else uid)
        for keyword in _ABOUT_THE_IMAGE:
            if keyword in scan:
                source[keyword] = scan[keyword]
        source.Modality = "OPT"
        if scan.get("ImageLaterality") in ("L", "R"):
            source.ImageLaterality = scan.ImageLaterality
        for keyword in ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"):
            groups = scan.get(keyword) or []
            setattr(source, keyword, Items([_places(group) for group in groups]))
    return source


def _places(group: pydicom.Dataset) -> pydicom.Dataset:
    """Where a functional group says that its frames lie."""
    place = pydicom.Dataset()
    for name, keywords in _PLACES.items():
        if item := (group.get(name) or [None])[0]:
            known = {keyword: item.get(keyword) for keyword in keywords if item.get(keyword) is not None}
            setattr(place, name, Items([make_item(**known)]))
    return place


def _lay_frames(hd: Any, source: pydicom.Dataset, header: OCTHeader) -> None:
    """Give the scan highdicom's functional groups: the frames' own places, or those of `_own_geometry`."""
    own = {} if _has_positions(source) else _own_geometry(hd, header)
    shared = (source.SharedFunctionalGroupsSequence or [pydicom.Dataset()])[0]
    groups = list(source.PerFrameFunctionalGroupsSequence) or [pydicom.Dataset()]
    positions = own.get("plane_positions") or [
        (group.get("PlanePositionSequence") or shared.PlanePositionSequence) for group in groups
    ]
    of_all = make_item(
        PixelMeasuresSequence=own.get("pixel_measures") or _first("PixelMeasuresSequence", shared, groups),
        PlaneOrientationSequence=own.get("plane_orientation")
        or _first("PlaneOrientationSequence", shared, groups),
    )
    source.NumberOfFrames, source.Rows, source.Columns = header.shape
    source.SharedFunctionalGroupsSequence = Items([of_all])
    source.PerFrameFunctionalGroupsSequence = Items(
        make_item(PlanePositionSequence=position) for position in positions
    )


def _first(name: str, shared: pydicom.Dataset, groups: Sequence[pydicom.Dataset]) -> Any:
    """What is common to all frames, also where each frame says it."""
    return shared.get(name) or groups[0][name].value


def _has_positions(source: pydicom.Dataset) -> bool:
    """Whether the scan says where each of its frames lies in the patient, all in one direction."""
    shared = (source.get("SharedFunctionalGroupsSequence") or [pydicom.Dataset()])[0]
    groups = source.get("PerFrameFunctionalGroupsSequence") or [pydicom.Dataset()]

    def holds(name: str, keyword: str, size: int) -> bool:
        items = [(group.get(name) or shared.get(name) or [{}])[0].get(keyword) for group in groups]
        return all(item is not None and len(item) == size for item in items)

    directions = {
        tuple(item.ImageOrientationPatient)
        for group in (shared, *groups)
        for item in group.get("PlaneOrientationSequence") or []
        if item.get("ImageOrientationPatient")
    }
    return (
        len(groups) == int(source.NumberOfFrames)
        and len(directions) == 1
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
