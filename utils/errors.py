"""The errors that end a command with one line instead of a traceback.

`UserError` is their root. A command ends with exit code 2 on any of them (utils.cli).
"""

from __future__ import annotations

EXIT_USER_ERROR = 2


class UserError(RuntimeError):
    """The user's mistake, in one line: what, where, what was expected, what was found."""


class ConfigError(UserError):
    """A configuration that cannot be run; the line names the key."""
