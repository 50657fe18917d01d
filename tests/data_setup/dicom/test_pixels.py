"""Pixels of a DICOM file: frames against pydicom, samples and layouts, grey values."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pydicom.dataset import FileDataset
from pydicom.encaps import encapsulate, generate_frames
from pydicom.filewriter import dcmwrite
from pydicom.sequence import Sequence
from pydicom.uid import UID, ExplicitVRBigEndian, JPEG2000Lossless, RLELossless

from data_setup.readers.dicom import OCTReadError, RejectReason, open_volume, read_volume
from tests.data_setup.dicom.reading import SYNTAXES, assign, read_header, reason_of
from tests.support.dicom_factory import TRITON, decode_frames, item, opt_dataset, speckle, write_opt
from tests.support.pipeline_factory import ROOT
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


@pytest.mark.parametrize("padding", [b"\0" * 2, b"\0" * 24, b" " * 2, b"\0" * 4000], ids=len)
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("syntax", [JPEG2000Lossless, RLELossless], ids=["j2k", "rle"])
def test_padding_behind_a_frame_is_none_of_it(tmp_path: Path, syntax: str, bits: int, padding: bytes) -> None:
    """With a frame in a fragment, and in two of them."""
    for halves in (1, 2):

        def pad(ds: FileDataset, halves: int = halves) -> None:
            frames = [frame + padding for frame in generate_frames(ds.PixelData, number_of_frames=6)]
            ds.PixelData = encapsulate(frames, fragments_per_frame=halves, has_bot=syntax == RLELossless)

        path = write_opt(tmp_path, speckle(bits=bits), syntax=syntax, edit=pad)
        np.testing.assert_array_equal(decode_frames(path), speckle(bits=bits))


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
        ({"BitsStored": 6, "HighBit": 5}, 8),  # values beyond the bits that are said to be stored
        ({"BitsStored": 12, "HighBit": 11}, 16),
        ({"BitsStored": 8, "HighBit": 7}, 16),
    ],
)
def test_a_rescale_that_would_clip_is_a_reject(tmp_path: Path, values: dict[str, str], bits: int) -> None:
    path = write_opt(tmp_path, speckle(bits=bits), edit=assign(**values))
    with pytest.raises(OCTReadError, match=r"in B-scan 1 of 6(, times (1|4) plus (-128|0))?") as caught:
        read_volume(path)
    assert caught.value.reason == RejectReason.HEADER_MISMATCH


@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
@pytest.mark.parametrize(("value", "limit"), [(255, None), (251, 255), (255, 251), (0, None), (None, 7)])
def test_padding_is_black_as_outside_the_field(
    tmp_path: Path, photometric: str, value: int | None, limit: int | None
) -> None:
    """PixelPaddingValue, alone or as one end of a range; a limit alone says nothing."""
    voxels = speckle() // 2 + 20
    voxels[:, :12] = 253 if limit else value or 0
    values = {"PixelPaddingValue": value, "PixelPaddingRangeLimit": limit}
    says = {name: number for name, number in values.items() if number is not None}
    path = write_opt(tmp_path, voxels, edit=assign(PhotometricInterpretation=photometric, **says))
    grey = 255 - voxels if photometric == "MONOCHROME1" else voxels.copy()
    grey[:, :12] = grey[:, :12] if value is None else 0
    np.testing.assert_array_equal(read_volume(path).voxels, grey)


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
