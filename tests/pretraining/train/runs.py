"""What a run wrote: its rows, with and without the clock's, and its weights; the other recipe's keys."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from utils.checkpoint import load_checkpoint

METHODS = (
    "method.recipe=methods",
    "method.mask_ratio=0.6",
    "method.ema_base=0.996",
    "method.dropout=0.1",
    "method.drop_path=0.1",
    "method.regulariser=none",
    "method.regulariser_weight=0",
    "method.neighbour_weight=0",
)


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_clock(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows]


def weights(run: Path, name: str = "step_00000008") -> dict[str, torch.Tensor]:
    return load_checkpoint(str(run / "checkpoints" / f"{name}.pt"))["model"]


def assert_same_weights(a: Path, b: Path) -> None:
    for (name, x), y in zip(weights(a).items(), weights(b).values(), strict=True):
        assert torch.equal(x, y), name
