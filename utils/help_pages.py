"""--help for people: what a command is for, examples, and the keys that matter; its details come last.

In: the docstring of a command's module. Out: a parser whose --help has its parts around argparse's list of
options. Meanings and defaults of keys are those of docs/reference/configuration.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from dataclasses import dataclass
from typing import Any, NoReturn

WIDTH = 100
KEYS = "Keys that matter: "


class Parser(argparse.ArgumentParser):
    """argparse's own, whose errors end with where to go from them."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """argparse's own; `~` in front of a word, or of an option's value, is the home folder."""
        return super().parse_known_args(
            [_at_home(w) for w in (sys.argv[1:] if args is None else args)], namespace
        )

    def error(self, message: str) -> NoReturn:
        """One line, and exit 2."""
        super().error(f"{message}; examples and all options: {self.prog} --help")


def _at_home(word: str) -> str:
    """The word as a shell gives it where it expands `~`, which it does not after `--out=`."""
    option, equals, value = word.partition("=")
    if word.startswith("--") and equals:
        return f"{option}={os.path.expanduser(value)}"
    return os.path.expanduser(word)


class PeopleParser(Parser):
    """A parser of one command, whose --help is made of `text`, the docstring of its module."""

    def __init__(self, command: str, text: str) -> None:
        super().__init__(prog=f"python -m {command}", formatter_class=argparse.RawDescriptionHelpFormatter)
        self.page = help_page(text)

    def format_help(self) -> str:
        page = self.page
        self.description = "\n\nexamples:\n".join(filter(None, (page.purpose, page.examples)))
        details = f"details:\n{page.details}" if page.details else ""
        self.epilog = "\n\n".join(filter(None, (key_lines(page.keys), details)))
        return super().format_help()


@dataclass(frozen=True)
class HelpPage:
    """What a person wants to know first."""

    purpose: str
    examples: str  # indented lines
    keys: tuple[str, ...]  # of the configuration
    details: str


def help_page(text: str) -> HelpPage:
    """A docstring's parts: first paragraph, an indented next, a last that begins with KEYS, the rest."""
    purpose, *parts = text.strip().split("\n\n")
    examples = parts.pop(0) if parts and parts[0].startswith("    ") else ""
    keys = parts.pop().removeprefix(KEYS).split(",") if parts and parts[-1].startswith(KEYS) else []
    return HelpPage(purpose, examples, tuple(name.strip() for name in keys), "\n\n".join(parts))


def key_lines(names: tuple[str, ...]) -> str:
    """The keys with their meanings and defaults, '' for none."""
    if not names:
        return ""
    from utils.config.keys import keys  # here: only --help needs it

    lines = ["keys that matter, as section.key=value (all: docs/reference/configuration.md):"]
    for name in names:
        key = keys()[name]
        words = f"{key.meaning} [{key.type.replace('`', '')}; {key.default.strip('*`')}]"
        indent = " " * 31
        lines += textwrap.wrap(
            words, WIDTH, initial_indent=f"  {name:<28} ", subsequent_indent=indent, break_long_words=False
        )
    return "\n".join(lines)
