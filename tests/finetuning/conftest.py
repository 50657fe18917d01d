"""A small encoder and a small world for the tests of this room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from models import vit3d
from models.probes import intervals
from tests.support.finetune_factory import make_world


@pytest.fixture(scope="module", autouse=True)
def _two_blocks() -> Iterator[None]:
    """Two blocks at the smallest size, and few resamples; modules may define this fixture anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vit3d.SIZES, "ti", vit3d.Size(2, 48, 2))
        patch.setattr(intervals, "BOOTSTRAP_SAMPLES", 300)
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two volumes a participant and two devices, with labels; a test file may have its own."""
    return make_world(tmp_path_factory.mktemp("world"))
