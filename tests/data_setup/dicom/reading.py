"""What the tests of the DICOM reader share: a header, a reason, an edit of an attribute."""

from collections.abc import Callable

import pytest
from pydicom.dataset import FileDataset
from pydicom.uid import (
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGLSLossless,
    RLELossless,
)

from data_setup.readers.dicom import OCTHeader, OCTReadError, RejectReason, open_volume

SYNTAXES = [ExplicitVRLittleEndian, ImplicitVRLittleEndian, RLELossless, JPEG2000Lossless, JPEGLSLossless]


def read_header(url: str) -> OCTHeader:
    return open_volume(url)[0]


def reason_of(call: Callable[[str], object], url: str) -> RejectReason:
    with pytest.raises(OCTReadError) as caught:
        call(url)
    assert caught.value.url == url
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{url}: {caught.value.reason}: expected ")
    return caught.value.reason


def assign(**values: object) -> Callable[[FileDataset], None]:
    def edit(ds: FileDataset) -> None:
        for keyword, value in values.items():
            setattr(ds, keyword, value)

    return edit
