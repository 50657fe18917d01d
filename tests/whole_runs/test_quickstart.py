"""docs/quickstart.ipynb runs from top to bottom, and lies there without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.pipeline_factory import ROOT
from tests.test_readme import dead_links

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
