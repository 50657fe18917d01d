"""A run leaves its rows, log, checkpoints, W&B rows and pictures, and names its best checkpoints."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data_setup.store.reader import PreparedStore
from models import vit3d
from pretraining import train as loop
from pretraining.progress import NEW_RUN, Progress
from pretraining.rows import open_rows
from pretraining.schedules import Schedule
from pretraining.train import train
from tests.pretraining.train.runs import metrics
from tests.support.model_factory import small_config
from tests.support.pipeline_factory import WITH_WANDB, pipeline_config
from tests.support.wandb_reader import history, run_ids
from utils.checkpoint import list_steps, load_checkpoint
from utils.config.load import load_config
from utils.runtime.single import Runtime

pytestmark = pytest.mark.usefixtures("small_encoder")


def test_a_run_leaves_what_a_reader_needs(finished: Path) -> None:
    rows = metrics(finished)
    assert [r["step"] for r in rows if "train/loss" in r] == list(range(1, 9))
    validations = {r["step"]: r for r in rows if "val/loss" in r}
    assert list(validations) == [0, 4, 8]
    assert not {"val/probe", "perf/validation_fraction"} & set(validations[0]), "a small one before step 1"
    for step in (4, 8):
        assert {"val/probe", "val/skill_position", "val/leak"} <= set(validations[step])
        assert 0 < validations[step]["perf/gauges_fraction"] < 1
        assert 0 < validations[step]["perf/validation_fraction"] < 1
    last = [r for r in rows if "train/loss" in r][-1]
    for key in ("loss", "lr", "grad_norm", "ema_momentum", "feature_std", "skill_mean", "skill_position"):
        assert f"train/{key}" in last, key
    assert {"ema/init_weight", "perf/volumes_per_s", "perf/data_wait_fraction"} <= set(last)
    assert last["train/grad_norm"] > 0
    assert last["ema/init_weight"] == pytest.approx(
        np.prod([r["train/ema_momentum"] for r in rows if "train/loss" in r])
    )
    for name in ("config.yaml", "log.txt", "provenance.json", "prepare_report.json"):
        assert (finished / name).stat().st_size > 0
    assert len(list((finished / "snapshots").glob("step_00000000_*.npz"))) >= 1
    assert list_steps(str(finished / "checkpoints")) == [6, 8]
    assert {p.stem for p in (finished / "checkpoints").glob("best_*.pt")} == {"best_probe", "best_val_loss"}


@pytest.mark.parametrize("keep", [10, 2])
def test_checkpoints_of_epochs_are_kept_whatever_else_is_written(
    folder: Path, tmp_path: Path, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as train.keep_epochs at most, and the start says what they will take."""
    monkeypatch.setitem(vit3d.SIZES, "ti", vit3d.Size(1, 192, 3))  # tensors that are most of a file
    run = tmp_path / f"epochs_kept_{keep}"
    every = "train.ckpt_every_steps=3", "train.ckpt_every_epochs=1", "train.keep_last=1", "train.max_steps=14"
    small = "train.global_batch_size=8", "train.per_core_batch_size=8", "train.val_every_steps=14"
    cfg = pipeline_config(folder, f"run.dir={run}", *every, *small, f"train.keep_epochs={keep}")
    epoch = round(len(open_rows(cfg, PreparedStore.open(str(folder / "store"))).train) / 8)
    assert epoch == 2, "seven epochs, of which keep_epochs=2 leaves every fourth"
    assert train(cfg) == 0
    kept = list(range(2, 15, 2)) if keep == 10 else [8]
    assert list_steps(str(run / "checkpoints")) == sorted({*kept, 14})
    banner = re.search(
        r"checkpoints: (\S+) MB each, at most (\d+) of them .*: (\S+) GB in", (run / "log.txt").read_text()
    )
    assert banner is not None
    size = (run / "checkpoints" / "step_00000014.pt").stat().st_size
    assert float(banner[1]) == pytest.approx(size / 1e6, rel=0.02)
    assert int(banner[2]) == 1 + len(kept) + 2 + 1
    assert float(banner[3]) == pytest.approx(int(banner[2]) * size / 1e9, rel=0.02)


def test_a_run_says_who_and_where_it_is_and_ends_with_a_command(folder: Path, finished: Path) -> None:
    lines = [line.partition(" INFO ")[2] for line in (finished / "log.txt").read_text().splitlines()]
    banner = {line.split()[0]: line for line in lines if line}
    assert "cpu: " in banner["device"]
    assert "float32" in banner["device"]
    assert banner["world"] == "world   1 process, 1 device"
    assert banner["batch"].endswith("global batch 4 = 4 per device x 1 processes x 1 accumulated, on cpu")
    assert "24 tokens" in banner["model"]
    assert str(folder / "store") in banner["store"]
    assert (
        banner["commit"].split()[1].partition("+")[0]
        == json.loads((finished / "provenance.json").read_text())["commit"].partition("+")[0]
    )
    assert f"{finished}: step 0 of 8" in banner["run"]
    assert f"kill {os.getpid()}" in banner["stop"]
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 8
    assert max(len(re.findall(r"\d[\d.]*", line)) for line in steps) <= 8, "the rest is in metrics.jsonl"
    assert [line.split(":")[0] for line in lines if line.startswith("validation")] == [
        f"validation at step {step}" for step in (0, 4, 8)
    ]
    last = lines[lines.index(f"finished at step 8; run directory {finished}") + 1]
    *_, module, option, config = shlex.split(last.removeprefix("next: "))
    assert (module, option) == ("finetuning.evaluate", "--config")
    assert load_config(config) == pipeline_config(folder, f"run.dir={finished}", WITH_WANDB)


def test_the_checkpoint_names_its_participants_and_never_the_test_split(folder: Path, finished: Path) -> None:
    state = load_checkpoint(str(finished / "checkpoints" / "step_00000008.pt"))
    index = PreparedStore.open(str(folder / "store")).index
    seen = index[index["person_id"].isin(state["participants"])]
    assert set(seen["split"]) == {"train"}
    assert set(state["participants"]) == set(
        index[(index["split"] == "train") & (index["status"] == "kept")]["person_id"]
    )
    rows = open_rows(pipeline_config(folder), PreparedStore.open(str(folder / "store")))
    people = [
        {rows.person_of_row[int(r)] for r in side} for side in (rows.train, rows.val, rows.official_val)
    ]
    assert not people[0] & people[1]
    assert not (people[0] | people[1]) & people[2]
    assert state["normalisation"] == "zscore_valid"


def test_one_wandb_run_with_training_metrics_on_the_step_clock(finished: Path) -> None:
    assert len(run_ids(finished)) == 1
    rows = history(finished)
    logged = {int(r["_step"]): r["train/loss"] for r in rows if "train/loss" in r}
    assert logged == {r["step"]: r["train/loss"] for r in metrics(finished) if "train/loss" in r}


def test_without_a_checkpoint_directory_nothing_is_saved(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "unsaved"
    train(pipeline_config(folder, f"run.dir={run}", "train.ckpt_dir=null", "train.max_steps=2"))
    assert not (run / "checkpoints").exists()
    assert not list(tmp_path.glob("None*"))
    assert not list(Path.cwd().glob("None*"))


def test_pictures_go_to_wandb_for_synthetic_data_alone(folder: Path, tmp_path: Path, finished: Path) -> None:
    assert list(finished.glob("wandb/*/files/media/images/**/*.png"))
    store = tmp_path / "as_if_real"
    shutil.copytree(folder / "store", store)
    attributes = json.loads((store / "zarr.json").read_text())
    attributes["attributes"]["synthetic"] = False
    (store / "zarr.json").write_text(json.dumps(attributes))
    run = tmp_path / "real_run"
    overrides = [f"run.dir={run}", f"data.store={store}", "train.max_steps=1", WITH_WANDB]
    assert train(pipeline_config(folder, *overrides)) == 0
    assert list(run.glob("wandb/*/*.wandb"))
    assert not list(run.glob("wandb/*/files/media/**/*.png"))


def progress_of(init_weight: float = 0.0) -> Progress:
    runtime = Runtime(torch.device("cpu"), use_bf16=False)
    return Progress(runtime, Schedule(small_config(), 8), {**NEW_RUN, "init_weight": init_weight})


def test_artifacts_are_the_bests_or_every_step_that_is_there(folder: Path, finished: Path) -> None:
    """Only of a run that has ended, in the order of its steps."""
    for more, steps in (([], []), (["wandb.artifacts=all"], list_steps(str(finished / "checkpoints")))):
        cfg = pipeline_config(folder, f"run.dir={finished}", *more)
        progress = progress_of()
        progress.step, progress.best = 8, {"best_probe": 0.5}
        sent: list[str] = []
        run_log: Any = SimpleNamespace(artifact=lambda _, url: sent.append(url), alert=lambda *_: None)  # noqa: B023
        gauges: Any = SimpleNamespace(alarms=SimpleNamespace(raised=[]))
        loop.finish(cfg, gauges, progress, 9, run_log)
        assert sent == []
        assert loop.finish(cfg, gauges, progress, 8, run_log) == 0
        names = ["best_probe", *(f"step_{step:08d}" for step in steps)]
        assert sent == [f"{finished}/checkpoints/{name}.pt" for name in names]
        assert all(Path(url).is_file() for url in sent)
    assert len(steps) > 1


def test_which_checkpoint_is_the_best() -> None:
    measured = {"val/loss": 0.5, "val/rankme": 40.0, "val/probe": 0.6, "val/skill_position": 0.1}
    progress = progress_of()
    assert progress.best_names(measured, is_warm=False) == []
    assert progress.best_names(measured, is_warm=True) == ["best_probe", "best_val_loss"]
    worse = {**measured, "val/loss": 0.6, "val/rankme": 50.0, "val/probe": 0.5}
    assert progress.best_names(worse, is_warm=True) == []
    spoilt = {"val/loss": float("nan"), "val/rankme": None, "val/probe": 0.7, "val/skill_position": None}
    assert progress.best_names(spoilt, is_warm=True) == ["best_probe"]
    lower = {**worse, "val/loss": 0.1, "val/skill_position": None}
    assert progress.best_names(lower, is_warm=True) == ["best_val_loss"]


def test_without_labels_rank_decides_among_learned_checkpoints() -> None:
    def names(skill: float | None, init_weight: float = 0.0) -> list[str]:
        measured = {"val/loss": None, "val/rankme": 40.0, "val/probe": None, "val/skill_position": skill}
        return progress_of(init_weight).best_names(measured, is_warm=True)

    assert names(0.1) == ["best_rankme"]
    assert names(-0.1) == names(None) == names(0.1, 0.2) == []
