"""Bytes at a URL: the only file that knows URL schemes and fsspec.

A URL is a local path (no scheme), or gs://, s3://, memory:// ... . Credentials come from the environment
(gcloud or GOOGLE_APPLICATION_CREDENTIALS, the AWS variables); options carry an endpoint and a profile name.
Writes appear whole or not at all: temporary name, fsync, rename on a disk; one put on an object store. The
caller is the only writer of its object. Every failure is a `StorageError` with the URL and what to do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import fsspec

from utils.config import StorageOptions, UserError

PARTIAL_SUFFIX = ".partial"  # of an unfinished local write; list_names hides it
_SCHEME_ALIASES = {"gcs": "gs", "s3a": "s3"}


class StorageError(UserError):
    """An object that cannot be read or written; one line with the URL, the cause and what to do.

    A message alone will do as well: torch's DataLoader makes a worker's error again from its text.
    """

    def __init__(self, url_or_message: str, problem: str | None = None) -> None:
        super().__init__(*((url_or_message,) if problem is None else (url_or_message, problem)))
        self.url = "" if problem is None else url_or_message
        self.problem = url_or_message if problem is None else problem

    def __str__(self) -> str:
        return ": ".join(self.args)


class StorageNotFoundError(StorageError):
    """There is no object at this URL."""


@dataclass(frozen=True)
class ObjectStat:
    size: int  # bytes
    etag_or_mtime: str  # changes when the content does: the store's ETag or generation, a file's mtime in ns


def is_remote(url: str) -> bool:
    """True when the URL has a scheme other than file://."""
    return _split(url)[0] != "file"


def join(url: str, *parts: str) -> str:
    """The URL of a descendant; leading and trailing slashes of the parts do not matter."""
    clean = [p.strip("/") for p in parts]
    base = url if url.endswith("://") else url.rstrip("/") + "/" if url else ""
    return (base + "/".join(p for p in clean if p)).rstrip("/") or "/"


def absolute(url: str) -> str:
    """The URL as it means the same from any folder: a local path absolute, no slash at the end."""
    scheme, rest = _split(url)
    return os.path.abspath(rest) if scheme == "file" else f"{scheme}://{rest}".rstrip("/")


def open_url(url: str, mode: str = "rb", options: StorageOptions | None = None) -> IO[Any]:
    """Open for reading ("rb", or "r" for UTF-8 text); to write, use write_bytes."""
    if mode not in ("rb", "r"):
        raise ValueError(
            f"{url}: open_url: expected mode 'rb' or 'r', found {mode!r}; use write_bytes to write"
        )
    with _named_errors(url):
        encoding = {"encoding": "utf-8"} if mode == "r" else {}
        if not is_remote(url):
            return open(_split(url)[1], mode, **encoding)
        fs, path = _filesystem(url, options)
        return fs.open(path, mode, **encoding)


def exists(url: str, options: StorageOptions | None = None) -> bool:
    """True when an object or a folder is there; no permission is an error, not False."""
    with _named_errors(url):
        fs, path = _filesystem(url, options)
        try:
            fs.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True


def read_bytes(url: str, options: StorageOptions | None = None) -> bytes:
    """The whole object; raises StorageError."""
    with _named_errors(url):
        if not is_remote(url):
            return Path(_split(url)[1]).read_bytes()
        fs, path = _filesystem(url, options)
        return fs.cat_file(path)


def read_text(url: str, options: StorageOptions | None = None) -> str:
    """The whole object as UTF-8 text; a byte order mark is dropped; raises StorageError."""
    data = read_bytes(url, options)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise StorageError(url, f"expected UTF-8 text, found {error.reason} at byte {error.start}") from error


def write_bytes(url: str, data: bytes | memoryview, options: StorageOptions | None = None) -> None:
    """Write the whole object, making its folder; readers see the old or the new content, never a part."""
    with _named_errors(url):
        if is_remote(url):
            fs, path = _filesystem(url, options)
            fs.pipe_file(path, bytes(data))
            return
        path = Path(_split(url)[1])
        partial = path.with_name(f".{path.name}{PARTIAL_SUFFIX}")
        try:
            file = open(partial, "wb")  # noqa: SIM115 (opened again when its folder has to be made first)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(partial, "wb")  # noqa: SIM115
        with file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)


def write_text(url: str, text: str, options: StorageOptions | None = None) -> None:
    """write_bytes of the UTF-8 text."""
    write_bytes(url, text.encode("utf-8"), options)


def create(url: str, data: bytes, options: StorageOptions | None = None) -> bool:
    """Write the object only if there is none; False when there is one already. For lock files."""
    with _named_errors(url):
        fs, path = _filesystem(url, options)
        if is_remote(url):
            try:
                fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            return True
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return True


def list_names(url: str, options: StorageOptions | None = None) -> list[str]:
    """Sorted names of the children of a folder; empty when there is no such folder."""
    with _named_errors(url):
        fs, path = _filesystem(url, options)
        try:
            children = os.listdir(path) if not is_remote(url) else fs.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = {posixpath.basename(c.rstrip("/")) for c in children if c.rstrip("/") != path.rstrip("/")}
        return sorted(n for n in names if n and not n.endswith(PARTIAL_SUFFIX))


def find_names(url: str, options: StorageOptions | None = None) -> list[str]:
    """Sorted paths of all objects below a folder, relative to it; empty when there is no such folder."""
    with _named_errors(url):
        fs, path = _filesystem(url, options)
        root = path.rstrip("/") + "/"
        found = [f.removeprefix(root) for f in fs.find(path)] if fs.exists(path) else []
        return sorted(f for f in found if not f.endswith(PARTIAL_SUFFIX))


def remove(url: str, options: StorageOptions | None = None, recursive: bool = False) -> None:
    """Remove an object (or, with recursive, a folder); it is no error when there is none."""
    with _named_errors(url):
        fs, path = _filesystem(url, options)
        with contextlib.suppress(FileNotFoundError):
            if recursive:
                fs.rm(path, recursive=True)
            else:
                fs.rm_file(path)


def make_dirs(url: str, options: StorageOptions | None = None) -> None:
    """Make a folder and its parents; object stores have none, so nothing happens there."""
    if not is_remote(url):
        with _named_errors(url):
            os.makedirs(_split(url)[1], exist_ok=True)


def stat(url: str, options: StorageOptions | None = None) -> ObjectStat:
    """Size and version of an object; raises StorageError."""
    with _named_errors(url):
        fs, path = _filesystem(url, options)
        if not is_remote(url):
            info = os.stat(path)
            return ObjectStat(info.st_size, str(info.st_mtime_ns))
        found = fs.info(path)
        keys = ("etag", "ETag", "generation", "mtime", "LastModified", "updated", "created")
        version = next((found[k] for k in keys if found.get(k)), "")
        return ObjectStat(int(found["size"] or 0), str(version).strip('"'))


def cached_read_bytes(url: str, copy: Path, options: StorageOptions | None = None) -> bytes:
    """read_bytes through a local copy, which is trusted when it is there."""
    try:
        return copy.read_bytes()
    except FileNotFoundError:
        data = read_bytes(url, options)
    copy.parent.mkdir(parents=True, exist_ok=True)
    partial = copy.with_name(f".{copy.name}.{os.getpid()}{PARTIAL_SUFFIX}")  # loader workers share the cache
    partial.write_bytes(data)
    os.replace(partial, copy)
    return data


def _split(url: str) -> tuple[str, str]:
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "file", url
    return _SCHEME_ALIASES.get(scheme, scheme), rest


def _filesystem(url: str, options: StorageOptions | None) -> tuple[fsspec.AbstractFileSystem, str]:
    scheme, rest = _split(url)
    options = options or StorageOptions()
    if scheme == "file":
        return fsspec.filesystem("file"), rest
    arguments: dict[str, Any] = {"use_listings_cache": False}  # other processes write while we look
    if scheme == "gs" and options.endpoint_url:
        arguments["endpoint_url"] = options.endpoint_url
        if not os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
            arguments["token"] = "anon"  # an emulator; never hand it the default account of this machine
    if scheme == "s3":
        arguments |= {k: v for k in ("endpoint_url", "profile") if (v := getattr(options, k))}
    try:
        fs = fsspec.filesystem(scheme, **arguments)
    except ValueError as error:
        raise StorageError(
            url, f"expected a path or a gs://, s3:// or other fsspec URL, found: {error}"
        ) from error
    return fs, fs._strip_protocol(url)


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


def _remote_error_types() -> tuple[type[BaseException], ...]:
    """Errors of the cloud clients that are no OSError; only asked for when something already went wrong."""
    names = {
        "gcsfs.retry": ("HttpError", "ChecksumError", "NonRetryableError"),
        "google.auth.exceptions": ("GoogleAuthError",),
        "aiohttp": ("ClientError",),
        "botocore.exceptions": ("BotoCoreError", "ClientError"),
    }
    return tuple(getattr(sys.modules[m], n) for m, ns in names.items() if m in sys.modules for n in ns)


@contextlib.contextmanager
def _named_errors(url: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ImportError, *_remote_error_types()) as error:  # the tuple is made only after an error
        raise _storage_error(url, error) from error


def _storage_error(url: str, error: BaseException) -> StorageError:
    text = " ".join(str(error).split())[:200]
    code = str(getattr(error, "code", ""))
    kind = type(error).__name__
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return StorageNotFoundError(url, "not found; check the path, and data.gcs_root or data.store")
    if isinstance(error, IsADirectoryError):
        return StorageError(url, "expected a file, found a folder")
    if isinstance(error, ImportError):
        return StorageError(url, f"needs an extra package: {text}")
    denied = (
        isinstance(error, PermissionError) or code in ("401", "403") or "Auth" in kind or "Credential" in kind
    )
    if denied or "Forbidden" in text or "nauthorized" in text:
        login = {"gs": "gcloud auth application-default login", "s3": "the AWS variables or profile"}
        advice = login.get(_split(url)[0])
        return StorageError(
            url, f"no permission ({text})" + (f"; check the credentials: {advice}" if advice else "")
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return StorageError(url, "no space left; free some and run again, finished work is kept")
    return StorageError(url, f"{kind}: {text}; check the connection and run again")
