"""Parts of a DICOM data set: an empty file, items, codes, and UIDs that are a function of what they name."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from typing import Any

from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.sequence import Sequence
from pydicom.uid import UID, ExplicitVRLittleEndian

from data_setup.readers.faults import OCTReadError, RejectReason


def new_file(sop_class: str, uid: str) -> FileDataset:
    """An empty file of this class, uncompressed."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = UID(sop_class)
    meta.MediaStorageSOPInstanceUID = UID(uid)
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    return FileDataset(io.BytesIO(), {}, file_meta=meta, preamble=b"\0" * 128)


def fill(ds: Dataset, attributes: Mapping[str, Any]) -> None:
    for keyword, value in attributes.items():
        setattr(ds, keyword, value)


def to_bytes(ds: FileDataset) -> bytes:
    """The file's bytes (Part 10, with preamble and checked file meta)."""
    buffer = io.BytesIO()
    ds.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()


def make_item(**attributes: Any) -> Dataset:
    item = Dataset()
    fill(item, attributes)
    return item


def make_code(value: str, scheme: str, meaning: str) -> Sequence:
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
