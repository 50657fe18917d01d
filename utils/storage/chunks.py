"""Bytes in parts: a checkpoint is written and uploaded from the memory of its tensors, without another copy.

In: parts, in order. Out: one length, one checksum, a file to read them from; the parts are never joined.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

READ_AHEAD = 2**20  # bytes of a request


class Chunks:
    """An immutable sequence of bytes in parts."""

    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        self.parts = [memoryview(part).cast("B") for part in parts if len(part)]
        self._size = sum(map(len, self.parts))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, bounds: slice) -> Chunks:
        """The bytes between two offsets."""
        start, stop, _ = bounds.indices(self._size)
        parts, offset = [], 0
        for part in self.parts:
            parts.append(part[max(0, start - offset) : max(0, stop - offset)])
            offset += len(part)
        return Chunks(parts)

    def feed(self, update: Callable[[memoryview], Any]) -> None:
        """Give the parts one after the other, to a checksum or to a file."""
        for part in self.parts:
            update(part)

    def open(self) -> io.BufferedReader:
        """A file with these bytes."""
        parts = PartFile(len(self), lambda start, end: b"".join(self[start:end].parts))
        return io.BufferedReader(parts, READ_AHEAD)


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
