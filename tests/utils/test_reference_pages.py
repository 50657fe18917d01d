"""docs/reference tells what the code has: every key, every reason, every error, every failure mode."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from data_setup.readers.faults import RejectReason
from data_setup.store import summary
from docs import write_pages
from pretraining.gauges.alarms import HEADLINE
from utils import errors
from utils.config.keys import keys
from utils.config.schema import Config, leaves

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("utils", "models", "data_setup", "pretraining", "finetuning")
PAGE = (ROOT / "docs" / "reference" / "troubleshooting.md").read_text()
# Errors that no person sees: each is caught, and becomes one of the others or a row's status.
INNER = {
    "StopRequested", "IntegrityError", "GaveUp", "ArchiveFault", "OCTReadError", "UnboundedReadError",
    "NoFeaturesError",
}  # fmt: skip


@cache
def trees() -> list[ast.Module]:
    return [ast.parse(path.read_text()) for room in ROOMS for path in sorted((ROOT / room).glob("**/*.py"))]


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
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
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
    assert f"Where the last column is empty: {usual}." in " ".join(PAGE.split())
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
