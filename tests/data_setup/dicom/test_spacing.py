"""Spacing is taken from where it is, in order of trust, and never invented."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydicom.dataset import FileDataset
from pydicom.sequence import Sequence

from data_setup.readers.dicom import RejectReason, read_volume
from tests.data_setup.dicom.reading import read_header, reason_of
from tests.support.dicom_factory import CIRRUS, item, measures, speckle, steps_along, write_opt


@pytest.mark.parametrize("where", ["shared", "per_frame", "root"])
def test_spacing_is_found_where_it_is(tmp_path: Path, where: str) -> None:
    header = read_header(write_opt(tmp_path, speckle(), where=where))
    assert header.spacing_mm == pytest.approx((0.12, 0.0026, 0.03))
    assert header.spacing_source == where


def test_shared_spacing_wins_over_per_frame_and_root(tmp_path: Path) -> None:
    def add(ds: FileDataset) -> None:
        for frame in ds.PerFrameFunctionalGroupsSequence:
            frame.PixelMeasuresSequence = measures((0.2, 0.004, 0.05))
        ds.PixelSpacing, ds.SliceThickness = [0.003, 0.02], 0.3

    assert read_header(write_opt(tmp_path, speckle(), edit=add)).spacing_mm[0] == pytest.approx(0.12)
    header = read_header(write_opt(tmp_path, speckle(), where="none", edit=add))
    assert header.spacing_mm == pytest.approx((0.2, 0.004, 0.05))


def test_missing_distance_comes_from_frame_positions(tmp_path: Path) -> None:
    def drop(ds: FileDataset) -> None:
        del ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].SliceThickness

    positions = steps_along(6, 1, 0.25)
    header = read_header(write_opt(tmp_path, speckle(), edit=drop, positions=positions))
    assert header.spacing_mm == pytest.approx((0.25, 0.0026, 0.03))
    assert header.spacing_source == "frame_positions"
    assert reason_of(read_header, write_opt(tmp_path, speckle(), edit=drop)) == RejectReason.MISSING_SPACING


def test_cirrus_trap(tmp_path: Path) -> None:
    """SliceThickness holds the lateral spacing: frame positions first, then the field of the protocol."""
    wrong = (0.0117, 0.00195, 0.0117)
    voxels = speckle(frames=11)
    header = read_header(
        write_opt(tmp_path, voxels, name=CIRRUS, spacing=wrong, positions=steps_along(11, 2, -0.31))
    )
    assert (header.spacing_mm[0], header.spacing_source) == (pytest.approx(0.31), "frame_positions")
    header = read_header(write_opt(tmp_path, voxels, name=CIRRUS, spacing=wrong))
    assert (header.spacing_mm[0], header.spacing_source) == (pytest.approx(6 / 10), "protocol")

    def cirrus(ds: FileDataset) -> None:
        ds.ManufacturerModelName = "CIRRUS HD-OCT 5000"

    unnamed = write_opt(tmp_path, voxels, name="unnamed.dcm", spacing=wrong, edit=cirrus)
    assert reason_of(read_header, unnamed) == RejectReason.MISSING_SPACING
    honest = write_opt(tmp_path, voxels, name="unnamed.dcm", spacing=(0.05, 0.00195, 0.0117), edit=cirrus)
    assert read_header(honest).spacing_mm[0] == pytest.approx(0.05)


@pytest.mark.parametrize(
    "spacing",
    [(1.0, 0.0026, 0.03), (0.12, 1.0, 0.03), (0.12, 0.0026, 1.0), (0.0, 0.0026, 0.03), (0.12, -0.0026, 0.03)],
)
def test_implausible_spacing(tmp_path: Path, spacing: tuple[float, float, float]) -> None:
    path = write_opt(tmp_path, speckle(), spacing=spacing)
    assert reason_of(read_volume, path) == RejectReason.IMPLAUSIBLE_SPACING


def test_missing_spacing_is_never_invented(tmp_path: Path) -> None:
    assert (
        reason_of(read_volume, write_opt(tmp_path, speckle(), where="none")) == RejectReason.MISSING_SPACING
    )

    def empty(ds: FileDataset) -> None:
        one = item(PixelSpacing=None, SliceThickness=None)
        ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence = Sequence([one])

    path = write_opt(tmp_path, speckle(), edit=empty)
    assert reason_of(read_volume, path) == RejectReason.MISSING_SPACING
