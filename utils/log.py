"""Messages of a program: on stderr, in log.txt, and files to which lines are appended.

In: what `logging` is given. Out: the console, for people where it is a terminal; log.txt once `log_to_file`
names it. Only rank 0 writes.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import sys
from pathlib import Path, PurePath

from utils.errors import ConfigError, UserError, shown
from utils.terminal import is_interactive

log = logging.getLogger(__name__)
FORM = "%(asctime)s %(levelname)s %(message)s"


class LineFile:
    """Appends lines to a file; lines that a full disk refuses are kept and written with a later line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size
        self._pending: list[str] = []

    def append(self, line: str) -> None:
        """Add a line; a warning when it cannot be written yet."""
        self._pending.append(line + "\n")
        data = memoryview("".join(self._pending).encode())
        try:
            size = self._size + len(data)
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self._file.truncate(self._size)  # no half lines
            if len(self._pending) == 1:
                log.warning("%s: not written, training goes on: %s", self.path, error)
            return
        self._pending, self._size = [], size

    def close(self) -> None:
        """Close the file; log how many lines could not be written."""
        if self._pending:
            log.error("%s: the last %d lines could not be written", self.path, len(self._pending))
        self._file.close()


def setup_logging(rank: int = 0) -> None:
    """Show messages on stderr, and keep them until `log_to_file` names their file.

    Processes after the first show only errors.
    """
    logging.setLogRecordFactory(_Record)
    if rank > 0:
        form = f"%(asctime)s %(levelname)s rank {rank}: %(message)s"
        logging.basicConfig(level=logging.ERROR, format=form, handlers=[_Console()], force=True)
        return
    early = logging.handlers.MemoryHandler(
        capacity=10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False
    )
    console = _Console()
    if is_interactive():
        console.setFormatter(_ForPeople(datefmt="%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, format=FORM, handlers=[console, early], force=True)
    for noisy in ("fsspec", "gcsfs", "aiobotocore", "urllib3", "matplotlib", "PIL"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # W&B's own telemetry: that a server refuses it is no news of a run, and W&B has had its warning
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)


class _Record(logging.LogRecord):
    """A message whose texts may be a stranger's file names: they forge no line."""

    def getMessage(self) -> str:
        args = self.args if isinstance(self.args, tuple) else ()
        texts = [shown(arg) if isinstance(arg, str | PurePath | BaseException) else arg for arg in args]
        return str(self.msg) % tuple(texts) if texts else super().getMessage()


class _LogFile(logging.FileHandler):
    """log.txt; when the disk is full, messages appear only on the console."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def log_to_file(path: Path) -> None:
    """Append all messages so far, and all later ones, to a file."""
    file = _LogFile(path)
    file.setFormatter(logging.Formatter(FORM))
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, logging.handlers.MemoryHandler):
            handler.setTarget(file)
            handler.flush()
            root.removeHandler(handler)
            handler.close()
    root.addHandler(file)


def log_failure(error: BaseException) -> None:
    """Write why the run ends to log.txt; the console gets it from whoever catches the error."""
    is_explained = isinstance(error, UserError | ConfigError)
    log.error("stopped: %s", error, exc_info=None if is_explained else error, extra={"is_shown": False})


class _Console(logging.Handler):
    """Prints messages on stderr, above the live line where there is one, which takes the place of sys.stderr;
    a console that is gone or full does not stop the run.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "is_shown", True):
            with contextlib.suppress(OSError):
                print(self.format(record), file=sys.stderr, flush=True)


class _ForPeople(logging.Formatter):
    """The time of day, and the level only where it asks for attention."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname} " if record.levelno > logging.INFO else ""
        return f"{record.asctime} {level}{record.message}"

    def usesTime(self) -> bool:
        return True
