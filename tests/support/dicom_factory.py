"""Small OPT files for tests: write_opt() makes a sound one; its arguments and `edit` take it apart."""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from pydicom.dataset import Dataset, FileDataset
from pydicom.sequence import Sequence as DicomSequence
from pydicom.uid import UID, ExplicitVRLittleEndian, ImplicitVRLittleEndian

from data_setup.export.items import make_item as item
from data_setup.export.items import new_file
from data_setup.readers.dicom import PIXEL_TAGS, open_file, read_dataset
from data_setup.readers.pixels import BoundedFile, iter_pixels, read_layout

OPT = "1.2.840.10008.5.1.4.1.1.77.1.5.4"
TRITON = "9001_triton_macula_6x6_octa_oct_r_1.2.3.dcm"
CIRRUS = "9001_cirrus_mac_oct_oct_l_1.2.3.dcm"


def speckle(frames: int = 6, rows: int = 40, columns: int = 36, bits: int = 8, seed: int = 0) -> np.ndarray:
    """An image that compresses and that no constant or mirrored copy equals."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 0.7, rows)[None, :, None] + np.linspace(0, 0.2, frames)[:, None, None]
    values = np.clip(ramp + 0.1 * rng.random((frames, rows, columns)), 0, 1) * (2**bits - 1)
    return values.astype(np.uint8 if bits <= 8 else np.uint16)


def measures(spacing: Sequence[float], thickness: bool = True) -> DicomSequence:
    """A PixelMeasuresSequence of (B-scan distance, axial, lateral)."""
    one = item(PixelSpacing=[spacing[1], spacing[2]])
    if thickness:
        one.SliceThickness = spacing[0]
    return DicomSequence([one])


def opt_dataset(
    voxels: np.ndarray,
    *,
    spacing: Sequence[float] = (0.12, 0.0026, 0.03),
    where: str = "shared",
    positions: Sequence[Sequence[float]] | None = None,
    references: Sequence[Sequence[float]] | None = None,
    bits_stored: int | None = None,
) -> FileDataset:
    """An uncompressed OPT dataset; where: shared | per_frame | root | none."""
    ds = new_file(OPT, "1.2.3")
    ds.SOPClassUID, ds.SOPInstanceUID, ds.Modality = OPT, "1.2.3", "OPT"
    ds.PatientID, ds.PatientName = "9001", "Secret^Name"
    ds.ManufacturerModelName, ds.ImageLaterality = "Triton", "R"
    frames, ds.Rows, ds.Columns = voxels.shape
    ds.NumberOfFrames = frames
    ds.SamplesPerPixel, ds.PhotometricInterpretation, ds.PixelRepresentation = 1, "MONOCHROME2", 0
    ds.BitsAllocated = 8 * voxels.dtype.itemsize
    ds.BitsStored = bits_stored or ds.BitsAllocated
    ds.HighBit = ds.BitsStored - 1
    shared = Dataset()
    per_frame = [Dataset() for _ in range(frames)]
    if where == "shared":
        shared.PixelMeasuresSequence = measures(spacing)
    for index, frame in enumerate(per_frame):
        if where == "per_frame":
            frame.PixelMeasuresSequence = measures(spacing)
        if positions is not None:
            place = item(ImagePositionPatient=list(positions[index]))
            frame.PlanePositionSequence = DicomSequence([place])
        if references is not None:
            line = item(ReferenceCoordinates=list(references[index]), OphthalmicImageOrientation="LINEAR")
            frame.OphthalmicFrameLocationSequence = DicomSequence([line])
    if where == "root":
        ds.PixelSpacing, ds.SliceThickness = [spacing[1], spacing[2]], spacing[0]
    ds.SharedFunctionalGroupsSequence = DicomSequence([shared])
    ds.PerFrameFunctionalGroupsSequence = DicomSequence(per_frame)
    ds.PixelData = voxels.tobytes() + b"\0" * (voxels.nbytes % 2)
    ds["PixelData"].VR = "OB" if voxels.dtype == np.uint8 else "OW"
    return ds


def write_opt(
    folder: Path,
    voxels: np.ndarray,
    *,
    name: str = TRITON,
    syntax: str = ExplicitVRLittleEndian,
    edit: Callable[[FileDataset], None] | None = None,
    **options: object,
) -> str:
    """Write an OPT file and return its path; `edit` changes the dataset before it is written."""
    ds = opt_dataset(voxels, **options)
    if UID(syntax).is_compressed:
        ds.compress(syntax, generate_instance_uid=False)
    elif syntax == ImplicitVRLittleEndian:
        ds.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian
    if edit:
        edit(ds)
    path = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    encoding = {"implicit_vr": syntax == ImplicitVRLittleEndian, "little_endian": True}
    ds.save_as(path, enforce_file_format=False, **encoding)
    return str(path)


def rows_down(frames: int, start: float = 100, step: float = 10) -> list[list[float]]:
    """ReferenceCoordinates of a raster whose lines go down the localizer, from superior to inferior."""
    return [[start + i * step, 0.0, start + i * step, 500.0] for i in range(frames)]


def steps_along(frames: int, axis: int, step: float) -> list[list[float]]:
    """ImagePositionPatient of a raster that steps along one axis (0 x, 1 y, 2 z), mm."""
    return [[step * i if a == axis else 1.0 for a in range(3)] for i in range(frames)]


def decode_frames(url: str) -> np.ndarray:
    """Stored values [F, rows, cols] or [F, rows, cols, samples] of any multi-frame file."""
    with open_file(url, None) as opened:
        file = BoundedFile(opened)
        layout = read_layout(read_dataset(file, PIXEL_TAGS, url), url)
        frames = iter_pixels(file, layout, url)
        first = next(frames)
        result = np.empty((layout.frames, *first.shape), first.dtype)
        for index, frame in enumerate(chain([first], frames)):
            result[index] = frame
        return result
