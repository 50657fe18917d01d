"""A file of lines that several processes append to, on a disk or in a bucket; no line is changed or lost.

In: a URL, and a function that makes the next line from those that are there. Out: the line that was appended.
On a disk the file is locked meanwhile, so processes of one machine (or of a network disk with locks) wait for
each other. A bucket cannot append: there the URL is a folder with one object a line, 000001 first, each
created once; who comes second takes the next number.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from utils import storage
from utils.config.schema import StorageOptions
from utils.storage.errors import named_errors, split_scheme


def append_line(
    url: str, next_line: Callable[[Sequence[str]], str], options: StorageOptions | None = None
) -> str:
    """Append what `next_line` makes of the lines so far, and return it; raises StorageError.

    The function may be called more than once. Nothing is written when it raises.
    """
    if not storage.is_remote(url):
        with named_errors(url):
            return _append(Path(split_scheme(url)[1]), next_line)
    while True:
        lines = read_lines(url, options)
        line = next_line(lines)
        if storage.create(storage.join(url, f"{len(lines) + 1:06d}"), line.encode(), options):
            return line


def read_lines(url: str, options: StorageOptions | None = None) -> list[str]:
    """All lines, the oldest first; empty where there is none yet."""
    if not storage.exists(url, options):
        return []
    if not storage.is_remote(url):
        return storage.read_text(url).splitlines()
    return [storage.read_text(storage.join(url, name), options) for name in storage.list_names(url, options)]


def _append(path: Path, next_line: Callable[[Sequence[str]], str]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise  # a disk without locks: then the file needs one writer
        file.seek(0)
        content = file.read()
        line = next_line(content.decode("utf-8", "replace").splitlines())
        is_cut = content and not content.endswith(b"\n")  # by a kill: the next line is still a line
        file.write(b"\n" * bool(is_cut) + line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return line
