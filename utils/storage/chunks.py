"""Bytes in parts: a checkpoint is written and uploaded from the memory of its tensors, without another copy.

In: parts, in order. Out: one length, one checksum, a file to read them from; the parts are never joined.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

_READ_AHEAD = 2**20  # bytes


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
        return io.BufferedReader(_Reader(self), _READ_AHEAD)


class _Reader(io.RawIOBase):
    """Chunks as a file."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks, self._position = chunks, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, len(self._chunks))[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        piece = self._chunks[self._position : self._position + len(buffer)]
        offset = 0
        for part in piece.parts:
            buffer[offset : offset + len(part)] = part
            offset += len(part)
        self._position += offset
        return offset
