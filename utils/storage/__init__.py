"""Bytes at a URL: the only file that knows URL schemes and fsspec.

A URL is a local path (no scheme), or gs://, s3://, memory:// ... . Credentials come from the environment
(gcloud or GOOGLE_APPLICATION_CREDENTIALS, the AWS variables), never from a URL; options carry an endpoint and
a profile name. Writes appear whole or not at all: temporary name, fsync, rename on a disk; one put on an
object store. Several processes may write the same object, the last one stays. Requests to a bucket are
repeated (utils/storage/clients.py); every failure that stays is a `StorageError` with the URL and what to do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import posixpath
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import fsspec

from utils.config.schema import StorageOptions
from utils.storage import clients as cloud
from utils.storage.errors import (
    NamedFile,
    StorageError,
    StorageNotFoundError,
    missing_is_the_bucket,
    named_errors,
    split_scheme,
)
from utils.storage.retry import has_login, redact

__all__ = [
    "PARTIAL_SUFFIX",
    "ObjectStat",
    "StorageError",
    "StorageNotFoundError",
    "absolute",
    "create",
    "exists",
    "find_names",
    "find_sizes",
    "is_remote",
    "join",
    "list_names",
    "make_dirs",
    "open_url",
    "read_bytes",
    "read_range",
    "read_text",
    "remove",
    "stat",
    "write_bytes",
    "write_text",
]

_SECRET = re.compile(r"(?i)://.*[?&](sig|[^=&]*(signature|token|secret|credential|password|key)[^=&]*)=")
PARTIAL_SUFFIX = ".partial"  # of an unfinished local write; list_names hides it


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


def open_url(url: str, mode: str = "rb", options: StorageOptions | None = None) -> IO[Any]:
    """Open for reading ("rb", or "r" for UTF-8 text); to write, use write_bytes."""
    if mode not in ("rb", "r"):
        raise ValueError(
            f"{url}: open_url: expected mode 'rb' or 'r', found {mode!r}; use write_bytes to write"
        )
    with named_errors(url):
        encoding = {"encoding": "utf-8"} if mode == "r" else {}
        if not is_remote(url):
            return open(split_scheme(url)[1], mode, **encoding)
        fs, path = _filesystem(url, options)
        # Of one kind for all clients; that of gcsfs prefetches in a thread, which logs tracebacks by itself.
        file = NamedFile(url, fs.open(path, "rb", cache_type="readahead"))
        buffered = io.BufferedReader(file)
        return io.TextIOWrapper(buffered, **encoding) if encoding else buffered


def exists(url: str, options: StorageOptions | None = None) -> bool:
    """True when an object or a folder is there; no permission is an error, not False."""
    with named_errors(url):
        fs, path = _filesystem(url, options)
        try:
            fs.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True


def read_bytes(url: str, options: StorageOptions | None = None) -> bytes:
    """The whole object; raises StorageError."""
    with named_errors(url):
        if not is_remote(url):
            return Path(split_scheme(url)[1]).read_bytes()
        fs, path = _filesystem(url, options)
        return fs.cat_file(path)


def read_range(url: str, start: int, end: int, options: StorageOptions | None = None) -> bytes:
    """Bytes [start, end) of an object, fewer where it ends before that; raises StorageError."""
    with named_errors(url):
        fs, path = _filesystem(url, options)
        return fs.cat_file(path, start=start, end=end) if start < end else b""


def read_text(url: str, options: StorageOptions | None = None) -> str:
    """The whole object as UTF-8 text; a byte order mark is dropped; raises StorageError."""
    data = read_bytes(url, options)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise StorageError(url, f"expected UTF-8 text, found {error.reason} at byte {error.start}") from error


def write_bytes(
    url: str, data: bytes | memoryview, options: StorageOptions | None = None, staging: str | None = None
) -> None:
    """Write the whole object, making its folder; readers see the old or the new content, never a part.

    `staging`: see `create`.
    """
    with named_errors(url):
        if is_remote(url):
            fs, path = _filesystem(url, options)
            with missing_is_the_bucket(url):
                cloud.upload(fs, path, bytes(data))
            return
        path = Path(split_scheme(url)[1])
        if staging is not None:
            _write_partial(_partial_of_its_own(path, staging), data, path)
        elif not _write_partial(path.with_name(f".{path.name}{PARTIAL_SUFFIX}"), data, path):
            _write_partial(_partial_of_its_own(path, None), data, path)
        _sync_folder(path.parent)


def _partial_of_its_own(path: Path, staging: str | None) -> Path:
    """An unfinished file that nobody else has, in `staging` when that is on the target's disk."""
    folder = path.parent
    if staging is not None:
        folder.mkdir(parents=True, exist_ok=True)
        other = Path(split_scheme(staging)[1])
        if other.stat().st_dev == folder.stat().st_dev:
            folder = other
    return folder / f".{path.name[:50]}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}"


def _write_partial(partial: Path, data: bytes | memoryview, target: Path | None = None) -> bool:
    """Write the file to the disk, making its folder, and rename it to `target`; after an error it is gone.

    False, with nothing written, while another process writes a file of that name.
    """
    try:
        file = open(partial, "ab")  # noqa: SIM115 (opened again when its folder has to be made first)
    except FileNotFoundError:
        partial.parent.mkdir(parents=True, exist_ok=True)
        file = open(partial, "ab")  # noqa: SIM115
    with file:
        if not _is_ours(file, partial):
            return False
        try:
            file.truncate(0)  # a killed process may have left a part
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if target is not None:
                os.replace(partial, target)
        except OSError:
            partial.unlink(missing_ok=True)  # a disk that is full needs the space
            raise
    return True


def _is_ours(file: IO[bytes], partial: Path) -> bool:
    """Lock the open file until it is closed; False when another process holds it, or has just renamed it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), os.stat(partial))
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):  # one writer an object, then
            return True
        raise


def write_text(url: str, text: str, options: StorageOptions | None = None) -> None:
    """write_bytes of the UTF-8 text."""
    write_bytes(url, text.encode("utf-8"), options)


def create(url: str, data: bytes, options: StorageOptions | None = None, staging: str | None = None) -> bool:
    """Write the whole object only if there is none; False when there is one (of a bucket: another one).

    `staging`: an existing folder of the same disk for the unfinished file, which a kill leaves behind; who
    names it removes it. Without, that file lies hidden beside the object. A bucket needs neither.
    """
    with named_errors(url):
        fs, path = _filesystem(url, options)
        if is_remote(url):
            try:
                with missing_is_the_bucket(url):
                    cloud.upload(fs, path, data, "create")
            except FileExistsError:
                # Ours, when the answer to the first attempt was lost and the second met its success.
                with contextlib.suppress(FileNotFoundError):
                    return fs.cat_file(path) == data
                return False
            return True
        partial = _partial_of_its_own(Path(path), staging)
        _write_partial(partial, data)
        try:
            os.link(partial, path)  # unlike a rename, no other file is replaced
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            return _create_without_links(path, data)
        finally:
            partial.unlink(missing_ok=True)
        _sync_folder(Path(path).parent)
        return True


def _create_without_links(path: str, data: bytes) -> bool:
    """On a file system without hard links; a kill may leave a part of the file."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        os.unlink(path)
        raise
    return True


def list_names(url: str, options: StorageOptions | None = None) -> list[str]:
    """Sorted names of the children of a folder; empty when there is no such folder."""
    with named_errors(url):
        fs, path = _filesystem(url, options)
        try:
            children = os.listdir(path) if not is_remote(url) else fs.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = {posixpath.basename(c.rstrip("/")) for c in children if c.rstrip("/") != path.rstrip("/")}
        return sorted(n for n in names if n and not n.endswith(PARTIAL_SUFFIX))


def find_names(url: str, options: StorageOptions | None = None) -> list[str]:
    """Sorted paths of all objects below a folder, relative to it; empty when there is no such folder."""
    with named_errors(url):
        fs, path = _filesystem(url, options)
        root = path.rstrip("/") + "/"
        found = [f.removeprefix(root) for f in fs.find(path)] if fs.exists(path) else []
        return sorted(f for f in found if not f.endswith(PARTIAL_SUFFIX))


def find_sizes(url: str, options: StorageOptions | None = None) -> dict[str, int]:
    """{path: bytes} of all objects below a folder, as find_names; one listing, no request per object.

    On a disk links are followed; folders that may not be read count as empty.
    """
    with named_errors(url):
        fs, path = _filesystem(url, options)
        root = path.rstrip("/") + "/"
        if is_remote(url):
            found = fs.find(path, detail=True) if fs.exists(path) else {}
            names = {name.removeprefix(root): int(info["size"] or 0) for name, info in found.items()}
        else:
            names = {file.removeprefix(root): size for file, size in _walk(root, frozenset())}
        return {n: names[n] for n in sorted(names) if not n.endswith((PARTIAL_SUFFIX, "/"))}


def _walk(folder: str, above: frozenset[tuple[int, int]]) -> Iterator[tuple[str, int]]:
    """(path, bytes) of the files below; `above`: the folders on the way here, where no link leads back."""
    try:
        here = os.stat(folder)
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    if (here.st_dev, here.st_ino) in above:
        return
    for entry in entries:
        if entry.is_dir():
            yield from _walk(entry.path, above | {(here.st_dev, here.st_ino)})
        else:
            with contextlib.suppress(FileNotFoundError):  # a link to nowhere
                yield entry.path, entry.stat().st_size


def remove(url: str, options: StorageOptions | None = None, recursive: bool = False) -> None:
    """Remove an object (or, with recursive, a folder); it is no error when there is none."""
    with named_errors(url):
        fs, path = _filesystem(url, options)
        with contextlib.suppress(FileNotFoundError):
            if recursive:
                fs.rm(path, recursive=True)
            else:
                fs.rm_file(path)


def make_dirs(url: str, options: StorageOptions | None = None) -> None:
    """Make a folder and its parents; object stores have none, so nothing happens there."""
    if not is_remote(url):
        with named_errors(url):
            os.makedirs(split_scheme(url)[1], exist_ok=True)


def stat(url: str, options: StorageOptions | None = None) -> ObjectStat:
    """Size and version of an object; raises StorageError."""
    with named_errors(url):
        fs, path = _filesystem(url, options)
        if not is_remote(url):
            info = os.stat(path)
            return ObjectStat(info.st_size, str(info.st_mtime_ns))
        found = fs.info(path)
        keys = ("etag", "ETag", "generation", "mtime", "LastModified", "updated", "created")
        version = next((found[k] for k in keys if found.get(k)), "")
        return ObjectStat(int(found["size"] or 0), str(version).strip('"'))


def _filesystem(url: str, options: StorageOptions | None) -> tuple[fsspec.AbstractFileSystem, str]:
    scheme, _ = split_scheme(url)
    options = options or StorageOptions()
    for where in (url, options.endpoint_url or ""):
        if "@" in urlsplit(where).netloc or has_login(where) or _SECRET.search(where):
            problem = "expected no credentials in a URL; put them into the environment"
            raise StorageError(redact(where), problem)
    try:
        fs = _client(scheme, options.endpoint_url, options.profile, os.getpid())
    except ValueError as error:
        raise StorageError(
            url, f"expected a path or a gs://, s3:// or other fsspec URL, found: {error}"
        ) from error
    return fs, fs._strip_protocol(url)


@cache  # fsspec keeps one a thread, each with its own connections and login
def _client(
    scheme: str, endpoint_url: str | None, profile: str | None, pid: int
) -> fsspec.AbstractFileSystem:
    """The one client of this process; a forked one cannot use its parent's."""
    if scheme == "gs":
        return cloud.gcs_filesystem(endpoint_url)
    if scheme == "s3":
        return cloud.s3_filesystem(endpoint_url, profile)
    return fsspec.filesystem(scheme, use_listings_cache=False)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable; some file systems refuse to sync a folder, and there the rename has to do."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
