"""`make docs`, which CI runs on the pages as they are: what it must refuse, and links that leave docs/."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tests.support.report_factory import write_run

ROOT = Path(__file__).resolve().parents[1]


def test_dead_links_dead_anchors_and_pages_outside_the_order_are_refused(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "docs" / "guides" / "new.md").write_text("# New\n")
    with (tmp_path / "docs" / "start" / "demo.md").open("a") as file:
        file.write("\n[a](absent.md) [b](dicoms.md#nowhere) [c](../../CONTRIBUTING.md)\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    problems = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    for word in ("absent.md", "nowhere", "guides/new.md"):
        assert word in done.stderr, word
    assert len(problems) == 3, done.stderr


def test_a_link_that_leaves_the_pages_becomes_a_name() -> None:
    spec = spec_from_file_location("site_links", ROOT / "docs" / "site_links.py")
    assert spec is not None
    assert spec.loader is not None
    hook = module_from_spec(spec)
    spec.loader.exec_module(hook)
    text = "[rules](../CONTRIBUTING.md#x), [a](start/demo.md), [web](https://example.org), ![p](../p.png)"
    assert hook.plain_links(text, "README.md") == text.replace(
        "[rules](../CONTRIBUTING.md#x)", "rules (`CONTRIBUTING.md` in the repository)"
    )
    inside = "[masks](../concepts/masks.md#uniform)"
    assert hook.plain_links(inside, "guides/labels.md") == inside


def test_two_runs_are_drawn_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(write_run(tmp_path / name)) for name in ("healthy", "collapsed")]
    for words, code in ((runs, 0), ([*runs, "--row", "9"], 2), ([runs[0], str(tmp_path)], 2)):
        monkeypatch.setattr("sys.argv", ["draw_collapse", *words])
        with pytest.raises(SystemExit) as end:
            runpy.run_module("docs.draw.collapse", run_name="__main__", alter_sys=True)
        assert end.value.code == code
    drawn = {path.name for path in (tmp_path / "collapsed").glob("*.png")}
    assert drawn == {"collapse_gauges.png", "collapse_features.png"}
    wrong_row, no_run = capsys.readouterr().err.splitlines()
    assert "--row: expected a row with pictures in both runs, found 9; there: 3" in wrong_row
    assert wrong_row.endswith("there: 3")
    assert no_run.endswith("give the run.dir of one")
