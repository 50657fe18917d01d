"""data_setup/readers/dead_ends.py: files that only another export can replace say so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydicom.dataset import FileDataset
from pydicom.encaps import encapsulate
from pydicom.uid import JPEG2000Lossless

from data_setup.readers.faults import RejectReason
from data_setup.readers.open_record import peek_record
from tests.data_setup.dicom.reading import assign
from tests.data_setup.importers.reading import SPACING, read, record, reject
from tests.support.dicom_factory import rows_down, speckle, write_opt
from utils import storage
from utils.config.schema import StorageOptions


def scrambled(length: int) -> bytes:
    """Bytes as others describe Zeiss' frames: JP2 at three fifths, each seventh byte changed by 0x5A."""
    frame = bytearray(range(1, 251)) * (length // 250)
    start = len(frame) * 3 // 5
    frame[start : start + 12] = b"\0\0\0\x0cjP  \r\n\x87\n"
    frame[::7] = bytes(byte ^ 0x5A for byte in frame[::7])
    return bytes(frame)


def scramble_pixels(ds: FileDataset) -> None:
    ds.file_meta.TransferSyntaxUID = JPEG2000Lossless
    ds.PixelData = encapsulate([scrambled(5000 + 250 * n) for n in range(6)])
    ds["PixelData"].is_undefined_length = True


def hide_in_private_tag(ds: FileDataset) -> None:
    """Each phase of seven: the frame starts anywhere in the file."""
    ds.SOPClassUID = "1.2.840.10008.5.1.4.1.1.66"
    ds.private_block(0x0407, "CARL ZEISS MEDITEC", create=True).add_new(0x06, "OB", scrambled(4000))
    del ds.PixelData


@pytest.mark.parametrize(
    ("edit", "reason", "text"),
    [
        (scramble_pixels, RejectReason.SCRAMBLED_PIXELS, "ask Zeiss for an export as standard OPT DICOM"),
        (hide_in_private_tag, RejectReason.SCRAMBLED_PIXELS, "ask Zeiss"),
        (assign(SOPClassUID="1.2.840.10008.5.1.4.1.1.66"), RejectReason.MAKERS_RAW_DATA, "export the scan"),
        (assign(SOPClassUID="1.2.276.0.75.2.2.70.0.9.9"), RejectReason.MAKERS_RAW_DATA, "export the scan"),
        (assign(SOPClassUID=""), RejectReason.NOT_OPT, "no SOPClassUID"),
        (assign(SOPClassUID="1.2.840.10008.5.1.4.1.1.104.1"), RejectReason.NOT_OPT, r"a report \(PDF\)"),
    ],
)
def test_a_dead_end_says_what_to_export(
    tmp_path: Path, edit: object, reason: RejectReason, text: str
) -> None:
    path = write_opt(tmp_path, speckle(), spacing=SPACING, references=rows_down(6), edit=edit)
    actual, message = reject(path, device="unknown")
    assert actual == reason
    assert re.search(text, message), message
    assert "Secret" not in message


def test_a_sound_file_and_a_damaged_one_keep_their_reasons(tmp_path: Path) -> None:
    path = Path(
        write_opt(tmp_path, speckle(), syntax=JPEG2000Lossless, spacing=SPACING, references=rows_down(6))
    )
    assert read(path, device="unknown")[0].transfer_syntax == JPEG2000Lossless
    data = path.read_bytes()
    start = data.index(b"\xff\x4f\xff\x51")
    path.write_bytes(data[:start] + b"\0" * 60 + data[start + 60 :])
    assert reject(path, device="unknown")[0] == RejectReason.CORRUPT_PIXEL_DATA
    size = storage.stat(str(path)).size
    assert peek_record(record(path), size, StorageOptions()).shape == (6, 40, 36)
