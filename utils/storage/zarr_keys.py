"""The key-value layer below Zarr, one code path for a disk and a bucket, and local copies of a bucket's
objects.

In: the URL of a store. Out: the store for zarr.open_array and zarr.create_group.

A copy is read when it is there and written when there is room; its name changes with the content. It only
saves time, so no fault of its disk (full, read-only, no permission) ends a run: the process warns once and
reads the bucket. A copy is on the disk itself before it has its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from utils import storage
from utils.config.schema import StorageOptions

log = logging.getLogger(__name__)
_given_up: set[Path] = set()  # folders in which this process writes no more copies; it warned once for each


class ObjectStore(Store):
    """A Zarr store on the reads and the whole writes of utils/storage/__init__.py.

    A key in `chunk_names` is known to exist: Zarr reads a lost chunk as zeros, here it is an error. With
    `cache_dir`, this key of a remote store is read through a local copy at cache_dir/chunk_names[key]; the
    name should change with the content.
    """

    supports_writes = supports_deletes = supports_listing = True

    def __init__(
        self,
        url: str,
        options: StorageOptions | None = None,
        read_only: bool = True,
        cache_dir: str | None = None,
        chunk_names: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(read_only=read_only)
        self.url, self.options = url, options
        self.cache_dir = cache_dir if storage.is_remote(url) else None
        self.chunk_names = chunk_names or {}

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ObjectStore)
            and (self.url, self.options) == (other.url, other.options)
            and self.read_only == other.read_only
        )

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    def with_read_only(self, read_only: bool = False) -> ObjectStore:
        return ObjectStore(self.url, self.options, read_only, self.cache_dir, self.chunk_names)

    def _read(self, key: str) -> bytes | None:
        url = storage.join(self.url, key)
        if key in self.chunk_names and self.cache_dir is not None:
            return read_through(url, Path(self.cache_dir, self.chunk_names[key]), self.options)
        try:
            return storage.read_bytes(url, self.options)
        except storage.StorageNotFoundError:
            if key in self.chunk_names:
                raise
            return None

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        # Reading a disk is quicker than a change of threads; reading a bucket must not block the other reads.
        is_remote = storage.is_remote(self.url)
        data = await asyncio.to_thread(self._read, key) if is_remote else self._read(key)
        if data is None:
            return None
        match byte_range:
            case RangeByteRequest(start, end):
                data = data[start:end]
            case OffsetByteRequest(offset):
                data = data[offset:]
            case SuffixByteRequest(suffix):
                data = data[-suffix:]
        return prototype.buffer.from_bytes(data)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    async def exists(self, key: str) -> bool:
        return await asyncio.to_thread(storage.exists, storage.join(self.url, key), self.options)

    async def set(self, key: str, value: Buffer) -> None:
        self._check_writable()
        url = storage.join(self.url, key)
        await asyncio.to_thread(storage.write_bytes, url, value.to_bytes(), self.options)

    async def delete(self, key: str) -> None:
        self._check_writable()
        await asyncio.to_thread(storage.remove, storage.join(self.url, key), self.options)

    async def list(self) -> AsyncIterator[str]:
        async for key in self.list_prefix(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for key in await asyncio.to_thread(storage.find_names, self.url, self.options):
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        url = storage.join(self.url, prefix)
        for child in await asyncio.to_thread(storage.list_names, url, self.options):
            yield child


def read_through(url: str, copy: Path, options: StorageOptions | None = None) -> bytes:
    """The object from its copy, or from the URL, which makes the copy; raises StorageError."""
    try:
        return copy.read_bytes()
    except FileNotFoundError:
        pass
    except OSError as error:
        _give_up(copy.parent, error)
    data = storage.read_bytes(url, options)
    if copy.parent not in _given_up:
        try:
            storage.write_bytes(str(copy), data, staging=str(copy.parent))  # loader workers share the folder
        except storage.StorageError as error:
            _give_up(copy.parent, error)
    return data


def drop_copy(copy: Path) -> bool:
    """Remove a copy that cannot be decoded; False when there is no copy."""
    if not copy.is_file():
        return False
    with contextlib.suppress(OSError):  # it may be on a read-only disk
        copy.unlink()
    return True


def _give_up(folder: Path, error: OSError | storage.StorageError) -> None:
    if folder not in _given_up:
        _given_up.add(folder)
        message = "no more local copies are kept there by this process, the store is read instead"
        log.warning("data.cache_dir %s: %s (%s)", folder, message, error)
