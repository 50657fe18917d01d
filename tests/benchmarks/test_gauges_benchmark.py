"""What the gauges cost: every part of them is inside the time that is called theirs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gauges
from models.vit3d import SIZES, Size
from pretraining.gauges.monitor import Gauges
from pretraining.step import Balance

PAUSE_S = 0.25
OPTIONS = "--config", "configs/smoke_test.yaml", "--batch", "2", "--rounds", "1"
CHANGES = (
    *("spatial.image_size=[8,32,32]", "method.predictor_width=64", "method.predictor_depth=1"),
    *("train.log_every_steps=10", "train.use_bf16=false"),
)


def slow(work: Callable[..., Any]) -> Callable[..., Any]:
    """The same work, and a pause."""

    def slower(*args: Any, **kwargs: Any) -> Any:
        time.sleep(PAUSE_S)
        return work(*args, **kwargs)

    return slower


@pytest.mark.parametrize(
    ("owner", "name", "remembered"),
    [
        (Gauges, "observe", 1),
        (Gauges, "finish", 1),
        (Balance, "watch", 0),  # a pass backwards through the penalty, on steps that measure alone
        (gauges, "target_drift", 0),
        (gauges, "update_ratio", 0),
    ],
)
def test_every_part_is_counted(
    owner: Any, name: str, remembered: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "ti", Size(2, 48, 2))
    monkeypatch.setattr(owner, name, slow(getattr(owner, name)))
    file = tmp_path / "gauges.json"
    gauges.main([*OPTIONS, "--json", str(file), *CHANGES])
    costs = json.loads(file.read_text())
    assert costs["gauges_measured_s"] >= PAUSE_S
    assert (costs["gauges_remembered_s"] >= PAUSE_S) == bool(remembered)
    # of every step, or of one in the ten of a log line
    assert costs["share"] * costs["step_without_s"] >= PAUSE_S * (1.0 if remembered else 0.1)
