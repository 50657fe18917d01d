"""Fixtures shared by all tests."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
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


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A command that a test runs takes Ctrl-C and SIGTERM over; afterwards they are pytest's again."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """A command that sets the level of the logs sets it for its own test alone."""
    root = logging.getLogger()
    before = root.level
    yield
    root.setLevel(before)


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A phantom and its store, made by the first of the test processes that asks; nobody changes them."""
    from tests.support.pipeline_factory import make_store

    base = tmp_path_factory.getbasetemp()
    made = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "made once"
    with (made.parent / "made_once.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / "store" / "prepare_report.json").exists():
            make_store(made)
    return made


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A phantom tree of three participants, all files good."""
    from data_setup.phantom.__main__ import write_tree

    out = tmp_path_factory.mktemp("phantom") / "tree"
    write_tree(out, participants=3, seed=5, workers=1)
    return out


@pytest.fixture(scope="session")
def clean(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree prepared without any interruption."""
    from data_setup.prepare import main
    from tests.support.prepare_runs import arguments

    store = tmp_path_factory.mktemp("clean") / "store"
    assert main(arguments(tree, store)) == 0
    return store


@pytest.fixture(scope="module")
def small_encoder() -> Iterator[None]:
    """Runs of this process have an encoder of two blocks, where what is shown is not the model's."""
    from models import vit3d  # here, since it imports torch: after the lines above

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vit3d.SIZES, "ti", vit3d.Size(2, 48, 2))
        yield


@pytest.fixture(scope="module")
def folder(
    request: pytest.FixtureRequest, pipeline: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A copy of the phantom and its store for a module, removed (350 MB) unless a test fails."""
    before = request.session.testsfailed
    folder = tmp_path_factory.mktemp("the pipeline")
    shutil.copytree(pipeline, folder, dirs_exist_ok=True)
    yield folder
    if request.session.testsfailed == before:
        shutil.rmtree(folder)
