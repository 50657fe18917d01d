"""What a person sees of long work: a bar on a terminal, a short line now and then anywhere else.

In: how much there is to do. Out: text, only on stderr. A terminal is one where a person watches: neither a
pipe or a file, nor CI, nor one that cannot move its cursor. A terminal that goes away does not end the work.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Generator, Iterable
from typing import TextIO, TypeVar

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from utils.errors import shown

T = TypeVar("T")
# where nobody watches: so long to the first line of `track`, then twice as long each, up to the second
PLAIN_FIRST_S, PLAIN_EVERY_S = 2.0, 30.0
REDRAWS_PER_S = 5


def is_interactive() -> bool:
    """Whether a person watches stderr."""
    return sys.stderr.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"


def duration(seconds: float) -> str:
    """45 s, 12 min, 3 h 10 min, 2 d 4 h: as exact as a forecast deserves."""
    minutes, hours, days = round(seconds / 60), round(seconds / 3600), seconds / 86400
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{int(days)} d {round(days % 1 * 24)} h" if days % 1 < 23.5 / 24 else f"{int(days) + 1} d 0 h"


class Pace:
    """When work ends, from the pace so far. Times are seconds of one clock, counts are units of work."""

    def __init__(self, done: int, total: int, now: float) -> None:
        self.first, self.total, self.began = done, total, now

    def seconds_left(self, done: int, now: float) -> float | None:
        """None before a unit is done."""
        if done <= self.first:
            return None
        return (now - self.began) / (done - self.first) * (self.total - done)

    def text(self, done: int, now: float) -> str:
        """'2 min left', or '' before anything is known."""
        seconds = self.seconds_left(done, now)
        return "" if seconds is None else f"{duration(seconds)} left"


class _Lasting:
    """A stream that drops what it cannot write: the work goes on when its terminal is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    @property
    def encoding(self) -> str:
        return self._stream.encoding


def _console() -> Console:
    return Console(file=_Lasting(sys.stderr), highlight=False, soft_wrap=True)  # type: ignore[arg-type] # what rich uses of it


class LiveLine:
    """One line at the bottom of a terminal, over which other messages scroll. Only where `is_interactive`.

    No thread: it is drawn again when `show` is called, at most REDRAWS_PER_S times a second.
    """

    def __init__(self) -> None:
        self._live = Live(
            console=_console(), auto_refresh=False, transient=True, redirect_stdout=sys.stdout.isatty()
        )
        self._live.start()
        self._drawn = 0.0

    def show(self, text: str, style: str = "", *, at_once: bool = False) -> None:
        """Replace the line; what does not fit the terminal's width is cut off."""
        if at_once or time.monotonic() - self._drawn > 1 / REDRAWS_PER_S:
            self._drawn = time.monotonic()
            self._live.update(Text(text, style, no_wrap=True, overflow="ellipsis"), refresh=True)

    def close(self) -> None:
        """Remove the line, and give the terminal back."""
        self._live.stop()


def say(*lines: str, file: TextIO | None = None, flush: bool = False) -> None:
    """Print lines, each of which stays one whatever names are in it."""
    if lines:
        print(*map(shown, lines), sep="\n", file=file, flush=flush)


def track(items: Iterable[T], total: int, title: str, unit: str) -> Generator[T, None, None]:
    """The items as they come, with how many there have been and when the last of `total` is expected.

    `unit`: plural, as in '12 of 40 volumes'. Where nobody watches: lines after
    PLAIN_FIRST_S to PLAIN_EVERY_S.
    """
    pace, title = Pace(0, total, time.monotonic()), shown(title)
    if not is_interactive():
        yield from _plain(items, total, title, unit, pace)
        return
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn(unit),
        TextColumn("{task.fields[left]}"),
    )  # fmt: skip
    with Progress(*columns, console=_console(), transient=True, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task(title, total=total, left="")
        for done, item in enumerate(items, 1):
            yield item
            bar.update(task, completed=done, left=pace.text(done, time.monotonic()))


def _plain(items: Iterable[T], total: int, title: str, unit: str, pace: Pace) -> Generator[T, None, None]:
    last, wait = pace.began, PLAIN_FIRST_S
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - last >= wait:
            last, wait = now, min(2 * wait, PLAIN_EVERY_S)
            with contextlib.suppress(OSError):
                text = f"{title}: {done} of {total} {unit}, {pace.text(done, now)}"
                print(text, file=sys.stderr, flush=True)
