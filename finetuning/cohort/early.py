"""What of a task is refused before torch is imported: wrong words, a checkpoint or a table that is not there.

In: a task's file and the words of a command line. Out: nothing, or a UserError.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from finetuning.cohort.labels import check_table
from utils.cli import AddArguments, parse_words, require_there
from utils.config.load import require_changes
from utils.config.written import read_file, read_words
from utils.errors import ConfigError, UserError


def is_task_file(path: str | Path) -> bool:
    """Whether a file of configs/ names no method: a task's. False where it cannot be read."""
    try:
        return "method" not in read_file(path)
    except ConfigError:
        return False


def wanted_checkpoint(path: str | Path, overrides: Sequence[str]) -> str:
    """What a task's file, or the command line, gives as model.checkpoint; raises ConfigError for null."""
    wanted = OmegaConf.select(OmegaConf.merge(read_file(path), read_words(overrides)), "model.checkpoint")
    if wanted is None:
        raise ConfigError(
            f"{path}: model.checkpoint: expected a checkpoint or a run's folder, found null; add "
            "model.checkpoint=RUN_OR_FILE to the command"
        )
    return str(wanted)


def check_task(config: str, overrides: Sequence[str], is_training: bool = True) -> None:
    """Raise UserError for a task without its checkpoint, and for what check_table refuses."""
    check_table(config, overrides, is_training)
    if is_task_file(config):
        require_there("model.checkpoint", wanted_checkpoint(config, overrides))


def parse_config_or_head(
    command: str, description: str, argv: Sequence[str] | None, add_arguments: AddArguments | None = None
) -> argparse.Namespace:
    """The words of a command line; raises UserError unless one of --config and --head is there."""

    def add_all(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--head", metavar="FILE_OR_RUN", help="in place of --config")
        if add_arguments:
            add_arguments(parser)

    asked = parse_words(command, description, argv, add_all, needs_config=False)
    if bool(asked.config) == bool(asked.head):
        number = "both" if asked.config else "neither"
        raise UserError(f"--config, --head: expected one of them, found {number}")
    require_there("--head", asked.head)
    if asked.config:
        check_task(asked.config, asked.overrides, is_training=False)
    else:
        require_changes("evaluate", asked.overrides)
    return asked
