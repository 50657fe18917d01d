"""The README tells what exists: its commands, its tree, and their limits of length."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from utils.config.load import load_config

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
BLOCKS = re.findall(r"```\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    line.strip()
    for block in BLOCKS
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith(("make ", "python ", "pip "))
]


def test_it_is_short_and_finished() -> None:
    assert len(README.splitlines()) <= 150
    assert re.findall(r"\b(?:DEMO_OUTPUT|RESULTS)\b|\bTREE_\w*", README) == []  # where numbers go


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_make_targets_exist(command: str) -> None:
    for target in command.split()[1:]:
        assert re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE), target


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python ")])
def test_commands_name_modules_and_configurations_that_load(command: str) -> None:
    words = shlex.split(command)
    assert words[1] == "-m"
    module = ROOT / words[2].replace(".", "/")
    assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()
    if "--config" in words:
        load_config(ROOT / words[words.index("--config") + 1], [w for w in words if "=" in w])


def test_the_commands_without_make_are_those_of_the_demo() -> None:
    """`make demo` runs in CI; so the README's other spelling must be the same commands."""
    values = dict(re.findall(r"^(\w+) :?\??= *(.*)$", MAKEFILE, re.MULTILINE))
    recipe = MAKEFILE.split("\ndemo:")[1].split("\n\n")[0]
    for _ in range(2):
        recipe = re.sub(r"\$\((\w+)\)", lambda m: values.get(m[1], m[0]), recipe)
    demo = [c.rstrip(")") for c in re.findall(r"-m [^|\n]*", recipe)]
    block = next(b for b in BLOCKS if b.startswith("pip install"))
    assert [line.removeprefix("python ") for line in block.splitlines()[1:]] == demo


def test_the_tree_lists_every_room() -> None:
    tree = README.split("## The tree")[1]
    for folder in ("data_setup", "models", "pretraining", "finetuning", "utils", "benchmarks"):
        for sign in (ROOT / folder).glob("**/__init__.py"):
            room = sign.parent
            assert re.search(rf"^( *|.* ){room.name}/", tree, re.MULTILINE), (
                f"{room} is not in the README's tree"
            )
