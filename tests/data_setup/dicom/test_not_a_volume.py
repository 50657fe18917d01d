"""Frames that make no volume are refused: circles, stars, one frame, spacings that differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydicom.dataset import Dataset, FileDataset
from pydicom.sequence import Sequence

from data_setup.readers.dicom import RejectReason, read_volume
from tests.data_setup.dicom.reading import reason_of
from tests.support.dicom_factory import item, measures, rows_down, speckle, write_opt


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
