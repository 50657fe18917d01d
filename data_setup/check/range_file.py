"""An object as a file of which only the parts that are asked for are fetched, for headers of large files.

In: a URL and the object's size. Out: read, seek and tell, and counts of what came.
"""

from __future__ import annotations

from utils import storage
from utils.config.schema import StorageOptions

HEAD_BYTES = 2**16  # of the first request; the header of 100 frames


class RangeFile:
    """An object read through range requests: what is asked for, and ahead at least as much as there is.

    `fetched` counts the bytes that came, `requests` the requests.
    """

    def __init__(self, url: str, size: int, options: StorageOptions, first: int = HEAD_BYTES) -> None:
        self.url, self.size, self.options, self.first = url, size, options, first
        self.fetched = self.requests = 0
        self._position = self._start = 0
        self._data = b""

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self.size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        start = self._position
        end = self.size if size < 0 else min(self.size, start + size)
        if start < self._start or start > self._start + len(
            self._data
        ):  # a jump: what lies between is not read
            self._start, self._data = start, b""
        there = self._start + len(self._data)
        if end > there:
            ahead = max(end, there + max(self.first, len(self._data)))
            self._data += self._fetch(there, min(ahead, self.size))
        found = self._data[start - self._start : max(end - self._start, 0)]
        self._position = start + len(found)
        return found

    def _fetch(self, start: int, end: int) -> bytes:
        data = storage.read_range(self.url, start, end, self.options)
        self.fetched, self.requests = self.fetched + len(data), self.requests + 1
        return data
