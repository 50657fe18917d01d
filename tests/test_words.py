"""English as a colleague speaks it: words and forms that do not come back, in all that is read: pages,
configurations, docstrings, messages.
"""

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


def docstrings(path: Path) -> Iterator[str]:
    """All docstrings of a file, without the names of modules in them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield re.sub(r"\w+(\.\w+)+", " ", ast.get_docstring(node) or "")


def help_texts(path: Path) -> Iterator[str]:
    """The words of a command's options."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ("help", "description", "epilog"):
            for part in ast.walk(node.value):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def messages(path: Path) -> Iterator[str]:
    """What errors, logs and tables say: texts of two words or more that are no docstring."""
    tree = ast.parse(path.read_text())
    others = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in others:
            yield node.value if " " in node.value.strip() else ""


def everything() -> dict[str, str]:
    """Where -> what is read there."""
    pages = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("**/*.md"))]
    texts = {str(page.relative_to(ROOT)): prose(page) for page in pages}
    lists = [*ROOT.glob("requirements*.txt"), ROOT / "Makefile", ROOT / "docs/guides/train.sbatch"]
    files = [*sorted((ROOT / "configs").glob("*.yaml")), *lists]
    texts |= {str(path.relative_to(ROOT)): comments(path) for path in files}
    for room in ROOMS:
        for path in sorted((ROOT / room).glob("**/*.py")):
            parts = [*docstrings(path), *help_texts(path), *messages(path)]
            texts[str(path.relative_to(ROOT))] = flat(" | ".join(parts))
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
