"""What validation measures: LiDAR over masks, probes on labels and on shortcuts, one embedding for all."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from data_setup.store.reader import PreparedStore
from models.probes.participants import knn_probe
from pretraining.gauges import validation as validate
from pretraining.gauges import validation_probes as val_probes
from pretraining.run import Run, open_run
from tests.support.model_factory import nano_model
from tests.support.pipeline_factory import pipeline_config
from utils.runtime.single import Runtime

CPU = Runtime(torch.device("cpu"), use_bf16=False)
PROBES = {f"val/{name}" for name in ("probe", "ridge", "knn_device", "ridge_device")}
PROBES |= {"val/knn_laterality", "val/ridge_laterality"}


@pytest.fixture
def run(folder: Path) -> Run:
    cfg = pipeline_config(folder)
    return replace(open_run(cfg, CPU), model=nano_model(cfg))


def features_that_tell(store: PreparedStore, column: str) -> object:
    """In place of embed_rows: one-hot features of a column of the index, and which rows were asked for."""
    values = sorted(set(store.index[column]))
    asked: list[list[int]] = []

    def embed_rows(run: Run, chosen: np.ndarray):
        asked.append(chosen.tolist())
        noise = 0.01 * np.random.default_rng(0).standard_normal((len(chosen), len(values)))
        return np.eye(len(values))[
            [values.index(v) for v in run.store.index.loc[chosen, column]]
        ] + noise, chosen

    embed_rows.asked = asked
    return embed_rows


@pytest.mark.parametrize("column", val_probes.SHORTCUTS)
def test_features_that_tell_a_shortcut_are_found_out(
    run: Run, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = features_that_tell(run.store, column)
    monkeypatch.setattr(val_probes, "embed_rows", planted)
    monkeypatch.setattr(val_probes, "knn_probe", partial(knn_probe, k=1))  # 20 are all of so small a fold
    scores = val_probes.probe_scores(run)
    assert set(scores) == PROBES
    assert scores[f"val/knn_{column}"] == scores[f"val/ridge_{column}"] == 1.0
    (other,) = set(val_probes.SHORTCUTS) - {column}
    assert scores[f"val/ridge_{other}"] < 0.9
    assert len(planted.asked) == 2, "each side is embedded once for all probes"


def test_no_participant_is_on_both_sides(run: Run) -> None:
    scores = val_probes.probe_scores(run)
    assert all(scores[name] is not None for name in PROBES)
    person = run.rows.person_of_row[int(run.rows.train[0])]
    shared = {**run.rows.person_of_row, int(run.rows.official_val[0]): person}
    mixed = replace(run.rows, person_of_row=shared)
    assert set(val_probes.probe_scores(replace(run, rows=mixed)).values()) == {None}


def test_without_labels_the_shortcuts_are_still_measured(run: Run) -> None:
    scores = val_probes.probe_scores(replace(run, rows=replace(run.rows, label_of_row={})))
    assert scores["val/probe"] is scores["val/ridge"] is None
    assert scores["val/knn_device"] is not None


def test_rows_with_labels_come_first_and_are_spread() -> None:
    chosen = val_probes.choose_rows(np.arange(100), dict.fromkeys(range(0, 100, 2), "a"), 5)
    assert chosen.tolist() == [0, 24, 48, 74, 98]
    assert val_probes.choose_rows(np.arange(10), {}, 4).tolist() == [0, 3, 6, 9]


def test_two_eyes_of_one_participant_count_for_their_own_side() -> None:
    embedded = [(np.eye(4), np.arange(4)), (np.eye(4), np.arange(4, 8))]
    people = {r: f"p{r // 2}" for r in range(8)}
    folds = val_probes.make_folds(embedded, {r: "LR"[r % 2] for r in range(8)}, people)
    assert folds is not None
    assert folds[0].participants.tolist() == ["p0/L", "p0/R", "p1/L", "p1/R"]
    assert folds[1].labels.tolist() == [0, 1, 0, 1]
    assert val_probes.make_folds(embedded, dict.fromkeys(range(8), "L"), people) is None


def test_validation_measures_everything_and_repeats(run: Run) -> None:
    run = replace(run, rows=replace(run.rows, val=run.rows.train[:6]))
    first = validate.validate(run)
    assert set(first) == {"val/loss", "val/rankme", "val/lidar"} | PROBES
    assert 1 < first["val/lidar"] <= 5
    assert validate.validate(run) == first
    one = validate.validate(replace(run, rows=replace(run.rows, val=run.rows.val[:1])))
    assert one["val/lidar"] is None


def test_lidar_sees_one_volume_under_several_masks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []

    def mean_id(view: torch.Tensor, context: torch.Tensor, *_: object) -> torch.Tensor:
        seen.append(context)
        return torch.stack([context.float(), view.mean((1, 2, 3, 4))[:, None].expand(context.shape)], dim=-1)

    monkeypatch.setattr(run.model, "encode_context", mean_id)
    cpu_batch = next(validate.validation_batches(run.cfg, run.store, run.rows.val, 2))
    plan = validate.MaskPlan.from_config(run.cfg)
    views_QE = torch.stack(list(validate.masked_views(run, plan, cpu_batch)))
    assert views_QE.shape == (2, validate.LIDAR_MASKS, 2)
    assert torch.equal(seen[0], cpu_batch["context"]), "the first mask is that of the validation loss"
    assert len({tuple(ids[0].tolist()) for ids in seen}) > validate.LIDAR_MASKS // 2
    valid = cpu_batch["token_valid"][0]
    by_hand = [ids[0][valid[ids[0]]].float().mean() for ids in seen]
    torch.testing.assert_close(views_QE[0, :, 0], torch.stack(by_hand))
    assert float(views_QE[0, :, 1].std()) == pytest.approx(0, abs=1e-6), "the volume stays"
