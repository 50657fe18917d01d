"""The reasons why a file is not used, and the boundary that turns a library's error into one of them.

A reader raises `OCTReadError(url, reason, expected, actual)`; `prepare` counts the reasons and goes on.
An error of storage (no permission, no connection) stays a `StorageError`: it says nothing about the file.
The texts repeat only numbers and terms of the standard. They go into reports and logs, and a damaged header
can hold a patient's name anywhere.
"""

import logging
import struct
import traceback
import warnings
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from enum import StrEnum

from pydicom.errors import BytesLengthException, InvalidDicomError

from utils.storage import StorageError, StorageNotFoundError

# Their log messages repeat values of the file, and the root logger's handlers would keep them.
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
    FEW_GREY_LEVELS = "few_grey_levels"
    MISSING_SPACING = "missing_spacing"
    IMPLAUSIBLE_SPACING = "implausible_spacing"
    OUTSIDE_GRID = "outside_grid"  # of data_setup/jobs.py: no token of the grid lies in the scan
    NOT_A_VOLUME = "not_a_volume"
    NOT_FINITE = "not_finite"
    HEADER_MISMATCH = "header_mismatch"
    # data_setup/readers/open_record.py: DICOM that only another export can replace
    SCRAMBLED_PIXELS = "scrambled_pixels"
    MAKERS_RAW_DATA = "makers_raw_data"
    # the same: files that are no DICOM
    WRONG_KIND = "wrong_kind"  # the content is not what the name says
    UNSUPPORTED_FORMAT = "unsupported_format"
    CORRUPT_FILE = "corrupt_file"
    BAD_SIDECAR = "bad_sidecar"
    UNKNOWN_AXES = "unknown_axes"
    MISSING_SHAPE = "missing_shape"  # raw voxels
    MISSING_LIBRARY = "missing_library"  # of an optional extra
    # data_setup/readers/heights.py: height maps
    NOT_HEIGHT_MAP = "not_height_map"
    WRONG_REFERENCE = "wrong_reference"  # the map names another OCT file than the manifest
    SURFACE_COUNT = "surface_count"  # not the number of surfaces of its device
    NO_VALID_HEIGHTS = "no_valid_heights"
    OUTSIDE_VOLUME = "outside_volume"  # most heights are no rows of the paired scan
    NO_EDGE = "no_edge"  # the scan is no brighter below the first surface than above: another scan's map
    # data_setup/readers/octa.py: flow cubes and en-face images
    NOT_FLOW_CUBE = "not_flow_cube"
    NOT_EN_FACE = "not_en_face"
    UNKNOWN_SLAB = "unknown_slab"  # an image type that names no slab of flow
    OTHER_FIELD = "other_field"  # its pixels cover another field than the paired scan
    NO_FIT = "no_fit"  # flow does not lie where the scan has tissue: another scan's cube
    # data_setup/readers/labels.py: labels that come with a tree
    NOT_LABELS = "not_labels"  # values that are no whole numbers from 0 to 255, or arrays of other names
    UNLISTED_CLASS = "unlisted_class"  # a value that label_classes.yaml does not name


class OCTReadError(Exception):
    """One file that cannot be used: `url: reason: expected ..., found ...` in one line; it can be pickled."""

    def __init__(self, url: str, reason: RejectReason, expected: object, actual: object) -> None:
        super().__init__(url, reason, expected, actual)
        self.url = url
        self.reason = reason
        expected, actual = (" ".join(str(text).split()) for text in (expected, actual))
        self.detail = f"expected {expected}, found {actual[:300]}"

    def __str__(self) -> str:
        return f"{self.url}: {self.reason}: {self.detail}"


class UnboundedReadError(Exception):
    """A library asked for the whole rest of a file."""


# What pydicom and its codecs raise for damaged bytes. LookupError covers KeyError and IndexError, ValueError
# bad numbers and text, RuntimeError recursion and "no plugin decoded it".
_LIBRARY_ERRORS = (
    *(InvalidDicomError, BytesLengthException, struct.error, zlib.error, EOFError),
    *(AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError),
)


def place_of(error: BaseException) -> str:
    """The error's type and module, `ValueError in pydicom.valuerep`; its text would quote values."""
    name = type(error).__name__
    frames = list(traceback.walk_tb(error.__traceback__))
    return f"{name} in {frames[-1][0].f_globals.get('__name__')}" if frames else name


def known(value: str, terms: Collection[str]) -> str:
    """The value where it is one of the terms, which a message may repeat; else "another value"."""
    return value if value in terms else "another value"


def number(value: float, limit: float = 0xFFFF) -> str:
    """The number as text where it is plausible; a date in its place is not repeated."""
    return f"{value:g}" if abs(value) <= limit else "a number out of range"


@contextmanager
def named_faults(url: str, reason: RejectReason, expected: str) -> Iterator[None]:
    """Turn a library's error about this file's bytes into an OCTReadError with this reason. The library's
    warnings are ignored: the callers check the values that matter.
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
        # `from None`: a printed traceback would show the text of the cause, which quotes values.
        raise OCTReadError(url, reason, expected, place_of(error)) from None
