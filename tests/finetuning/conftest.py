"""A small encoder for all tests of this room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from models import vit3d
from models.probes import intervals


@pytest.fixture(scope="module", autouse=True)
def _two_blocks() -> Iterator[None]:
    """The smallest size of the configurations has two blocks here, and an interval few resamples. Tests whose
    own processes build models define a fixture of this name.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vit3d.SIZES, "ti", vit3d.Size(2, 48, 2))
        patch.setattr(intervals, "BOOTSTRAP_SAMPLES", 300)
        yield
