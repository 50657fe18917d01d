"""--help and docs/reference tell what the code has: examples that would run, each key, reason and error."""

from __future__ import annotations

import ast
import re
import runpy
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest

from data_setup.readers.faults import RejectReason
from data_setup.store import summary
from docs import write_pages
from pretraining.gauges.alarms import HEADLINE
from tests.support.task_configs import below
from tests.test_readme import ROOMS, configured_commands, missing_modules
from tests.test_structure import COMMANDS
from utils import errors
from utils.cli import parse_words
from utils.config.keys import keys
from utils.config.schema import Config, leaves
from utils.help_pages import HelpPage, PeopleParser, help_page, key_lines

ROOT = Path(__file__).resolve().parents[2]


def help_pages() -> dict[str, HelpPage]:
    """Of every command that has a parser of ours: what its module's docstring gives."""
    pages = {}
    for room in ROOMS:
        for path in (ROOT / room).glob("**/*.py"):
            text = path.read_text()
            named = re.findall(
                r'(?:parse_cli|parse_words|PeopleParser|answer_help|parse_config_or_head)\(\s*"([\w.]+)"',
                text,
            )
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
    measuring = {"accelerator", "evidence", "phantom_difficulty", "phantom_truth", "same_eye", "tpu_fit"}
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
    "docs.draw.architecture", "docs.write_pages",
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


# --- docs/reference ---

PRODUCT = ("utils", "models", "data_setup", "pretraining", "finetuning")
TROUBLES = (ROOT / "docs" / "reference" / "troubleshooting.md").read_text()
# Errors that no person sees: each is caught, and becomes one of the others or a row's status.
INNER = {
    "StopRequested", "IntegrityError", "GaveUp", "ArchiveFault", "OCTReadError", "UnboundedReadError",
    "NoFeaturesError",
}  # fmt: skip


@cache
def trees() -> list[ast.Module]:
    return [ast.parse(path.read_text()) for room in PRODUCT for path in sorted((ROOT / room).glob("**/*.py"))]


def error_classes() -> set[str]:
    """Every error class of ours, by name."""
    classes = (node for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    bases = {node.name: {base.id for base in node.bases if isinstance(base, ast.Name)} for node in classes}
    ours = {"RuntimeError", "Exception"}
    while more := {name for name, of in bases.items() if of & ours} - ours:
        ours |= more
    return ours - {"RuntimeError", "Exception"}


@cache
def everything() -> str:
    """Every text of the code as it is shown, one a line, with {} in the place of a value."""
    return "\n".join(" ".join(text.split()) for text in texts())


def texts() -> Iterator[str]:
    for tree in trees():
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def table(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    section = TROUBLES.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


def test_the_configuration_page_is_the_schema() -> None:
    """`python -m docs.write_pages` brings it up to date."""
    assert write_pages.CONFIGURATION.read_text() == write_pages.configuration()


def test_the_recipes_page_shows_the_table() -> None:
    assert write_pages.recipes() in write_pages.OF_RECIPES.read_text()


def test_every_key_is_on_the_page_and_means_something() -> None:
    assert {name for name, _, _ in leaves(Config())} <= set(keys())
    assert {name for name, key in keys().items() if not key.meaning} == set()


def test_a_key_is_told_in_words() -> None:
    lr, scale, blocks = (
        keys()[k] for k in ("optim.base_lr", "method.mask_blocks[].scale", "method.mask_blocks")
    )
    assert (lr.type, lr.default, lr.may_change) == ("float, a number above 0", "*required*", False)
    assert scale.meaning.startswith("share of the plane")
    assert blocks.type == "list of sections or null"
    every = keys()["train.log_every_steps"]
    assert (every.unit, every.default, every.may_change) == ("updates", "`10`", True)
    assert keys()["spatial.image_size"].type == "3 x int"
    assert keys()["train.ckpt_dir"].default == "`${run.dir}/checkpoints`"
    assert keys()["wandb.mode"].type == "one of `online`, `offline`, `disabled`"
    assert keys()["method.control"].type.startswith("one of `penalty_only`, `mismatched_targets`, ")


def test_every_reason_for_a_reject_is_on_the_page() -> None:
    usual = "export or copy the file again, or take its row out of the manifest"
    assert f"Where the last column is empty: {usual}." in " ".join(TROUBLES.split())
    rows = {cells[0].strip("`"): (*cells, usual)[2] for cells in table("Files that are not used")}
    assert set(rows) == {*RejectReason, *summary._NEXT_STEPS}
    assert rows == {reason: summary.next_step(reason) for reason in rows}


def test_every_error_is_on_the_page_and_is_worded_as_there() -> None:
    rows = table("Errors in one line")
    assert {cells[3].strip("`") for cells in rows} == error_classes() - INNER
    absent = [
        span for cells in rows for span in re.findall("`([^`]+)`", cells[0]) if span not in everything()
    ]
    assert absent == []


def test_every_exit_code_is_on_the_page() -> None:
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert {int(cells[0]) for cells in table("Exit codes")} == codes


def test_every_alarm_is_on_the_page() -> None:
    alarms = dict(cells[0].replace("`", "").split(": ") for cells in table("Alarms of a training"))
    assert alarms == HEADLINE


@pytest.mark.parametrize("cells", table("Failures that nobody saw"), ids=lambda cells: cells[0])
def test_every_failure_has_its_test_and_its_line(cells: list[str]) -> None:
    path, name = cells[2].strip("`").split("::")
    functions = [
        node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    assert name in functions
    for span in re.findall("`([^`]+)`", cells[1]):
        assert span in everything()


def test_the_failures_are_all_there() -> None:
    """DESIGN counts thirteen; its row of silent defaults is three here."""
    assert len(table("Failures that nobody saw")) == 15
