"""The device in the features, and what taking it out leaves."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.evidence.device import AS_IS, LESS_DEVICE, less_device_of_each_place, score_forms
from tests.support.evidence_factory import small_truth


def test_a_token_loses_the_mean_of_its_device_and_place() -> None:
    tokens = np.array([[[1.0], [10.0]], [[3.0], [20.0]], [[9.0], [99.0]], [[5.0], [6.0]]], np.float32)
    valid = np.array([[1, 1], [1, 0], [1, 1], [1, 0]], np.float32)
    device = np.array(["a", "a", "a", "b"])
    training = np.array([True, True, False, True])
    rest = less_device_of_each_place(tokens, valid, device, training)
    # a: (1 + 3) / 2 and, of the one valid token, 10; b has no valid token at the second place: its mean is 5
    np.testing.assert_allclose(rest[..., 0], [[-1, 0], [1, 10], [7, 89], [0, 1]])
    with pytest.raises(ValueError, match="b: expected a training volume"):
        less_device_of_each_place(tokens, valid, device, np.array([True, True, True, False]))


def test_a_planted_device_is_read_and_then_gone_while_the_anatomy_stays() -> None:
    """Anatomy and an offset of each device and place, in tokens of grid (2, 2, 2)."""
    truth, rng = small_truth(), np.random.default_rng(5)
    device = np.tile(["a", "b"], 40)
    offset = {name: rng.normal(size=(8, 3)).astype(np.float32) for name in "ab"}
    tokens = truth.occupancy.astype(np.float32) + 3 * np.stack([offset[name] for name in device])
    valid = np.ones((80, 8), np.float32)
    forms = score_forms(truth, device, tokens, valid, (2, 2, 2))
    assert forms[AS_IS]["device"] == 1.0
    assert forms[LESS_DEVICE]["device"] < 0.7
    assert forms[AS_IS]["occupancy"] < forms[LESS_DEVICE]["occupancy"]
    assert forms[LESS_DEVICE]["occupancy"] > 0.9
