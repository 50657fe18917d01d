"""--help: every command of ours says what it is for, with examples that would run and keys that exist."""

from __future__ import annotations

import ast
import re
import runpy
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.task_configs import below
from tests.test_readme import ROOMS, configured_commands, missing_modules
from tests.test_structure import COMMANDS
from utils.cli import parse_words
from utils.config.keys import keys
from utils.help_pages import HelpPage, PeopleParser, help_page, key_lines

ROOT = Path(__file__).resolve().parents[2]


def help_pages() -> dict[str, HelpPage]:
    """Of every command that has a parser of ours: what its module's docstring gives."""
    pages = {}
    for room in ROOMS:
        for path in (ROOT / room).glob("**/*.py"):
            text = path.read_text()
            named = re.findall(r'(?:parse_cli|parse_words|PeopleParser|answer_help)\(\s*"([\w.]+)"', text)
            page = help_page(ast.get_docstring(ast.parse(text)) or "") if named else None
            if page and page.examples:
                pages |= dict.fromkeys(named, page)
    return pages


PAGES = help_pages()


@pytest.mark.parametrize("command", PAGES)
def test_examples_are_of_the_command_and_would_run(command: str) -> None:
    examples = textwrap.dedent(PAGES[command].examples).splitlines()
    for example in (line for line in examples if not line.startswith(" ")):  # which goes on
        assert f"-m {command} " in f"{example} "
    text = "```\n" + "\n".join(examples) + "\n```\n"
    assert missing_modules(text) == []
    for path, overrides in configured_commands(text):
        from utils.config.load import load_config

        load_config(ROOT / path, overrides, below(ROOT / path))


def test_keys_that_matter_exist() -> None:
    assert {name for page in PAGES.values() for name in page.keys} <= set(keys())


def test_the_pages_of_docstrings_are_found() -> None:
    own = {"data_setup.export", "data_setup.index", "utils.doctor"}  # have their own --help
    measuring = {"accelerator", "evidence", "phantom_difficulty", "phantom_truth", "tpu_fit"}
    assert set(PAGES) == COMMANDS - own | {f"benchmarks.{name}" for name in measuring}
    assert "train.max_steps" in PAGES["pretraining.train"].keys
    assert "Keys that matter" not in PAGES["pretraining.train"].details


def commands() -> list[str]:
    """Every module and file that a person can run, and the second processes of commands."""
    files = [path for room in (*ROOMS, "docs") for path in (ROOT / room).glob("**/*.py")]
    guarded = [path for path in files if re.search(r"^if __name__ == .__main__.:", path.read_text(), re.M)]
    names = [str(p.relative_to(ROOT).with_suffix("")).replace("/", ".") for p in guarded]
    return sorted(name.removesuffix(".__main__") for name in names)


def main_of(command: str) -> Callable[[], object]:
    """What `python -m command` runs."""
    return partial(runpy.run_module, command, alter_sys=True, run_name="__main__")


@pytest.mark.parametrize("command", commands())
@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")
def test_every_command_has_help_with_an_example_and_says_where_it_is(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And does nothing else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    with pytest.raises(SystemExit) as end:
        main_of(command)()
    assert end.value.code == 0
    text = capsys.readouterr().out
    called = f"python -m {command}"
    assert text.startswith(f"usage: {called}")
    assert re.search(rf"{re.escape(called)}\b", text.partition("\n\n")[2]), "no example"
    if command != "benchmarks.tpu_fit.trace":  # for tpu_fit to start, where torch_xla is
        monkeypatch.setattr(sys, "argv", [command, "--no-such-option"])
        with pytest.raises(SystemExit) as end:
            main_of(command)()
        assert end.value.code == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert re.search(rf"^{re.escape(called)}.*: error: .*{re.escape(called)}.* --help$", last)
    assert not any(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")
def test_nothing_is_no_number_of_minutes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *words = ["benchmarks.accelerator", "--out", "x", "--minutes", "0"]
    monkeypatch.setattr(sys, "argv", [command, *words])
    with pytest.raises(SystemExit) as end:
        main_of(command)()
    assert end.value.code == 2
    assert "expected 1 or more, found 0; examples" in capsys.readouterr().err.splitlines()[-1]


ERRORS_CANNOT_BE_THE_USERS = {  # they read no file of a user, or start where nothing is installed
    "docs.draw_architecture", "docs.write_pages",
    "benchmarks.tpu_fit.compile", "utils.doctor",
}  # fmt: skip


def test_every_command_ends_with_one_line_where_the_user_is_mistaken() -> None:
    for command in set(commands()) - ERRORS_CANNOT_BE_THE_USERS:
        path = ROOT / command.replace(".", "/")
        text = (
            path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__main__.py"
        ).read_text()
        assert re.search(
            r"\b(run_cli|errors_in_one_line)\(", text.partition('if __name__ == "__main__":')[2]
        ), command


TEXT = """Train.

    python -m pretraining.train --config configs/smoke_test.yaml

The details.

More of them.

Keys that matter: train.max_steps,
run.dir
"""


def test_help_begins_with_the_purpose_and_ends_with_the_details(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_words("pretraining.train", TEXT, ["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    parts = [
        "Train.",
        "\nexamples:\n    python -m pretraining.train --config configs/smoke_test.yaml\n",
        "\noptions:\n",
        "keys that matter",
        "  train.max_steps              length of the run in updates",
        "details:\nThe details.\n\nMore of them.\n",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_a_docstring_of_one_paragraph_is_the_purpose() -> None:
    assert "Only these words." in PeopleParser("some.command", "Only these words.").format_help()


def test_a_key_has_its_meaning_type_and_default() -> None:
    (_, *lines) = key_lines(("train.ckpt_dir",)).splitlines()
    words = " ".join(" ".join(lines).split())
    assert words == "train.ckpt_dir null: no checkpoints [text or null; ${run.dir}/checkpoints]"
    assert key_lines(()) == ""
