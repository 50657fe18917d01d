"""Whether a test runs a command: by its source, for it may be long.

In: a file, the name of a test, the module of a command. A test runs the command if it, or what it uses of
tests/ (functions, fixtures, constants, one from the other), calls the `main` of that very module or has the
words `-m MODULE`. To call any other function of the module is no run of the command.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

from tests.support.pipeline_factory import ROOT

Origins = dict[str, str]  # name in a file -> 'package.module' or 'package.module.name'


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def file_of(module: str) -> Path | None:
    """The file that `python -m MODULE` runs."""
    path = ROOT / module.replace(".", "/")
    return next((p for p in (path.with_suffix(".py"), path / "__main__.py") if p.is_file()), None)


@cache
def origins(tree: ast.AST) -> Origins:
    """What the names that a tree imports are called where they come from."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            names |= {a.asname: a.name for a in node.names if a.asname}
    return names


def dotted(node: ast.expr, names: Origins) -> str:
    """`a.b.c` of an expression, its first name as where it was imported from."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, names)}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def mains(module: str) -> set[str]:
    """Where the `main` of a command stands: in its module, or where this one has it from."""
    path = file_of(module)
    if path is None:
        return set()
    names = origins(tree_of(path))
    return {f"{module}.main", names.get("main", f"{module}.main")}


@cache
def definitions(path: Path) -> dict[str, ast.stmt]:
    """Functions, classes and constants of a file."""
    nodes: dict[str, ast.stmt] = {}
    for node in tree_of(path).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            nodes[node.name] = node
        elif isinstance(node, ast.Assign):
            nodes |= {n.id: node for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return nodes


def place_of(name: str, path: Path) -> tuple[Path, str] | None:
    """The file and name behind a name in a file of tests/: its own, an imported one, a fixture."""
    if name in definitions(path):
        return path, name
    module, _, there = origins(tree_of(path)).get(name, "").rpartition(".")
    if module.startswith("tests.") and (file := file_of(module)) and there in definitions(file):
        return file, there
    folders = [folder for folder in path.parents if folder.is_relative_to(ROOT / "tests")]
    for conftest in (folder / "conftest.py" for folder in folders):
        if conftest.is_file() and conftest != path and name in definitions(conftest):
            return conftest, name
    return None


def used(path: Path, test: str) -> Iterator[tuple[Path, ast.stmt]]:
    """The test and everything of tests/ that it uses, each with its file."""
    todo, seen = [(path, test)], set()
    while todo:
        place = todo.pop()
        if place in seen:
            continue
        seen.add(place)
        node = definitions(place[0])[place[1]]
        yield place[0], node
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        names |= {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
        todo += [other for name in sorted(names) if (other := place_of(name, place[0]))]


def choices_of(words: Iterable[str]) -> set[str]:
    """The options and choices of a command, no places and no numbers."""
    line = list(words)
    places = {after for option, after in pairwise(line) if option in ("--out", "--dir")}
    return {word.partition("=")[0] for word in line if re.fullmatch(r"--[a-z].*|[a-z_]+", word)} - places


def runs(path: Path, test: str, module: str, words: Iterable[str]) -> bool:
    """Whether there is such a test and it runs `python -m MODULE`, or its main, and has these options."""
    if test not in definitions(path):
        return False
    wanted, is_run, texts, is_variable = mains(module), False, set(), False
    for file, node in used(path, test):
        names = origins(tree_of(file))
        for part in ast.walk(node):
            is_run |= isinstance(part, ast.Call) and dotted(part.func, names) in wanted
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                texts |= {part.value, *part.value.split()}
            children = list(ast.iter_child_nodes(part))
            for flag, after in pairwise(children):
                if isinstance(flag, ast.Constant) and flag.value == "-m":
                    is_run |= isinstance(after, ast.Constant) and after.value == module
                    is_variable |= isinstance(after, ast.Name)  # whose value is one of the texts
    return (is_run or (is_variable and module in texts)) and choices_of(words) <= texts
