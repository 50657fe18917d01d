"""A phantom tree and its store, for the tests of this folder."""

import shutil
from pathlib import Path

import pytest

from data_setup.phantom.__main__ import write_tree
from data_setup.prepare import main
from tests.data_setup.prepare.runs import arguments


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A phantom tree of three participants, all files good."""
    out = tmp_path_factory.mktemp("phantom") / "tree"
    write_tree(out, participants=3, seed=5, workers=1)
    return out


@pytest.fixture(scope="session")
def clean(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree prepared without any interruption."""
    store = tmp_path_factory.mktemp("clean") / "store"
    assert main(arguments(tree, store)) == 0
    return store


@pytest.fixture
def own_tree(tree: Path, tmp_path: Path) -> Path:
    """A copy of the tree for tests that damage it."""
    return Path(shutil.copytree(tree, tmp_path / "tree"))
