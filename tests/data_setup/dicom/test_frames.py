"""Frames come back as they were written: every syntax, fragments split anywhere, one by one, by URL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pydicom.dataset import FileDataset
from pydicom.encaps import encapsulate, generate_frames
from pydicom.filewriter import dcmwrite
from pydicom.uid import UID, ExplicitVRBigEndian, JPEG2000Lossless, RLELossless

from data_setup.readers.dicom import RejectReason, decode_frames, open_volume, read_volume
from tests.data_setup.dicom.reading import SYNTAXES, read_header, reason_of
from tests.support.dicom_factory import TRITON, opt_dataset, speckle, write_opt
from utils.storage import write_bytes


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda s: UID(s).name)
def test_round_trip(tmp_path: Path, syntax: str, bits: int) -> None:
    voxels = speckle(bits=bits)
    path = write_opt(tmp_path, voxels, syntax=syntax)
    np.testing.assert_array_equal(decode_frames(path), voxels)
    volume = read_volume(path)
    expected = voxels if bits == 8 else np.rint(voxels * (255 / 65535)).astype(np.uint8)
    np.testing.assert_array_equal(volume.voxels, expected)
    assert volume.header.transfer_syntax == syntax
    assert volume.header.bits_stored == bits


def test_odd_number_of_bytes_and_big_endian(tmp_path: Path) -> None:
    odd = speckle(3, 5, 7)
    np.testing.assert_array_equal(decode_frames(write_opt(tmp_path, odd)), odd)
    ds = opt_dataset(speckle(bits=16))
    ds.file_meta.TransferSyntaxUID = ExplicitVRBigEndian
    ds.PixelData = speckle(bits=16).byteswap().tobytes()
    dcmwrite(tmp_path / "big.dcm", ds, implicit_vr=False, little_endian=False, force_encoding=True)
    np.testing.assert_array_equal(decode_frames(str(tmp_path / "big.dcm")), speckle(bits=16))


def test_colour_frames_keep_their_samples(tmp_path: Path) -> None:
    colours = np.random.default_rng(0).integers(0, 256, (3, 8, 10, 3), np.uint8)

    def paint(ds: FileDataset) -> None:
        ds.SamplesPerPixel, ds.PhotometricInterpretation, ds.PlanarConfiguration = 3, "RGB", 0
        ds.PixelData = colours.tobytes()

    path = write_opt(tmp_path, speckle(3, 8, 10), edit=paint)
    np.testing.assert_array_equal(decode_frames(path), colours)
    assert reason_of(read_volume, path) == RejectReason.UNSUPPORTED_PIXELS


def test_frames_split_anywhere_are_joined(tmp_path: Path) -> None:
    """Several fragments per frame, with a basic offset table and without one."""
    voxels = speckle()

    def split(with_table: bool) -> Callable[[FileDataset], None]:
        def edit(ds: FileDataset) -> None:
            streams = list(generate_frames(ds.PixelData, number_of_frames=len(voxels)))
            ds.PixelData = encapsulate(streams, fragments_per_frame=3, has_bot=with_table)

        return edit

    for with_table in (True, False):
        path = write_opt(tmp_path, voxels, syntax=JPEG2000Lossless, edit=split(with_table))
        np.testing.assert_array_equal(decode_frames(path), voxels)
    # RLE has no end marker: only the table says which fragments make a frame.
    path = write_opt(tmp_path, voxels, syntax=RLELossless, edit=split(True))
    np.testing.assert_array_equal(decode_frames(path), voxels)
    path = write_opt(tmp_path, voxels, syntax=RLELossless, edit=split(False))
    assert reason_of(decode_frames, path) == RejectReason.FRAME_COUNT_MISMATCH


def test_frames_arrive_one_by_one_and_the_file_is_closed(tmp_path: Path) -> None:
    voxels = speckle()
    path = write_opt(tmp_path, voxels)
    _, frames = open_volume(path)
    np.testing.assert_array_equal(next(frames), voxels[0])
    del frames  # a dropped iterator closes its file: an open one would be a ResourceWarning, an error here
    header, frames = open_volume(path)
    assert header.shape == voxels.shape
    np.testing.assert_array_equal(np.stack(list(frames)), voxels)


def test_remote_files(tmp_path: Path) -> None:
    voxels = speckle()
    url = f"memory://reader/{TRITON}"
    write_bytes(url, Path(write_opt(tmp_path, voxels, syntax=JPEG2000Lossless)).read_bytes())
    np.testing.assert_array_equal(read_volume(url).voxels, voxels)
    assert read_header(url).device == "topcon_triton"
    assert reason_of(read_volume, "memory://reader/none.dcm") == RejectReason.MISSING_FILE
