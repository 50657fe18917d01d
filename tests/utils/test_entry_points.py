"""The installed commands do what `python -m` does: help, and one line with exit code 2 for a mistake."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from tests.support.pipeline_factory import ROOT
from utils import entry_points

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPTS = {name: target.partition(":") for name, target in PROJECT["scripts"].items()}
CALL = """
import sys
from utils.entry_points import {function}
try:
    {function}()
finally:
    print("with torch" if "torch" in sys.modules else "without torch")
"""


def run(function: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """An installed command, which is a process of its own."""
    command = [sys.executable, "-c", CALL.format(function=function), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_command_explains_itself(name: str) -> None:
    module, _, function = SCRIPTS[name]
    assert module == "utils.entry_points"
    assert name == f"oct-{function}"
    done = run(function, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage: python -m" in done.stdout
    assert "\nexamples:\n    python -m " in done.stdout
    assert "without torch" in done.stdout  # which takes seconds to import


@pytest.mark.parametrize(
    ("function", "arguments"),
    [("report", ["absent"]), ("prepare", ["--config", "absent.yaml"])],
)
def test_a_mistake_is_one_line_and_exit_code_2(function: str, arguments: list[str]) -> None:
    done = run(function, *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "absent" in line


def test_every_entry_function_is_installed() -> None:
    functions = {name for name, value in vars(entry_points).items() if callable(value) and name[0] != "_"}
    assert functions - {"run_module"} == {function for _, _, function in SCRIPTS.values()}
