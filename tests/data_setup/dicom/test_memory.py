"""Peak memory is bounded by the raw volume, whatever a header claims."""

import io
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from pydicom.dataset import FileDataset
from pydicom.encaps import encapsulate, generate_frames
from pydicom.uid import ExplicitVRLittleEndian, JPEG2000Lossless

from data_setup.readers.dicom import RejectReason, read_volume
from data_setup.readers.pixels import BoundedFile
from tests.data_setup.dicom.reading import assign, reason_of
from tests.support.dicom_factory import decode_frames, speckle, write_opt
from tests.support.pipeline_factory import ROOT


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


# The high-water mark of this process's own memory; ru_maxrss would start at the parent's.
MEASURE = """
import sys
from pathlib import Path
from data_setup.readers.dicom import OCTReadError, read_volume
from tests.support.dicom_factory import decode_frames
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
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
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
