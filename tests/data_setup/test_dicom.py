"""The reader: native frames of any modality, OPT volumes, and every fault by its name."""

from __future__ import annotations

import io
import pickle
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pydicom.dataset import Dataset, FileDataset
from pydicom.encaps import encapsulate, generate_frames
from pydicom.filewriter import dcmwrite
from pydicom.sequence import Sequence
from pydicom.uid import (
    UID,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGLossless,
    JPEGLosslessSV1,
    RLELossless,
)

from data_setup.readers.dicom import (
    OCTHeader,
    OCTReadError,
    RejectReason,
    decode_frames,
    open_volume,
    read_volume,
)
from data_setup.readers.pixels import BoundedFile
from tests.support.dicom_factory import (
    CIRRUS,
    TRITON,
    item,
    measures,
    opt_dataset,
    rows_down,
    speckle,
    steps_along,
    write_opt,
)
from utils.storage import write_bytes

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
DECODE = SHARED / "dicom_decode"
REAL = SHARED / "real_oct" / "retinal_oct" / "structural_oct"
needs_shared = pytest.mark.skipif(not DECODE.is_dir(), reason="the shared sample files are not here")
SYNTAXES = [ExplicitVRLittleEndian, ImplicitVRLittleEndian, RLELossless, JPEG2000Lossless]


def read_header(url: str) -> OCTHeader:
    return open_volume(url)[0]


def reason_of(call: Callable[[str], object], url: str) -> RejectReason:
    with pytest.raises(OCTReadError) as caught:
        call(url)
    assert caught.value.url == url
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{url}: {caught.value.reason}: expected ")
    return caught.value.reason


# ---- files of other modalities ----------------------------------------------------------------------------


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


# ---- real eyes --------------------------------------------------------------------------------------------


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


# ---- round trips ------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("count", "size"), [(300, 0), (100_000, 0), (300, 2), (30_000, 2)])
def test_frames_of_no_bytes_cost_nothing(tmp_path: Path, count: int, size: int) -> None:
    """One good frame, then as many (nearly) empty fragments as NumberOfFrames says."""
    big = np.zeros((2, 2000, 4096), np.uint8)
    big[:, ::50] = 7

    def edit(ds: FileDataset) -> None:
        first = next(generate_frames(ds.PixelData, number_of_frames=2))
        rest = (struct.pack("<HHL", 0xFFFE, 0xE000, size) + b"\0" * size) * (count - 1)
        item = struct.pack("<HHL", 0xFFFE, 0xE000, len(first))
        ds.PixelData = struct.pack("<HHL", 0xFFFE, 0xE000, 0) + item + first + rest
        ds.PixelData += struct.pack("<HHL", 0xFFFE, 0xE0DD, 0)
        ds.NumberOfFrames = count
        del ds.PerFrameFunctionalGroupsSequence

    path = write_opt(tmp_path, big, syntax=JPEG2000Lossless, edit=edit)
    tracemalloc.start()
    expected = RejectReason.CORRUPT_PIXEL_DATA if size else RejectReason.TRUNCATED_PIXEL_DATA
    for read in (decode_frames, read_volume):
        assert reason_of(read, path) == expected
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**25


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


# ---- intensities ------------------------------------------------------------------------------------------


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


# ---- spacing ----------------------------------------------------------------------------------------------


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


# ---- not a volume -----------------------------------------------------------------------------------------


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


# ---- orientation ------------------------------------------------------------------------------------------


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


# ---- faults -----------------------------------------------------------------------------------------------


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


def assign(**values: object) -> Callable[[FileDataset], None]:
    def edit(ds: FileDataset) -> None:
        for keyword, value in values.items():
            setattr(ds, keyword, value)

    return edit


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

    for syntax in (JPEGLossless, JPEGLosslessSV1):  # JPEG-LS has a codec beside highdicom
        path = write_opt(tmp_path, speckle(), edit=relabel(syntax))
        with pytest.raises(OCTReadError, match=r"pip install pylibjpeg-libjpeg \(GPL") as caught:
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


# ---- memory -----------------------------------------------------------------------------------------------

# The high-water mark of this process's own memory; ru_maxrss would start at the parent's.
MEASURE = """
import sys
from pathlib import Path
from data_setup.readers.dicom import OCTReadError, decode_frames, read_volume
def kilobytes(key):
    return int(Path("/proc/self/status").read_text().split(key + ":")[1].split()[0])
read_volume(sys.argv[3])  # codecs and tables load on first use
before = kilobytes("VmRSS")
try:
    result = {"decode_frames": decode_frames, "read_volume": read_volume}[sys.argv[1]](sys.argv[2])
except OCTReadError as error:
    print(error.reason)
print(kilobytes("VmHWM") - before)
"""
linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the /proc of Linux")


def peak_bytes(call: str, path: str, warm_up: str) -> tuple[int, str]:
    """Peak memory above the baseline after imports and a small volume, and the fault's name if any."""
    command = [sys.executable, "-c", MEASURE, call, path, warm_up]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    *reason, peak = done.stdout.split()
    return int(peak) * 1024, "".join(reason)


@linux
@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, JPEG2000Lossless], ids=["native", "j2k"])
def test_peak_memory_is_under_2_2_raw_volumes(tmp_path: Path, syntax: str) -> None:
    shape = (120, 1000, 500)
    voxels = np.broadcast_to((np.arange(1000) // 4 % 256).astype(np.uint8)[None, :, None], shape).copy()
    voxels[:, :, :4] = np.arange(120, dtype=np.uint8)[:, None, None]
    path = write_opt(tmp_path, voxels, syntax=syntax)
    warm_up = write_opt(tmp_path, speckle(2, 1000, 500), syntax=syntax, name="small.dcm")
    for call in ("decode_frames", "read_volume"):
        peak, reason = peak_bytes(call, path, warm_up)
        assert reason == ""
        assert 0.9 * voxels.nbytes < peak < 2.2 * voxels.nbytes, (
            f"{call}: {peak / voxels.nbytes:.2f} x the raw volume"
        )


def test_no_read_asks_for_more_than_is_left() -> None:
    """A wrong length in a header is a request for up to 4 GiB; a plain file would allocate them."""
    asked = []

    class Spy(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            asked.append(size)
            return super().read(size)

    file = BoundedFile(Spy(b"12345"))
    assert file.read(2) == b"12"
    assert file.read(2**32 - 2) == b"345"
    assert file.read(2**32 - 2) == b""
    assert asked == [2, 3, 0]


@linux
@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, JPEG2000Lossless], ids=["native", "j2k"])
def test_a_header_that_lies_about_size_allocates_nothing(tmp_path: Path, syntax: str) -> None:
    lies = assign(NumberOfFrames=4000, Rows=20000, Columns=20000, PerFrameFunctionalGroupsSequence=None)
    path = write_opt(tmp_path, speckle(), syntax=syntax, edit=lies)
    warm_up = write_opt(tmp_path, speckle(), syntax=syntax, name="small.dcm")
    peak, reason = peak_bytes("decode_frames", path, warm_up)
    assert reason in ("truncated_pixel_data", "frame_count_mismatch")
    assert peak < 50e6

    def lie(ds: FileDataset) -> None:  # a codestream that claims 60000 x 60000
        streams = [bytearray(s) for s in generate_frames(ds.PixelData, number_of_frames=6)]
        for stream in streams:
            stream[8:16] = struct.pack(">LL", 60000, 60000)
        ds.PixelData = encapsulate([bytes(s) for s in streams])

    if syntax == JPEG2000Lossless:
        path = write_opt(tmp_path, speckle(), syntax=syntax, edit=lie)
        peak, reason = peak_bytes("decode_frames", path, warm_up)
        assert reason == "frame_size_mismatch"
        assert peak < 50e6
