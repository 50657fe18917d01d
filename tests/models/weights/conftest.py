"""Research files, one of which fits a small encoder, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import VJEPA2Model

from models.vit3d import SIZES, Size
from tests.models.weights.weight_files import research_file
from tests.support.vjepa2_oracle import hf_model


@pytest.fixture(scope="module", autouse=True)
def _small_ti() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "ti", Size(3, 128, 2))
        yield


@pytest.fixture(scope="module")
def pair() -> tuple[VJEPA2Model, VJEPA2Model]:
    """Context and target models of one shape."""
    return hf_model(0), hf_model(1)


@pytest.fixture(scope="module")
def research(pair: tuple[VJEPA2Model, VJEPA2Model], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return research_file(tmp_path_factory.mktemp("research") / "vit.pt", *pair)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A research file that fits model.size ti, a predictor of 64 x 2 and patches of 8 x 8."""
    shape = {"patch_size": 8, "crop_size": 32, "pred_num_mask_tokens": 3}
    return research_file(
        tmp_path_factory.mktemp("tiny") / "ti.pt", hf_model(2, **shape), hf_model(3, **shape)
    )
