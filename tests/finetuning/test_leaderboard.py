"""The leaderboard: right rows in the right order, looks recorded, answers kept, comparisons corrected."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_setup.store.reader import PreparedStore
from finetuning import leaderboard as module
from finetuning.board import columns
from finetuning.board.answers import Cell
from finetuning.board.columns import Question, device_tables, low_shots
from finetuning.board.compare import bootstrap_p, compare, estimate, holm
from finetuning.board.entries import Entry, Volumes
from finetuning.board.page import write_pages
from finetuning.board.rows import Board
from finetuning.board.words import Words, parse
from finetuning.cohort import EVALUATED, TRAIN, VAL, Cohort, read_cohort
from finetuning.leaderboard import leaderboard
from finetuning.metrics import bootstrap_counts, measure
from finetuning.predictions import Predictions
from models.probes.intervals import paired_difference
from models.probes.participants import Prediction
from tests.support.finetune_factory import (
    DEVICES,
    RUNTIME,
    config,
    make_world,
    save_checkpoint,
    silence,
)
from utils.errors import UserError

LINEAR_PROBE = Path(__file__).resolve().parents[2] / "configs" / "cls_linear_probe.yaml"
BASELINES = ["raw-voxel PCA", "mean A-scan profile", "device one-hot"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def runs(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: `good` of random weights, `silent` whose features are all equal, `other`, which never ran."""
    root = tmp_path_factory.mktemp("runs")
    save_checkpoint(config(world, root / "good"))
    save_checkpoint(config(world, root / "silent"), lambda model: silence(model.target_encoder))
    return root


def words(world: Path, runs: Path, run_dir: Path, *overrides: str, **changes: object) -> Words:
    """The command line for the two runs, with few resamples."""
    small = ("probe.bootstrap_samples=200", f"run.dir={run_dir}", f"train.ckpt_dir={run_dir / 'checkpoints'}")
    base = Words(
        str(LINEAR_PROBE),
        (*small, *overrides),
        (str(runs / "good"), str(runs / "silent")),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def board(world: Path, runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Board:
    (world / "store" / "ledger.jsonl").unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "FRACTIONS", (0.25,))
        return leaderboard(words(world, runs, tmp_path_factory.mktemp("board")), RUNTIME)


def test_rows_and_their_order(board: Board) -> None:
    labels = [row.entry.label for row in board.rows]
    random = [label for label in labels if label.startswith("random initialisation")]
    assert sorted(labels) == sorted([*BASELINES, "good", "silent", *random])
    assert len(random) == 1
    assert [row.val for row in board.rows] == sorted((row.val for row in board.rows), reverse=True)
    scores = {
        row.entry.label: estimate(row.answers["linear"].cells["linear"].predictions, 50, 0).value
        for row in board.rows
    }
    assert scores["mean A-scan profile"] == 1.0
    assert scores["silent"] == scores["device one-hot"] == 0.5


def test_pages(board: Board) -> None:
    printed = write_pages(board)
    folder = Path(board.folder)
    text = (folder / "leaderboard.md").read_text()
    assert text in printed
    assert "Look 1 of this split" in text
    assert "25 % (" in text and f"without {DEVICES[0]}" in text and "p (Holm)" in text
    page = (folder / "leaderboard.html").read_text()
    assert "data:image/png;base64," in page and "On synthetic data" in page
    with (folder / "leaderboard.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {line["row"] for line in lines} == {row.entry.label for row in board.rows}
    assert (folder / "leaderboard.png").stat().st_size > 10_000
    assert all(float(line["row_seconds"]) > 0 for line in lines)
