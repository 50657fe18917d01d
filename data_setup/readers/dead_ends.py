"""Files that nothing here will open, named so that a user knows what to export or to fetch instead.

In: the reject of a file. Out: the same, or a reject with the reason that lies behind it. Known are
Zeiss' scrambled JPEG 2000 (each seventh byte of a frame changed by 0x5A, its parts in another order; found by
the signature of JP2, as pydicom's discussion 1618 describes it), a maker's raw data in a DICOM wrapper, and
reports and photographs; and of any kind a pointer of git-lfs or git-annex in place of the file.
"""

from contextlib import suppress

from pydicom.config import IGNORE
from pydicom.uid import UID

from data_setup.readers.dicom import peek_dataset
from data_setup.readers.faults import OCTReadError, RejectReason, named_faults
from utils.config.schema import StorageOptions
from utils.storage import StorageNotFoundError, join, list_names, read_range, stat

_LOOKED_AT = 2**22  # bytes: header and first frames
_JP2 = b"\x00\x00\x00\x0cjP  \r\n\x87\n"
_KEY, _STEP = 0x5A, 7
_SIGNATURES = tuple(
    bytes(byte ^ (_KEY if (place + phase) % _STEP == 0 else 0) for place, byte in enumerate(_JP2))
    for phase in range(_STEP)
)
_SUSPECTS = (  # what a scrambled or wrapped file is rejected for, before anybody looks further
    RejectReason.NOT_OPT,
    RejectReason.MISSING_PIXEL_DATA,
    RejectReason.CORRUPT_PIXEL_DATA,
    RejectReason.TRUNCATED_PIXEL_DATA,
    RejectReason.FRAME_COUNT_MISMATCH,
)
_UNREADABLE = (
    *(RejectReason.NOT_DICOM, RejectReason.WRONG_KIND, RejectReason.CORRUPT_FILE),
    *(RejectReason.UNSUPPORTED_FORMAT, RejectReason.MISSING_SHAPE),
)
_POINTERS = {  # how a file begins that is not fetched -> (whose, what fetches it)
    b"version https://git-lfs.github.com/spec/": ("git-lfs", "git lfs pull"),
    b"/annex/objects/": ("git-annex", "git annex get"),
}
_POINTER_BYTES = 1024
_RAW = "1.2.840.10008.5.1.4.1.1.66"
_OTHERS = {  # SOP classes that stand beside OCT in an export
    "1.2.840.10008.5.1.4.1.1.104.1": "a report (PDF)",
    "1.2.840.10008.5.1.4.1.1.77.1.5.1": "a photograph",
    "1.2.840.10008.5.1.4.1.1.77.1.5.2": "a photograph",
    "1.2.840.10008.5.1.4.1.1.7": "a screenshot (Secondary Capture)",
}


def _pointer(url: str, options: StorageOptions) -> str:
    """Of a file that is not fetched, the one at `url` or the first in this folder: whose pointer it is."""
    urls = [join(url, name) for name in list_names(url, options)] or [url]
    for one in urls:
        with suppress(StorageNotFoundError):
            data = read_range(one, 0, 64, options) if stat(one, options).size < _POINTER_BYTES else b""
            for mark, (whose, command) in _POINTERS.items():
                if data.startswith(mark):
                    return f"{whose} in its place; next: {command} ({one.rpartition('/')[2]})"
    return ""


def explained(error: OCTReadError, options: StorageOptions | None, is_dicom: bool = True) -> OCTReadError:
    """The reject, with the reason behind it where it is a known one; raises StorageError."""
    if error.reason in _UNREADABLE and (pointer := _pointer(error.url, options or StorageOptions())):
        return OCTReadError(error.url, RejectReason.MISSING_FILE, "the file", f"a pointer of {pointer}")
    if not is_dicom or error.reason not in _SUSPECTS:
        return error
    url, options = error.url, options or StorageOptions()
    data = read_range(url, 0, _LOOKED_AT, options)
    if any(signature in data for signature in _SIGNATURES):
        expected = "JPEG 2000 as the standard has it: ask Zeiss for an export as standard OPT DICOM"
        actual = "Zeiss' scrambled JPEG 2000, of the EXDCM export"
        return OCTReadError(url, RejectReason.SCRAMBLED_PIXELS, expected, actual)
    if error.reason != RejectReason.NOT_OPT:
        return error
    ds = peek_dataset(url, stat(url, options).size, ["SOPClassUID"], options)
    with named_faults(url, RejectReason.NOT_DICOM, "a whole DICOM header"):
        sop_class = str(ds.get("SOPClassUID") or "")
    if sop_class == _RAW or (sop_class and UID(sop_class, IGNORE).is_private):
        expected = (
            "Ophthalmic Tomography Image Storage: export the scan as OPT DICOM, not the device's raw data"
        )
        return OCTReadError(url, RejectReason.MAKERS_RAW_DATA, expected, "a maker's own data in a DICOM file")
    if sop_class in _OTHERS:
        expected = "Ophthalmic Tomography Image Storage: export the volume beside it as well"
        return OCTReadError(url, RejectReason.NOT_OPT, expected, _OTHERS[sop_class])
    return error
