"""Every command of README and guides is run: here, or by a test or target that is named, or a reason is.

A page that documented.yaml lacks, a command that fails, and an entry without its command are red. So is a
notebook that does not run from top to bottom, or has outputs.
"""

from __future__ import annotations

import ast
import re
import runpy
import shutil
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient

from tests.support.documented import (
    PAGES,
    RECORDS,
    Command,
    Page,
    commands_of,
    documented,
    filled,
    how_pages_are_run,
    targets_by_hand,
    targets_of,
)
from tests.support.pipeline_factory import ROOT
from tests.test_readme import dead_links

RUN, STORE, PHANTOM = "runs/smoke_test", "runs/phantom_store", "runs/phantom"
COMMANDS = documented()
HOW = how_pages_are_run()


def ci_targets() -> set[str]:
    """What .ci/run makes, one by one or in a loop."""
    text = (ROOT / ".ci/run").read_text()
    loops = " ".join(re.findall(r'^for suite in (.*); do\n.*\n *make "\$suite"', text, re.MULTILINE))
    return {*re.findall(r"^make ([\w-]+)$", text, re.MULTILINE), *loops.split()}


def runs_it(where: str, command: Command) -> bool:
    """Whether the test of a file runs the command's module, CI makes a target, or a page runs the command."""
    if where.startswith("make "):
        return where.removeprefix("make ") in ci_targets()
    path, _, test = where.partition("::")
    if not test:
        return any(c.text == command.text for c in COMMANDS[path]) and command.text not in HOW[path].elsewhere
    return calls(ast.parse((ROOT / path).read_text()), test, command.module)


def calls(tree: ast.Module, test: str, module: str) -> bool:
    """Whether a test, or what it uses of its file, has the words `-m MODULE` or calls the module's main."""
    own = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    origins = {a.asname or a.name: f"{node.module}.{a.name}" for node in imports for a in node.names}
    names = [test]
    for name in names:  # which grows
        for part in ast.walk(own[name]) if name in own else ():
            if isinstance(part, ast.Call):
                first, *more = ast.unparse(part.func).split(".")
                called = ".".join([origins.get(first, first), *more])
                if called.startswith(f"{module}.") and called.endswith((".main", ".train")):
                    return True
            elif isinstance(part, ast.Constant) and module in str(part.value).split():
                return True
            used = getattr(part, "id", None) or getattr(part, "arg", None)
            names += {used} & {*own} - {*names}
    return False


def gaps(how: Mapping[str, Page], pages: Mapping[str, list[Command]]) -> list[str]:
    """Pages and commands that only one of the table and the documents has, and runners that are not there."""
    wrong = [f"{page}: in one alone" for page in how.keys() ^ pages.keys()]
    for page in how.keys() & pages.keys():
        texts = {command.text: command for command in pages[page]}
        listed = {**how[page].elsewhere, **how[page].never}
        wrong += [f"{page}: no such command: {text}" for text in listed if text not in texts]
        more = [word for word in how[page].tiny if " " in word and word not in texts]
        wrong += [f"{page}: no such command: {text}" for text in more]
        wrong += [
            f"{page}: {text}: {where} does not run it"
            for text, where in how[page].elsewhere.items()
            if text in texts and not runs_it(where, texts[text])
        ]
    return wrong


def test_every_command_is_run_or_has_a_reason() -> None:
    assert gaps(HOW, COMMANDS) == []


def test_every_target_of_a_page_is_made_or_has_a_reason() -> None:
    named = {t for page, text in PAGES.items() if not page.startswith(RECORDS) for t in targets_of(text)}
    assert {"demo", "test", "test-slow"} <= ci_targets()
    assert named - ci_targets() == set(targets_by_hand())
    assert targets_of("```\nmake a-b  # words\n```\n`make\nc RUN=x` and make d") == {"a-b", "c"}


def test_what_is_missing_is_seen() -> None:
    commands = commands_of("```\npython -m utils.report --file DIGEST RUN\n```\n")
    assert gaps({}, {"a.md": commands}) == ["a.md: in one alone"]
    assert gaps({"a.md": Page(elsewhere={"python -m utils.doctor": "make demo"})}, {"a.md": commands}) == [
        "a.md: no such command: python -m utils.doctor"
    ]
    text, where = commands[0].text, "tests/utils/test_report_page.py::test_of_nothing"
    assert gaps({"a.md": Page(elsewhere={text: where})}, {"a.md": commands}) == [
        f"a.md: {text}: {where} does not run it"
    ]
    tree = ast.parse("from a.b import main\ndef of(): main([])\ndef test_x(of): pass\ndef test_y(): main")
    assert [calls(tree, test, "a.b") for test in ("test_x", "test_y", "test_z")] == [True, False, False]


def run(module: str, words: list[str]) -> int:
    """`python -m MODULE WORDS`, or `python FILE WORDS`, in this process and this folder; the exit code."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".* found in sys.modules after import", category=RuntimeWarning
        )
        patch.setattr("sys.argv", [module, *words])
        try:
            if module.endswith(".py"):
                runpy.run_path(str(ROOT / module), run_name="__main__")
            else:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


@pytest.fixture(scope="module")
def given(pipeline: Path, small_encoder: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pages take for granted: a phantom, its store, a run with two kept steps, a control, two heads."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "runs").mkdir()
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / PHANTOM).symlink_to(pipeline / "phantom")
    shutil.copytree(pipeline / "store", folder / STORE)
    commands = {command.text: command for command in commands_of(PAGES["docs/start/demo.md"])}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train, control = (c for c in commands.values() if c.module == "pretraining.train")
        for name, seed in (("smoke_test", 0), ("other", 1)):
            more = Page(tiny={"pretraining.train": f"train.max_steps=6 run.dir=runs/{name} seed={seed}"})
            assert run(train.module, filled(train, more)) == 0
        assert run(control.module, filled(control, Page())) == 0
        head = (
            "--config configs/cls_linear_probe.yaml model.checkpoint=runs/smoke_test run.dir=runs/NAME_probe"
        )
        assert run("finetuning.train", [*head.split(), "data.workers=0", "train.epochs=1"]) == 0
    with zipfile.ZipFile(folder / "retinal_oct.zip", "w") as archive:
        for path in sorted((folder / PHANTOM).resolve().rglob("*")):
            archive.write(path, path.relative_to((folder / PHANTOM).resolve()))
    return folder


@pytest.fixture
def place(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Page], None]:
    """Makes the folder of a page's commands the working folder."""
    index = pd.read_parquet(given / STORE / "index.parquet")
    index = index.query("status == 'kept' and device != 'zeiss_cirrus'").drop_duplicates("person_id")
    scans = [given / PHANTOM / path for path in index["path"]]
    run, other, control = (given / "runs" / name for name in ("smoke_test", "other", "smoke_control"))
    standing = {
        **dict.fromkeys((STORE, "STORE", "stores/NAME", "BUCKET/stores/oct"), given / STORE),
        **dict.fromkeys((PHANTOM, "BUCKET/dataset"), given / PHANTOM),
        **dict.fromkeys((RUN, "runs/NAME", "runs/A", "runs/from_public"), run),
        **dict.fromkeys(("runs/B", "runs/from_random"), other),
        **dict.fromkeys(("runs/C", "runs/smoke_control", "runs/NAME_control"), control),
        **dict.fromkeys(("runs/NAME_probe",), given / "runs/NAME_probe"),
        "configs": given / "configs",
        "FILE": given / "configs/smoke_test.yaml",
        "BUCKET/zips/retinal_oct.zip": given / "retinal_oct.zip",
        "public.pt": control / "checkpoints/best_probe.pt",
        "public.json": control / "checkpoints/best_probe.json",
        "more/scan.dcm": scans[0],
        "scans/eye.dcm": scans[1],
        **{f"{folder}/{scan.name}": scan for folder in ("own", "data/own", "exports") for scan in scans},
        **{f"{folder}/{scan.name}": scan for folder in ("scans", "FOLDER") for scan in scans[2:4]},
        "runs/NAME/checkpoints/step_00010000.pt": run / "checkpoints/step_00000004.pt",
        "runs/NAME/checkpoints/step_00010000.json": run / "checkpoints/step_00000004.json",
        "runs/NAME/checkpoints/step_00020000.pt": run / "checkpoints/step_00000006.pt",
        "runs/NAME/checkpoints/step_00020000.json": run / "checkpoints/step_00000006.json",
    }

    def make(page: Page) -> None:
        monkeypatch.chdir(tmp_path)
        taken = (*page.makes, *page.stands)
        own = {name: given / where for name, where in page.stands.items()}
        for name, source in {**standing, **own}.items():
            if name in page.makes or (name not in page.stands and name.startswith(taken)):
                continue
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            if name.startswith(("runs/", "STORE", "stores/")) and source.is_dir() and name != PHANTOM:
                shutil.copytree(source, name, ignore_dangling_symlinks=True)  # of wandb
            else:
                Path(name).symlink_to(source.resolve())

    return make


def run_page(page: str, how: Page, commands: list[Command]) -> list[tuple[str, int]]:
    """(command, exit code) of those that did not succeed."""
    for line in how.before:
        module, *words = line.split()
        assert run(module, words) == 0
    failed = []
    for command in sorted(commands, key=lambda command: command.module != "data_setup.phantom"):
        for name in how.anew:
            shutil.rmtree(name, ignore_errors=True)
        if code := run(command.module, filled(command, how)):
            failed.append((command.text, code))
    return failed


@pytest.mark.slow
@pytest.mark.parametrize("page", HOW)
def test_the_commands_of_a_page_succeed(page: str, place: Callable[[Page], None]) -> None:
    how = HOW[page]
    place(how)
    commands = [c for c in COMMANDS[page] if c.text not in {**how.elsewhere, **how.never}]
    assert run_page(page, how, commands) == []


# --- the notebook ---

NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"
PLACE = 'WORK = ROOT / "runs" / "quickstart"'


def test_it_has_no_outputs_and_links_pages_that_exist() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)
        else:
            assert dead_links("docs/quickstart.ipynb", cell.source) == []


@pytest.mark.slow
def test_it_runs_from_top_to_bottom(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (cell,) = (cell for cell in notebook.cells if PLACE in cell.source)
    cell.source = cell.source.replace(PLACE, f"WORK = Path({str(tmp_path)!r})")
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    outputs = [str(output) for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("data:image/png" in output for output in outputs) == 3
    assert any("finished at step 20" in output for output in outputs)
    assert (tmp_path / "run" / "report.html").is_file()
    assert (tmp_path / "features" / "features.parquet").is_file()
