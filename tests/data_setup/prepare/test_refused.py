"""Another geometry, another source and a tree that is not there are one line, and change nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from data_setup.prepare import main
from tests.data_setup.prepare.runs import arguments, contents, start
from utils.errors import UserError


def test_another_geometry_is_refused(tree: Path, clean: Path) -> None:
    before = contents(clean)
    with pytest.raises(UserError, match=r"geometry: expected .*found .*data\.store of its own"):
        main(arguments(tree, clean, "spatial.image_size=[16, 96, 72]"))
    assert contents(clean) == before


def test_another_source_is_refused_and_the_same_one_spelt_differently_is_not(
    tree: Path, own_tree: Path, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same relative paths below another root would be taken for the same files."""
    store = Path(shutil.copytree(clean, tmp_path / "store"))
    with pytest.raises(UserError, match=rf"source_root: expected {own_tree}, found {tree}; .*data\.store"):
        main(arguments(own_tree, store))
    assert contents(store) == contents(clean)
    monkeypatch.chdir(tree.parent)
    assert main(arguments(Path("tree/"), store)) == 0
    assert json.loads((store / "prepare_report.json").read_text())["run"]["reused"] > 0
    assert contents(store) == contents(clean)
    row = json.loads((store / "rows" / "000000.json").read_text())
    assert row["source_url"] == str(tree / row["record"]["path"])


def test_user_errors_are_one_line_with_exit_code_two(tree: Path, tmp_path: Path) -> None:
    with start(tmp_path, tmp_path / "store") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "manifest.tsv: not found" in err
