"""Bounded retries with a jittered, growing wait; every retry and the end name the object.

In: a coroutine function that makes one request, and which of its errors pass by themselves. Out: its result,
or `GaveUp`. One layer for every cloud client (utils/storage/clients.py switches the clients' own off), so
that the attempts of a request are `RetryPolicy.attempts` and never a product.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

log = logging.getLogger(__name__)
_T = TypeVar("_T")

# The URL that the calling thread works on; a coroutine sent to another thread's event loop takes it along.
current_url: ContextVar[str] = ContextVar("current_url", default="storage")

# The secret of an AWS key often has a slash, so a login may reach past the first one.
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
    """How long a request may fail, in seconds; the defaults wait 63 s in all at most, 48 s on average."""

    attempts: int = 8
    first_wait_s: float = 0.5  # doubled after every attempt
    max_wait_s: float = 32.0
    connect_timeout_s: float = 15.0
    read_timeout_s: float = 60.0  # without a single byte
    min_upload_rate: float = 2**18  # bytes/s; a slower upload is taken for a stalled one

    def wait_s(self, attempt: int) -> float:
        """Seconds before the attempt after this one (1, 2, ...): half of it fixed, half drawn."""
        longest = min(self.max_wait_s, self.first_wait_s * 2 ** (attempt - 1))
        return random.uniform(longest / 2, longest)  # not seeded: workers must not retry in step


class IntegrityError(Exception):
    """A response that is not what the server stored: cut short, or with another checksum."""


class GaveUp(Exception):
    """A request that failed in every attempt; the last error is its cause."""

    def __init__(self, attempts: int, seconds: float) -> None:
        super().__init__(attempts, seconds)
        self.attempts, self.seconds = attempts, seconds


async def with_retries(
    request: Callable[[], Awaitable[_T]],
    errors: tuple[type[BaseException], ...],
    is_transient: Callable[[BaseException], bool],
    policy: RetryPolicy,
) -> _T:
    """The request's result; its own error when that is not transient; GaveUp after policy.attempts."""
    start = time.monotonic()
    attempt = 1
    while True:
        try:
            return await request()
        except errors as error:
            if not is_transient(error):
                raise
            if attempt == policy.attempts:
                raise GaveUp(attempt, time.monotonic() - start) from error
            wait = policy.wait_s(attempt)
            log.warning(
                "%s: attempt %d of %d failed (%s); again in %.1f s",
                redact(current_url.get()),
                attempt,
                policy.attempts,
                describe(error),
                wait,
            )
        await asyncio.sleep(wait)
        attempt += 1


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
