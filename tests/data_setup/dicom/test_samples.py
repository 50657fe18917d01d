"""Files of others: samples of other modalities frame by frame, and two real eyes."""

from __future__ import annotations

import numpy as np
import pytest

from data_setup.readers.dicom import RejectReason, decode_frames, read_volume
from tests.data_setup.dicom.reading import reason_of
from tests.support.pipeline_factory import ROOT

SHARED = ROOT.parent / "shared" / "data"
DECODE = SHARED / "dicom_decode"
REAL = SHARED / "real_oct" / "retinal_oct" / "structural_oct"
needs_shared = pytest.mark.skipif(not DECODE.is_dir(), reason="the shared sample files are not here")


@needs_shared
def test_three_codecs_give_the_same_frames() -> None:
    names = ("uncompressed", "jpeg_2k_lossless", "RLE")
    arrays = [decode_frames(str(DECODE / f"pydicom_emri_small_{n}.dcm")) for n in names]
    assert arrays[0].shape == (10, 64, 64)
    assert arrays[0].dtype == np.uint16
    for other in arrays[1:]:
        np.testing.assert_array_equal(arrays[0], other)


@needs_shared
def test_frames_split_over_fragments() -> None:
    frames = decode_frames(str(DECODE / "weasis_jpeg2000-multiframe-multifragments.dcm"))
    assert frames.shape == (19, 256, 256)
    assert frames.dtype == np.uint16
    assert all(f.std() > 10 for f in frames)


@needs_shared
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pydicom_emri_small_j2k_TRUNCATED", RejectReason.TRUNCATED_PIXEL_DATA),
        ("fodicom_multiframe_WSI140", RejectReason.FRAME_SIZE_MISMATCH),
    ],
)
def test_bad_sample_files_are_named(name: str, reason: RejectReason) -> None:
    assert reason_of(decode_frames, str(DECODE / f"{name}.dcm")) == reason


@needs_shared
def test_other_modalities_are_not_opt() -> None:
    assert reason_of(read_volume, str(DECODE / "pydicom_emri_small_RLE.dcm")) == RejectReason.NOT_OPT


@needs_shared
@pytest.mark.parametrize(
    ("device", "shape", "spacing", "side"),
    [
        ("heidelberg_spectralis", (145, 496, 512), (0.0298, 0.003872, 0.011182), "R"),
        ("topcon_triton", (49, 200, 200), (0.1224, 0.0026, 0.03), "L"),
    ],
)
def test_real_eyes(
    device: str, shape: tuple[int, int, int], spacing: tuple[float, float, float], side: str
) -> None:
    (path,) = (REAL / device).glob("*/*.dcm")
    volume = read_volume(str(path))
    assert volume.voxels.shape == volume.header.shape == shape
    assert volume.voxels.dtype == np.uint8
    assert volume.header.spacing_mm == pytest.approx(spacing)
    assert (volume.header.spacing_source, volume.header.laterality) == ("shared", side)
    assert (volume.header.flip_d, volume.header.orientation_source) == (False, "reference_coordinates")
    assert volume.header.device == device
