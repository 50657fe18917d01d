"""The house rules that no single module can keep: who may import whom, and how large a room may be."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from utils.config.keys import keys
from utils.config.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("utils", "models", "data_setup", "pretraining", "finetuning")
MAY_IMPORT = {
    "utils": {"utils"},
    "models": {"models", "utils"},
    "data_setup": {"data_setup", "utils"},
    "pretraining": {"pretraining", "data_setup", "models", "utils"},
    "finetuning": {"finetuning", "data_setup", "models", "utils"},
}
URL_LIBRARIES = {"fsspec", "gcsfs", "s3fs", "google", "aiohttp"}


@cache
def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.split(".")[0] for name in names}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def arrows(paths: list[Path]) -> dict[str, set[str]]:
    """Module -> those of `paths` that it imports anywhere: at its top, in a function, for types alone."""
    names = {module_name(path) for path in paths}
    edges: dict[str, set[str]] = {}
    for path in paths:
        imported = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= inner & names or {node.module}
        edges[module_name(path)] = imported & names
    return edges


def circle(edges: dict[str, set[str]]) -> list[str]:
    """A circle of imports, its first module repeated at its end; empty where there is none."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return []
        for other in sorted(edges[name]):
            if closed := visit(other, [*trail, name]):
                return closed
        done.add(name)
        return []

    return next((closed for name in sorted(edges) if (closed := visit(name, []))), [])


MODULES = sorted(p for folder in FOLDERS for p in (ROOT / folder).glob("**/*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: f"{p.parent.name}.{p.stem}")
def test_dependency_direction(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    ours = imports(path) & {*FOLDERS, "tests", "benchmarks"}
    assert ours <= MAY_IMPORT[folder], f"{path}: {ours - MAY_IMPORT[folder]}"


def test_no_circle_of_imports() -> None:
    assert circle(arrows(MODULES)) == []


def test_a_circle_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three modules, one of which imports inside a function."""
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    texts = {"a": "from room import b", "b": "import room.c", "c": "def f():\n    from room.a import x"}
    (tmp_path / "room").mkdir()
    for name, text in texts.items():
        (tmp_path / "room" / f"{name}.py").write_text(text)
    assert circle(arrows(sorted(tmp_path.glob("room/*.py")))) == ["room.a", "room.b", "room.c", "room.a"]


def test_xla_stays_in_its_files() -> None:
    allowed = {"utils/runtime/xla.py", "utils/runtime/xla_kernels.py"}
    assert {str(p.relative_to(ROOT)) for p in MODULES if "torch_xla" in imports(p)} <= allowed
    using = [name for name, imported in arrows(MODULES).items() if "utils.runtime.xla" in imported]
    assert using == ["utils.runtime.open"]


def test_only_storage_knows_urls() -> None:
    knowing = {str(p.relative_to(ROOT)) for p in MODULES if imports(p) & URL_LIBRARIES}
    assert {str(Path(name).parent) for name in knowing} == {"utils/storage"}


def test_only_stores_open_zarr() -> None:
    knowing = {str(p.relative_to(ROOT)) for p in MODULES if "zarr" in imports(p)}
    assert knowing <= {
        "data_setup/attach/stored.py",
        "data_setup/store/reader.py",
        "data_setup/store/writer.py",
        "finetuning/embedding/run.py",  # a store of its own, of features
        "utils/storage/zarr_keys.py",
    }


def test_pydicom_stays_in_data_setup() -> None:
    knowing = {p.relative_to(ROOT).parts[0] for p in MODULES if "pydicom" in imports(p)}
    assert knowing == {"data_setup"}


def recipe_comparisons(text: str) -> list[str]:
    """Comparisons with a recipe's name: `x == "mae"`, `x in ("mae", "methods")`, `case "mae":`."""
    lines = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            parts: list[ast.AST] = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        else:
            continue
        constants = [c for part in parts for c in ast.walk(part) if isinstance(c, ast.Constant)]
        if any(constant.value in RECIPES for constant in constants if isinstance(constant.value, str)):
            lines.append(ast.unparse(node))
    return lines


def test_nothing_but_the_table_asks_for_a_recipe_by_name() -> None:
    benchmarks = sorted((ROOT / "benchmarks").glob("**/*.py"))
    asking = {str(p): recipe_comparisons(p.read_text()) for p in [*MODULES, *benchmarks]}
    assert {path: lines for path, lines in asking.items() if lines} == {}


def test_a_comparison_with_a_recipe_is_seen() -> None:
    text = "a = cfg.method.recipe == 'mae'\nb = name not in ('vjepa2', 'x')\nmatch c:\n  case 'methods': pass"
    assert len(recipe_comparisons(text + "\nd = RECIPES['mae']\ne = f('mae')")) == 3


METHOD_FILES = ("vit3d", "predictor", "vjepa3d", "losses")
MOST_METHOD_LINES, MOST_INPUTS = 750, 6


def test_the_method_can_be_read_in_one_sitting() -> None:
    """An experiment is a patch of an arm in benchmarks/evidence, and no branch here."""
    texts = {name: (ROOT / "models" / f"{name}.py").read_text() for name in METHOD_FILES}
    assert sum(len(text.splitlines()) for text in texts.values()) <= MOST_METHOD_LINES
    forward = next(
        function
        for node in ast.parse(texts["vjepa3d"]).body
        if isinstance(node, ast.ClassDef) and node.name == "VJEPA3D"
        for function in node.body
        if isinstance(function, ast.FunctionDef) and function.name == "forward"
    )
    assert len(forward.args.args) - 1 + len(forward.args.kwonlyargs) <= MOST_INPUTS  # less self
    assert "cfg" not in {node.id for node in ast.walk(forward) if isinstance(node, ast.Name)}
    asked = [ast.unparse(node.test) for node in ast.walk(forward) if isinstance(node, ast.If | ast.IfExp)]
    assert asked == [  # which recipe, and whether the loss of neighbours has a weight
        "isinstance(self.predictor, Predictor3D)",
        "self.neighbour_head is not None and self.training",
        "self.recipe.loss == 'normalised_l2'",
    ]


NO_NAMES = {"told", "said", "found", "left", "mine", "heard"}  # they say nothing of what they hold


def names_that_say_nothing(text: str) -> list[str]:
    """Variables, parameters and attributes of these names, where they are bound."""
    bound = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.append(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            bound.append(node.attr)
        elif isinstance(node, ast.arg):
            bound.append(node.arg)
    return [name for name in bound if name in NO_NAMES]


def test_a_variable_says_what_it_holds() -> None:
    paths = [
        *MODULES,
        *(p for room in ("benchmarks", "tests") for p in sorted((ROOT / room).glob("**/*.py"))),
    ]
    bound = {str(path): names_that_say_nothing(path.read_text()) for path in paths}
    assert {path: names for path, names in bound.items() if names} == {}


def test_a_name_that_says_nothing_is_seen() -> None:
    text = "told = 1\nfor said in x: pass\ndef f(found, *, left=1): self.mine = 2\nheard: int = 3"
    assert sorted(names_that_say_nothing(text)) == sorted(NO_NAMES)


def test_every_room_has_a_sign() -> None:
    """What comes in, what goes out, which file to read first."""
    for room in {path.parent for path in MODULES}:
        sign = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
        assert sign, f"{room} has no docstring in __init__.py"


def test_the_loop_can_be_recited() -> None:
    functions = {
        node.name: node
        for name in ("train", "step")
        for node in ast.walk(ast.parse((ROOT / "pretraining" / f"{name}.py").read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    loop, update = functions["_train"], functions["train_step"]
    assert (loop.end_lineno or 0) - loop.lineno + 1 <= 80
    assert len(update.args.args) + len(update.args.kwonlyargs) <= 7


STORIES = (
    "pretraining/train.py",
    "pretraining/step.py",
    "models/vjepa3d.py",
    "data_setup/loader.py",
    "data_setup/prepare.py",
)
A_SCREEN = 60  # lines


def without_signpost(text: str) -> list[tuple[int, int]]:
    """First and last line of what is longer than a screen without a comment on a line for itself."""
    definitions = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    first, lines = next(definitions).lineno, text.splitlines()
    posts = [n for n, line in enumerate(lines, 1) if n >= first and line.lstrip().startswith("#")]
    stretches = zip([first - 1, *posts], [*posts, len(lines) + 1], strict=True)
    return [(above + 1, below - 1) for above, below in stretches if below - above - 1 > A_SCREEN]


@pytest.mark.parametrize("name", STORIES)
def test_a_story_has_a_signpost_on_every_screen(name: str) -> None:
    assert without_signpost((ROOT / name).read_text()) == []


def test_a_stretch_without_signpost_is_seen() -> None:
    function = "def f():\n" + "    x = 1  # no signpost\n" * 60
    text = "import os\n" * 99 + function + "    # why\n" + "    x = 1\n" * 60
    assert without_signpost(text) == [(100, 160)]


def test_every_marker_has_a_make_target() -> None:
    """A test that no target runs is no test."""
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    targets = re.findall(r'-m "(\w+)"', (ROOT / "Makefile").read_text())
    assert {marker.partition(":")[0] for marker in markers} == set(targets)


# A ratchet: adding to a room, a command or a key means taking from another, or a new number here, in a commit
# that says why.
LINES = {
    "data_setup": 16_737,
    "models": 5_546,
    "pretraining": 2_454,
    "finetuning": 13_188,
    "utils": 8_759,
    "benchmarks": 4_989,
    "tests": 44_011,
}
BOXES = {  # top-level files and folders of a room, floors, arrows between boxes
    "data_setup": (19, 5, 46),
    "models": (15, 5, 21),  # the losses have a kernel too
    "pretraining": (7, 5, 15),
    "finetuning": (13, 7, 31),
    "utils": (18, 7, 47),  # tables and terminal show a stranger's names by utils.errors
}
COMMANDS = {  # what a person runs as `python -m NAME`
    "data_setup.expand",
    "data_setup.export",
    "data_setup.index",
    "data_setup.phantom",
    "data_setup.prepare",
    "finetuning.compare",
    "finetuning.embed",
    "finetuning.evaluate",
    "finetuning.power",
    "finetuning.predict",
    "finetuning.train",
    "models.weights",
    "pretraining.train",
    "utils.doctor",
    "utils.report",
}
NUM_KEYS = 95


def lines_of(room: Path) -> int:
    return sum(path.read_text().count("\n") for path in room.glob("**/*.py"))


def plan(room: Path) -> tuple[int, int, int]:
    """Boxes, floors and arrows of a room: each file and folder that lies in it is a box, each import between
    two boxes an arrow, and a box lies a floor above the highest that it imports.
    """
    boxes: dict[str, set[str]] = {}
    for name, imported in arrows(sorted(room.glob("**/*.py"))).items():
        box = name.removeprefix(f"{room.name}").lstrip(".").partition(".")[0]
        others = {other.removeprefix(f"{room.name}").lstrip(".").partition(".")[0] for other in imported}
        if box:  # not the room's own sign
            boxes.setdefault(box, set()).update(others - {box, ""})
    floors: dict[str, int] = {}

    def floor(box: str, trail: tuple[str, ...] = ()) -> int:
        assert box not in trail, f"{room.name}: boxes in a circle: {[*trail, box]}"
        if box not in floors:
            floors[box] = 1 + max((floor(other, (*trail, box)) for other in boxes[box]), default=0)
        return floors[box]

    return len(boxes), max(map(floor, boxes)), sum(map(len, boxes.values()))


def commands() -> set[str]:
    """Product modules that `python -m` runs."""
    guarded = [path for path in MODULES if re.search(r"^if __name__ == .__main__.:", path.read_text(), re.M)]
    return {module_name(path).removesuffix(".__main__") for path in guarded}


@pytest.mark.parametrize("room", LINES)
def test_a_room_holds_no_more_lines_than_it_may(room: str) -> None:
    assert lines_of(ROOT / room) <= LINES[room]


@pytest.mark.parametrize("room", BOXES)
def test_a_room_can_be_drawn(room: str) -> None:
    drawn = plan(ROOT / room)
    assert all(value <= limit for value, limit in zip(drawn, BOXES[room], strict=True)), drawn


def test_no_command_is_added() -> None:
    assert commands() == COMMANDS


def test_no_key_is_added() -> None:
    assert len(keys()) == NUM_KEYS


def test_a_plan_counts_boxes_floors_and_arrows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command on a folder of two files, which stands on a file."""
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    texts = {
        "room/__init__.py": "",
        "room/command.py": "from room.inner import a, b",
        "room/inner/__init__.py": "",
        "room/inner/a.py": "import room.ground",
        "room/inner/b.py": "from room.ground import x\nfrom room.inner.a import y",
        "room/ground.py": "import os",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert plan(tmp_path / "room") == (3, 3, 2)
