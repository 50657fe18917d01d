"""The errors that end a command with one line instead of a traceback, and the exit codes of all commands.

`UserError` is their root. Its classes say with which code a command ends (utils.cli). A restart rule needs no
more than the code: stop at EXIT_FINISHED and EXIT_USER_ERROR, start again at any other.
"""

from __future__ import annotations

EXIT_FINISHED = 0
EXIT_FAILURE = 1  # a traceback: a fault of the program
EXIT_USER_ERROR = 2  # the configuration, the data, a NaN or a failed self-check: a person has to look
EXIT_TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: it may pass by itself
EXIT_INTERRUPTED = 130  # a second Ctrl-C, as shells count it
EXIT_STOPPED = 76  # training was told to stop before its end; neither shells nor Python use this code


def shown(text: object) -> str:
    """A text from outside for a message: what cannot be printed, or moves a cursor, as its escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


class UserError(RuntimeError):
    """The user's mistake, in one line: what, where, what was expected, what was found."""

    exit_code = EXIT_USER_ERROR
    leaves_at_once = False  # the process must not wait for its threads and devices at its end


class TransientError(UserError):
    """What is nobody's mistake and may pass by itself, in one line: the same command again goes on."""

    exit_code = EXIT_TRY_AGAIN


class ConfigError(UserError):
    """A configuration that cannot be run; the line names the key."""
