"""Where B-scans lie: order, direction and spacing by what the file states; what is no volume is named."""

from pathlib import Path

import numpy as np
import pytest
from pydicom.dataset import Dataset, FileDataset
from pydicom.sequence import Sequence

from data_setup.readers.dicom import RejectReason, read_volume
from tests.data_setup.dicom.reading import read_header, reason_of
from tests.support.dicom_factory import CIRRUS, item, measures, rows_down, speckle, steps_along, write_opt


@pytest.mark.parametrize(
    ("positions", "references", "flip", "source"),
    [
        (None, rows_down(6), False, "reference_coordinates"),
        (None, rows_down(6)[::-1], True, "reference_coordinates"),
        (steps_along(6, 1, 0.12), None, False, "assumed"),
        (steps_along(6, 1, -0.12), None, True, "assumed"),
        (steps_along(6, 2, -0.12), None, False, "assumed"),
        (steps_along(6, 2, 0.12), None, True, "assumed"),
        (steps_along(6, 0, 0.12), None, False, "unknown"),  # B-scans side by side: temporal to nasal
        (steps_along(6, 1, 0.12), rows_down(6), False, "reference_coordinates"),
        (steps_along(6, 1, -0.12), rows_down(6), False, "unknown"),  # they contradict each other
        (None, [[0, i, 500, i] for i in range(6)], False, "unknown"),
        (None, [*rows_down(5), []], False, "unknown"),
        (None, None, False, "unknown"),
    ],
)
def test_orientation(
    tmp_path: Path,
    positions: list[list[float]] | None,
    references: list[list[float]] | None,
    flip: bool,
    source: str,
) -> None:
    voxels = speckle()
    path = write_opt(tmp_path, voxels, positions=positions, references=references)
    volume = read_volume(path)
    assert (volume.header.flip_d, volume.header.orientation_source) == (flip, source)
    np.testing.assert_array_equal(volume.voxels, voxels[::-1] if flip else voxels)


def test_empty_attributes_are_absent(tmp_path: Path) -> None:
    def clear(ds: FileDataset) -> None:
        ds.ImageLaterality = ds.ManufacturerModelName = ds.ProtocolName = None
        ds.RescaleSlope = ds.RescaleIntercept = ds.HorizontalFieldOfView = None
        ds.SharedFunctionalGroupsSequence[0].PlaneOrientationSequence = Sequence([])
        for frame in ds.PerFrameFunctionalGroupsSequence:
            frame.PlanePositionSequence = Sequence([item(ImagePositionPatient=None)])
            frame.OphthalmicFrameLocationSequence = Sequence([])
            frame.PixelMeasuresSequence = Sequence([item(PixelSpacing=None)])

    header = read_header(write_opt(tmp_path, speckle(), edit=clear))
    assert (header.orientation_source, header.spacing_source) == ("unknown", "shared")
    assert (header.laterality, header.device) == ("R", "topcon_triton")  # from the file name


def test_laterality_of_the_frames(tmp_path: Path) -> None:
    def move(ds: FileDataset) -> None:
        ds.ImageLaterality = None
        ds.SharedFunctionalGroupsSequence[0].FrameAnatomySequence = Sequence([item(FrameLaterality="L")])

    assert read_header(write_opt(tmp_path, speckle(), edit=move)).laterality == "L"


@pytest.mark.parametrize(
    ("word", "side"), [("OD", "R"), ("OS", "L"), ("RIGHT EYE", "R"), ("NONE", None), ("U", None)]
)
def test_words_for_the_side_in_a_header(tmp_path: Path, word: str, side: str | None) -> None:
    def write(ds: FileDataset) -> None:
        ds.ImageLaterality = word

    assert read_header(write_opt(tmp_path, speckle(), name="eye.dcm", edit=write)).laterality == side


def test_nothing_about_the_person_leaves_the_file(tmp_path: Path) -> None:
    volume = read_volume(write_opt(tmp_path, speckle(), name="x.dcm"))
    assert "Secret" not in repr(volume.header)
    assert "9001" not in repr(volume.header)


@pytest.mark.parametrize("where", ["shared", "per_frame", "root"])
def test_spacing_is_found_where_it_is(tmp_path: Path, where: str) -> None:
    header = read_header(write_opt(tmp_path, speckle(), where=where))
    assert header.spacing_mm == pytest.approx((0.12, 0.0026, 0.03))
    assert header.spacing_source == where


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


def test_frames_with_different_spacing_are_no_volume(tmp_path: Path) -> None:
    def vary(ds: FileDataset) -> None:
        for index, frame in enumerate(ds.PerFrameFunctionalGroupsSequence):
            frame.PixelMeasuresSequence = measures((0.1, 0.0039, 0.01 + 0.001 * index))

    path = write_opt(tmp_path, speckle(), where="none", edit=vary)
    assert reason_of(read_volume, path) == RejectReason.NOT_A_VOLUME


def test_optic_disc_circle_scans_are_no_volume(tmp_path: Path) -> None:
    """The AI-READI structure: no shared spacing, spacing per frame without SliceThickness, empty items."""

    def onh(ds: FileDataset) -> None:
        for frame in ds.PerFrameFunctionalGroupsSequence:
            frame.PixelMeasuresSequence = measures((0, 0.003872, 0.012), thickness=False)
            frame.PlanePositionSequence = Sequence([Dataset()])
            frame.PlaneOrientationSequence = Sequence([Dataset()])

    name = "9001_spectralis_onh_rc_hr_oct_oct_l_1.2.3.dcm"
    path = write_opt(tmp_path, speckle(), name=name, where="none", edit=onh)
    assert reason_of(read_volume, path) == RejectReason.NOT_A_VOLUME


def test_turned_frames_are_no_volume(tmp_path: Path) -> None:
    def turn(ds: FileDataset) -> None:
        for index, frame in enumerate(ds.PerFrameFunctionalGroupsSequence):
            angle = np.pi * index / 6
            one = item(ImageOrientationPatient=[float(np.cos(angle)), float(np.sin(angle)), 0, 0, 0, -1])
            frame.PlaneOrientationSequence = Sequence([one])

    path = write_opt(tmp_path, speckle(), edit=turn, name="unnamed.dcm")
    assert reason_of(read_volume, path) == RejectReason.NOT_A_VOLUME
    star = [
        [100 - 50 * np.sin(a), 100 - 50 * np.cos(a), 100 + 50 * np.sin(a), 100 + 50 * np.cos(a)]
        for a in np.pi * np.arange(6) / 6
    ]
    path = write_opt(tmp_path, speckle(), references=star, name="unnamed.dcm")
    assert reason_of(read_volume, path) == RejectReason.NOT_A_VOLUME


def test_one_frame_and_nonlinear_frames_are_no_volume(tmp_path: Path) -> None:
    assert reason_of(read_volume, write_opt(tmp_path, speckle(frames=1))) == RejectReason.NOT_A_VOLUME

    def circle(ds: FileDataset) -> None:
        for frame in ds.PerFrameFunctionalGroupsSequence:
            frame.OphthalmicFrameLocationSequence[0].OphthalmicImageOrientation = "NONLINEAR"

    path = write_opt(tmp_path, speckle(), references=rows_down(6), edit=circle)
    assert reason_of(read_volume, path) == RejectReason.NOT_A_VOLUME
