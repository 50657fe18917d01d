"""README and docs/ tell what exists: commands, configurations, targets, rooms, links, pictures."""

from __future__ import annotations

import re
import runpy
import shlex
import warnings
from argparse import ArgumentParser
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from string import Template

import pytest

from tests.support.task_configs import below
from utils.config.load import load_config

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("data_setup", "models", "pretraining", "finetuning", "utils", "benchmarks")
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("**/*.md"))]
}
README = PAGES["README.md"]
MAKEFILE = (ROOT / "Makefile").read_text()
MAX_PICTURE_BYTES = 300_000
MAX_INTENTS = 15

FENCE = re.compile(r"^( *)```.*\n((?:.*\n)*?)\1```$", re.MULTILINE)
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")
# a line that begins with a command; benchmarks import what they measure before they read words
COMMAND = re.compile(
    r" *(?:[A-Z_]+=\S+ )*(?:until )?(?:python|torchrun .*) -m "
    r"((?:data_setup|models|pretraining|finetuning|utils)(?:\.\w+)+)(?= |$)"
)
LATE = re.compile(r"-m finetuning\.evaluate ")  # it imports torch first
DEMO = "docs/start/demo.md"
MAX_LINES, MAX_DECIMALS, FIRST_COMMAND = 120, 10, 20  # of README.md
MAX_PAGES, MAX_WORDS = 25, 30_000  # of docs/
MAX_CHANGES = 150  # lines of CHANGELOG.md
OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)+=.*")


def blocks(text: str) -> list[str]:
    """The code blocks of a page, fenced or indented by four spaces; lines joined where one goes on."""
    fenced = [match[2] for match in FENCE.finditer(text)]
    indented = re.findall(r"(?:^ {4,}.*\n)+", FENCE.sub("", text), re.MULTILINE)
    return [re.sub(r"\\\n\s*", "", block) for block in [*fenced, *indented]]


def prose(text: str) -> str:
    return FENCE.sub("", text)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)}


def dead_links(page: str, text: str) -> list[str]:
    """Relative links of a page whose file or anchor is not there."""
    dead = []
    for _, address in LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", address):
            continue
        path, _, anchor = address.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            dead.append(address)
    return dead


def missing_modules(text: str) -> list[str]:
    """Modules of `python -m X` and `torchrun ... -m X` that cannot be run."""
    missing = []
    for name in re.findall(r"(?:python|torchrun[^`\n]*?)\s+-m\s+(\w+(?:\.\w+)*)", text):
        path = ROOT / name.replace(".", "/")
        is_ours = path.parent.is_dir() and name.partition(".")[0] in (*ROOMS, "tests")
        if is_ours and not (path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()):
            missing.append(name)
        if not is_ours and find_spec(name.partition(".")[0]) is None:
            missing.append(name)
    return missing


def configured_commands(text: str) -> list[tuple[str, list[str]]]:
    """(configuration, overrides) of the commands in a page's code blocks; of a loop, the first round's."""
    commands, loops = [], dict(re.findall(r"^ *for (\w+) in (\S+)", text, re.MULTILINE))
    for line in Template("".join(blocks(text))).safe_substitute(loops).splitlines():
        if match := re.search(r"\bconfigs/(?!sweep_)\w+\.yaml", line):  # a sweep is no configuration
            words = shlex.split(line[match.end() :].partition(";")[0], comments=True)
            commands.append((match[0], [word for word in words if OVERRIDE.fullmatch(word)]))
    return commands


@pytest.mark.parametrize("page", PAGES)
def test_every_link_is_alive(page: str) -> None:
    assert dead_links(page, PAGES[page]) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_command_names_a_module_that_can_be_run(page: str) -> None:
    assert missing_modules(PAGES[page]) == []


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if configured_commands(text)])
def test_every_configuration_of_a_command_loads_with_its_overrides(page: str) -> None:
    for path, overrides in configured_commands(PAGES[page]):
        load_config(ROOT / path, overrides, below(ROOT / path))


class Accepted(BaseException):
    """A parser took its words."""


def accepting(real: Callable[..., object]) -> Callable[..., object]:
    """A method of a parser after which nothing is run."""

    def parse(*words: object, **options: object) -> object:
        real(*words, **options)
        raise Accepted

    return parse


def refused_commands(text: str) -> list[str]:
    """Commands of a page whose own parser does not take their words."""
    refused = []
    for line in "".join(blocks(text)).splitlines():
        match = COMMAND.match(line)
        if match is None or LATE.search(line):
            continue
        words = shlex.split(line[match.end() :].partition(";")[0], comments=True)
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a module that was imported before
            patch.setattr("sys.argv", [match[1], *words])
            for name in ("parse_args", "parse_intermixed_args"):
                patch.setattr(ArgumentParser, name, accepting(getattr(ArgumentParser, name)))
            try:
                runpy.run_module(match[1], run_name="__main__", alter_sys=True)
            except Accepted:
                continue
            except SystemExit:
                refused.append(line.strip())
    return refused


def test_every_command_of_a_page_is_accepted_by_its_own_parser() -> None:
    """Those of the demo's page are run by `make demo`."""
    refused = [line for page in PAGES if page != DEMO for line in refused_commands(PAGES[page])]
    assert refused == []
    wrong = "python -m finetuning.embed --config configs/smoke_test.yaml"
    assert refused_commands(f"```\n{wrong}\n```\n") == [wrong]


def test_the_first_page_shows_lines_of_the_demo() -> None:
    begin, end = (f"<!-- the demo's output {word} -->" for word in ("begins", "ends"))
    lines = PAGES[DEMO].partition(begin)[2].partition(end)[0].splitlines()
    shown = [block for block in blocks(README) if "report.html" in block]
    assert shown
    assert set(shown[0].splitlines()) <= set(lines)


def test_the_first_page_is_short_and_begins_with_a_command() -> None:
    lines = README.splitlines()
    assert len(lines) <= MAX_LINES
    assert next(n for n, line in enumerate(lines, 1) if line.startswith("```")) < FIRST_COMMAND
    before = README.split("## Results")[0]
    assert len(re.findall(r"\d\.\d", before)) <= MAX_DECIMALS


def test_the_documents_are_few_and_short() -> None:
    pages = {page: text for page, text in PAGES.items() if page.startswith("docs/")}
    assert len(pages) <= MAX_PAGES
    assert sum(len(text.split()) for text in pages.values()) <= MAX_WORDS
    assert len(PAGES["CHANGELOG.md"].splitlines()) <= MAX_CHANGES


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_exists(page: str) -> None:
    lines = re.findall(r"^make (.+)$", "".join(blocks(PAGES[page])), re.MULTILINE)
    spans = re.findall(r"`make\s+([a-z-]+)`", PAGES[page])
    targets = {target for line in [*lines, *spans] for target in line.split()}
    assert {t for t in targets if not re.search(rf"^{re.escape(t)}:", MAKEFILE, re.MULTILINE)} == set()


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_every_file_that_a_page_names_exists(page: str) -> None:
    paths = re.findall(r"\b(?:configs|tests|" + "|".join(ROOMS) + r")/[\w/]+\.(?:py|sh|yaml)", PAGES[page])
    assert {path for path in paths if not (ROOT / path).is_file()} == set()


def test_every_picture_is_small_and_shown() -> None:
    shown = {
        ((ROOT / page).parent / address).resolve()
        for page, text in PAGES.items()
        for mark, address in LINK.findall(prose(text))
        if mark
    }
    pictures = set((ROOT / "docs" / "pictures").iterdir())
    assert shown == pictures
    assert {path.name for path in pictures if path.stat().st_size >= MAX_PICTURE_BYTES} == set()


def test_the_commands_without_make_are_those_of_the_demo() -> None:
    """`make demo` runs in CI; so the other spelling must be the same commands."""
    values = dict(re.findall(r"^(\w+) :?\??= *(.*)$", MAKEFILE, re.MULTILINE))
    recipe = MAKEFILE.split("\ndemo:")[1].split("\n\n")[0]
    for _ in range(2):
        recipe = re.sub(r"\$\((\w+)\)", lambda m: values.get(m[1], m[0]), recipe)
    demo = [c.rstrip(") ") for c in re.findall(r"-m [^|>\n]*", recipe)]  # what is printed may go into a file
    block = next(b for b in blocks(PAGES[DEMO]) if b.startswith("pip install"))
    assert [line.removeprefix("python ") for line in block.splitlines()[1:]] == demo


def test_the_tree_lists_every_room_on_a_line() -> None:
    tree = README.split("## The tree")[1].split("\n## ")[0]
    lines = re.findall(r"^ *\* \[\w+/\]\(([\w/]+)\): ", tree, re.MULTILINE)
    rooms = {
        str(sign.parent.relative_to(ROOT)) for room in ROOMS for sign in (ROOT / room).glob("**/__init__.py")
    }
    assert rooms - set(lines) == set()
    assert len(lines) == len(set(lines))


def test_the_index_of_docs_has_fifteen_intents_and_every_page() -> None:
    begin, listed = PAGES["docs/README.md"].split("## All pages")
    assert len(re.findall(r"^\* ", begin.split("## I want to")[1], re.MULTILINE)) <= MAX_INTENTS
    pages = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")} - {"README.md"}
    assert {address for _, address in LINK.findall(listed)} - {"quickstart.ipynb"} == pages


def test_dead_ends_are_seen() -> None:
    """What the searches above must find."""
    text = (
        "[a](docs/README.md) [b](absent.md) [c](README.md#nowhere) [d](#results) ![e](no.png)\n## Results\n"
    )
    assert dead_links("README.md", text) == ["absent.md", "README.md#nowhere", "no.png"]
    text = (
        "`python -m data_setup.prepare` `python -m data_setup.absent` `torchrun --n=2 -m pretraining.nothing`"
    )
    assert missing_modules(text + " `python -m pytest -m soak`") == [
        "data_setup.absent",
        "pretraining.nothing",
    ]
    text = "```\nuntil python -m x --config configs/smoke_test.yaml \\\n    seed.a=1 --flag b=2; do\n```\n"
    assert configured_commands(text) == [("configs/smoke_test.yaml", ["seed.a=1"])]
    assert slug("Gauges, and `which` checkpoint is good") == "gauges-and-which-checkpoint-is-good"
