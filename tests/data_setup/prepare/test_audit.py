"""Files that are missing or in no row are counted, in a bucket on request alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from data_setup.prepare import main
from tests.data_setup.prepare.runs import CONFIG, arguments, dicoms
from utils import storage


def test_missing_files_and_orphans_are_counted(
    own_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, first = tmp_path / "store", dicoms(own_tree)[0]
    orphans = [first.with_name(f"left_over_{n:02d}.dcm") for n in range(21)]
    for orphan in orphans:
        shutil.copy(dicoms(own_tree)[-1], orphan)
    first.unlink()
    main(arguments(own_tree, store, "data.max_reject_fraction=0.9"))
    assert "files: 1 of the manifest missing, 21 in no manifest row" in capsys.readouterr().out
    audit = json.loads((store / "prepare_report.json").read_text())["run"]["audit"]
    assert audit["missing"] == {"count": 1, "first": [str(first.relative_to(own_tree))]}
    assert audit["orphans"]["count"] == 21
    assert audit["orphans"]["first"] == [str(o.relative_to(own_tree)) for o in orphans[:20]]


def test_a_remote_tree_is_listed_on_request_only(tree: Path, tmp_path: Path) -> None:
    root = f"memory://{tmp_path.name}/tree"
    for file in (p for p in tree.rglob("*") if p.is_file() and p.suffix != ".npz"):
        storage.write_bytes(storage.join(root, str(file.relative_to(tree))), file.read_bytes())
    places = [
        "--config",
        CONFIG,
        "--workers",
        "0",
        f"data.gcs_root={root}",
        f"data.store={tmp_path / 'store'}",
    ]
    for more, audit in (
        ([], None),
        (["--audit"], {k: {"count": 0, "first": []} for k in ("missing", "orphans", "unused_missing")}),
    ):
        assert main([*places, *more]) == 0
        assert json.loads((tmp_path / "store" / "prepare_report.json").read_text())["run"]["audit"] == audit
