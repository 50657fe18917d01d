"""MATLAB (.mat, version 5 to 7.2 and 7.3), NumPy (.npz, .npy) and MetaImage (.mhd, .mha) as an OCT volume.

The YAML, or the row's volume_yaml, says which array it is (`array`, where the file has several of three axes)
and what its axes are (`axes`, in the order of MATLAB's size(), NumPy's shape or DimSize: [W, H, D] where x of
a MetaImage runs along the B-scan). Only a MetaImage has a spacing; its TransformMatrix and Offset are not
read. Nothing in a file is run: no pickles, no MATLAB objects.
Format: https://itk.org/Wiki/ITK/MetaIO/Documentation.
"""

import math
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import numpy as np
from scipy.io import loadmat, whosmat

from data_setup.readers.dicom import open_file
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.sidecar import Sidecar, array_frames, check_length, reading
from utils.config.schema import StorageOptions
from utils.storage import join

HDF5_MARK = b"\x89HDF\r\n\x1a\n"
_CLASSES = {
    "double": "f8",
    "single": "f4",
    "logical": "u1",
    **{f"{u}int{8 * n}": f"{u or 'i'}{n}" for u in ("u", "") for n in (1, 2, 4, 8)},
}
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_TYPES = {"MET_UCHAR": "u1", "MET_CHAR": "i1", "MET_USHORT": "u2", "MET_SHORT": "i2"}
_TYPES |= {"MET_UINT": "u4", "MET_INT": "i4", "MET_FLOAT": "f4", "MET_DOUBLE": "f8"}
_LOCAL = "LOCAL"
_MAX_HEADER = 2**16
_TRUE = ("true", "1")
_LENGTHS = ("ElementSpacing", "ElementSize")  # two names of one fact, in ITK's order
_BIG_ENDIAN = ("BinaryDataByteOrderMSB", "ElementByteOrderMSB")
_SCALE, _UNSCALED = "ElementToIntensityFunction", (("Slope", 1.0), ("Offset", 0.0))


@dataclass(frozen=True)
class Stored:
    """An array in a file, before it is read."""

    shape: tuple[int, ...]
    dtype: np.dtype


def read(file: IO[bytes], url: str, sidecar: Sidecar) -> Iterator[Any]:
    """The header, then uint8 frames [H, W] in the order of the array's D axis; raises OCTReadError."""
    name, stored = _choose(list_arrays(file, url), sidecar, url)
    check_length(math.prod(stored.shape) * stored.dtype.itemsize, url)
    spacing = (None, "an array without a spacing")
    values = partial(load_array, file, url, name)
    of_array = (stored.shape, stored.dtype)
    yield from array_frames(url, "array", "the axes of an array", of_array, spacing, sidecar, values)


def list_arrays(file: IO[bytes], url: str) -> dict[str, Stored]:
    """The numeric arrays of a file, by name ("" of an .npy), without their values; raises OCTReadError."""
    with reading(url, RejectReason.CORRUPT_FILE, "a .mat, .npz or .npy file"):
        head = _head(file)
        if head[:6] == b"\x93NUMPY":
            if (stored := _npy_header(file)) is None:
                raise ValueError("an .npy file of no numbers, or of another version")
            return {"": stored}
        if head[:4] == b"PK\x03\x04":
            return _npz_headers(file, url)
        if _is_hdf5(head):
            with _open_hdf5(file, url) as opened:
                sets = _own_sets(opened, url)
                return {n: Stored(tuple(d.shape[::-1]), d.dtype.newbyteorder("=")) for n, d in sets.items()}
        listed = whosmat(file)
        check_once([name for name, _, _ in listed], url)
        return {
            name: Stored(tuple(int(n) for n in shape), np.dtype(_CLASSES[kind]))
            for name, shape, kind in listed
            if kind in _CLASSES
        }


def check_once(names: Sequence[str], url: str) -> None:
    """Raise header_mismatch for two arrays of one name, of which a library gives one."""
    if len(set(names)) < len(names):
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, "arrays of different names", "a name twice")


def load_array(file: IO[bytes], url: str, name: str) -> np.ndarray:
    """One array of the file, its axes as MATLAB's size() or NumPy's shape has them; raises OCTReadError."""
    arrays = list_arrays(file, url)
    if name not in arrays:
        raise OCTReadError(url, RejectReason.UNKNOWN_AXES, f"an array {name}", _words(arrays))
    stored = arrays[name]
    length = math.prod(stored.shape) * stored.dtype.itemsize
    check_length(length, url, file.seek(0, 2))
    with reading(url, RejectReason.TRUNCATED_PIXEL_DATA, f"{length} bytes of the array"):
        head = _head(file)
        if head[:6] == b"\x93NUMPY":
            return _native(np.lib.format.read_array(file, allow_pickle=False))
        if head[:4] == b"PK\x03\x04":
            with zipfile.ZipFile(file) as archive, archive.open(f"{name}.npy") as member:
                return _native(np.lib.format.read_array(member, allow_pickle=False))
        if _is_hdf5(head):
            with _open_hdf5(file, url) as opened:
                return _native(np.asarray(_own_sets(opened, url)[name]).T)
        # mat_dtype: of the array's class; the file keeps whole numbers of a double in fewer bytes
        return _native(loadmat(file, variable_names=[name], mat_dtype=True)[name])


def _choose(arrays: dict[str, Stored], sidecar: Sidecar, url: str) -> tuple[str, Stored]:
    """The array that the YAML names, or the only one of three axes."""
    volumes = {name: a for name, a in arrays.items() if len(a.shape) == 3 and min(a.shape) > 0}
    if sidecar.array is not None:
        volumes = {name: a for name, a in volumes.items() if name == sidecar.array}
    if len(volumes) != 1:
        wanted = "array: NAME in the YAML, of an array" if sidecar.array is None else f"{sidecar.array},"
        expected = f"{wanted} of three axes and of numbers"
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, expected, _words(arrays))
    return next(iter(volumes.items()))


def _words(arrays: dict[str, Stored]) -> str:
    words = [f"{name[:40]} {' x '.join(map(str, a.shape))}" for name, a in sorted(arrays.items())]
    return ", ".join(words[:6]) or "no array of numbers"


def _head(file: IO[bytes]) -> bytes:
    file.seek(0)
    head = file.read(1024)
    file.seek(0)
    return head


def _is_hdf5(head: bytes) -> bool:
    return HDF5_MARK in (head[:8], head[512:520])


def _open_hdf5(file: IO[bytes], url: str) -> Any:
    try:
        import h5py
    except ImportError:
        expected, actual = "h5py, which reads MATLAB 7.3: pip install h5py", "no h5py"
        raise OCTReadError(url, RejectReason.MISSING_CODEC, expected, actual) from None
    return h5py.File(file, "r")


def _own_sets(opened: Any, url: str) -> dict[str, Any]:
    """The arrays of numbers in an open HDF5 file; one that a link or another file holds is a reject."""
    import h5py

    sets = {}
    for name in opened:
        if not isinstance(opened.get(name, getlink=True), h5py.HardLink):
            expected, actual = "arrays that are stored in the file", f"a link ({name[:40]})"
            raise OCTReadError(url, RejectReason.UNSUPPORTED_FORMAT, expected, actual)
        one = opened[name]
        if not isinstance(one, h5py.Dataset) or one.dtype.kind not in "uif":
            continue
        if one.external or one.is_virtual:
            expected = "arrays that are stored in the file"
            actual = f"{'external' if one.external else 'virtual'} storage ({name[:40]})"
            raise OCTReadError(url, RejectReason.UNSUPPORTED_FORMAT, expected, actual)
        if len(one.shape) == 3 and one.size:
            _check_stored(one, url)
        sets[name] = one
    return sets


def _check_stored(one: Any, url: str) -> None:
    """Raise for an array that is not written whole (HDF5 gives zeros), or claims far more than it has."""
    stored = one.id.get_storage_size()
    check_length(one.size * one.dtype.itemsize, url, stored)
    if one.chunks is None:
        is_whole = stored >= one.size * one.dtype.itemsize
    else:
        is_whole = one.id.get_num_chunks() == math.prod(
            -(-n // chunk) for n, chunk in zip(one.shape, one.chunks, strict=True)
        )
    if not is_whole:
        actual = f"{stored} bytes of {one.size} values: parts were never written"
        raise OCTReadError(url, RejectReason.TRUNCATED_PIXEL_DATA, "an array that is written whole", actual)


def _npy_header(file: IO[bytes]) -> Stored | None:
    """What is in an .npy; None for another version, and for no numbers."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        return None
    shape, _, dtype = _HEADERS[version](file)
    return Stored(shape, dtype.newbyteorder("=")) if dtype.kind in "uif" else None


def _npz_headers(file: IO[bytes], url: str) -> dict[str, Stored]:
    arrays = {}
    with zipfile.ZipFile(file) as archive:
        check_once(archive.namelist(), url)
        for member in (m for m in archive.namelist() if m.endswith(".npy")):
            with archive.open(member) as opened:
                if (stored := _npy_header(opened)) is not None:
                    arrays[member.removesuffix(".npy")] = stored
    return arrays


def _native(array: np.ndarray) -> np.ndarray:
    return array.astype(array.dtype.newbyteorder("="), copy=False)


@dataclass(frozen=True)
class MetaHeader:
    """What the text of a MetaImage says."""

    shape: tuple[int, int, int]  # in the order of DimSize
    dtype: np.dtype  # with its byte order
    spacing: tuple[float, ...] | None
    data_file: str  # LOCAL: behind the header
    start: int  # of the voxels in their file
    is_compressed: bool

    @property
    def length(self) -> int:
        """Bytes of the voxels."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_metaimage(
    file: IO[bytes], url: str, sidecar: Sidecar, options: StorageOptions | None = None
) -> Iterator[Any]:
    """The header, then uint8 frames [H, W]; raises OCTReadError."""
    meta = read_metaimage_header(file, url)
    spacing = (meta.spacing, "metaimage_header" if meta.spacing else "no ElementSpacing")
    stored = (meta.shape, meta.dtype.newbyteorder("="))
    voxels = partial(read_voxels, file, url, meta, options)
    yield from array_frames(url, "MetaImage", "the axes of DimSize", stored, spacing, sidecar, voxels)


def read_metaimage_header(file: IO[bytes], url: str) -> MetaHeader:
    """The header of a file of three axes and one value a voxel; raises OCTReadError."""
    file.seek(0)
    fields: dict[str, str] = {}
    with reading(url, RejectReason.CORRUPT_FILE, "lines of `Key = value` up to ElementDataFile"):
        head, end = file.read(_MAX_HEADER), 0
        while "ElementDataFile" not in fields:
            if end >= len(head):
                raise ValueError("no ElementDataFile")
            line, _, _ = head[end:].partition(b"\n")
            end += len(line) + 1
            key, value = (part.strip() for part in line.decode("ascii").partition("=")[::2])
            if fields.setdefault(key, value) != value:
                expected, actual = "each key once", f"{key[:40]} twice, with two values"
                raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, actual)
        sizes = tuple(int(n) for n in fields["DimSize"].split())
        lengths = _of_synonyms(fields, _LENGTHS, lambda text: tuple(map(float, text.split())), url)
        is_big = _of_synonyms(fields, _BIG_ENDIAN, lambda text: text.lower() in _TRUE, url)
        kind, channels = fields["ElementType"], int(fields.get("ElementNumberOfChannels", 1))
        start = int(fields.get("HeaderSize", 0))
        is_plain = all(float(fields.get(f"{_SCALE}{name}", value)) == value for name, value in _UNSCALED)
        is_plain &= fields.get("BinaryData", "True").lower() in _TRUE
        is_plain &= int(fields.get("NDims", len(sizes))) == len(sizes)
    if len(sizes) != 3 or min(sizes) < 1 or channels != 1:
        actual = f"DimSize of {len(sizes)} numbers, {channels} channels"
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, "three axes and one value a voxel", actual)
    if kind not in _TYPES or start < 0 or not is_plain or (lengths is not None and len(lengths) != 3):
        expected = f"ElementType of {', '.join(_TYPES)}, unscaled binary, three lengths, HeaderSize from 0"
        raise OCTReadError(url, RejectReason.UNSUPPORTED_FORMAT, expected, "another MetaImage")
    data_file = fields["ElementDataFile"]
    if not re.fullmatch(r"[^/\\%:]+", data_file) or data_file.split()[0] == "LIST" or data_file[0] == ".":
        expected = "ElementDataFile LOCAL, or one file in the same folder"
        raise OCTReadError(url, RejectReason.UNSUPPORTED_FORMAT, expected, "another")
    meta = MetaHeader(
        shape=(sizes[0], sizes[1], sizes[2]),
        dtype=np.dtype(_TYPES[kind]).newbyteorder(">" if is_big else "<"),
        spacing=lengths,
        data_file=data_file,
        start=end if data_file.upper() == _LOCAL else start,
        is_compressed=fields.get("CompressedData", "").lower() in _TRUE,
    )
    check_length(meta.length, url)
    return meta


def _of_synonyms(
    fields: dict[str, str], names: tuple[str, ...], value_of: Callable[[str], Any], url: str
) -> Any:
    """The value of keys that mean one thing, None without any; raises header_mismatch for two values."""
    values = [value_of(fields[name]) for name in names if fields.get(name)]
    if any(value != values[0] for value in values):
        expected, texts = f"one value of {' and '.join(names)}", (fields[name][:40] for name in names)
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, " and ".join(texts))
    return values[0] if values else None


def read_voxels(
    file: IO[bytes], url: str, meta: MetaHeader, options: StorageOptions | None = None
) -> np.ndarray:
    """Stored values in native order, axes in the order of DimSize; raises OCTReadError."""
    is_local = meta.data_file.upper() == _LOCAL
    expected = f"{meta.length} bytes of voxels"
    with (
        nullcontext(file) if is_local else open_file(data_url(url, meta), options) as source,
        reading(url, RejectReason.TRUNCATED_PIXEL_DATA, expected),
    ):
        check_length(meta.length, url, source.seek(0, 2))
        source.seek(meta.start)
        data = source.read(-1 if meta.is_compressed else meta.length)
        if meta.is_compressed:
            data = zlib.decompressobj().decompress(data, meta.length)
    if len(data) < meta.length:
        raise OCTReadError(url, RejectReason.TRUNCATED_PIXEL_DATA, expected, len(data))
    array = np.frombuffer(data, meta.dtype).reshape(meta.shape, order="F")
    return array.astype(meta.dtype.newbyteorder("="), copy=False)


def data_url(url: str, meta: MetaHeader) -> str:
    """Where the voxels are; the header's own place where they follow it."""
    return url if meta.data_file.upper() == _LOCAL else join(url.rpartition("/")[0], meta.data_file)
