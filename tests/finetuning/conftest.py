"""A small encoder and a small world for the tests of this room."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from finetuning.features import entries
from models import vit3d
from models.probes import intervals
from models.probes.participants import fit_logistic
from tests.support.finetune_factory import make_world


@pytest.fixture(scope="module", autouse=True)
def _two_blocks() -> Iterator[None]:
    """Two blocks at the smallest size, few resamples, two penalties; modules may define this fixture anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vit3d.SIZES, "ti", vit3d.Size(2, 48, 2))
        patch.setattr(intervals, "BOOTSTRAP_SAMPLES", 300)
        patch.setattr(entries, "fit_logistic", partial(fit_logistic, c_grid=(0.01, 1.0)))
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two volumes a participant and two devices, with labels; a test file may have its own."""
    return make_world(tmp_path_factory.mktemp("world"))
