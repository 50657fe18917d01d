"""The installed commands do what `python -m` does: help, and one line with exit code 2 for a mistake."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from utils import entry_points

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
SCRIPTS = {name: target.partition(":") for name, target in PROJECT["scripts"].items()}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_command_explains_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, _, function = SCRIPTS[name]
    assert module == "utils.entry_points"
    assert name == f"oct-{function}"
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ending:
        getattr(entry_points, function)()
    assert ending.value.code == 0
    assert "usage: python -m" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("report", ["--run", "absent"]), ("prepare", ["--config", "absent.yaml"])],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"oct-{name}", *arguments])
    with pytest.raises(SystemExit) as ending:
        getattr(entry_points, name)()
    assert ending.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "absent" in line


def test_every_entry_function_is_installed() -> None:
    functions = {name for name, value in vars(entry_points).items() if callable(value) and name[0] != "_"}
    assert functions - {"import_module", "run_cli"} == {function for _, _, function in SCRIPTS.values()}
