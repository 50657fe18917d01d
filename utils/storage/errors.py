"""What goes wrong with storage, in one line: the URL, what was expected or found, and what to do.

In: any error of a file system or a cloud client. Out: `StorageError`, or `StorageNotFoundError`; none of them
repeats a credential.
"""

from __future__ import annotations

import contextlib
import errno
import io
import sys
from collections.abc import Iterator
from typing import IO

from utils.errors import UserError
from utils.storage.retry import GaveUp, current_url, describe, redact

_SCHEME_ALIASES = {"gcs": "gs", "s3a": "s3"}
_CLOUDS = {  # how to log in, and what an account needs
    "gs": (
        "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS",
        "storage.objects.get, list, create and delete",
    ),
    "s3": (
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or storage_options.profile",
        "s3:GetObject, PutObject, DeleteObject and ListBucket",
    ),
}


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


def split_scheme(url: str) -> tuple[str, str]:
    """(scheme, rest) of a URL; ("file", path) of a path."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "file", url
    return _SCHEME_ALIASES.get(scheme, scheme), rest


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
def named_errors(url: str) -> Iterator[None]:
    """Whatever goes wrong at the URL inside becomes a StorageError; retries in there name the URL."""
    token = current_url.set(url)
    try:
        yield
    except GaveUp as error:
        last = describe(error.__cause__ or error)
        said = f"gave up after {error.attempts} attempts in {error.seconds:.0f} s, the last: {last}"
        raise StorageError(redact(url), f"{said}; check the connection and run again") from error
    except (OSError, ImportError, *_remote_error_types()) as error:  # the tuple is made only after an error
        raise storage_error(url, error) from error
    finally:
        current_url.reset(token)


class NamedFile(io.RawIOBase):
    """A client's open file for reading: an error of any later read or seek is a StorageError as well."""

    def __init__(self, url: str, file: IO[bytes]) -> None:
        self._url, self._file = url, file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        with named_errors(self._url):
            return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: memoryview) -> int:
        with named_errors(self._url):
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        with named_errors(self._url):
            return self._file.read()

    def close(self) -> None:
        self._file.close()
        super().close()


@contextlib.contextmanager
def missing_is_the_bucket(url: str) -> Iterator[None]:
    """An upload finds everything missing but its bucket."""
    try:
        yield
    except FileNotFoundError as error:
        if split_scheme(url)[0] == "memory":
            raise
        problem = f"expected the bucket {_bucket(url)}, found none; check its name, or make it"
        raise StorageError(redact(url), problem) from error


def _bucket(url: str) -> str:
    return split_scheme(url)[1].partition("/")[0]


def storage_error(url: str, error: BaseException) -> StorageError:
    """The error of a client as one line: what is wrong and what to do."""
    scheme = split_scheme(url)[0]
    url = redact(url)
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        bucket = f" and the bucket name {_bucket(url)}" if scheme in _CLOUDS else ""
        return StorageNotFoundError(
            url, f"not found; check the path{bucket}, and data.gcs_root or data.store"
        )
    if isinstance(error, IsADirectoryError):
        return StorageError(url, "expected a file, found a folder")
    if isinstance(error, ImportError):
        package = {"s3": "s3fs", "gs": "gcsfs"}.get(scheme, error.name or "its fsspec client")
        return StorageError(url, f"{scheme}:// needs an extra package: pip install {package}")
    if _is_denied(error):
        advice = ""
        if scheme in _CLOUDS:
            login, needed = _CLOUDS[scheme]
            advice = f"; log in ({login}), or ask for {needed} on the bucket {_bucket(url)}"
        return StorageError(url, f"no permission ({describe(error)}){advice}")
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return StorageError(url, "read-only file system; choose a place that can be written, and run again")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(url, "no space left; free some and run again, finished work is kept")
    what = "disk" if scheme == "file" else "connection"
    return StorageError(url, f"{describe(error)}; check the {what} and run again")


def _is_denied(error: BaseException) -> bool:
    """401 or 403, or no usable credentials; each client says it in its own way."""
    names = {c.__name__ for c in type(error).__mro__}
    if isinstance(error, PermissionError) or names & {"GoogleAuthError", "NoCredentialsError"}:
        return True
    text = str(error)
    return str(getattr(error, "code", "")) in ("401", "403") or "Forbidden" in text or "nauthorized" in text
