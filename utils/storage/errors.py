"""What goes wrong with storage, in one line: the URL, what was expected or found, and what to do.

In: any error of a file system or a cloud client. Out: a `StorageError` without credentials.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from utils.errors import TransientError, UserError
from utils.storage.clients import VERSIONS
from utils.storage.retry import GaveUp, client_errors, current_url, describe, redact

_SCHEME_ALIASES = {"gcs": "gs", "s3a": "s3"}
_CLOUDS = {  # how to log in, and what an account needs
    "gs": (
        "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS",
        "storage.objects.get, list, create and delete",
    ),
    "s3": (
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
        "s3:GetObject, PutObject, DeleteObject and ListBucket",
    ),
}


class StorageError(UserError):
    """An object that cannot be read or written; one line with the URL, the cause and what to do.

    A message is enough, because torch's DataLoader makes a worker's error again from its text.
    """

    def __init__(self, url_or_message: str, problem: str | None = None) -> None:
        super().__init__(*((url_or_message,) if problem is None else (url_or_message, problem)))
        self.url = "" if problem is None else url_or_message
        self.problem = url_or_message if problem is None else problem

    def __str__(self) -> str:
        return ": ".join(self.args)


class StorageNotFoundError(StorageError):
    """There is no object at this URL."""


class StorageAwayError(StorageError, TransientError):
    """Storage that does not answer, or not as it should; it may later."""


def split_scheme(url: str) -> tuple[str, str]:
    """(scheme, rest) of a URL; ("file", path) of a path, where `~` in front is the home folder."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme == "file":
        return "file", os.path.expanduser(rest if separator else url)
    return _SCHEME_ALIASES.get(scheme, scheme), rest


@contextlib.contextmanager
def named_errors(url: str) -> Iterator[None]:
    """Turn any error inside into a StorageError of this URL; retries inside log this URL."""
    token = current_url.set(url)
    try:
        yield
    except GaveUp as error:
        last = describe(error.__cause__ or error)
        problem = f"gave up after {error.attempts} attempts in {error.seconds:.0f} s, the last: {last}"
        raise StorageAwayError(redact(url), f"{problem}; check the connection and run again") from error
    except client_errors(OSError, ImportError) as error:
        raise storage_error(url, error) from error
    finally:
        current_url.reset(token)


@contextlib.contextmanager
def missing_bucket(url: str) -> Iterator[None]:
    """Around an upload: what an upload does not find is its bucket."""
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
    """A client's error as one line: what is wrong and what to do."""
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
        package = f"'{package}{VERSIONS[package]}'" if package in VERSIONS else package
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
    kind = StorageAwayError if isinstance(error, (ConnectionError, TimeoutError)) else StorageError
    return kind(url, f"{describe(error)}; check the {what} and run again")


def _is_denied(error: BaseException) -> bool:
    """True for 401, 403 or no usable credentials; each client has another error for them."""
    names = {c.__name__ for c in type(error).__mro__}
    if isinstance(error, PermissionError) or names & {"GoogleAuthError", "NoCredentialsError"}:
        return True
    text = str(error)
    return str(getattr(error, "code", "")) in ("401", "403") or "Forbidden" in text or "nauthorized" in text
