"""An object as a file: what is read of it is fetched, and nothing else.

In: its size, and a function that fetches any part. Out: a file for reading.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

READ_AHEAD = 2**20  # bytes of a request


class PartFile(io.RawIOBase):
    """A file of `size` bytes, of which `read(start, end)` gives any part."""

    def __init__(self, size: int, read: Callable[[int, int], bytes]) -> None:
        self._size, self._read, self._position = size, read, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._read(self._position, min(self._position + len(buffer), self._size))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
