"""Which way the B-scans run and which eye it is; empty attributes are absent, the person stays out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydicom.dataset import FileDataset
from pydicom.sequence import Sequence

from data_setup.readers.dicom import read_volume
from tests.data_setup.dicom.reading import read_header
from tests.support.dicom_factory import item, rows_down, speckle, steps_along, write_opt


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


@pytest.mark.parametrize(("word", "side"), [("OD", "R"), ("OS", "L"), ("B", None)])
def test_words_for_the_side_in_a_header(tmp_path: Path, word: str, side: str | None) -> None:
    def write(ds: FileDataset) -> None:
        ds.ImageLaterality = word

    assert read_header(write_opt(tmp_path, speckle(), name="eye.dcm", edit=write)).laterality == side


def test_nothing_about_the_person_leaves_the_file(tmp_path: Path) -> None:
    volume = read_volume(write_opt(tmp_path, speckle(), name="x.dcm"))
    assert "Secret" not in repr(volume.header)
    assert "9001" not in repr(volume.header)
