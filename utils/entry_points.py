"""The installed commands: `oct-prepare` is `python -m data_setup.prepare`, and so on ([project.scripts]).

A room's command is imported by name when it is called, because utils imports no other room.
"""

from __future__ import annotations

from importlib import import_module

from utils.cli import run_cli


def _run(module: str) -> None:
    """Run the main() of a module, or of the cli.py of a package."""
    command = import_module(module)
    if hasattr(command, "__path__"):
        command = import_module(f"{module}.cli")
    run_cli(command.main)


def check() -> None:
    _run("data_setup.check")


def evaluate() -> None:
    _run("finetuning.evaluate")


def expand() -> None:
    _run("data_setup.expand")


def phantom() -> None:
    _run("data_setup.phantom")


def prepare() -> None:
    _run("data_setup.prepare")


def pretrain() -> None:
    _run("pretraining.train")


def report() -> None:
    _run("utils.report")


def weights() -> None:
    _run("models.weights")
