"""Grey values become 8 bits: depth, rescale, MONOCHROME1; values that do not fit are rejects."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydicom.dataset import FileDataset
from pydicom.sequence import Sequence

from data_setup.readers.dicom import OCTReadError, RejectReason, open_volume, read_volume
from tests.data_setup.dicom.reading import assign
from tests.support.dicom_factory import item, speckle, write_opt


def test_twelve_of_sixteen_bits_fill_the_range(tmp_path: Path) -> None:
    voxels = speckle(bits=12)
    voxels[0, 0, :2] = 0, 4095
    volume = read_volume(write_opt(tmp_path, voxels, bits_stored=12))
    np.testing.assert_array_equal(volume.voxels, np.rint(voxels * (255 / 4095)).astype(np.uint8))
    assert (volume.voxels.min(), volume.voxels.max()) == (0, 255)


@pytest.mark.parametrize("place", ["root", "shared", "per_frame"])
def test_rescale_is_applied(tmp_path: Path, place: str) -> None:
    def rescale(ds: FileDataset) -> None:
        values = item(RescaleSlope="0.5", RescaleIntercept="10", RescaleType="US")
        groups = [*ds.SharedFunctionalGroupsSequence] if place == "shared" else []
        groups += [*ds.PerFrameFunctionalGroupsSequence] if place == "per_frame" else []
        for group in groups:
            group.PixelValueTransformationSequence = Sequence([values])
        if place == "root":
            ds.RescaleSlope, ds.RescaleIntercept = "0.5", "10"

    voxels = speckle()
    volume = read_volume(write_opt(tmp_path, voxels, edit=rescale))
    assert volume.header.rescale == (0.5, 10.0)
    np.testing.assert_array_equal(volume.voxels, np.rint(voxels * 0.5 + 10).astype(np.uint8))


@pytest.mark.parametrize("bits", [12, 13])
@pytest.mark.parametrize("stored", [16, None])
def test_values_that_use_few_of_their_bits_are_a_reject(
    tmp_path: Path, bits: int, stored: int | None
) -> None:
    def edit(ds: FileDataset) -> None:
        ds.BitsStored, ds.HighBit = stored, None if stored is None else stored - 1

    path = write_opt(tmp_path, speckle(bits=bits), edit=edit)
    with pytest.raises(OCTReadError, match=r"few_grey_levels.* BitsStored .* found (16|17|32|33) of 16 bits"):
        read_volume(path)
    assert read_volume(write_opt(tmp_path, speckle(bits=14))).header.bits_stored == 16


@pytest.mark.parametrize(
    ("values", "bits"),
    [
        ({"RescaleIntercept": "-128", "RescaleSlope": "1"}, 8),
        ({"RescaleIntercept": "0", "RescaleSlope": "4"}, 8),
        ({"RescaleIntercept": "0", "RescaleSlope": "4"}, 16),
    ],
)
def test_a_rescale_that_would_clip_is_a_reject(tmp_path: Path, values: dict[str, str], bits: int) -> None:
    path = write_opt(tmp_path, speckle(bits=bits), edit=assign(**values))
    with pytest.raises(OCTReadError, match=r"in B-scan 1 of 6, times (1|4) plus (-128|0)") as caught:
        read_volume(path)
    assert caught.value.reason == RejectReason.HEADER_MISMATCH


def test_8_bits_of_few_grey_levels_are_what_they_are(tmp_path: Path) -> None:
    voxels = speckle() // 32
    np.testing.assert_array_equal(read_volume(write_opt(tmp_path, voxels)).voxels, voxels)


def test_8_bits_stored_in_16_come_as_uint8(tmp_path: Path) -> None:
    voxels = speckle()
    volume = read_volume(write_opt(tmp_path, voxels.astype(np.uint16), bits_stored=8))
    np.testing.assert_array_equal(volume.voxels, voxels)
    _, frames = open_volume(write_opt(tmp_path, voxels.astype(np.uint16), bits_stored=8))
    assert {frame.dtype for frame in frames} == {np.dtype(np.uint8)}


def test_monochrome1_is_inverted(tmp_path: Path) -> None:
    voxels = speckle()
    path = write_opt(
        tmp_path, voxels, edit=lambda ds: setattr(ds, "PhotometricInterpretation", "MONOCHROME1")
    )
    np.testing.assert_array_equal(read_volume(path).voxels, 255 - voxels)
