"""The day on which a scan was taken: read where somebody asks for it, and nowhere else.

In: the URL of a scan. Out: its date as 2024-01-31, empty where the file says none. Of DICOM the first of
AcquisitionDateTime, AcquisitionDate, ContentDate and StudyDate; of a Heidelberg XML the study's date; of a
.vol the visit's (days from 30 December 1899).
"""

import re
import struct
from datetime import date, timedelta

from data_setup.readers.dicom import peek_dataset
from data_setup.readers.faults import OCTReadError, RejectReason, named_faults
from data_setup.readers.makers import kinds
from data_setup.readers.open_record import kind_by_name
from utils import storage
from utils.config.schema import StorageOptions

_TAGS = ["AcquisitionDateTime", "AcquisitionDate", "ContentDate", "StudyDate"]
_DAY = rb"\s*<Year>\s*(\d+)\s*</Year>\s*<Month>\s*(\d+)\s*</Month>\s*<Day>\s*(\d+)\s*</Day>"
_XML = re.compile(rb"<StudyDate>\s*<Date>" + _DAY)
_VOL_VISIT, _EPOCH, _YEARS = 200, date(1899, 12, 30), (1980, 2100)


def visit_date_of(url: str, options: StorageOptions) -> str:
    """Empty of what cannot be read, too: its reader has said why."""
    kind = kind_by_name(url)
    try:
        if kind == "Heidelberg XML":
            match = _XML.search(storage.read_bytes(url, options))
            return _written(*map(int, match.groups())) if match else ""
        if kind == kinds.VOL:
            (days,) = struct.unpack("<d", storage.read_range(url, _VOL_VISIT, _VOL_VISIT + 8, options))
            day = _EPOCH + timedelta(days=int(days)) if 0 < days < 1e5 else None
            return _written(day.year, day.month, day.day) if day else ""
        is_file = kind == "DICOM" or (kind is None and not storage.list_names(url, options))
        return _of_dicom(url, options) if is_file else ""
    except (OCTReadError, storage.StorageError, struct.error):
        return ""


def _of_dicom(url: str, options: StorageOptions) -> str:
    ds = peek_dataset(url, storage.stat(url, options).size, _TAGS, options)
    with named_faults(url, RejectReason.NOT_DICOM, "a whole DICOM header"):
        texts = [str(ds.get(tag) or "").strip() for tag in _TAGS]
    dates = (re.match(r"(\d{4})(\d\d)(\d\d)", text) for text in texts)
    return next((text for date in dates if date and (text := _written(*map(int, date.groups())))), "")


def _written(year: int, month: int, day: int) -> str:
    """ISO 8601; empty of no day on which an OCT could be taken."""
    try:
        written = date(year, month, day)
    except ValueError:
        return ""
    return written.isoformat() if _YEARS[0] <= year < _YEARS[1] else ""
