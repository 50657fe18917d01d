"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("WANDB_SILENT", "true")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none, and say so."""
    if item.get_closest_marker("gpu") is not None:
        import torch  # here, after the lines above

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, and none is here")


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A phantom and its store for a module's tests, in a path with a space. Removed after the last of them
    (a run leaves 350 MB), unless one fails.
    """
    from tests.support.pipeline_factory import (
        make_store,  # here, since it imports torch: after the lines above
    )

    before = request.session.testsfailed
    folder = tmp_path_factory.mktemp("the pipeline")
    make_store(folder)
    yield folder
    if request.session.testsfailed == before:
        shutil.rmtree(folder)
