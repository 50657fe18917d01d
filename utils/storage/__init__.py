"""Bytes at a URL: the only room that knows URL schemes and fsspec.

A URL is a local path (no scheme), or gs://, s3://, memory:// ... . Credentials come from the environment
(gcloud or GOOGLE_APPLICATION_CREDENTIALS, the AWS variables), never from a URL; options hold an endpoint. A
write appears whole or not at all: on a disk by a temporary name, fsync and rename, in a bucket by one
request. Several processes may write the same object; the last one stays. Requests to a bucket are repeated by
clients.py and errors.py; a failure that stays is a `StorageError` with the URL and what to do.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import posixpath
import re
import shutil
import stat as stat_mode
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import fsspec

from utils.config.schema import StorageOptions
from utils.storage import clients
from utils.storage.chunks import READ_AHEAD, PartFile
from utils.storage.chunks import Chunks as Chunks
from utils.storage.errors import StorageAwayError as StorageAwayError
from utils.storage.errors import StorageError as StorageError  # named again: a part of this room's surface
from utils.storage.errors import StorageNotFoundError as StorageNotFoundError
from utils.storage.errors import has_login, is_absent, missing_bucket, named_errors, redact, split_scheme
from utils.storage.local_writes import PARTIAL_SUFFIX as PARTIAL_SUFFIX
from utils.storage.local_writes import (
    link_once,
    make_folder,
    replace_whole,
    sync_folder,
    unique_partial,
    write_new,
)

log = logging.getLogger(__name__)
_NAMED = 3  # paths of a warning

_SECRET = re.compile(r"(?i)://.*[?&](sig|[^=&]*(signature|token|secret|credential|password|key)[^=&]*)=")
_AZURE = re.compile(r"abfss?://[\w-]+@(?P<account>\w+)\.dfs\.core\.windows\.net(?:/|$)")  # container@account


@dataclass(frozen=True)
class ObjectStat:
    size: int  # bytes
    etag_or_mtime: str  # changes when the content does: the store's ETag or generation, a file's mtime in ns


def is_remote(url: str) -> bool:
    """True when the URL has a scheme other than file://."""
    return split_scheme(url)[0] != "file"


def join(url: str, *parts: str) -> str:
    """The URL of a descendant; leading and trailing slashes of the parts do not matter."""
    clean = [p.strip("/") for p in parts]
    base = url if url.endswith("://") else url.rstrip("/") + "/" if url else ""
    return (base + "/".join(p for p in clean if p)).rstrip("/") or "/"


def absolute(url: str) -> str:
    """The URL as it means the same from any folder: a local path absolute, no slash at the end."""
    scheme, rest = split_scheme(url)
    return os.path.abspath(rest) if scheme == "file" else f"{scheme}://{rest}".rstrip("/")


def kind_of_no_file(mode: int) -> str:
    """What `st_mode` says that is neither a file nor a folder; empty for these."""
    if stat_mode.S_ISREG(mode) or stat_mode.S_ISDIR(mode):
        return ""
    return "a named pipe" if stat_mode.S_ISFIFO(mode) else "a device or a socket"


def _require_file(path: str) -> None:
    """Raise for a pipe or a device, which would be waited for without an end."""
    with contextlib.suppress(OSError):  # who opens it meets the same
        if what := kind_of_no_file(os.stat(path).st_mode):
            raise StorageNotFoundError(path, f"expected a file, found {what}; take it away, or its row")


def open_url(url: str, options: StorageOptions | None = None) -> IO[bytes]:
    """Open an object to read it; raises StorageError, later reads as well when it is in a bucket."""
    with named_errors(url):
        if not is_remote(url):
            _require_file(split_scheme(url)[1])
            return open(split_scheme(url)[1], "rb")
    file = PartFile(stat(url, options).size, partial(read_range, url, options=options))
    return io.BufferedReader(file, READ_AHEAD)


def exists(url: str, options: StorageOptions | None = None) -> bool:
    """True when an object or a folder is there; no permission is an error, not False."""
    with _client_of(url, options) as (fs, path):
        try:
            fs.info(path)
        except OSError as error:
            if not is_absent(error):
                raise
            return False
        return True


def is_vacant(url: str, options: StorageOptions | None = None) -> bool:
    """True when not even a link to nowhere is there, which `exists` leaves out; nor a pipe."""
    return not (exists(url, options) if is_remote(url) else os.path.lexists(split_scheme(url)[1]))


def read_bytes(url: str, options: StorageOptions | None = None) -> bytes:
    """The whole object; raises StorageError."""
    if is_remote(url):
        with _client_of(url, options) as (fs, path):
            return fs.cat_file(path)
    with named_errors(url):
        _require_file(split_scheme(url)[1])
        return Path(split_scheme(url)[1]).read_bytes()


def read_range(url: str, start: int, end: int, options: StorageOptions | None = None) -> bytes:
    """Bytes [start, end) of an object, fewer where it ends before that; raises StorageError."""
    with _client_of(url, options) as (fs, path):
        if not is_remote(url):
            _require_file(path)
        return fs.cat_file(path, start=start, end=end) if start < end else b""


def read_text(url: str, options: StorageOptions | None = None) -> str:
    """The whole object as UTF-8 text; a byte order mark is dropped; raises StorageError."""
    data = read_bytes(url, options)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise StorageError(url, f"expected UTF-8 text, found {error.reason} at byte {error.start}") from error


def write_bytes(
    url: str,
    data: bytes | memoryview | Chunks,
    options: StorageOptions | None = None,
    staging: str | None = None,
) -> None:
    """Write the whole object and make its folder; readers see the old or the new content, never a part.

    `staging`: see `create`.
    """
    if is_remote(url):
        with _client_of(url, options) as (fs, path), missing_bucket(url):
            if isinstance(data, Chunks) and not getattr(fs, "takes_chunks", False):
                data = b"".join(data.parts)
            fs.pipe_file(path, data if isinstance(data, Chunks) else bytes(data))
        return
    with named_errors(url):
        file = Path(split_scheme(url)[1])
        hidden = file.with_name(f".{file.name}{PARTIAL_SUFFIX}")
        if staging is not None or not replace_whole(hidden, data, file):
            replace_whole(unique_partial(file, staging), data, file)
        sync_folder(file.parent)


def write_text(url: str, text: str, options: StorageOptions | None = None) -> None:
    """write_bytes of the UTF-8 text."""
    write_bytes(url, text.encode("utf-8"), options)


def create(url: str, data: bytes, options: StorageOptions | None = None, staging: str | None = None) -> bool:
    """Write the whole object if there is none; False if there is one (in a bucket: one with other content).

    `staging` is an existing folder on the same disk for the unfinished file. A kill may leave that file, so
    the caller removes the folder. Without `staging` the file is hidden beside the object. Buckets need none.
    """
    with _client_of(url, options) as (fs, path):
        if is_remote(url):
            try:
                with missing_bucket(url):
                    fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                # The object is ours when the answer to the first attempt was lost.
                with contextlib.suppress(FileNotFoundError):
                    return fs.cat_file(path) == data
                return False
            return True
        partial = unique_partial(Path(path), staging)
        write_new(partial, data)
        try:
            link_once(partial, path, data)
        except FileExistsError:
            return False
        finally:
            partial.unlink(missing_ok=True)
        sync_folder(Path(path).parent)
        return True


def copy(source: str, target: str, options: StorageOptions | None = None) -> None:
    """Give an object a second name beside the first; a bucket copies it itself, a disk makes a hard link."""
    with _client_of(target, options) as (fs, path):
        if is_remote(target):
            fs.cp_file(fs._strip_protocol(source), path)
            return
        partial = unique_partial(Path(path), None)
        try:
            os.link(split_scheme(source)[1], partial)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                raise
            write_bytes(target, read_bytes(source))
            return
        try:
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        sync_folder(Path(path).parent)


def list_unfinished(url: str) -> list[str]:
    """Sorted names of what local writes have begun in a folder, or a kill has left; a bucket has none."""
    folder = Path(split_scheme(url)[1])
    if is_remote(url) or not folder.is_dir():
        return []
    with named_errors(url):
        return sorted(name for name in os.listdir(folder) if name.endswith(PARTIAL_SUFFIX))


def free_bytes(url: str) -> int | None:
    """Space left on the disk of an existing folder; None for a bucket."""
    if is_remote(url):
        return None
    with named_errors(url):
        return shutil.disk_usage(split_scheme(url)[1]).free


def list_names(url: str, options: StorageOptions | None = None) -> list[str]:
    """Sorted names of the children of a folder; empty when there is no such folder."""
    with _client_of(url, options) as (fs, path):
        try:
            children = os.listdir(path) if not is_remote(url) else fs.ls(path, detail=False)
        except OSError as error:
            if not is_absent(error):
                raise
            return []
        names = {posixpath.basename(c.rstrip("/")) for c in children if c.rstrip("/") != path.rstrip("/")}
        return sorted(n for n in names if n and not n.endswith(PARTIAL_SUFFIX))


def find_names(url: str, options: StorageOptions | None = None) -> list[str]:
    """Sorted paths of all objects below a folder, relative to it; empty when there is no such folder."""
    return list(find_sizes(url, options))


def find_sizes(url: str, options: StorageOptions | None = None) -> dict[str, int]:
    """{path: bytes} of all objects below a folder, sorted; empty when there is no such folder.

    One listing gives all. On a disk links are followed, and folders that may not be read count as empty. What
    is no file (a pipe, a device, a link to nowhere or to itself) is left out, with a warning that names it.
    """
    with _client_of(url, options) as (fs, path):
        root = path.rstrip("/") + "/"
        if is_remote(url):
            infos: dict[str, Any] = {}
            with contextlib.suppress(FileNotFoundError):
                infos = fs.find(path, detail=True)
            sizes = {name: int(info["size"] or 0) for name, info in infos.items()}
        else:
            sizes = _walk(root)
        names = sorted(n for n in sizes if n.startswith(root) and not n.endswith((PARTIAL_SUFFIX, "/")))
        return {name.removeprefix(root): sizes[name] for name in names}


def _walk(root: str) -> dict[str, int]:
    """{path: bytes} of the files below, at any depth. A link back to a folder above is skipped; so is, with a
    warning, what is no file and a folder that may not be listed.
    """
    sizes: dict[str, int] = {}
    skipped: dict[str, list[str]] = {}
    todo: list[tuple[str, frozenset[tuple[int, int]]]] = [(root, frozenset())]  # and the folders above
    while todo:
        folder, above = todo.pop()
        try:
            info = os.stat(folder)
            entries = list(os.scandir(folder))
        except OSError as error:
            if is_absent(error):
                continue
            if error.errno not in (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG):
                raise
            is_long = error.errno == errno.ENAMETOOLONG
            why = "too long a path" if is_long else "no permission to list this folder"
            shown = f"{folder[:200]}..." if is_long else folder
            log.warning("%s: %s: what lies in it is not seen", shown, why)
            continue
        here = info.st_dev, info.st_ino
        if here in above:
            continue
        inside = above | {here}
        for entry in entries:
            what, size = _look_at(entry)
            if what == "folder":
                todo.append((entry.path, inside))
            elif what:
                skipped.setdefault(what, []).append(entry.path)
            else:
                sizes[entry.path] = size
    for what, paths in sorted(skipped.items()):
        names = ", ".join(map(repr, sorted(paths)[:_NAMED])) + (", ..." if len(paths) > _NAMED else "")
        log.warning("skipped: %s: %d (%s)", what, len(paths), names)
    return sizes


def _look_at(entry: os.DirEntry[str]) -> tuple[str, int]:
    """("", bytes) of a file, ("folder", 0), or what else it is."""
    try:
        info = entry.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "a link to itself", 0
        if isinstance(error, FileNotFoundError):
            return (
                "a link to nowhere, not fetched perhaps (git annex get)" if entry.is_symlink() else "gone"
            ), 0
        raise
    return ("folder" if stat_mode.S_ISDIR(info.st_mode) else kind_of_no_file(info.st_mode)), info.st_size


def remove(url: str, options: StorageOptions | None = None, recursive: bool = False) -> None:
    """Remove an object (or, with recursive, a folder); it is no error when there is none."""
    with _client_of(url, options) as (fs, path), contextlib.suppress(FileNotFoundError):
        if recursive:
            fs.rm(path, recursive=True)
        else:
            fs.rm_file(path)


def make_dirs(url: str) -> None:
    """Make a folder and its parents; buckets have no folders, so nothing happens there."""
    if not is_remote(url):
        with named_errors(url):
            make_folder(Path(split_scheme(url)[1]))


def stat(url: str, options: StorageOptions | None = None) -> ObjectStat:
    """Size and version of an object; raises StorageError."""
    with _client_of(url, options) as (fs, path):
        if not is_remote(url):
            status = os.stat(path)
            return ObjectStat(status.st_size, str(status.st_mtime_ns))
        info = fs.info(path)
        keys = ("etag", "ETag", "generation", "mtime", "LastModified", "updated", "created")
        version = next((info[k] for k in keys if info.get(k)), "")
        return ObjectStat(int(info["size"] or 0), str(version).strip('"'))


@contextlib.contextmanager
def _client_of(url: str, options: StorageOptions | None) -> Iterator[tuple[fsspec.AbstractFileSystem, str]]:
    """The client of a URL and the path there; every error inside becomes a StorageError."""
    with named_errors(url):
        yield _filesystem(url, options)


def _filesystem(url: str, options: StorageOptions | None) -> tuple[fsspec.AbstractFileSystem, str]:
    scheme, _ = split_scheme(url)
    options = options or StorageOptions()
    azure = _AZURE.match(url)
    for where in (url, options.endpoint_url or ""):
        has_user = "@" in urlsplit(where).netloc or has_login(where)
        if (has_user and not (azure and where == url)) or _SECRET.search(where):
            problem = "expected no credentials in a URL; put them into the environment"
            raise StorageError(redact(where), problem)
    try:
        fs = _client(scheme, options.endpoint_url, os.getpid(), azure["account"] if azure else None)
    except ValueError as error:
        raise StorageError(
            url, f"expected a path or a gs://, s3:// or other fsspec URL, found: {error}"
        ) from error
    return fs, fs._strip_protocol(url)


@cache  # fsspec itself keeps one for each thread, with its own connections and login
def _client(
    scheme: str, endpoint_url: str | None, pid: int, azure_account: str | None
) -> fsspec.AbstractFileSystem:
    """The one client of this process; a forked process cannot use the client of its parent."""
    if scheme == "gs":
        return clients.gcs_filesystem(endpoint_url)
    if scheme == "s3":
        return clients.s3_filesystem(endpoint_url)
    account = {"account_name": azure_account} if azure_account else {}
    return fsspec.filesystem(scheme, use_listings_cache=False, **account)
