"""What goes wrong with storage: what may pass by itself is tried again, the rest is one line with the URL,
what was expected or found, and what to do.

In: a coroutine function that makes one request, and a test for errors that may pass; any error of a file
system or a cloud client. Out: its result, or `GaveUp`; a `StorageError` without credentials. Retries are
bounded, with growing, random waits, and each logs the object and the error. All cloud clients share this one
layer (clients.py switches their own retries off), so a request is made `RetryPolicy.attempts` times at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import random
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from utils.errors import TransientError, UserError

log = logging.getLogger(__name__)
_T = TypeVar("_T")

# The classes of clients.py build on private names of theirs: raise these, and the requirements, once the
# tests pass.
VERSIONS = {"gcsfs": ">=2025.3,<2026.11", "s3fs": ">=2025.3,<2026.10"}
_SCHEME_ALIASES = {"gcs": "gs", "s3a": "s3"}
_AWAY = (errno.ENOTCONN, errno.ESTALE, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH)  # a mount's
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


# The URL that the calling thread works on; it follows a coroutine into another thread's event loop.
current_url: ContextVar[str] = ContextVar("current_url", default="storage")

# The secret of an AWS key often contains a slash, so a login may go on after the first slash.
# host:port/name@x is no login; a bucket has no port.
_PORT = r"(?: \[[^\]/\s]*\] (?: :\d{1,5})? | [^/:@\s]*:\d{1,5} ) (?: [/?\#\s] | $ )"
_LOGIN = re.compile(
    rf"(?xi) (?<=://) (?: (?: (?<=gs://|cs://|s3://|3a://) | (?!{_PORT}) ) [^/@\s]*:\S*@ | [^/@\s]+@ )"
)
_AUTHORIZATION = re.compile(
    r"""(?xi) ( \bauthorization \\?['"]? \s*[:=]\s* \\?['"]? (?: (?:bearer|basic)\s+ )?
    | \b(?:bearer|basic)\s+ ) [^\s'"]+"""
)
_NAMED_SECRET = re.compile(
    r"""(?xi)
    ( (?: token | secret | signature | password | assertion | credential | (?:access|api|private)[_-]?key )
    (?!s) [\w-]{0,40} \\?['"]? \s*[:=]\s* \\? )
    (?: "(?:\\.|[^"\\])*"? | '(?:\\.|[^'\\])*'? | [^\s&'"]+ )"""
)


@dataclass(frozen=True)
class RetryPolicy:
    """How long a request may fail; with the defaults the waits add up to 63 s at most, 48 s on average."""

    attempts: int = 8
    first_wait_s: float = 0.5  # doubles after every attempt
    max_wait_s: float = 32.0
    connect_timeout_s: float = 15.0
    read_timeout_s: float = 60.0  # without a single byte
    min_upload_rate: float = 5 * 2**20  # bytes/s; a slower upload counts as stalled

    def wait_s(self, attempt: int) -> float:
        """Seconds to wait after this attempt (1, 2, ...): half of them fixed, half drawn."""
        longest = min(self.max_wait_s, self.first_wait_s * 2 ** (attempt - 1))
        return random.uniform(longest / 2, longest)  # not seeded: workers must not retry in step


class IntegrityError(Exception):
    """An answer that differs from what the server stored: too short, or with another checksum."""


class GaveUp(Exception):
    """A request that failed in every attempt; the last error is its cause."""

    def __init__(self, attempts: int, seconds: float) -> None:
        super().__init__(attempts, seconds)
        self.attempts, self.seconds = attempts, seconds


def client_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """`others`, and errors of the cloud clients that are no OSError; a client never imported raises none."""
    names = {
        "gcsfs.retry": ("HttpError", "ChecksumError", "NonRetryableError"),
        "google.auth.exceptions": ("GoogleAuthError",),
        "aiohttp": ("ClientError",),
        "botocore.exceptions": ("BotoCoreError", "ClientError"),
        "botocore.parsers": ("ResponseParserError",),
    }
    known = (getattr(sys.modules[m], n) for m, ns in names.items() if m in sys.modules for n in ns)
    return (*others, *known)


async def with_retries(
    request: Callable[[], Awaitable[_T]], is_transient: Callable[[BaseException], bool], policy: RetryPolicy
) -> _T:
    """The request's result; its own error when that is not transient; GaveUp after policy.attempts."""
    start = time.monotonic()
    for attempt in itertools.count(1):
        try:
            return await request()
        except client_errors(OSError, IntegrityError) as error:
            if not is_transient(error):
                raise
            if attempt == policy.attempts:
                raise GaveUp(attempt, time.monotonic() - start) from error
            wait = policy.wait_s(attempt)
            text = "%s: attempt %d of %d failed (%s); again in %.1f s"
            log.warning(text, redact(current_url.get()), attempt, policy.attempts, describe(error), wait)
        await asyncio.sleep(wait)
    raise AssertionError  # the loop has no end


def describe(error: BaseException) -> str:
    """An error of a cloud client in one line without credentials."""
    text = redact(" ".join(str(error).split()))[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def redact(text: str) -> str:
    """The text without user:password@, query values, tokens, signatures and other secrets with a name."""
    text = _LOGIN.sub("***@", text)
    text = re.sub(r"([?&][^=&\s]+=)[^&\s]+", r"\1***", text)
    text = _AUTHORIZATION.sub(r"\1***", text)
    return _NAMED_SECRET.sub(r"\1***", text)


def has_login(url: str) -> bool:
    """True for user:password@ in a URL, also when the password has a slash in it."""
    return bool(_LOGIN.search(url))


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


def is_absent(error: OSError) -> bool:
    """Whether an error says that nothing is at a path; a link to itself is nothing."""
    return isinstance(error, FileNotFoundError | NotADirectoryError) or error.errno == errno.ELOOP


def storage_error(url: str, error: BaseException) -> StorageError:
    """A client's error as one line: what is wrong and what to do."""
    scheme = split_scheme(url)[0]
    url = redact(url)
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        bucket = f" and the bucket name {_bucket(url)}" if scheme in _CLOUDS else ""
        return StorageNotFoundError(
            url, f"not found; check the path{bucket}, and data.gcs_root or data.store"
        )
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return StorageNotFoundError(url, "expected a file, found a link to itself; take it away, or its row")
    if isinstance(error, IsADirectoryError):
        return StorageError(url, "expected a file, found a folder")
    if isinstance(error, FileExistsError):
        return StorageError(url, f"expected a folder, found a file at {error.filename}; give another place")
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
    is_away = isinstance(error, (ConnectionError, TimeoutError)) or getattr(error, "errno", None) in _AWAY
    kind = StorageAwayError if is_away else StorageError
    return kind(url, f"{describe(error)}; check the {what} and run again")


def _is_denied(error: BaseException) -> bool:
    """True for 401, 403 or no usable credentials; each client has another error for them."""
    names = {c.__name__ for c in type(error).__mro__}
    if isinstance(error, PermissionError) or names & {"GoogleAuthError", "NoCredentialsError"}:
        return True
    text = str(error)
    return str(getattr(error, "code", "")) in ("401", "403") or "Forbidden" in text or "nauthorized" in text
