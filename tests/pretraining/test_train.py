"""The loop on phantom data: it learns, resumes exactly, survives signals and bad input, and says what it
did.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from data_setup.store.reader import PreparedStore
from data_setup.transforms import JEPAMaskd
from models import vit3d
from models.vjepa3d import VJEPA3D
from pretraining import step as step_module
from pretraining import train as loop
from pretraining.gauges import validation
from pretraining.gauges.alarms import NEIGHBOUR_RANK_FALL
from pretraining.gauges.monitor import FrozenTargetError, LeakError, check_no_leak
from pretraining.gauges.throughput import StepTrace
from pretraining.gauges.validation import validate
from pretraining.progress import NEW_RUN, Progress, Schedule, ema_momentum
from pretraining.resume import restore
from pretraining.run import open_rows, open_run
from pretraining.train import train
from tests.support.model_factory import nano_model, small_config, token_ids, volumes
from tests.support.pipeline_factory import SURROUNDINGS, WITH_WANDB, pipeline_config, stop_after
from tests.support.process_factory import assert_same_run, metrics, weights, without_clock
from tests.support.wandb_reader import run_ids
from utils.checkpoint import CheckpointWriter, list_steps, load_checkpoint
from utils.config.load import load_config
from utils.errors import EXIT_STOPPED, ConfigError, UserError
from utils.run import guard, skipped_updates
from utils.run.lease import hold
from utils.runtime.processes import Group
from utils.runtime.single import Runtime

pytestmark = pytest.mark.usefixtures("small_encoder")


@pytest.fixture(scope="module")
def finished(folder: Path, small_encoder: None) -> Path:
    """An uninterrupted run of 8 steps."""
    run = folder / "finished"
    assert train(pipeline_config(folder, f"run.dir={run}", WITH_WANDB)) == 0
    return run


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


@pytest.fixture(scope="module")
def finished_methods(folder: Path, small_encoder: None) -> Path:
    """The same of the other recipe."""
    run = folder / "finished_methods"
    assert train(pipeline_config(folder, f"run.dir={run}", *METHODS)) == 0
    return run


def plant_in_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], None]) -> None:
    """Do something before update number `step`."""
    real = loop.train_step

    def planted(*args: Any) -> Any:
        if args[5].step == step:
            act()
        return real(*args)

    monkeypatch.setattr(loop, "train_step", planted)


def plant_error(monkeypatch: pytest.MonkeyPatch, step: int, error: Exception) -> None:
    def act() -> None:
        raise error

    plant_in_step(monkeypatch, step, act)


def short_of_memory(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """A trial step of more than so many volumes does not fit."""
    real = step_module.trial_step

    def trial(model: Any, optimizer: Any, batch: Any, cfg: Any, runtime: Any) -> None:
        if len(batch["row"]) > most:
            raise torch.OutOfMemoryError("planted")
        real(model, optimizer, batch, cfg, runtime)

    monkeypatch.setattr(loop, "trial_step", trial)


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
    more = f"train.keep_epochs={keep}", "data.sampling=device_balanced"
    cfg = pipeline_config(folder, f"run.dir={run}", *every, *small, *more)
    epoch = round(len(open_rows(cfg, PreparedStore.open(str(folder / "store"))).train) / 8)
    assert epoch == 2, "seven epochs, of which keep_epochs=2 leaves every fourth"
    assert train(cfg) == 0
    kept = list(range(2, 15, 2)) if keep == 10 else [8]
    assert list_steps(str(run / "checkpoints")) == sorted({*kept, 14})
    text = (run / "log.txt").read_text()
    assert re.search(r" passes  \w+ [\d.]+(, \w+ [\d.]+)*\n", text), "of each device"
    banner = re.search(r"checkpoints: (\S+) MB each, at most (\d+) of them .*: (\S+) GB in", text)
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


def test_the_checkpoint_names_its_participants_and_never_the_test_split(
    folder: Path, finished: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = load_checkpoint(str(finished / "checkpoints" / "step_00000008.pt"))
    index = PreparedStore.open(str(folder / "store")).index
    seen = index[index["person_id"].isin(state["participants"])]
    assert set(seen["split"]) == {"train"}
    assert set(state["participants"]) == set(
        index[(index["split"] == "train") & (index["status"] == "kept")]["person_id"]
    )
    rows = open_rows(pipeline_config(folder), PreparedStore.open(str(folder / "store")))
    assert f"Validation of {len(rows.val)} volumes measures no skill" in caplog.text  # before an hour of it
    people = [
        {rows.person_of_row[int(r)] for r in side} for side in (rows.train, rows.val, rows.official_val)
    ]
    assert not people[0] & people[1]
    assert not (people[0] | people[1]) & people[2]
    assert state["normalisation"] == "zscore_valid"


@pytest.mark.parametrize(
    ("recipe", "number", "word"),
    [("vjepa2", signal.SIGTERM, "SIGTERM"), ("methods", signal.SIGINT, "Ctrl-C")],
)
def test_a_signal_then_resume_equals_no_interruption(
    folder: Path,
    tmp_path: Path,
    recipe: str,
    number: signal.Signals,
    word: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finished = request.getfixturevalue("finished" if recipe == "vjepa2" else "finished_methods")
    run = tmp_path / f"interrupted_{recipe}"
    cfg = pipeline_config(folder, f"run.dir={run}", *(METHODS if recipe == "methods" else (WITH_WANDB,)))
    plant_in_step(monkeypatch, 4, lambda: os.kill(os.getpid(), number))
    assert train(cfg) == EXIT_STOPPED
    assert list_steps(str(run / "checkpoints"))[-1] == 5
    stopped = f"stopped by {word} at step 5 of 8; run the same command again to go on"
    assert stopped in (run / "log.txt").read_text()
    assert "resuming" not in (run / "log.txt").read_text()
    monkeypatch.undo()
    assert train(cfg) == 0
    assert "resuming from step 5" in (run / "log.txt").read_text()
    assert_same_run(run, finished, 8)
    assert len(run_ids(run)) == (1 if recipe == "vjepa2" else 0)
    before = (run / "metrics.jsonl").read_text()
    assert train(cfg) == 0  # a third time there is nothing to do
    assert (run / "metrics.jsonl").read_text() == before


def test_a_run_whose_checkpoints_are_gone_is_an_error_and_keeps_its_history(
    folder: Path, tmp_path: Path, finished: Path
) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    elsewhere = (finished / "checkpoints").rename(tmp_path / "elsewhere")
    try:
        expected = (
            r"finished: expected checkpoints of this run, which is at step 8, found none in .*checkpoints;"
        )
        with pytest.raises(UserError, match=expected):
            train(pipeline_config(folder, f"run.dir={finished}"))
    finally:
        shutil.rmtree(finished / "checkpoints", ignore_errors=True)
        elsewhere.rename(finished / "checkpoints")
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_a_run_that_ended_before_its_first_checkpoint_begins_anew_and_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "early"
    cfg = pipeline_config(folder, f"run.dir={run}", "train.ckpt_every_steps=4", "train.max_steps=4")
    plant_error(monkeypatch, 2, UserError("planted"))
    with pytest.raises(UserError, match="planted"):
        train(cfg)
    monkeypatch.undo()
    assert train(cfg) == 0
    assert "the run ended at about step 2 and begins again at step 0" in (run / "log.txt").read_text()
    assert [r["step"] for r in metrics(run) if "train/loss" in r] == [1, 2, 3, 4]
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match="which is at step 4"):
        train(cfg)


def test_a_run_goes_on_where_its_machine_is_replaced(folder: Path, tmp_path: Path, finished: Path) -> None:
    """Stopped at step 5, its run directory gone: one W&B run, one history, one log."""
    run, kept = tmp_path / "moved", tmp_path / "bucket"
    cfg = pipeline_config(folder, f"run.dir={run}", f"train.ckpt_dir={kept}", WITH_WANDB)
    with stop_after(5):
        assert train(cfg) == EXIT_STOPPED
    (wandb_id,) = run_ids(run)
    old = run.rename(tmp_path / "old_machine")
    with (old / "metrics.jsonl").open("a") as file:  # of steps that no checkpoint has
        file.write('{"step": 6, "train/loss": 0.0}\n')
    with stop_after(7):
        assert train(cfg) == EXIT_STOPPED
    assert run_ids(run) == {wandb_id}
    expected = without_clock(finished)
    assert without_clock(run) == [row for row in expected if row["step"] <= 7]
    text = (run / "log.txt").read_text()
    assert text.count("stopped by SIGTERM at step 5 of 8") == text.count("resuming from step 5") == 1
    assert text.index("stopped by SIGTERM") < text.index("resuming from step 5")

    shutil.rmtree(run)
    old.rename(run)  # the first machine again: it takes over what the second one did
    assert train(cfg) == 0
    assert run_ids(run) == {wandb_id}
    assert without_clock(run) == expected
    assert (run / "log.txt").read_text().count("stopped by SIGTERM at step 7 of 8") == 1


@pytest.mark.parametrize("at", [4, 8])
def test_sigterm_in_a_validation_ends_it_and_the_next_start_makes_it(
    folder: Path, tmp_path: Path, finished: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in that of the last step. The run is then as if nothing had happened, its best checkpoint too."""
    run = tmp_path / f"validating_{at}"
    cfg = pipeline_config(folder, f"run.dir={run}")
    real = validation.measure_batch

    def signal_then_measure(*arguments: Any, **options: Any) -> Any:
        if [row["step"] for row in metrics(run)][-1:] == [at]:
            os.kill(os.getpid(), signal.SIGTERM)
            monkeypatch.setattr(validation, "measure_batch", never)
            monkeypatch.setattr(validation, "probe_scores", never)
        return real(*arguments, **options)

    monkeypatch.setattr(validation, "measure_batch", signal_then_measure)
    assert train(cfg) == EXIT_STOPPED
    assert list_steps(str(run / "checkpoints"))[-1] == at
    assert [row for row in metrics(run) if "val/loss" in row and row["step"] == at] == []
    monkeypatch.undo()
    assert train(cfg) == 0
    assert_same_run(run, finished, 8)
    best = [load_checkpoint(str(r / "checkpoints" / "best_val_loss.pt"))["step"] for r in (run, finished)]
    assert best[0] == best[1]
    assert train(cfg) == 0  # and nothing is owed any more
    assert without_clock(run) == without_clock(finished)


@pytest.mark.parametrize("phase", ["open_run", "restore", "settle_memory"])
def test_sigterm_while_it_starts_ends_it_before_the_next_phase(
    folder: Path, tmp_path: Path, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(loop, phase)

    def signal_then(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    monkeypatch.setattr(loop, phase, signal_then)
    after = {"open_run": "restore", "restore": "settle_memory", "settle_memory": "open_log"}[phase]
    monkeypatch.setattr(loop, after, never)
    assert train(pipeline_config(folder, f"run.dir={tmp_path / phase}")) == EXIT_STOPPED
    files = {path.name for path in (tmp_path / phase).rglob("*") if path.is_file()}
    assert not files


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("expected the run to have ended")


class OfTwo(Group):
    """The first of two processes; `change` says how what the other one sends differs."""

    size = 2
    messages: list[tuple[str, int]]

    def __init__(self, change: Callable[[Any], Any] = lambda value: value) -> None:
        self.change, self.messages = change, []

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, self.change(value)]

    def leave_message(self, text: str, exit_code: int) -> None:
        self.messages.append((text, exit_code))


@pytest.mark.parametrize("differs", [True, False])
def test_processes_with_other_settings_are_refused_before_they_run(
    folder: Path, tmp_path: Path, differs: bool
) -> None:
    def change(value: Any) -> Any:
        return {**value, "optim.base_lr": "0.1"} if differs and isinstance(value, dict) else value

    runtime = Runtime(torch.device("cpu"), use_bf16=False, group=OfTwo(change))
    changes = f"run.dir={tmp_path / 'two'}", "train.per_core_batch_size=2"
    run = open_run(pipeline_config(folder, *changes), runtime)
    if differs:
        with pytest.raises(
            UserError, match=r"optim.base_lr: expected .* on process 0, found 0.1 on process 1"
        ):
            restore(run, loop.open_gauges(run))
    else:
        assert restore(run, loop.open_gauges(run)).step == 0


@pytest.mark.parametrize("error", [ValueError("a fault"), UserError("a mistake")])
def test_a_failing_process_of_several_leaves_at_once_with_a_message(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(guard, "leave", codes.append)
    group = OfTwo()
    guard._leave_word(Runtime(torch.device("cpu"), use_bf16=False, group=group), type(error), error, None)
    if isinstance(error, UserError):  # utils.cli says it in one line, and leaves
        assert error.leaves_at_once
        assert (group.messages, codes) == ([("a mistake", 2)], [])
    else:
        assert (group.messages, codes) == ([("ValueError: a fault", 1)], [1])


def test_workers_and_accumulation_change_nothing(folder: Path, tmp_path: Path, finished: Path) -> None:
    run = tmp_path / "accumulated"
    train(pipeline_config(folder, f"run.dir={run}", "train.per_core_batch_size=1", "data.workers=2"))
    pairs = zip(metrics(run), metrics(finished), strict=True)
    for a, b in pairs:
        for key in ("train/loss", "val/loss"):
            if key in a:
                assert a[key] == pytest.approx(b[key], rel=1e-4), (a["step"], key)


def test_out_of_memory_halves_the_batch_and_keeps_the_losses(
    folder: Path, tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "small_memory"
    short_of_memory(monkeypatch, 1)
    train(pipeline_config(folder, f"run.dir={run}"))
    assert "per_core_batch_size 4 -> 2" in (run / "log.txt").read_text()
    assert "per_core_batch_size 2 -> 1" in (run / "log.txt").read_text()
    for a, b in zip(metrics(run), metrics(finished), strict=True):
        if "train/loss" in a:
            assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-4)

    short_of_memory(monkeypatch, 0)
    with pytest.raises(UserError, match=r"out of memory: one volume of spatial\.image_size \[8, 24, 32\]"):
        train(pipeline_config(folder, f"run.dir={tmp_path / 'no_memory'}"))

    short_of_memory(monkeypatch, 1)  # one volume alone has no other to take targets of
    with pytest.raises(UserError, match=r"out of memory: a batch of two volumes of spatial"):
        train(pipeline_config(folder, f"run.dir={tmp_path / 'control'}", "method.control=mismatched_targets"))
    latents = "method.control=mismatched_latents", "method.neighbour_weight=1"
    with pytest.raises(UserError, match=r"out of memory: a batch of two volumes of spatial"):
        train(pipeline_config(folder, f"run.dir={tmp_path / 'latents'}", *latents))


# a larger batch does not fit; there is no room to try a larger one; no larger one divides the global batch
@pytest.mark.parametrize(("most", "has_room", "size"), [(2, True, 2), (9, False, 1), (9, True, 4)])
def test_an_automatic_batch_is_the_largest_that_fits_and_keeps_the_losses(
    most: int,
    has_room: bool,
    size: int,
    folder: Path,
    tmp_path: Path,
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short_of_memory(monkeypatch, most)
    monkeypatch.setattr(Runtime, "has_room", lambda _, growth: has_room and growth == 2)
    train(
        pipeline_config(folder, f"run.dir={tmp_path}", "train.per_core_batch_size=auto", "train.max_steps=2")
    )
    assert f"train.per_core_batch_size: auto -> {size}\n" in (tmp_path / "log.txt").read_text()
    assert load_config(tmp_path / "config.yaml").train.per_core_batch_size == size
    first, expected = (next(row for row in metrics(run) if row["step"] == 1) for run in (tmp_path, finished))
    assert first["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-4)


def test_a_run_directory_that_was_copied_goes_on(folder: Path, tmp_path: Path, finished: Path) -> None:
    """Its places are its own; data that moved is said to need a link."""
    run = shutil.copytree(finished, tmp_path / "copied")
    *_, before, last = list_steps(str(run / "checkpoints"))
    for path in (run / "checkpoints").glob(f"step_{last:08d}.*"):
        path.unlink()
    elsewhere = pytest.raises(
        UserError, match=r"data\.store: expected .*\(a link from the old path to the new"
    )
    with elsewhere:
        train(pipeline_config(folder, f"run.dir={run}", f"data.store={tmp_path}/store"))
    assert train(pipeline_config(folder, f"run.dir={run}")) == 0
    assert list_steps(str(run / "checkpoints"))[-1] == last
    assert without_clock(run) == without_clock(finished)
    assert f"resuming from step {before}" in (run / "log.txt").read_text()


def test_without_a_checkpoint_directory_nothing_is_saved(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "unsaved"
    train(pipeline_config(folder, f"run.dir={run}", "train.ckpt_dir=null", "train.max_steps=2"))
    assert not (run / "checkpoints").exists()
    assert not list(tmp_path.glob("None*"))
    assert not list(Path.cwd().glob("None*"))


@pytest.mark.parametrize("ckpt_dir", ["null", "{}/other", "{}/run/../run"])
def test_one_training_at_a_time_writes_a_run_directory(folder: Path, tmp_path: Path, ckpt_dir: str) -> None:
    run = tmp_path / "run"
    places = f"run.dir={run}", f"train.ckpt_dir={ckpt_dir.format(tmp_path)}"
    refused = pytest.raises(UserError, match=r"run: expected no other training of this run, found process")
    with hold(str(run)), refused:
        train(pipeline_config(folder, *places))
    assert train(pipeline_config(folder, *places, "train.max_steps=1")) == 0
    assert not list(tmp_path.rglob("lease_*"))


def test_a_foreign_store_geometry_is_refused(folder: Path, tmp_path: Path) -> None:
    cfg = pipeline_config(folder, f"run.dir={tmp_path / 'other'}", "spatial.image_size=[16,24,32]")
    with pytest.raises(UserError, match="image_size"):
        train(cfg)


def plant_nan(folder: Path, target: Path, rows: slice) -> None:
    shutil.copytree(folder / "store", target)
    path = target / "index.parquet"
    index = pd.read_parquet(path)
    index.loc[index.index[rows], "intensity_mean"] = float("nan")
    index.to_parquet(path)


def test_a_volume_that_gives_nan_is_skipped_and_counted(folder: Path, tmp_path: Path) -> None:
    plant_nan(folder, tmp_path / "nan_one", slice(0, 3))
    run = tmp_path / "nan_run"
    cfg = pipeline_config(
        folder, f"run.dir={run}", f"data.store={tmp_path / 'nan_one'}", "train.max_steps=12"
    )
    assert train(cfg) == 0
    last = [r for r in metrics(run) if "train/loss" in r][-1]
    assert 0 < last["train/bad_steps"] < 12
    assert "update skipped, loss or gradient not finite: step" in (run / "log.txt").read_text()
    assert all(bool(torch.isfinite(w).all()) for w in weights(run, 12).values())


def test_nan_for_good_stops_with_the_rows_and_the_checkpoint_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when that checkpoint is still being written."""
    real = CheckpointWriter._write

    def slow(*args: Any) -> None:
        time.sleep(1)
        real(*args)

    monkeypatch.setattr(CheckpointWriter, "_write", slow)
    plant_nan(folder, tmp_path / "nan_all", slice(None))
    overrides = [f"data.store={tmp_path / 'nan_all'}", "train.max_steps=30"]
    monkeypatch.setattr(skipped_updates, "MAX_BAD_STEPS", 3)
    names = r"not finite in 3 updates in a row .*step 2: rows \[.* checkpoint is .*/step_00000002\.pt$"
    with pytest.raises(UserError, match=names):
        train(pipeline_config(folder, f"run.dir={tmp_path / 'nan_stop'}", *overrides))


def test_a_target_that_does_not_move_is_an_alarm(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VJEPA3D, "update_target", lambda *_: None)
    with pytest.raises(FrozenTargetError, match="target is not moving"):
        train(pipeline_config(folder, f"run.dir={tmp_path / 'frozen'}"))


@pytest.mark.parametrize("recipe", ["vjepa2", "methods"])
def test_a_leak_is_an_alarm(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = small_config(recipe)
    model = nano_model(cfg).eval()
    context, target = token_ids(cfg, 2)
    check_no_leak(model, volumes(cfg, 2), context, target)
    monkeypatch.setattr(VJEPA3D, "encode_context", lambda self, view, *_: self.encoder(view))
    with pytest.raises(LeakError, match="context sees targets"):
        check_no_leak(model, volumes(cfg, 2), context, target)


@pytest.mark.parametrize("recipe", ["vjepa2", "mae", "surroundings"])
def test_the_alarms_know_what_is_predicted(
    folder: Path, tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their weights start another run; where nothing is hidden no leak is measured."""
    built, real = [], loop.Gauges
    monkeypatch.setattr(loop, "Gauges", lambda *a, **k: built.append(real(*a, **k)) or built[-1])
    mae = ("method.recipe=mae", "method.regulariser=none", "method.regulariser_weight=0")
    changes = {"vjepa2": (), "mae": mae, "surroundings": SURROUNDINGS}[recipe]
    run, other = tmp_path / f"alarms_{recipe}", tmp_path / f"from_{recipe}"
    assert train(pipeline_config(folder, f"run.dir={run}", "train.max_steps=1", *changes)) == 0
    assert [g.alarms.has_fixed_targets for g in built] == [recipe != "vjepa2"]
    assert [g.alarms.has_hidden for g in built] == [recipe != "surroundings"]
    assert (built[0].alarms.rank_fall == NEIGHBOUR_RANK_FALL) == (recipe != "surroundings")
    start = f"method.init_from={run / 'checkpoints' / 'step_00000001.pt'}"
    assert train(pipeline_config(folder, f"run.dir={other}", "train.max_steps=1", start, *changes)) == 0
    first = [row for row in metrics(other) if row["step"] == 0]
    assert {key: first[0][key] is None for key in ("val/loss", "val/leak", "val/lidar")} == {
        "val/loss": False,
        "val/leak": recipe == "surroundings",
        "val/lidar": recipe == "surroundings",
    }


def test_an_update_uses_its_own_momentum(folder: Path, finished_methods: Path) -> None:
    """Update s moves the target by the momentum of s, not by that of the update before."""
    cfg = pipeline_config(folder, *METHODS)
    rows = {r["step"]: r for r in metrics(finished_methods) if "train/loss" in r}
    assert np.isfinite([row["train/loss"] for row in rows.values()]).all()
    expected = [ema_momentum(cfg, step, 8) for step in range(8)]
    assert [rows[done]["train/ema_momentum"] for done in range(1, 9)] == pytest.approx(expected, abs=1e-12)


def test_a_momentum_of_one_or_a_skipped_update_is_no_alarm(folder: Path, tmp_path: Path) -> None:
    """The last step of methods has momentum 1 and a validation of its own; no update is expected to move."""
    run = tmp_path / "last_step"
    overrides = [f"run.dir={run}", "train.max_steps=3", "train.val_every_steps=2", *METHODS]
    assert train(pipeline_config(folder, *overrides)) == 0
    plant_nan(folder, tmp_path / "nan_half", slice(0, 12))
    overrides = [f"data.store={tmp_path / 'nan_half'}", "train.val_every_steps=1"]
    overrides += [f"run.dir={tmp_path / 'skips'}"]
    assert train(pipeline_config(folder, *overrides)) == 0


@pytest.mark.parametrize("start", [0, 6])
def test_a_first_batch_with_a_token_on_both_sides_stops_the_run(
    folder: Path, tmp_path: Path, finished: Path, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the run goes on: before any step is made."""
    real = JEPAMaskd.__call__

    def overlapping(self: JEPAMaskd, sample: dict) -> dict:
        masked = real(self, sample)
        masked["target"][0] = masked["context"][2]
        return masked

    monkeypatch.setattr(JEPAMaskd, "__call__", overlapping)
    monkeypatch.setattr("pretraining.train.trial_step", None)
    run = tmp_path / "overlap"
    if start:
        shutil.copytree(finished / "checkpoints", run / "checkpoints")
        (run / "checkpoints" / "step_00000008.pt").unlink()
    cfg = pipeline_config(folder, f"run.dir={run}")
    with pytest.raises(LeakError, match=r"row \d+: expected disjoint context and target .* found 1 in both"):
        train(cfg)


def test_a_leaking_encoder_stops_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = VJEPA3D.encode_context

    def leaks(self, view, context, target, seed):
        return real(self, view, context, target, seed) + view.mean()

    monkeypatch.setattr(VJEPA3D, "encode_context", leaks)
    with pytest.raises(LeakError, match="context sees targets"):
        train(pipeline_config(folder, f"run.dir={tmp_path / 'leak'}"))


def test_later_out_of_memory_names_the_last_checkpoint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_error(monkeypatch, 5, torch.OutOfMemoryError("planted"))
    with pytest.raises(UserError, match=r"out of memory, .*step_00000004\.pt"):
        train(pipeline_config(folder, f"run.dir={tmp_path / 'late'}"))


def test_a_run_that_could_not_start_leaves_no_claim(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "retry"
    with pytest.raises(ConfigError, match="global 5 != per core 4"):
        train(pipeline_config(folder, f"run.dir={run}", "train.global_batch_size=5"))
    with pytest.raises(UserError, match="found no such file"):
        train(pipeline_config(folder, f"run.dir={run}", "method.init_from=nowhere.pt"))
    assert train(pipeline_config(folder, f"run.dir={run}", "train.max_steps=1")) == 0


def test_filters_and_the_manifest_decide_what_is_trained_on(folder: Path) -> None:
    store = PreparedStore.open(str(folder / "store"))
    everything = open_rows(pipeline_config(folder), store)
    device = store.index.loc[everything.val[0], "device"]
    one = open_rows(pipeline_config(folder, f"data.device_filter=[{device}]"), store)
    assert set(store.index.loc[one.train, "device"]) == {device}
    assert 0 < len(one.train) < len(everything.train)
    assert set(one.val) <= set(everything.val)
    gone = everything.train[0]
    store.index.loc[gone, "listed"] = False
    assert gone not in open_rows(pipeline_config(folder), store).train


def test_one_volume_in_two_splits_is_not_trained_on(folder: Path) -> None:
    """Also where `prepare` has not been asked again since."""
    store = PreparedStore.open(str(folder / "store"))
    first, second = (store.index[store.index["split"] == split].index[0] for split in ("train", "test"))
    store.index.loc[second, "checksum"] = store.index.loc[first, "checksum"]
    with pytest.raises(UserError, match=r"store: expected no volume in two splits, found .*\(train\)"):
        open_rows(pipeline_config(folder), store)


def test_validation_leaves_the_model_in_training_mode(folder: Path) -> None:
    cfg = pipeline_config(folder)
    run = open_run(cfg, Runtime(torch.device("cpu"), use_bf16=False))
    validate(run)
    assert run.model.training


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


def test_artifacts_are_the_bests(folder: Path, finished: Path) -> None:
    """Only of a run that has ended."""
    cfg, progress = pipeline_config(folder, f"run.dir={finished}"), progress_of()
    progress.step, progress.best = 8, {"best_probe": 0.5}
    sent: list[str] = []
    run_log: Any = SimpleNamespace(artifact=lambda _, url: sent.append(url), alert=lambda *_: None)
    gauges: Any = SimpleNamespace(alarms=SimpleNamespace(raised=[]))
    loop.finish(cfg, gauges, progress, 9, run_log)
    assert sent == []
    assert loop.finish(cfg, gauges, progress, 8, run_log) == 0
    assert sent == [f"{finished}/checkpoints/best_probe.pt"]
    assert Path(sent[0]).is_file()


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


def test_blocks_that_the_encoder_lacks_are_refused(folder: Path) -> None:
    cfg = pipeline_config(folder, "model.feature_blocks=[6,14]")
    with pytest.raises(UserError, match=r"model.feature_blocks: expected rising numbers of 1 to \d+, found"):
        open_run(cfg, Runtime(torch.device("cpu"), use_bf16=False))


def test_init_from_starts_from_these_weights(folder: Path, tmp_path: Path, finished: Path) -> None:
    run = tmp_path / "continued"
    source = finished / "checkpoints" / "step_00000008.pt"
    train(pipeline_config(folder, f"run.dir={run}", f"method.init_from={source}", "train.max_steps=1"))
    first = next(r for r in metrics(run) if "val/loss" in r)
    last = [r for r in metrics(finished) if "val/loss" in r][-1]
    assert first["val/loss"] == pytest.approx(last["val/loss"], rel=1e-5)
    state = load_checkpoint(str(source))
    state["participants"].append("a stranger")
    writer = CheckpointWriter(str(tmp_path / "strange"), 1)
    writer.save(state, ["stranger"])
    writer.close()
    overrides = [f"method.init_from={tmp_path / 'strange' / 'stranger.pt'}", "train.max_steps=1"]
    train(pipeline_config(folder, f"run.dir={tmp_path / 'inherits'}", *overrides))
    seen = load_checkpoint(str(tmp_path / "inherits" / "checkpoints" / "step_00000001.pt"))["participants"]
    assert "a stranger" in seen
    assert len(seen) > 1
    writer = CheckpointWriter(str(tmp_path / "strange"), 1)
    writer.save({**state, "normalisation": "minmax"}, ["stranger"])
    writer.close()
    with pytest.raises(UserError, match=r"normalisation: expected zscore_valid .*, found minmax"):
        train(pipeline_config(folder, f"run.dir={tmp_path / 'minmax'}", *overrides))


def test_a_changed_key_is_refused_by_name_also_under_a_new_run_dir(
    folder: Path, tmp_path: Path, finished: Path
) -> None:
    """A replaced machine has no run.dir, but its checkpoints in the bucket."""
    kept = shutil.copytree(finished / "checkpoints", tmp_path / "bucket")
    overrides = [f"run.dir={tmp_path / 'new_machine'}", f"train.ckpt_dir={kept}"]
    for where, own in (("finished", [f"run.dir={finished}"]), ("bucket", overrides)):
        changed = rf"{where}.*: optim\.base_lr: expected 0\.0005 as the run began, found 0\.01"
        with pytest.raises(UserError, match=changed):
            train(pipeline_config(folder, *own, "optim.base_lr=1e-2"))
    assert train(pipeline_config(folder, *overrides)) == 0  # nothing left to do


def test_skipped_updates_leave_the_initialisation_in_the_target(folder: Path, tmp_path: Path) -> None:
    plant_nan(folder, tmp_path / "nan_most", slice(None))
    overrides = [f"data.store={tmp_path / 'nan_most'}", "train.max_steps=4"]
    run = tmp_path / "nothing_moved"
    assert train(pipeline_config(folder, f"run.dir={run}", *overrides)) == 0
    rows = [r for r in metrics(run) if "train/loss" in r]
    assert rows[-1]["train/bad_steps"] == 4
    assert {r["ema/init_weight"] for r in rows} == {1.0}


def test_validation_uses_the_batch_that_fits(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def spy(run, **options):
        seen.append(run.cfg.train.per_core_batch_size)
        return validate(run, **options)

    short_of_memory(monkeypatch, 1)
    monkeypatch.setattr(validation, "validate", spy)
    assert train(pipeline_config(folder, f"run.dir={tmp_path / 'fits'}", "train.max_steps=1")) == 0
    assert set(seen) == {1}
    # programs of the batches that did not fit (4, then 2) are forgotten
    forgotten = []
    monkeypatch.setattr("pretraining.run.choose_kernels", lambda *_: None)
    monkeypatch.setattr(torch.compiler, "reset", lambda: forgotten.append(1))
    again = (f"run.dir={tmp_path / 'compiled'}", "train.max_steps=1", "train.compile=true")
    assert train(pipeline_config(folder, *again)) == 0
    assert len(forgotten) == 2


PARTS = ("data_wait", "forward", "backward", "update", "logging", "other")


def test_where_the_time_of_a_step_goes(finished: Path) -> None:
    rows = [r for r in metrics(finished) if "train/loss" in r]
    parameters = sum(w.numel() * w.element_size() for w in weights(finished, 8).values())
    for row in rows:
        assert sum(row[f"perf/{part}_fraction"] for part in PARTS) == pytest.approx(1, abs=0.01)
        assert row["perf/step_s"] * row["perf/volumes_per_s"] == pytest.approx(4)  # the global batch
        assert all(row[f"perf/{part}_fraction"] > 0 for part in PARTS)
        assert row["perf/mfu"] > 0
        assert parameters < row["perf/peak_memory_gib"] * 2**30 < 64 * 2**30
    peaks = [row["perf/flops_per_s"] / row["perf/mfu"] for row in rows]
    assert peaks == pytest.approx([peaks[0]] * len(rows))


def test_slow_parts_are_named_and_a_profile_is_a_trace_that_changes_no_loss(
    folder: Path, tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause planted in one part of each of some steps; the last three are profiled."""
    run, pause_s, slow = tmp_path / "slow", 0.3, {1: "data_wait", 2: "forward", 3: "backward", 4: "update"}
    current = [0]
    real_next, real_step, real_report = loop.next_or_stop, loop.train_step, loop.report
    real_predict, real_update = step_module.predict, VJEPA3D.update_target

    def pause(part: str) -> None:
        time.sleep(pause_s if slow.get(current[0]) == part else 0)

    def next_or_stop(*args):
        pause("data_wait")
        return real_next(*args)

    def train_step(*args):
        result = real_step(*args)
        current[0] = args[5].step + 1
        return result

    def predict(*args, **kwargs):
        output = real_predict(*args, **kwargs)
        pause("forward")
        if output.loss_B.requires_grad:
            output.loss_B.register_hook(lambda _: pause("backward"))
        return output

    def update_target(*args):
        pause("update")
        real_update(*args)

    def report(run_log, gauges, step, values):
        time.sleep(pause_s if step == 6 else 0)
        real_report(run_log, gauges, step, values)

    for where, name, planted in (
        (loop, "next_or_stop", next_or_stop),
        (loop, "train_step", train_step),
        (loop, "report", report),
        (step_module, "predict", predict),
        (VJEPA3D, "update_target", update_target),
    ):
        monkeypatch.setattr(where, name, planted)
    assert train(pipeline_config(folder, f"run.dir={run}", "run.profile=true")) == 0
    monkeypatch.undo()
    rows = {r["step"]: r for r in metrics(run) if "train/loss" in r}
    for step, part in (*((s + 1, p) for s, p in slow.items()), (7, "logging")):
        assert rows[step]["perf/step_s"] * rows[step][f"perf/{part}_fraction"] >= pause_s, part
    assert_same_run(run, finished, 8)

    (path,) = (run / "profile").iterdir()
    assert str(path) in (run / "log.txt").read_text()
    with gzip.open(path) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"aten::addmm", "aten::_fused_adamw_"} <= names


def test_a_run_too_short_for_a_profile_says_so(caplog: pytest.LogCaptureFixture) -> None:
    cfg = small_config("vjepa2", "run.profile=true")
    trace = StepTrace(cfg, Runtime(torch.device("cpu"), use_bf16=False), start=2)
    assert not any(trace.at(step) for step in range(2, 7))
    trace.close()
    assert "run.profile: no trace, the run ended before step 8" in caplog.text
