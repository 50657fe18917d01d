"""What validation measures: LiDAR over masks, probes on labels and on shortcuts, one embedding for all."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_setup.store.reader import PreparedStore
from models import vit3d
from models.predictor import Predictor3D
from models.probes.participants import knn_probe
from models.vit3d import gather_tokens
from models.vjepa3d import VJEPA3D
from pretraining.gauges import validation as validate
from pretraining.gauges.alarms import Alarms
from pretraining.gauges.validation import participants_in_turn, quarters
from pretraining.run import Run, open_run
from pretraining.train import train
from tests.support import counted_validation
from tests.support.model_factory import nano_model
from tests.support.pipeline_factory import pipeline_config
from tests.support.process_factory import command, run_two
from utils.report.run_files import _series
from utils.runtime.single import Runtime

CPU = Runtime(torch.device("cpu"), use_bf16=False)
PROBES = {f"val/{name}" for name in ("probe", "ridge", "knn_device", "ridge_device")}
PROBES |= {"val/knn_laterality", "val/ridge_laterality"}


NO_PENALTY = "method.regulariser=none", "method.regulariser_weight=0"
RECIPES = {
    "vjepa2": (),
    "mae": ("method.recipe=mae", *NO_PENALTY),
    "methods": (
        "method.recipe=methods",
        "method.mask_ratio=0.5",
        "method.ema_base=0.9",
        "method.neighbour_weight=0",
        *NO_PENALTY,
    ),
}
MEASURED = {f"val/{name}" for name in ("loss", "skill_mean", "skill_position", "leak", "rankme", "lidar")}
MEASURED |= {"val/volumes"}


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


@pytest.mark.parametrize("column", validate.SHORTCUTS)
def test_features_that_tell_a_shortcut_are_found_out(
    run: Run, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = features_that_tell(run.store, column)
    monkeypatch.setattr(validate, "embed_rows", planted)
    monkeypatch.setattr(validate, "knn_probe", partial(knn_probe, k=1))  # 20 are all of so small a fold
    scores = validate.probe_scores(run)
    assert set(scores) == PROBES
    assert scores[f"val/knn_{column}"] == scores[f"val/ridge_{column}"] == 1.0
    (other,) = set(validate.SHORTCUTS) - {column}
    assert scores[f"val/ridge_{other}"] < 0.9
    assert len(planted.asked) == 2, "each side is embedded once for all probes"


def test_no_participant_is_on_both_sides(run: Run) -> None:
    scores = validate.probe_scores(run)
    assert all(scores[name] is not None for name in PROBES)
    person = run.rows.person_of_row[int(run.rows.train[0])]
    shared = {**run.rows.person_of_row, int(run.rows.official_val[0]): person}
    mixed = replace(run.rows, person_of_row=shared)
    assert set(validate.probe_scores(replace(run, rows=mixed)).values()) == {None}


def test_without_labels_the_shortcuts_are_still_measured(run: Run) -> None:
    scores = validate.probe_scores(replace(run, rows=replace(run.rows, label_of_row={})))
    assert scores["val/probe"] is scores["val/ridge"] is None
    assert scores["val/knn_device"] is not None


def test_rows_with_labels_come_first_and_are_spread() -> None:
    chosen = validate.choose_rows(np.arange(100), dict.fromkeys(range(0, 100, 2), "a"), 5)
    assert chosen.tolist() == [0, 24, 48, 74, 98]
    assert validate.choose_rows(np.arange(10), {}, 4).tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_context_that_attends_to_its_targets_is_a_leak(
    recipe: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is learned; without the fault the predictions do not move at all."""
    cfg = pipeline_config(folder, *RECIPES[recipe])
    run = replace(open_run(cfg, CPU), model=nano_model(cfg))
    healthy = validate.validate(run, is_first=True)
    assert healthy["val/leak"] < 1e-6
    assert Alarms().update(0, healthy) == []

    def sees_all(view: torch.Tensor, context: torch.Tensor, *_: object) -> torch.Tensor:
        everything = run.model.encoder(view)
        return everything if run.model.is_dense else gather_tokens(everything, context)

    monkeypatch.setattr(run.model, "encode_context", sees_all)
    measured = validate.validate(run, is_first=True)
    assert measured["val/leak"] > 0.01
    (alarm,) = Alarms().update(0, measured)
    assert alarm.text.startswith("context sees targets: the prediction moves with the voxels of its targets")


def test_a_run_that_copies_its_targets_reads_above_a_half_and_alarms(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context encoder sees the target tokens, and the predictor hands on what it gets."""
    real = VJEPA3D.forward

    def context_is_target(self: VJEPA3D, view: Any, other: Any, context: Any, target: Any, *rest: Any) -> Any:
        own = self.encoder(view, context)  # what the gauges of training read
        return replace(real(self, view, other, target, target, *rest), context_BKE=own)

    def hand_on(self: Predictor3D, context: torch.Tensor, *_: object) -> torch.Tensor:
        return context + sum(0 * p.sum() for p in self.parameters())

    monkeypatch.setattr(VJEPA3D, "forward", context_is_target)
    monkeypatch.setattr(Predictor3D, "forward", hand_on)
    monkeypatch.setitem(vit3d.SIZES, "ti", vit3d.SIZES["nano"])
    monkeypatch.setattr("pretraining.run.VAL_FRACTION", 0.7)
    many = "train.max_steps=30", "train.val_every_steps=15"
    quiet = "train.ckpt_dir=null", "wandb.mode=disabled", "train.log_every_steps=15", f"run.dir={tmp_path}"
    assert train(pipeline_config(folder, *many, *quiet, *NO_PENALTY)) == 0
    series, _, alarms = _series((tmp_path / "metrics.jsonl").read_text(), tmp_path)
    assert [step for step, _ in series["val/skill_position"]] == [0, 15, 30]
    assert min(value for _, value in series["val/skill_position"]) > 0.5
    assert alarms[0][0] == 0
    assert alarms[0][1].startswith("context sees targets")


def test_validation_takes_participants_in_turn_and_always_the_same() -> None:
    people = {
        row: f"p{row // 10 if row < 30 else row}" for row in range(40)
    }  # three of ten volumes, ten of one
    rows = np.arange(40)
    chosen = participants_in_turn(rows, people, 20)
    assert len({people[row] for row in chosen[:13].tolist()}) == 13, "one of each before a second of any"
    by_person = [sum(people[row] == f"p{n}" for row in chosen.tolist()) for n in range(3)]
    assert max(by_person) - min(by_person) <= 1
    assert participants_in_turn(rows[::-1], people, 20).tolist() == chosen.tolist()
    assert participants_in_turn(rows, people, 7).tolist() == chosen[:7].tolist()
    assert sorted(participants_in_turn(rows, people, 99).tolist()) == rows.tolist()
    quarter = quarters([people[row] for row in chosen.tolist()])
    assert (
        len({(people[row], part) for row, part in zip(chosen.tolist(), quarter.tolist(), strict=True)}) == 13
    )
    assert np.bincount(quarter[:13]).tolist() == [4, 3, 3, 3]


def test_two_eyes_of_one_participant_count_for_their_own_side() -> None:
    embedded = [(np.eye(4), np.arange(4)), (np.eye(4), np.arange(4, 8))]
    people = {r: f"p{r // 2}" for r in range(8)}
    folds = validate.make_folds(embedded, {r: "LR"[r % 2] for r in range(8)}, people)
    assert folds is not None
    assert folds[0].participants.tolist() == ["p0/L", "p0/R", "p1/L", "p1/R"]
    assert folds[1].labels.tolist() == [0, 1, 0, 1]
    assert validate.make_folds(embedded, dict.fromkeys(range(8), "L"), people) is None


@torch.no_grad()
def test_the_probes_read_the_target_encoder(run: Run) -> None:
    """And nothing of the context encoder, which is another one after the first update."""
    rows = run.rows.official_val[:3]
    before, _ = validate.embed_rows(run, rows)
    for weight in run.model.encoder.parameters():
        weight.mul_(3).add_(0.1)
    assert np.array_equal(validate.embed_rows(run, rows)[0], before)
    run.model.update_target(0.0, torch.tensor(True))
    assert not np.allclose(validate.embed_rows(run, rows)[0], before, rtol=0.01)


def test_two_processes_share_the_reads_and_get_the_numbers_of_one(
    folder: Path, tmp_path: Path, small_encoder: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads its part with workers, each volume once for each purpose, and nothing itself."""
    run_dir = tmp_path / "shared"
    overrides = [f"run.dir={run_dir}", "train.per_core_batch_size=2", "seed=1"]
    monkeypatch.setattr("pretraining.run.VAL_FRACTION", counted_validation.VAL_FRACTION)
    overrides += ["val.max_volumes=17"]
    _, *words = command(folder, *overrides, "data.workers=1")
    run_two("tests.support.counted_validation", words[2:], tmp_path / "processes")
    alone = open_run(pipeline_config(folder, *overrides), CPU)
    expected = validate.validate(alone)
    assert all(expected[name] is not None for name in MEASURED)
    sides = [len(side) for side in validate.probe_sides(alone)]
    assert sides == [4, 7]
    for rank in range(2):
        numbers = json.loads((run_dir / f"numbers_{rank}.json").read_text())
        measured = {name: value for name, value in expected.items() if value is not None}
        assert {name for name, value in numbers.items() if value is not None} == set(measured)
        assert {name: numbers[name] for name in measured} == pytest.approx(measured, rel=1e-4)
        reads = [path.name.split("_") for path in (run_dir / "reads").glob(f"{rank}_*")]
        assert len(reads) <= sum(math.ceil(volumes / 2) for volumes in (17, *sides))
        assert all(process != "own" for _, process, _, _ in reads), "a worker's work"
    rows = {int(path.name.split("_")[2]) for path in (run_dir / "reads").iterdir()}
    assert len(rows) == 17 + sum(sides), "every volume was read by somebody"


def test_validation_measures_everything_and_repeats(run: Run) -> None:
    run = replace(run, rows=replace(run.rows, val=run.rows.train[:6]))
    first = validate.validate(run)
    assert set(first) == MEASURED | PROBES
    assert 1 < first["val/lidar"] <= 5
    assert validate.validate(run) == first
    one = validate.validate(replace(run, rows=replace(run.rows, val=run.rows.val[:1])))
    assert one["val/lidar"] is None
    assert (first["val/volumes"], one["val/volumes"]) == (6, 1)


def test_lidar_sees_one_volume_under_several_masks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []

    def mean_id(view: torch.Tensor, context: torch.Tensor, *_: object) -> torch.Tensor:
        seen.append(context)
        return torch.stack([context.float(), view.mean((1, 2, 3, 4))[:, None].expand(context.shape)], dim=-1)

    monkeypatch.setattr(run.model, "encode_context", mean_id)
    cpu_batch = next(validate.validation_batches(run.cfg, run.store, run.rows.val, 2))
    views_QE = validate.masked_views(run, cpu_batch, cpu_batch)
    assert views_QE.shape == (2, validate.LIDAR_MASKS, 2)
    assert torch.equal(seen[0], cpu_batch["context"]), "the first mask is that of the validation loss"
    assert len({tuple(ids[0].tolist()) for ids in seen}) > validate.LIDAR_MASKS // 2
    valid = cpu_batch["token_valid"][0]
    by_hand = [ids[0][valid[ids[0]]].float().mean() for ids in seen]
    torch.testing.assert_close(views_QE[0, :, 0], torch.stack(by_hand))
    assert float(views_QE[0, :, 1].std()) == pytest.approx(0, abs=1e-6), "the volume stays"
