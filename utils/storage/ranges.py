"""An object as a file of which only the blocks that are read are fetched, for headers of large files.

In: a URL and the object's size. Out: a file for reading that counts its requests and bytes.
"""

from __future__ import annotations

from fsspec.spec import AbstractBufferedFile

from utils import storage
from utils.config.schema import StorageOptions


class RangeFile(AbstractBufferedFile):
    """Reads blocks of `block_bytes`; `fetched` counts bytes, `requests` requests; raises StorageError."""

    def __init__(self, url: str, size: int, options: StorageOptions, block_bytes: int) -> None:
        self.url, self.options = url, options
        self.fetched = self.requests = 0
        super().__init__(None, url, block_size=block_bytes, cache_type="blockcache", size=size)

    def _fetch_range(self, start: int, end: int) -> bytes:
        data = storage.read_range(self.url, start, end, self.options)
        self.fetched, self.requests = self.fetched + len(data), self.requests + 1
        return data
