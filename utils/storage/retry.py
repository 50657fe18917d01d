"""Bounded retries with growing, random waits; each retry logs the object and the error.

In: a coroutine function that makes one request, and a test for errors that may pass by themselves. Out: its
result, or `GaveUp`. All cloud clients share this one layer (clients.py switches their own retries off), so a
request is made `RetryPolicy.attempts` times at most.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import re
import sys
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

log = logging.getLogger(__name__)
_T = TypeVar("_T")

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
