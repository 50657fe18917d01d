"""English as a colleague speaks it: words and forms that do not come back, in all that a user reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from utils.config.keys import keys

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("utils", "models", "data_setup", "pretraining", "finetuning", "benchmarks")

FORMS = {  # what does not come back -> what to write
    r"\b(?:of|a) (?:its|their|your|our|his|my|one's) own\b": "separate, another, or nothing",
    r"\balone\b": "only",
    r"\bsuch an?\b": "such a: this, or name it",
    r"\b(?:stands|stood)\b(?! for)": "is",
    r"\b(?:has|have|had) [-+]?0?\.\d": "scores, is",
    r"\bof before\b": "earlier",
    r"\b[Ww]hat is not\b": "a sentence with a subject",
    r"\bmeasured small\b|\bsmall it\b": "at a small scale",
    r"\bneed not\b": "does not need to",
    r"\banew\b": "again",
    r"\bin silence\b": "silently",
    r"\btold\b": "known, given, named",
    r"\bof today\b": "today's, current",
    r"\bto (?:its|their) end\b": "completely",
    r"\b(?:said|chosen|told|fed) otherwise\b": "differently",
    r"\bfor want of\b": "for lack of",
    r"\byardsticks?\b": "baseline",
    r"\bhinders?\b": "prevent",
    r"\bthe lines? say\b": "the last lines say whether",
    r"\bis no (?:volume|DICOM|text|number|quality|sign|retina|measure|claim|whole)\b": "is not a ...",
}


def flat(text: str) -> str:
    return " ".join(text.split())


def prose(page: Path) -> str:
    """A page without its code blocks and code spans."""
    text = re.sub(r"^( *)```.*\n(?:.*\n)*?\1```$", "", page.read_text(), flags=re.MULTILINE)
    return flat(re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text))


def comments(path: Path) -> str:
    """The comments of a configuration."""
    return flat("\n".join(line.partition("#")[2] for line in path.read_text().splitlines()))


def help_texts(path: Path) -> Iterator[str]:
    """What `--help` shows: a command's docstring, and the words of its options."""
    tree = ast.parse(path.read_text())
    if any(isinstance(node, ast.Name) and node.id in ("Parser", "PeopleParser") for node in ast.walk(tree)):
        yield ast.get_docstring(tree) or ""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ("help", "description", "epilog"):
            for part in ast.walk(node.value):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def messages(path: Path) -> Iterator[str]:
    """What errors, logs and tables say: texts of two words or more that are no docstring."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value if " " in node.value.strip() else ""


def everything() -> dict[str, str]:
    """Where -> what a user reads there."""
    pages = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("**/*.md"))]
    texts = {str(page.relative_to(ROOT)): prose(page) for page in pages}
    texts |= {f"configs/{path.name}": comments(path) for path in sorted((ROOT / "configs").glob("*.yaml"))}
    for room in ROOMS:
        for path in sorted((ROOT / room).glob("**/*.py")):
            texts[str(path.relative_to(ROOT))] = flat(" | ".join([*help_texts(path), *messages(path)]))
    texts["meanings of keys"] = flat(" ".join(key.meaning for key in keys().values()))
    return texts


def found(text: str) -> list[str]:
    return [match[0] for form in FORMS for match in re.finditer(form, text)]


def test_no_form_comes_back() -> None:
    wrong = {where: found(text) for where, text in everything().items()}
    assert {where: forms for where, forms in wrong.items() if forms} == {}, FORMS


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_seen(form: str) -> None:
    """Each has an example, and the list is long enough."""
    examples = (
        "a store of its own; alone; such a thing; it stands there; it has .87; files of before; what is not "
        "read; measured small; need not; made anew; in silence; told; those of today; to its end; chosen "
        "otherwise; for want of memory; a yardstick; it hinders; the lines say; it is no volume"
    )
    assert re.search(form, examples)
    assert len(FORMS) >= 20
