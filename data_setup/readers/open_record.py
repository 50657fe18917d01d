"""Files that are no DICOM, behind the same records: NIfTI, multi-page TIFF, image folders, Heidelberg XML.

In: a manifest `Record` whose path ends in .nii, .nii.gz, .tif, .tiff or .xml, or is a folder; every other
path is a DICOM file. Out: `open_record` what data_setup/readers/dicom.py's `open_volume` returns, an
`OCTHeader` and uint8 frames [H, W] in file order, so that checks, rejects, resampling and the store are one
path; `source_stat` the size and version of all that the volume was read from. A kind that nothing here opens
is a reject with its name and version. What each kind needs: docs/guides/importers.md.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import PurePosixPath
from typing import IO, Any

import numpy as np

from data_setup.manifest import Record
from data_setup.readers import dicom
from data_setup.readers import heidelberg as importers_heidelberg
from data_setup.readers import images as importers_images
from data_setup.readers import nifti as importers_nifti
from data_setup.readers.dicom import OCTHeader
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.sidecar import FOLDER_SIDECAR, Sidecar, open_file, read_sidecar, sidecar_url
from utils import storage
from utils.config.schema import StorageOptions
from utils.storage import ObjectStat, StorageNotFoundError, join, list_names
from utils.workers import in_threads

_SUFFIXES = {
    ".dcm": "DICOM",
    ".nii": "NIfTI",
    ".nii.gz": "NIfTI",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".xml": "Heidelberg XML",
    ".e2e": "Heidelberg E2E",
    ".vol": "Heidelberg VOL",
    ".fda": "Topcon FDA",
    ".fds": "Topcon FDS",
    ".img": "Zeiss IMG",
}
_CLOSED = ("Heidelberg E2E", "Heidelberg VOL", "Topcon FDA", "Topcon FDS", "Zeiss IMG")
_Reader = Callable[[IO[bytes], str, Sidecar], Iterator[Any]]
_FILE_READERS: dict[str, _Reader] = {"NIfTI": importers_nifti.read, "TIFF": importers_images.read_tiff}
_HEAD_BYTES = 1024


def open_record(
    record: Record, options: StorageOptions | None = None
) -> tuple[OCTHeader, Iterator[np.ndarray]]:
    """(header, frames uint8 [H, W] in file order) of a record of any kind; as `dicom.open_volume`.

    Raises OCTReadError; header_mismatch also where the file and the manifest name another eye, device or
    protocol.
    """
    url, kind = record.url, _kind(record.url, options)
    if kind == "DICOM":
        return dicom.open_volume(url, options)
    if kind == "folder":
        volume = importers_images.read_folder(url, read_sidecar(join(url, FOLDER_SIDECAR), options), options)
    elif kind == "Heidelberg XML":
        with open_file(url, options) as file:
            _check_content(kind, file, url)
        volume = importers_heidelberg.read_xml(url, options)
    else:
        volume = _file_volume(kind, url, options)
    header = next(volume)
    for name in ("laterality", "device", "protocol"):
        said, found = getattr(record, name), getattr(header, name)
        if found is not None and said not in (found, "unknown"):
            raise OCTReadError(
                url, RejectReason.HEADER_MISMATCH, f"{name} {said} as in the manifest", f"another {name}"
            )
    return header, volume


def source_stat(record: Record, options: StorageOptions | None = None) -> ObjectStat:
    """Bytes and version of a record's source: of several files the sum and a digest; raises StorageError."""
    url, kind = record.url, _kind(record.url, options)
    if kind == "DICOM":
        return storage.stat(url, options)
    if kind == "folder":
        urls = [join(url, name) for name in list_names(url, options)]
    elif kind == "Heidelberg XML":
        urls = [url]
        with suppress(OCTReadError):  # the reader meets the same fault and names it
            urls += importers_heidelberg.image_urls(url, options)
    else:
        urls = [url, sidecar_url(url)]
    first = storage.stat(urls[0], options)
    found = [first, *in_threads(lambda u: _stat_or_none(u, options), urls[1:])]
    there = [(u.rpartition("/")[2], s) for u, s in zip(urls, found, strict=True) if s is not None]
    if len(there) == 1:
        return first
    lines = "".join(f"{name}\t{s.size}\t{s.etag_or_mtime}\n" for name, s in there)
    return ObjectStat(
        sum(s.size for _, s in there), hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()
    )


def identify(head: bytes) -> tuple[str | None, str]:
    """(kind, version) by the first bytes of a file; (None, "") when they are those of no known kind."""
    if head[128:132] == b"DICM":
        return "DICOM", ""
    if head[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return "TIFF", ""
    if head[:2] == b"\x1f\x8b":
        return "gzip", ""
    if head[344:348] in (b"n+1\0", b"ni1\0") or head[4:8] in (b"n+2\0", b"ni2\0"):
        return "NIfTI", ""
    if head[:4] == b"CMDb" and len(head) >= 16:
        return "Heidelberg E2E", str(struct.unpack_from("<I", head, 12)[0])
    if match := re.match(rb"HSF-OCT-(\d{1,4})", head):
        return "Heidelberg VOL", match[1].decode()
    if head[:4] == b"FOCT" and head[4:7] in (b"FDA", b"FAA", b"FDS") and len(head) >= 15:
        kind = "Topcon FDS" if head[4:7] == b"FDS" else "Topcon FDA"
        return kind, "{}.{}".format(*struct.unpack_from("<II", head, 7))
    if head.lstrip(b"\xef\xbb\xbf\xff\xfe\0 \t\r\n")[:1] == b"<":
        return "Heidelberg XML", ""
    return None, ""


def kind_by_name(url: str) -> str | None:
    """The kind that the name's ending says; None without a known ending: a folder or a DICOM file."""
    name = PurePosixPath(url).name.lower()
    return next((kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix)), None)


def _kind(url: str, options: StorageOptions | None) -> str:
    """By the name; a name without a known ending is a folder when there is something in it, else DICOM."""
    return kind_by_name(url) or ("folder" if list_names(url, options) else "DICOM")


def _check_content(kind: str, file: IO[bytes], url: str) -> None:
    """Raise wrong_kind when the bytes are not those of the kind, unsupported_format for a closed one."""
    found, version = identify(file.read(_HEAD_BYTES))
    file.seek(0)
    if kind == "Zeiss IMG" and found is None:  # raw voxels: nothing in it says what it is
        said = "Zeiss IMG by its name; it has no header, so no version, no shape and no spacing"
        raise OCTReadError(url, RejectReason.UNSUPPORTED_FORMAT, _OPENABLE, said)
    if found in _CLOSED:
        raise OCTReadError(url, RejectReason.UNSUPPORTED_FORMAT, _OPENABLE, f"{found}, version {version}")
    if found != ("gzip" if url.lower().endswith(".gz") else kind):
        raise OCTReadError(url, RejectReason.WRONG_KIND, f"{kind}, as its name says", found or "another kind")


_OPENABLE = "a kind that can be opened: export it as DICOM or XML from the maker's software"


def _file_volume(kind: str, url: str, options: StorageOptions | None) -> Iterator[Any]:
    # A generator that has been started closes its file whether it is exhausted or dropped.
    with open_file(url, options) as file:
        _check_content(kind, file, url)
        yield from _FILE_READERS[kind](file, url, read_sidecar(sidecar_url(url), options))


def _stat_or_none(url: str, options: StorageOptions | None) -> ObjectStat | None:
    try:
        return storage.stat(url, options)
    except StorageNotFoundError:
        return None


def check_manifest(record: Record, header: OCTHeader) -> None:
    """Raise header_mismatch when the file is not the one that its manifest row describes."""
    uid, found_uid = record.sop_instance_uid, header.sop_instance_uid
    if uid and found_uid and uid != found_uid:  # an id that no manifest has does not leave the file
        said = f"SOPInstanceUID {uid} as in the manifest"
        raise OCTReadError(record.url, RejectReason.HEADER_MISMATCH, said, "another")
    if record.shape is not None and record.shape != header.shape:
        said = f"frames x height x width {record.shape} as in the manifest"
        raise OCTReadError(record.url, RejectReason.HEADER_MISMATCH, said, header.shape)
