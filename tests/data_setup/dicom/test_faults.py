"""Every fault has its name: no DICOM, wrong attributes, cut files, damaged bytes, codecs not there."""

import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pydicom.dataset import Dataset, FileDataset
from pydicom.encaps import encapsulate, generate_frames
from pydicom.sequence import Sequence
from pydicom.uid import (
    UID,
    DeflatedExplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGLossless,
    JPEGLosslessSV1,
    RLELossless,
)

from data_setup.readers.dicom import OCTReadError, RejectReason, read_volume
from tests.data_setup.dicom.reading import SYNTAXES, assign, reason_of
from tests.support.dicom_factory import decode_frames, opt_dataset, rows_down, speckle, steps_along, write_opt


def test_files_that_are_no_dicom(tmp_path: Path) -> None:
    assert reason_of(read_volume, str(tmp_path / "none.dcm")) == RejectReason.MISSING_FILE
    sound = Path(write_opt(tmp_path, speckle())).read_bytes()
    for index, data in enumerate((b"", b"text", b"\0" * 4096, b"\0" * 128 + b"DICM", sound[:140])):
        path = tmp_path / f"{index}.dcm"
        path.write_bytes(data)
        assert reason_of(read_volume, str(path)) == RejectReason.NOT_DICOM
        assert reason_of(decode_frames, str(path)) == RejectReason.NOT_DICOM


def drop_pixels(ds: FileDataset) -> None:
    del ds.PixelData


def float_pixels(ds: FileDataset) -> None:
    del ds.PixelData
    ds.FloatPixelData = np.ones(6 * 40 * 36, np.float32).tobytes()


def cut(size: int) -> Callable[[FileDataset], None]:
    def edit(ds: FileDataset) -> None:
        ds.PixelData = (ds.PixelData + b"\0" * 10000)[:size]

    return edit


FRAME = 40 * 36


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (drop_pixels, RejectReason.MISSING_PIXEL_DATA),
        (float_pixels, RejectReason.UNSUPPORTED_PIXELS),
        (cut(0), RejectReason.TRUNCATED_PIXEL_DATA),
        (cut(3 * FRAME + 100), RejectReason.TRUNCATED_PIXEL_DATA),
        (cut(3 * FRAME), RejectReason.FRAME_COUNT_MISMATCH),
        (cut(7 * FRAME), RejectReason.FRAME_COUNT_MISMATCH),
        (cut(6 * FRAME + 100), RejectReason.FRAME_SIZE_MISMATCH),
        (assign(NumberOfFrames=7), RejectReason.FRAME_COUNT_MISMATCH),
        (assign(NumberOfFrames=0), RejectReason.HEADER_MISMATCH),
        (assign(Rows=None), RejectReason.HEADER_MISMATCH),
        (assign(Columns=0), RejectReason.HEADER_MISMATCH),
        (assign(BitsStored=9), RejectReason.UNSUPPORTED_PIXELS),
        (assign(HighBit=15), RejectReason.UNSUPPORTED_PIXELS),
        (assign(PixelRepresentation=1), RejectReason.UNSUPPORTED_PIXELS),
        (assign(PhotometricInterpretation="PALETTE COLOR"), RejectReason.UNSUPPORTED_PIXELS),
        (assign(SOPClassUID="1.2.840.10008.5.1.4.1.1.2"), RejectReason.NOT_OPT),
        (assign(SOPClassUID=None), RejectReason.NOT_OPT),
        (assign(PixelData=b"\x07" * 6 * FRAME), RejectReason.CONSTANT_VOLUME),
        (assign(RescaleSlope="0", RescaleIntercept="3"), RejectReason.CONSTANT_VOLUME),
        (assign(PerFrameFunctionalGroupsSequence=Sequence([Dataset()])), RejectReason.FRAME_COUNT_MISMATCH),
    ],
)
def test_each_fault_has_its_name(
    tmp_path: Path, edit: Callable[[FileDataset], None], reason: RejectReason
) -> None:
    assert reason_of(read_volume, write_opt(tmp_path, speckle(), edit=edit)) == reason


def test_a_transfer_syntax_that_is_not_that_of_the_data_is_named(tmp_path: Path) -> None:
    path = Path(write_opt(tmp_path, speckle()))
    path.write_bytes(path.read_bytes().replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2\0\0\0"))
    with pytest.raises(
        OCTReadError, match="header_mismatch: expected implicit VR, as the transfer syntax says"
    ):
        read_volume(str(path))


def test_rescale_that_is_no_number(tmp_path: Path) -> None:
    path = Path(write_opt(tmp_path, speckle(), edit=assign(RescaleSlope="1.5", RescaleIntercept="0")))
    path.write_bytes(path.read_bytes().replace(b"DS\x04\x001.5 ", b"DS\x04\x00nan "))
    assert reason_of(read_volume, str(path)) == RejectReason.NOT_FINITE


def test_a_header_that_ends_early_says_so(tmp_path: Path) -> None:
    path = Path(write_opt(tmp_path, speckle(), references=rows_down(6)))
    data = path.read_bytes()
    ends = [
        data.index(struct.pack("<HH", *tag)) for tag in ((0x0028, 0x0011), (0x5200, 0x9229), (0x5200, 0x9230))
    ]
    for end in ends:
        path.write_bytes(data[:end])
        with pytest.raises(OCTReadError, match=f"missing_pixel_data.*after {end} bytes: a cut header"):
            read_volume(str(path))


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    """Cut anywhere in its pixels, a file is truncated: no partial volume ever comes back."""
    for syntax in SYNTAXES:
        path = Path(write_opt(tmp_path, speckle(), syntax=syntax))
        data = path.read_bytes()
        start = data.index(struct.pack("<HH", 0x7FE0, 0x0010))
        for fraction in (0.02, 0.5, 0.9, 0.999):
            path.write_bytes(data[: start + int((len(data) - start) * fraction)])
            assert reason_of(read_volume, str(path)) == RejectReason.TRUNCATED_PIXEL_DATA, (syntax, fraction)


def test_a_codestream_that_ends_early_inside_a_whole_file(tmp_path: Path) -> None:
    """openjpeg returns a partial picture for these; so the markers and tile lengths are checked."""
    voxels = speckle()

    def shorten(how: Callable[[bytes], bytes]) -> Callable[[FileDataset], None]:
        def edit(ds: FileDataset) -> None:
            streams = list(generate_frames(ds.PixelData, number_of_frames=len(voxels)))
            ds.PixelData = encapsulate([*streams[:2], how(streams[2]), *streams[3:]])

        return edit

    for how in (lambda s: s[: len(s) // 2], lambda s: s[: len(s) // 2] + b"\xff\xd9"):
        path = write_opt(tmp_path, voxels, syntax=JPEG2000Lossless, edit=shorten(how))
        assert reason_of(decode_frames, path) == RejectReason.TRUNCATED_PIXEL_DATA
    damaged = {
        RejectReason.CORRUPT_PIXEL_DATA: b"\0" * 40 + b"\xff\xd9",
        RejectReason.TRUNCATED_PIXEL_DATA: b"\xff\x4f",
    }
    for reason, stream in damaged.items():
        path = write_opt(tmp_path, voxels, syntax=JPEG2000Lossless, edit=shorten(lambda _, s=stream: s))
        assert reason_of(decode_frames, path) == reason


@pytest.mark.parametrize("syntax", [RLELossless, JPEG2000Lossless])
def test_compressed_frame_count_and_size(tmp_path: Path, syntax: str) -> None:
    for count in (5, 7):
        path = write_opt(tmp_path, speckle(), syntax=syntax, edit=assign(NumberOfFrames=count))
        assert reason_of(decode_frames, path) == RejectReason.FRAME_COUNT_MISMATCH
    path = write_opt(tmp_path, speckle(), syntax=syntax, edit=assign(Rows=30))
    reasons = {RejectReason.FRAME_SIZE_MISMATCH, RejectReason.CORRUPT_PIXEL_DATA}
    assert reason_of(decode_frames, path) in reasons


def test_missing_codecs_are_named_with_their_pip_line(tmp_path: Path) -> None:
    def relabel(syntax: str) -> Callable[[FileDataset], None]:
        def edit(ds: FileDataset) -> None:
            ds.PixelData = encapsulate([b"\xff\xd8\xff\xd9"] * 6)
            ds["PixelData"].VR = "OB"
            ds["PixelData"].is_undefined_length = True
            ds.file_meta.TransferSyntaxUID = UID(syntax)

        return edit

    for syntax in (JPEGLossless, JPEGLosslessSV1):  # JPEG-LS has a codec in requirements.txt
        path = write_opt(tmp_path, speckle(), edit=relabel(syntax))
        with pytest.raises(OCTReadError, match="pip install python-gdcm, found none") as caught:
            read_volume(path)
        assert caught.value.reason == RejectReason.MISSING_CODEC
    path = write_opt(tmp_path, speckle(), edit=relabel("1.2.840.10008.1.2.4.102"))  # MPEG-4
    with pytest.raises(OCTReadError, match=r"unsupported_pixels.* found MPEG-4 AVC/H.264 High Profile"):
        read_volume(path)


def test_deflated_files_are_unsupported(tmp_path: Path) -> None:
    ds = opt_dataset(speckle())
    ds.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    ds.save_as(tmp_path / "deflated.dcm", implicit_vr=False, little_endian=True)
    with pytest.raises(OCTReadError, match=r"unsupported_pixels.* found Deflated Explicit VR Little Endian"):
        read_volume(str(tmp_path / "deflated.dcm"))


def test_errors_survive_pickling() -> None:
    error = OCTReadError("a.dcm", RejectReason.CONSTANT_VOLUME, "an image", "every voxel\n0")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "a.dcm: constant_volume: expected an image, found every voxel 0"
    assert again.reason is RejectReason.CONSTANT_VOLUME


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda s: UID(s).name)
def test_damaged_bytes_give_named_errors_or_frames(tmp_path: Path, syntax: str) -> None:
    """Random damage never escapes the boundary as another exception, wherever it hits."""
    path = Path(write_opt(tmp_path, speckle(4, 40, 36), syntax=syntax, positions=steps_along(4, 1, 0.12)))
    sound = path.read_bytes()
    rng = np.random.default_rng(0)
    named = 0
    pixels = sound.index(struct.pack("<HH", 0x7FE0, 0x0010))
    for trial in range(120):
        data = bytearray(sound)
        for place in rng.integers(132, pixels if trial % 2 else len(sound), 3):
            data[place] = rng.integers(256)
        path.write_bytes(bytes(data))
        try:
            read_volume(str(path))
        except OCTReadError:
            named += 1
    assert named > 25
