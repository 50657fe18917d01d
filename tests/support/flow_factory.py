"""A phantom of small OCTA-type scans with flow cubes and en-face images, and its store."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path

from data_setup import prepare
from tests.support.heights_factory import OCTA, make_tree, words
from tests.support.octa_faults import write_flow

SHAPE = (22, 80, 24)


def make_flow_tree(
    root: Path,
    participants: int,
    quirks: Sequence[str] = (),
    protocols: Sequence[int] = range(len(OCTA)),
    shape: tuple[int, int, int] = SHAPE,
    height_quirks: Sequence[str] = (),
) -> Path:
    """As make_tree of heights_factory, with flow; what was planted stands in synthetic.json."""
    make_tree(root, participants, height_quirks, protocols, shape)
    rows = rows_of(root / "retinal_oct" / "manifest.tsv")
    marker = json.loads((root / "synthetic.json").read_text())
    marker["flow_faults"] = write_flow(root, rows, quirks, 0)
    (root / "synthetic.json").write_text(json.dumps(marker))
    return root


def rows_of(path: Path) -> list[dict[str, object]]:
    """The lines of a table."""
    with path.open(newline="") as file:
        return [dict(row) for row in csv.DictReader(file, delimiter="\t")]


def prepare_flow(root: Path, *overrides: str) -> None:
    """The store and its flow."""
    assert prepare.main([*words(root, *overrides), "--workers", "0"]) == 0
    assert prepare.main([*words(root, *overrides), "--workers", "0", "--flow"]) == 0
