"""Parts of a DICOM data set: items, codes, and UIDs that are a function of what they name."""

from __future__ import annotations

import hashlib
from typing import Any

from pydicom.dataset import Dataset
from pydicom.sequence import Sequence

from data_setup.readers.faults import OCTReadError, RejectReason


def make_item(**attributes: Any) -> Dataset:
    """An item with these attributes."""
    item = Dataset()
    for keyword, value in attributes.items():
        setattr(item, keyword, value)
    return item


def make_code(value: str, scheme: str, meaning: str) -> Sequence:
    """A sequence of one code."""
    return Sequence([make_item(CodeValue=value, CodingSchemeDesignator=scheme, CodeMeaning=meaning)])


def make_uid(*parts: object) -> str:
    """A 2.25 UID that is a function of `parts`."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return f"2.25.{int.from_bytes(digest[:16], 'big') >> 2}"


def require(scan: Dataset, keywords: tuple[str, ...], what: str, url: str) -> None:
    """Raise OCTReadError where a scan lacks what a file about it refers to; `what`: that file."""
    for keyword in keywords:
        if not scan.get(keyword):
            raise OCTReadError(url, RejectReason.UNSUPPORTED_FORMAT, f"a {keyword} for a {what}", "none")
