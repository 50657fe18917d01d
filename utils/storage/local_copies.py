"""Local copies of a bucket's objects, read when they are there and written when there is room.

In: the URL of an object, and the path of its copy, whose name changes with the content. Out: the bytes. A
copy only saves time, so no fault of its disk (full, read-only, no permission) ends a run: the process warns
once and reads the bucket. A copy is on the disk itself before it has its name.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from utils import storage
from utils.config.schema import StorageOptions

log = logging.getLogger(__name__)
_given_up: set[Path] = set()  # folders in which this process writes no more copies; it warned once for each


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


def drop(copy: Path) -> bool:
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
