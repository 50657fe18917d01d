"""Mutated DICOM files (tests/support/dicom_fuzz.py): a named error or a volume, in time and in bounded
memory.
"""

import io
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydicom.dataset import FileDataset
from pydicom.encaps import encapsulate, generate_frames
from pydicom.uid import UID, HTJ2KLossless, JPEG2000Lossless, JPEGBaseline8Bit

from data_setup.readers.dicom import RejectReason, open_volume, read_volume
from tests.data_setup.dicom.reading import reason_of
from tests.support.dicom_factory import decode_frames, speckle, write_opt
from tests.support.dicom_fuzz import LIMIT_S, Result, run_cases

J2K_START = b"\xff\x4f\xff\x51"
pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the /proc of Linux")
# Case numbers that found something in the reader of 2026-11-21, kept for ever: 68 an error of zlib; 893 and
# 1102 a codec at work for seconds on a few hundred bytes; 1036 a rescale slope beyond float32; 103816
# directions whose squares overflow; 107247 a PlanarConfiguration in words.
FOUND = (68, 893, 1036, 1102, 103816, 107247)


def check(cases: Sequence[int], folder: Path) -> list[Result]:
    results = run_cases(cases, folder)
    assert [r.case for r in results] == list(cases)
    bad = [r for r in results if not r.is_good]
    assert not bad, f"{len(bad)} of {len(results)}: " + "; ".join(map(str, bad[:10]))
    return results


def test_cases_that_once_found_something(tmp_path: Path) -> None:
    check(FOUND, tmp_path)


def check_variety(results: Sequence[Result]) -> None:
    """The mutations reach the checks behind one another, and some do no harm."""
    outcomes = Counter(r.outcome for r in results)
    assert 0.1 < outcomes["ok"] / len(results) < 0.6, outcomes
    reasons = {o for o in outcomes if o != "ok"}
    assert len(reasons) >= min(13, len(results) // 20), outcomes


def test_a_hundred_mutated_files(tmp_path: Path) -> None:
    check_variety(check(range(100), tmp_path))


@pytest.mark.slow
def test_two_thousand_mutated_files(tmp_path: Path) -> None:
    check_variety(check(range(2_000), tmp_path))


@pytest.mark.soak
def test_twenty_thousand_mutated_files(tmp_path: Path) -> None:
    check_variety(check(range(100_000, 120_000), tmp_path))


def test_the_watch_sees_what_it_is_for() -> None:
    sound = Result(0, "named: not_dicom", 0.1, 10**6)
    assert sound.is_good
    for bad in (
        Result(0, "ended it: -11", 0.0, 0),
        Result(0, "MemoryError at x: y", 0.1, 0),
        Result(0, "ok", LIMIT_S + 1, 0),
        Result(0, "ok", 0.1, 2**30),
    ):
        assert not bad.is_good


# ---- what it found ----------------------------------------------------------------------------------------


def no_groups(ds: FileDataset) -> None:
    del ds.PerFrameFunctionalGroupsSequence


@pytest.mark.parametrize("frames", [2**31 - 1, 2**31, 10**11])
@pytest.mark.parametrize("syntax", [None, JPEG2000Lossless])
@pytest.mark.parametrize("call", [read_volume, open_volume, decode_frames])
def test_a_number_of_frames_is_believed_only_with_the_frames(
    tmp_path: Path, call: Callable[[str], object], syntax: str | None, frames: int
) -> None:
    """The caller of open_volume allocates by its header, so that is checked before it is handed out."""

    def lie(ds: FileDataset) -> None:
        no_groups(ds)
        ds.NumberOfFrames = str(frames)

    options = {} if syntax is None else {"syntax": syntax}
    path = write_opt(tmp_path, speckle(3), edit=lie, **options)
    expected = {RejectReason.TRUNCATED_PIXEL_DATA, RejectReason.FRAME_COUNT_MISMATCH}
    assert reason_of(call, path) in expected


@pytest.mark.parametrize("syntax", [JPEG2000Lossless, HTJ2KLossless])
def test_a_short_codestream_is_no_huge_frame(tmp_path: Path, syntax: str) -> None:
    """Header and codestream agree on 20000 x 20000 in 300 bytes: a codec would take 7 GB."""

    def lie(ds: FileDataset) -> None:
        streams = [bytearray(s) for s in generate_frames(ds.PixelData, number_of_frames=3)]
        for stream in streams:
            stream[8:16] = struct.pack(">LL", 20000, 20000)
        ds.PixelData = encapsulate([bytes(s) for s in streams])
        ds.Rows = ds.Columns = 20000
        ds.file_meta.TransferSyntaxUID = UID(syntax)

    path = write_opt(tmp_path, speckle(3), syntax=JPEG2000Lossless, edit=lie)
    assert reason_of(read_volume, path) == RejectReason.CORRUPT_PIXEL_DATA


def edited(change: Callable[[bytes], bytes]) -> Callable[[FileDataset], None]:
    def edit(ds: FileDataset) -> None:
        ds.PixelData = encapsulate([change(s) for s in generate_frames(ds.PixelData, number_of_frames=3)])

    return edit


def components(stream: bytes) -> bytes:
    """500 of them, each as large as the frame."""
    at = stream.index(J2K_START)
    (end,) = struct.unpack_from(">H", stream, at + 4)
    siz = struct.pack(">H", 38 + 3 * 500) + stream[at + 6 : at + 40] + struct.pack(">H", 500)
    return stream[: at + 4] + siz + stream[at + 42 : at + 45] * 500 + stream[at + 4 + end :]


def tiles(stream: bytes) -> bytes:
    """One for every pixel."""
    at = stream.index(J2K_START)
    return stream[: at + 24] + struct.pack(">LL", 1, 1) + stream[at + 32 :]


def precincts(stream: bytes) -> bytes:
    """Of two by two pixels, in 65535 layers."""
    at = stream.index(b"\xff\x52")
    (length,) = struct.unpack_from(">H", stream, at + 2)
    cod = b"\x01\0\xff\xff" + stream[at + 8 : at + 14] + b"\x11" * (stream[at + 9] + 1)
    return stream[: at + 2] + struct.pack(">H", len(cod) + 2) + cod + stream[at + 2 + length :]


def hidden(stream: bytes) -> bytes:
    """Behind a sound header in a box that no codec reads, the header that lies."""
    return b"\0\0\0\x10uuid" + stream[:100] + components(stream)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (components, RejectReason.FRAME_SIZE_MISMATCH),
        (tiles, RejectReason.CORRUPT_PIXEL_DATA),
        (precincts, RejectReason.CORRUPT_PIXEL_DATA),
        (lambda s: s.replace(b"\xff\x52", b"\xff\x30\0\x02\xff\x52"), RejectReason.CORRUPT_PIXEL_DATA),
        (hidden, RejectReason.CORRUPT_PIXEL_DATA),
    ],
)
def test_no_codec_sees_a_header_with_more_planes_or_tiles_than_the_frame(
    tmp_path: Path, change: Callable[[bytes], bytes], reason: RejectReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_opt(tmp_path, speckle(3), syntax=JPEG2000Lossless, edit=edited(change))
    decoder = "pydicom.pixels.decoders.base.Decoder.as_array"
    monkeypatch.setattr(decoder, lambda *_, **__: pytest.fail("a codec was called"))
    for call in (read_volume, decode_frames):
        assert reason_of(call, path) == reason


def test_a_codestream_in_a_wrapper_is_decoded_without_it(tmp_path: Path) -> None:
    """JP2 boxes may hold a palette of 255 planes, so they never reach the codec."""
    boxes = b"\0\0\0\x0cjP  \r\n\x87\n\0\0\0\0jp2c"
    path = write_opt(tmp_path, speckle(3), syntax=JPEG2000Lossless, edit=edited(lambda s: boxes + s))
    np.testing.assert_array_equal(read_volume(path).voxels, speckle(3))


def jpeg(frame: np.ndarray, **options: object) -> bytes:
    out = io.BytesIO()
    Image.fromarray(frame).save(out, "JPEG", **options)
    return out.getvalue()


@pytest.mark.parametrize("kind", ["progressive", "two scans", "hidden scan", "filled"])
def test_a_grey_jpeg_is_one_sequential_scan(tmp_path: Path, kind: str) -> None:
    """A progressive one may repeat scans of 20 bytes, each as long to decode as the frame."""

    def edit(ds: FileDataset) -> None:
        streams = []
        for frame in speckle(3):
            stream = jpeg(frame, progressive=kind == "progressive", optimize=True)
            at = stream.rindex(b"\xff\xda")
            if kind == "two scans":
                stream = stream[:-2] + stream[at:]
            elif kind == "hidden scan":  # a length of 0: the next marker differs between readers
                stream = stream[:at] + b"\xff\xe1\0\0" + stream[at:]
            elif kind == "filled":  # fill bytes before a marker are allowed
                stream = stream[:at] + b"\xff" * 3 + stream[at:]
            streams.append(stream)
        ds.PixelData = encapsulate(streams)
        ds["PixelData"].is_undefined_length = True
        ds.file_meta.TransferSyntaxUID = JPEGBaseline8Bit

    path = write_opt(tmp_path, speckle(3), edit=edit)
    if kind == "filled":
        assert read_volume(path).voxels.shape == speckle(3).shape
        return
    assert reason_of(read_volume, path) == RejectReason.CORRUPT_PIXEL_DATA


def test_a_table_of_many_fragments_takes_no_quadratic_time(tmp_path: Path) -> None:
    frames, fragments = 30_000, 60_000

    def many(ds: FileDataset) -> None:
        no_groups(ds)
        items = b"\xfe\xff\x00\xe0\x02\x00\x00\x00\xff\xd9" * fragments
        table = struct.pack(f"<{frames}L", *range(0, 20 * frames, 20))
        head = b"\xfe\xff\x00\xe0" + struct.pack("<L", len(table)) + table
        ds.PixelData = head + items + b"\xfe\xff\xdd\xe0\0\0\0\0"
        ds.NumberOfFrames = frames

    path = write_opt(tmp_path, speckle(3), syntax=JPEG2000Lossless, edit=many)
    assert reason_of(decode_frames, path) == RejectReason.CORRUPT_PIXEL_DATA


@pytest.mark.parametrize("kind", ["plain", "padded", "another VR", "far behind", "implicit"])
def test_a_deflated_file_is_refused_before_it_is_inflated(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pydicom inflates whatever follows the file meta group, valid or not, to whatever size."""
    monkeypatch.setattr("zlib.decompress", lambda *_: pytest.fail("inflated"))

    def element(number: int, vr: bytes, value: bytes) -> bytes:
        length = struct.pack("<L", len(value)) if kind == "implicit" else vr + struct.pack("<H", len(value))
        return struct.pack("<HH", 2, number) + length + value

    syntax = b"1.2.840.10008.1.2.1.99" + (b"\0\0" if kind == "padded" else b"")
    meta = element(2, b"UI", b"1.2.840.10008.5.1.4.1.1.77.1.5.4")
    if kind == "far behind":
        meta += struct.pack("<HH2s2xL", 2, 1, b"OB", 2**17) + bytes(2**17)
    meta += element(0x10, b"SH" if kind == "another VR" else b"UI", syntax)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    path = tmp_path / "x.dcm"
    path.write_bytes(bytes(128) + b"DICM" + meta + packer.compress(bytes(2**16)) + packer.flush())
    assert reason_of(read_volume, str(path)) == RejectReason.UNSUPPORTED_PIXELS
