"""The command line that every stage shares.

In: the words of the command line. Out: a checked configuration and the stage's own arguments; exit codes.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from utils.config.load import load_config
from utils.config.schema import Config
from utils.errors import ConfigError, TransientError, UserError, shown
from utils.help_pages import PeopleParser
from utils.runtime.watchdog import leave

KEYS_PAGE = "docs/reference/configuration.md"
HELP_PAGE = "docs/reference/troubleshooting.md"
OF_THE_COMMAND_LINE = re.compile(r"--[a-z]|[A-Z]+: ")  # an option or a word that --help calls so
AddArguments = Callable[[argparse.ArgumentParser], object]


def parse_words(
    command: str,
    description: str,
    argv: Sequence[str] | None,
    add_arguments: AddArguments | None = None,
    needs_config: bool = True,
    has_checkpoint: bool = True,
) -> argparse.Namespace:
    """`--config FILE [--checkpoint X] [section.key=value ...]` of every stage, not looked at yet: `config`,
    and in `overrides` the changes to it, --checkpoint among them. `description`: what --help says last.
    `has_checkpoint`: false of a command that reads no model.checkpoint.
    """
    parser = PeopleParser(command, description)
    parser.add_argument("--config", required=needs_config, metavar="FILE", help="a YAML file of configs/")
    if has_checkpoint:
        parser.add_argument("--checkpoint", metavar="URL", help="the same as model.checkpoint=URL")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the file")
    if add_arguments:
        add_arguments(parser)
    args = parser.parse_intermixed_args(argv)
    if has_checkpoint and args.checkpoint:
        args.overrides = [*args.overrides, f"model.checkpoint={args.checkpoint}"]
    return args


def parse_cli(
    command: str,
    description: str,
    argv: Sequence[str] | None,
    add_arguments: AddArguments | None = None,
    has_checkpoint: bool = True,
) -> tuple[Config, argparse.Namespace]:
    """The command line that every stage shares, and the configuration that it means."""
    args = parse_words(command, description, argv, add_arguments, has_checkpoint=has_checkpoint)
    return load_config(args.config, args.overrides), args


def number_from(lowest: int) -> Callable[[str], int]:
    """For argparse: a whole number, and none below `lowest`."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"expected {lowest} or more, found {text}")
        return int(text)

    return number


def add_workers(parser: argparse.ArgumentParser) -> None:
    """`--workers N`, by default a process for each processor."""
    parser.add_argument(
        "--workers",
        type=number_from(0),
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes; 0: in this one",
    )


def add_image_arguments(parser: argparse.ArgumentParser) -> None:
    """`--image-encoder` and what is asked of it."""
    parser.add_argument("--image-encoder", metavar="FOLDER", help="a local Hugging Face image encoder")
    parser.add_argument("--image-size", type=int, help="of the square image it is given; default: its own")
    parser.add_argument(
        "--image-blocks", default="", metavar="3,6,9", help="its blocks that are joined; default: the last"
    )


def require_there(
    option: str, *paths: str | None, folder: str = "the folder of a run", of_all: bool = True
) -> None:
    """Raise UserError where a path of this machine leads nowhere, or all, before torch is imported."""
    names = [re.sub(r"(?i)(\.e2e)#\d+$", r"\1", path) for path in paths if path is not None]
    gone = [name for name in names if "://" not in name and not os.path.exists(name)]
    if gone and (of_all or len(gone) == len(names)):
        raise UserError(f"{option} {gone[0]}: expected a file or {folder}, found no such file")


def require_folder(option: str, *places: str | None) -> None:
    """Raise UserError for an output on this machine that can be no folder, or may not be written."""
    for place in places:
        if place == "":
            raise UserError(f"{option}: expected a folder, found ''")
        if place is None or "://" in place:
            continue
        there = Path(os.path.expanduser(place)).absolute()  # of an unknown ~name: as it is
        while not os.path.lexists(there):
            there = there.parent
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            what = "one without permission" if there.is_dir() else f"none at {there}"
            raise UserError(f"{option} {place}: expected a folder that can be written, found {what}")


def require_file(option: str, place: str) -> None:
    """Raise UserError for an output on this machine that is a folder, or lies in none."""
    if "://" not in place and os.path.isdir(place):
        raise UserError(f"{option} {place}: expected a file, found a folder")
    require_folder(option, os.path.dirname(place) or ".")


def hint(error: UserError) -> str:
    """What to do next, for an error whose own words end before that: after a ';', or with a page of docs/."""
    if isinstance(error, ConfigError):
        return f"; every key: {KEYS_PAGE}"
    if ";" in str(error) or "docs/" in str(error):
        return ""
    if isinstance(error, TransientError):
        return "; it may pass by itself: run the same command again"
    if OF_THE_COMMAND_LINE.match(str(error)):
        return "; examples and all options: the same command with --help"
    return f"; what to do: {HELP_PAGE}"


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """A UserError inside becomes one line on stderr and its exit code."""
    try:
        yield
    except UserError as error:
        print(f"error: {shown(error)}{hint(error)}", file=sys.stderr)
        if error.leaves_at_once:
            leave(error.exit_code)
        sys.exit(error.exit_code)


def answer_early(
    command: str,
    description: str,
    parse: Callable[..., Any] = parse_cli,
    check: Callable[[str, Sequence[str]], None] | None = None,
) -> None:
    """Answer --help, refuse a wrong command line, or say what is begun, before a module imports what takes
    seconds. `parse`: parse_words where the file without more is not whole. `check`: of the file and its
    overrides, what more can be refused so early.
    """
    with errors_in_one_line():
        parsed = parse(command, description, None)
        args = parsed[-1] if isinstance(parsed, tuple) else parsed
        if check:
            check(args.config, args.overrides)
    announce(f"{command}: {args.config or args.head}; the libraries load, which takes seconds")


def announce(text: str) -> None:
    """What a command is about to do, a line on stdout; of several processes only the first says it."""
    if os.environ.get("RANK", "0") == "0":
        print(shown(text), flush=True)


def run_cli(main: Callable[[], int | None]) -> None:
    """Run a command's main(): a UserError becomes one line on stderr and its exit code.

    What the terminal's encoding lacks, in the name of a file say, is written as an escape.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with errors_in_one_line():
        sys.exit(main() or 0)
