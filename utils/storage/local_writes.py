"""A file on a disk, written whole or not at all: under a hidden name, fsync, rename.

In: a path and bytes. Out: the file, on the disk itself. An error leaves no part behind, a kill a hidden one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from pathlib import Path
from typing import IO

from utils.storage.chunks import Chunks
from utils.storage.errors import split_scheme

PARTIAL_SUFFIX = ".partial"  # of an unfinished write; listings hide it


def make_folder(folder: Path) -> None:
    """Make it and those above; raises FileExistsError where one of them is a file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except NotADirectoryError as error:
        raise FileExistsError(*error.args, str(next(p for p in folder.parents if p.exists()))) from error


def unique_partial(path: Path, staging: str | None) -> Path:
    """A new name for an unfinished file, in `staging` when that is on the disk of the target."""
    folder = path.parent
    if staging is not None:
        make_folder(folder)
        other = Path(split_scheme(staging)[1])
        if other.stat().st_dev == folder.stat().st_dev:
            folder = other
    return folder / f".{path.name[:50]}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}"


def replace_whole(partial: Path, data: bytes | memoryview | Chunks, target: Path) -> bool:
    """Write `partial` to the disk, make its folder, and rename it to `target`; an error leaves no part
    behind.

    False, with nothing written, while another process writes a file of that name.
    """
    make_folder(partial.parent)
    with open(partial, "ab") as file:
        if not _lock(file, partial):
            return False
        try:
            file.truncate(0)  # a killed process may have left a part
            (data if isinstance(data, Chunks) else Chunks([data])).feed(file.write)
            file.flush()
            os.fsync(file.fileno())
            os.replace(partial, target)
        except OSError:
            partial.unlink(missing_ok=True)  # a full disk needs the space
            raise
    return True


def _lock(file: IO[bytes], partial: Path) -> bool:
    """Lock the open file until it is closed; False when another process holds it, or has just renamed it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), os.stat(partial))
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):  # then each object needs one writer
            return True
        raise


def write_new(path: Path, data: bytes | memoryview, mode: str = "wb") -> None:
    """Write a file to the disk itself, and make its folder; an error leaves no file behind."""
    make_folder(path.parent)
    file = open(path, mode)  # noqa: SIM115 (outside: mode "xb" must not remove the file that it finds)
    try:
        with file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)  # a full disk needs the space
        raise


def link_once(partial: Path, path: str, data: bytes) -> None:
    """Give the file its name; unlike a rename this replaces no other file, but raises FileExistsError."""
    try:
        os.link(partial, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        write_new(Path(path), data, "xb")  # a disk without hard links: a kill may leave a part of the file


def sync_folder(folder: Path) -> None:
    """Make a rename durable, on file systems that can sync a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
