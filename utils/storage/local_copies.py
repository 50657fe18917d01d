"""Local copies of a bucket's objects: read through when they are there, kept when there is room.

In: the URL of an object whose copy has a name that changes with the content. Out: its bytes. A copy only
saves time, so no fault of the copies' disk (full, read-only, no permission) ends a run: one warning a
process, and the object comes from the bucket. A copy is on the disk itself before it has its name.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from utils import storage
from utils.config.schema import StorageOptions

log = logging.getLogger(__name__)
_given_up: set[Path] = set()  # folders that this process keeps no new copies in, each after one warning


def read_through(url: str, copy: Path, options: StorageOptions | None = None) -> bytes:
    """The object, from its copy when that is there, else from the URL and copied; raises StorageError."""
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
    """Remove a copy that cannot be decoded; False when there is none to blame."""
    if not copy.is_file():
        return False
    with contextlib.suppress(OSError):  # it may be on a read-only disk
        copy.unlink()
    return True


def _give_up(folder: Path, error: OSError | storage.StorageError) -> None:
    if folder not in _given_up:
        _given_up.add(folder)
        said = "no more local copies are kept there by this process, the store is read instead"
        log.warning("data.cache_dir %s: %s (%s)", folder, said, error)
