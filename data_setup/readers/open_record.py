"""A manifest record of any kind of file as a header and frames: choose the reader here.

In: a `Record` whose path has an ending of _SUFFIXES, or is a folder; every other path is a DICOM file. Out:
`open_record` gives an `OCTHeader` and uint8 frames [H, W] in file order, as `open_volume` of
data_setup/readers/dicom.py does; `source_stat` the size and version of all files that the volume is read
from. A kind that cannot be opened is a reject with its name and version. docs/guides/importers.md: what each
needs.

Files that nothing here will open are named so that a user knows what to export or to fetch instead: Zeiss'
scrambled JPEG 2000 (each seventh byte of a frame changed by 0x5A, its parts in another order; found by the
signature of JP2, as pydicom's discussion 1618 describes it), a maker's raw data in a DICOM wrapper, reports
and photographs; and of any kind a pointer of git-lfs or git-annex in place of the file.
"""

import hashlib
import re
import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import PurePosixPath
from typing import IO, Any

import numpy as np
from pydicom.config import IGNORE
from pydicom.uid import UID

from data_setup.manifest import Record
from data_setup.protocols import BY_NAME, DEVICES
from data_setup.readers import arrays, dicom, heidelberg, images, nifti
from data_setup.readers.dicom import PEEK_BYTES, OCTHeader, open_file, peek_dataset
from data_setup.readers.faults import OCTReadError, RejectReason, named_faults
from data_setup.readers.geometry import check_field
from data_setup.readers.makers import kinds
from data_setup.readers.pixels import BoundedFile
from data_setup.readers.sidecar import Sidecar, parse_sidecar, read_sidecars, sidecar_urls
from data_setup.tables.text import D_ORDERS
from utils import storage
from utils.config.schema import StorageOptions
from utils.storage import ObjectStat, StorageNotFoundError, join, list_names, read_range
from utils.storage.ranges import RangeFile
from utils.workers import in_threads

_SUFFIXES = {
    ".dcm": "DICOM",
    **dict.fromkeys((".nii", ".nii.gz"), "NIfTI"),
    **dict.fromkeys((".tif", ".tiff"), "TIFF"),
    ".xml": "Heidelberg XML",
    ".e2e": kinds.E2E,
    ".vol": kinds.VOL,
    ".fda": kinds.FDA,
    ".fds": kinds.FDS,
    ".img": kinds.IMG,
    ".oct": "Optovue or Bioptigen OCT",
    ".mat": "MATLAB",
    **dict.fromkeys((".mhd", ".mha"), "MetaImage"),
    **dict.fromkeys((".npy", ".npz"), "NumPy"),
    **dict.fromkeys((".png", ".bmp", ".jpg", ".jpeg"), "a single image"),
}
_OPENABLE = "a kind that can be opened: export it as DICOM or XML from the maker's software"
_ADVICE = {  # kinds that are not looked into: what a user can do
    "a single image": "a folder of B-scan images: name the folder in the manifest",
    "Optovue or Bioptigen OCT": _OPENABLE,
}
_READERS: dict[str, Callable[[IO[bytes], str, Sidecar, StorageOptions | None], Iterator[Any]]] = {
    "NIfTI": lambda file, url, sidecar, options: nifti.read(file, url, sidecar),
    "TIFF": lambda file, url, sidecar, options: images.read_tiff(file, url, sidecar),
    "MATLAB": lambda file, url, sidecar, options: arrays.read(file, url, sidecar),
    "NumPy": lambda file, url, sidecar, options: arrays.read(file, url, sidecar),
    "MetaImage": arrays.read_metaimage,
}
_SORTED = ("DICOM", "Heidelberg XML", kinds.VOL)  # kinds that say where each B-scan lies
_TURNED = ("NIfTI", "MATLAB", "NumPy", "MetaImage")  # kinds that say which way an axis of their array runs
_HEAD_BYTES = 1024
_SPACING = 0.01  # relative: the manifest's and the file's
_ENDS, _LEAST_ENDS = 2**16, 2**9  # bytes at either end of a source, of all its files and of each
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


def open_record(
    record: Record, options: StorageOptions | None = None
) -> tuple[OCTHeader, Iterator[np.ndarray]]:
    """(header, frames uint8 [H, W] in order) of a record of any kind; as `dicom.open_volume`.

    What neither the file nor its YAML says comes from the manifest's columns spacing_mm, d_order and files.
    Raises OCTReadError; header_mismatch also where `check_manifest` does.
    """
    url, kind = record.url, _kind(record.url, options)
    volume: Iterator[Any]
    with _dead_ends_named(options, kind == "DICOM"):
        if kind == "DICOM":
            header, volume = dicom.open_volume(url, options, record)
        else:
            volume = _volume(kind, record, options)
            header = next(volume)
    check_manifest(record, header)
    if header.orientation_source == "unknown" and record.d_order and record.d_order != "unknown":
        header = replace(header, flip_d=D_ORDERS[record.d_order], orientation_source="manifest")
    return header, _with_field_checked(header, volume)


def _with_field_checked(header: OCTHeader, frames: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """The frames; raises implausible_spacing at their end: a count that they bear out is no wrong count."""
    yield from frames
    check_field(header.shape, header.spacing_mm, header.spacing_source, header.url)


def peek_record(record: Record, size: int, options: StorageOptions) -> OCTHeader:
    """The header by a file's first bytes (of `size`) or first image. Raises OCTReadError, StorageError."""
    url, kind = record.url, _kind(record.url, options)
    if kind == "DICOM":
        with (
            _dead_ends_named(options, is_dicom=True),
            named_faults(url, RejectReason.NOT_DICOM, "a DICOM file"),
        ):
            bounded = BoundedFile(RangeFile(url, size, options, PEEK_BYTES))
            header = dicom.read_header(bounded, url, record)
    else:
        file = None if kind == "folder" else RangeFile(kinds.split_part(url)[0], size, options, PEEK_BYTES)
        volume = _volume(kind, record, options, file)
        with _dead_ends_named(options, is_dicom=False):
            header = next(volume)
        volume.close()
    check_field(header.shape, header.spacing_mm, header.spacing_source, url)
    return header


def labelled_header(record: Record, options: StorageOptions | None) -> OCTHeader | None:
    """The header of a scan of a kind whose frames may be sorted or turned as they are read, else None:
    labels that lie as its file does are sorted and turned with them. Raises OCTReadError, StorageError.
    """
    if _kind(record.url, options) not in (*_SORTED, *_TURNED):
        return None
    size = storage.stat(record.url, options).size
    return peek_record(record, size, options or StorageOptions())


def _pointer(url: str, options: StorageOptions) -> str:
    """Of a file that is not fetched, the one at `url` or the first in this folder: whose pointer it is."""
    urls = [join(url, name) for name in list_names(url, options)] or [url]
    for one in urls:
        with suppress(StorageNotFoundError):
            data = (
                read_range(one, 0, 64, options) if storage.stat(one, options).size < _POINTER_BYTES else b""
            )
            for mark, (whose, command) in _POINTERS.items():
                if data.startswith(mark):
                    return f"{whose} in its place; next: {command} ({one.rpartition('/')[2]})"
    return ""


def _explained(error: OCTReadError, options: StorageOptions | None, is_dicom: bool) -> OCTReadError:
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
    ds = peek_dataset(url, storage.stat(url, options).size, ["SOPClassUID"], options)
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


@contextmanager
def _dead_ends_named(options: StorageOptions | None, is_dicom: bool) -> Iterator[None]:
    try:
        yield
    except OCTReadError as error:
        raise _explained(error, options, is_dicom) from None


def _volume(
    kind: str, record: Record, options: StorageOptions | None, file: IO[bytes] | None = None
) -> Generator[Any, None, None]:
    """The header, then the frames, of another kind than DICOM; `file`: the open file, else it is opened."""
    url = record.url
    if kind == "folder":
        yield from images.read_folder(url, _sidecar(record, True, options), options)
        return
    # A started generator closes its file, whether it is exhausted or dropped.
    with file or open_file(kinds.split_part(url)[0], options) as opened:
        _check_content(kind, opened, url)
        if kind in kinds.KINDS:
            yield from kinds.read(kind, opened, url, _sidecar(record, False, options), record.shape)
        elif kind == "Heidelberg XML":
            yield from heidelberg.read_xml(url, options)
        else:
            yield from _READERS[kind](opened, url, _sidecar(record, False, options), options)


def _sidecar(record: Record, is_folder: bool, options: StorageOptions | None) -> Sidecar:
    """The YAML of a record, and beneath it the columns of its row; raises OCTReadError."""
    row = parse_sidecar(record.volume_yaml.encode(), record.url) if record.volume_yaml else Sidecar()
    sidecar = read_sidecars(
        sidecar_urls(kinds.split_part(record.url)[0], record.path, is_folder), options, row
    )
    if None not in (sidecar.files, record.files) and sidecar.files != record.files:
        expected = "files of the YAML as in the manifest"
        raise OCTReadError(record.url, RejectReason.HEADER_MISMATCH, expected, "another pattern")
    return replace(sidecar, files=sidecar.files or record.files, listed_spacing_mm=record.spacing_mm)


def _sources(record: Record, options: StorageOptions | None) -> list[str]:
    """All files that a record is read from, its own first; some may be absent. Raises StorageError."""
    url, kind = record.url, _kind(record.url, options)
    urls = [kinds.split_part(url)[0]]
    if kind == "folder":
        urls = [join(url, name) for name in list_names(url, options)]
        urls += [u for u in sidecar_urls(url, record.path, True) if u not in urls]
    elif kind == "Heidelberg XML":
        with suppress(OCTReadError):  # the reader meets the same fault and names it
            urls += heidelberg.image_urls(url, options)
    elif kind != "DICOM":
        urls += sidecar_urls(urls[0], record.path, False)
        if kind == "MetaImage":
            with suppress(OCTReadError), open_file(url, options) as file:
                urls.append(arrays.data_url(url, arrays.read_metaimage_header(file, url)))
    return urls


def source_digest(record: Record, options: StorageOptions | None = None) -> str:
    """Of both ends of a record's files on a disk, where another one of equal size and time may take the place
    of one; "" in a bucket, which has versions.
    """
    return "" if storage.is_remote(record.url) else ends_digest(_sources(record, options), options)


def with_ends(source: ObjectStat, urls: Sequence[str], options: StorageOptions | None = None) -> ObjectStat:
    """Size and version of these files, with `ends_digest` on a disk."""
    digest = "" if storage.is_remote(urls[0]) else ends_digest(urls, options)
    return replace(source, etag_or_mtime=f"{source.etag_or_mtime}.{digest}".rstrip("."))


def ends_digest(urls: Sequence[str], options: StorageOptions | None = None) -> str:
    """Of both ends of files. What cannot be read is left out: the reader names it."""
    digest = hashlib.blake2b(digest_size=16)
    count = max(_ENDS // len(urls), _LEAST_ENDS)
    for url in urls:
        with suppress(storage.StorageError):
            size = storage.stat(url, options).size
            digest.update(read_range(url, 0, count, options))
            digest.update(read_range(url, max(0, size - count), size, options))
    return digest.hexdigest()


def source_stat(record: Record, options: StorageOptions | None = None) -> ObjectStat:
    """Bytes and version of a record's source: of several files the sum and a digest; raises StorageError."""
    urls = _sources(record, options)
    first = storage.stat(urls[0], options)
    others = in_threads(lambda u: _stat_or_none(u, options), urls[1:])
    stats = [(u, s) for u, s in zip(urls, [first, *others], strict=True) if s is not None]
    facts: list[Any] = [record.spacing_mm, record.d_order, record.files]  # others are another volume
    facts += [record.volume_yaml] if record.volume_yaml else []  # a row without it stays what it was
    if len(stats) == 1 and facts == [None] * 3:
        return first
    lines = "".join(f"{u.rpartition('/')[2]}\t{s.size}\t{s.etag_or_mtime}\n" for u, s in stats)
    lines += f"{facts}\n" if facts != [None] * 3 else ""
    digest = hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()
    return ObjectStat(sum(s.size for _, s in stats), digest)


def identify(head: bytes) -> tuple[str | None, str]:
    """(kind, version) by the first bytes of a file; (None, "") when they are those of no known kind."""
    if head[128:132] == b"DICM":
        return "DICOM", ""
    if head[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return "TIFF", ""
    if head[:2] == b"\x1f\x8b":
        return "gzip", ""
    if re.match(rb"MATLAB [57]\.\d MAT-file", head) or head[:8] == arrays.HDF5_MARK:
        return "MATLAB", ""
    if head[:4] == b"PK\x03\x04" or head[:6] == b"\x93NUMPY":
        return "NumPy", ""
    if re.match(rb"\s*(ObjectType|ObjectSubType|Comment|NDims)\s*=", head):
        return "MetaImage", ""
    if head[344:348] in (b"n+1\0", b"ni1\0") or head[4:8] in (b"n+2\0", b"ni2\0"):
        return "NIfTI", ""
    if head[:4] == b"CMDb" and len(head) >= 16:
        return kinds.E2E, str(struct.unpack_from("<I", head, 12)[0])
    if match := re.match(rb"HSF-OCT-(\d{1,4})|ep-v(\d{1,3}(?:\.\d{1,3}){1,2})", head):
        return kinds.VOL, (match[1] or b"eyepy " + match[2]).decode()
    if head[:4] == b"FOCT" and head[4:7] in (b"FDA", b"FAA", b"FDS") and len(head) >= 15:
        kind = kinds.FDS if head[4:7] == b"FDS" else kinds.FDA
        return kind, "{}.{}".format(*struct.unpack_from("<II", head, 7))
    if head.lstrip(b"\xef\xbb\xbf\xff\xfe\0 \t\r\n")[:1] == b"<":
        return "Heidelberg XML", ""
    return None, ""


def kind_by_name(url: str) -> str | None:
    """The kind of the name's ending; None without a known one: the URL is a folder or a DICOM file."""
    name = PurePosixPath(kinds.split_part(url)[0]).name.lower().strip()
    return next((kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix)), None)


def _kind(url: str, options: StorageOptions | None) -> str:
    return kind_by_name(url) or ("folder" if list_names(url, options) else "DICOM")


def _check_content(kind: str, file: IO[bytes], url: str) -> None:
    """Raise wrong_kind when the bytes are not those of the kind, unsupported_format for a closed one."""
    if kind in _ADVICE:
        raise OCTReadError(url, RejectReason.UNSUPPORTED_FORMAT, _ADVICE[kind], f"{kind}, by its name")
    actual, version = identify(file.read(_HEAD_BYTES))
    file.seek(0)
    if kind == kinds.IMG and actual is None:  # raw voxels, without a mark
        return
    if actual != ("gzip" if url.lower().endswith(".gz") else kind):
        expected = f"{kind}, as its name says"
        described = f"{actual}{f', version {version}' if version else ''}" if actual else "another kind"
        raise OCTReadError(url, RejectReason.WRONG_KIND, expected, described)


def _stat_or_none(url: str, options: StorageOptions | None) -> ObjectStat | None:
    try:
        return storage.stat(url, options)
    except StorageNotFoundError:
        return None


def check_manifest(record: Record, header: OCTHeader) -> None:
    """Raise header_mismatch when the file is not the one of its manifest row.

    A DICOM file has its maker's words for device and protocol: they contradict no name of the manifest's own.
    The spacing may differ by 1 %: tables round.
    """
    known_order = record.d_order if record.d_order != "unknown" else None
    if known_order and header.orientation_source != "unknown" and D_ORDERS[known_order] != header.flip_d:
        expected = f"d_order {record.d_order} as in the manifest"
        raise OCTReadError(record.url, RejectReason.HEADER_MISMATCH, expected, "the other")
    if record.spacing_mm and not np.allclose(record.spacing_mm, header.spacing_mm, rtol=_SPACING, atol=0):
        expected = "spacing_mm {:g}, {:g}, {:g} as in the manifest".format(*record.spacing_mm)
        actual = "{:g}, {:g}, {:g}".format(*header.spacing_mm) + f" ({header.spacing_source})"
        raise OCTReadError(record.url, RejectReason.HEADER_MISMATCH, expected, actual)
    is_dicom = header.transfer_syntax.startswith("1.2.")
    for name, words in (("laterality", ("L", "R")), ("device", DEVICES), ("protocol", BY_NAME)):
        row_value, value = getattr(record, name), getattr(header, name)
        is_comparable = row_value in words or not is_dicom
        same = BY_NAME.get(row_value)  # versions 2 and 3 have two names for a protocol
        names = (row_value, same.name if same else "unknown")
        if value is not None and row_value != "unknown" and is_comparable and value not in names:
            expected = f"{name} {row_value} as in the manifest"
            raise OCTReadError(record.url, RejectReason.HEADER_MISMATCH, expected, f"another {name}")
    row_uid, uid = record.sop_instance_uid, header.sop_instance_uid
    if row_uid and uid and row_uid != uid:  # the file's own UID may identify a person: no message has it
        expected = f"SOPInstanceUID {row_uid} as in the manifest"
        raise OCTReadError(record.url, RejectReason.HEADER_MISMATCH, expected, "another")
    if record.shape is not None and record.shape != header.shape:
        expected = f"frames x height x width {record.shape} as in the manifest"
        raise OCTReadError(record.url, RejectReason.HEADER_MISMATCH, expected, header.shape)
