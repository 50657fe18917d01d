"""The named ways in which one DICOM file is unusable, and the boundary that gives them their names.

A reader raises `OCTReadError(url, reason, expected, found)`; `prepare` counts the reasons and goes on.
Errors of storage itself (no permission, no connection) stay `StorageError`: they say nothing about the file.
Neither text ever repeats a value of the file that is not a number or a term of the standard: reasons go into
reports and logs, and a damaged header can hold a name anywhere.
"""

from __future__ import annotations

import logging
import struct
import warnings
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from enum import StrEnum

from pydicom.errors import BytesLengthException, InvalidDicomError

from utils.storage import StorageError, StorageNotFoundError

# They repeat values of the file in their remarks, also through warnings; handlers of the root would keep them.
for _library in ("pydicom", "tifffile"):
    logging.getLogger(_library).setLevel(logging.CRITICAL + 1)


class RejectReason(StrEnum):
    """Why a file is not used; the text is what reports and the store's index show."""

    MISSING_FILE = "missing_file"
    NOT_DICOM = "not_dicom"
    NOT_OPT = "not_opt"
    MISSING_PIXEL_DATA = "missing_pixel_data"
    TRUNCATED_PIXEL_DATA = "truncated_pixel_data"
    FRAME_COUNT_MISMATCH = "frame_count_mismatch"
    FRAME_SIZE_MISMATCH = "frame_size_mismatch"
    MISSING_CODEC = "missing_codec"
    UNSUPPORTED_PIXELS = "unsupported_pixels"
    CORRUPT_PIXEL_DATA = "corrupt_pixel_data"
    CONSTANT_VOLUME = "constant_volume"
    MISSING_SPACING = "missing_spacing"
    IMPLAUSIBLE_SPACING = "implausible_spacing"
    NOT_A_VOLUME = "not_a_volume"
    NOT_FINITE = "not_finite"
    HEADER_MISMATCH = "header_mismatch"
    # data_setup/readers/open_record.py: files that are no DICOM
    WRONG_KIND = "wrong_kind"  # the content is not what the name says
    UNSUPPORTED_FORMAT = "unsupported_format"
    CORRUPT_FILE = "corrupt_file"
    BAD_SIDECAR = "bad_sidecar"
    UNKNOWN_AXES = "unknown_axes"


class OCTReadError(Exception):
    """One file that cannot be used: `url: reason: expected ..., found ...` in one line; pickles whole."""

    def __init__(self, url: str, reason: RejectReason, expected: object, found: object) -> None:
        super().__init__(url, reason, expected, found)
        self.url = url
        self.reason = reason
        self.expected = " ".join(str(expected).split())
        self.found = " ".join(str(found).split())[:300]

    def __str__(self) -> str:
        return f"{self.url}: {self.reason}: expected {self.expected}, found {self.found}"


class UnboundedReadError(Exception):
    """A library asked for all that is left of a file."""


# What pydicom and its codecs raise on bytes that are not what they claim; LookupError covers KeyError and
# IndexError, ValueError bad numbers and text, RuntimeError recursion and "no plugin decoded it".
_LIBRARY_ERRORS = (
    InvalidDicomError,
    BytesLengthException,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
    RuntimeError,
    EOFError,
    struct.error,
    zlib.error,
)


def place_of(error: BaseException) -> str:
    """The error's kind and module, `ValueError in pydicom.valuerep`; not its text, which quotes values."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = f" in {place.tb_frame.f_globals.get('__name__')}" if place is not None else ""
    return f"{type(error).__name__}{where}"


def known(value: str, terms: Collection[str]) -> str:
    """A value of the file that may be repeated because it is a term of the standard; else "another value"."""
    return value if value in terms else "another value"


def number(value: float, limit: float = 0xFFFF) -> str:
    """A number of the file that may be repeated because it is plausible; a date in its place is not."""
    return f"{value:g}" if abs(value) <= limit else "a number out of range"


@contextmanager
def named_faults(url: str, reason: RejectReason, expected: str) -> Iterator[None]:
    """Turn an error of the DICOM library about this file's bytes into an OCTReadError with this reason.

    Its warnings are remarks about odd values that nothing here reads; what matters is checked by the callers.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    except StorageNotFoundError as error:
        raise OCTReadError(url, RejectReason.MISSING_FILE, "a file", "none") from error
    except StorageError:
        raise
    except (*_LIBRARY_ERRORS, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # pydicom's own OSErrors have no number
            raise StorageError(url, f"reading failed: {error}; run again") from error
        # Not chained: a printed traceback would show the text of the cause.
        raise OCTReadError(url, reason, expected, place_of(error)) from None
